from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_operator.cli import output
from dsv4_operator.cli.output import DocumentFormat
from dsv4_operator.cli.sources import local


@pytest.mark.parametrize(
    ("value", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (41.4, "41 s"), (119.4, "119 s"), (125, "2 min 5 s")]
)
def test_seconds(value: float, text: str) -> None:
    assert output.format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(7.9, "0:07"), (750, "12:30"), (3605, "1:00:05")])
def test_stopwatch(value: float, text: str) -> None:
    assert output.format_elapsed(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-1, "0s"), (119, "119s"), (720, "12m"), (11400, "3h10m"), (40000, "11h"), (400000, "4d")]
)
def test_age(value: float, text: str) -> None:
    assert output.format_age(value) == text


def test_one_line_joins_and_cuts() -> None:
    assert output.one_line("a\n  b") == "a b"
    assert output.one_line("x" * 300, 10) == "xxxxxxx..."


def test_root_option_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STATE_DIR", "/var/d")
    assert local.state_dir_option(Path("/var/d")) == ""
    assert local.state_dir_option(Path("/other")) == " --state-dir /other"


def test_a_table_never_cuts_and_has_no_trailing_blanks() -> None:
    assert output.render_table(["A", "LONG"], [["xyz", ""], ["1", "y" * 90]]) == (
        "A     LONG\nxyz   -\n1     " + "y" * 90
    )


def test_documents() -> None:
    document = {"name": "ü", "a": [1, None]}
    assert (
        output.render_document(document, DocumentFormat.JSON) == '{\n  "name": "ü",\n  "a": [\n    1,\n    null\n  ]\n}'
    )
    assert output.render_document(document, DocumentFormat.YAML) == "name: ü\na:\n- 1\n- null"


def test_without_escapes() -> None:
    assert output.without_escapes("\x1b[1;31mred\x1b[0m \x1b]8;;x\x07link\x1b]8;;\x07") == "red link"


def test_lines_are_broken_between_words() -> None:
    row = "NCCL buffers                    1.50     1.50       11.60    11.6 GiB were seen at NCCL's defaults; bounded"
    lines = output.wrap(row, 80).split("\n")
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(row.split())
    assert all(line.startswith(" " * row.index("11.6 GiB")) for line in lines[1:]), "below its own column"
    assert output.wrap("a" * 100, 80) == "a" * 100, "a word is never broken"
    assert output.wrap("short\n\n  - one", 80) == "short\n\n  - one"
