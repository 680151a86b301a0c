"""A hundred mistakes in manifests: each finding has field, value and reason, and its text is in the golden file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mistakes import GONE, GOOD, MISTAKES, SHOWN, manifest
from syrupy.assertion import SnapshotAssertion

from dsv4_operator.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "mistakes.md"


def plan(document: Any, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """Return stdout and stderr of `dsv4 plan`."""
    file = folder / "flash.json"
    file.write_text(json.dumps(document))
    code = main.run(["plan", str(file), "--state-dir", str(folder / "state"), *options])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert code == (0 if document == GOOD else 2)
    return out, err.replace(str(file), "flash.yaml")


def text(document: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of `dsv4 plan` about a mistake."""
    out, err = plan(document, folder, capsys)
    found = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    return found or [line for line in out.splitlines() if line.startswith(("It does not fit", "  - "))]


def test_there_are_a_hundred_mistakes_and_the_correct_manifest_has_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(MISTAKES) >= 100
    assert json.loads(plan(GOOD, tmp_path, capsys, "-o", "json")[0])["findings"] == []


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: f"{number}-{MISTAKES[number][0]}")
def test_a_mistake_has_one_finding(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    field, value, found = MISTAKES[number]
    document = json.loads(plan(manifest(field, value), tmp_path, capsys, "-o", "json")[0])
    refusals = [one for one in document["findings"] if one["severity"] == "refuse"]
    assert [(one["field"], one["value"], one["reason"]) for one in refusals] == [found]
    assert refusals[0]["message"]
    assert refusals[0]["remedy"]


def test_the_text_of_every_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    parts = []
    for field, value, _ in MISTAKES:
        written = "removed" if value is GONE else json.dumps(value, ensure_ascii=False)
        lines = text(manifest(field, value), tmp_path, capsys)
        parts.append("\n".join([f"# {field}: {written[:100]}", *lines]))
    assert "\n\n".join(parts) == snapshot


def test_the_page_shows_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    assert len(SHOWN) == 10
    for number in SHOWN:
        field, value, _ = MISTAKES[number]
        for line in text(manifest(field, value), tmp_path, capsys):
            assert line in page, f"{field}: {line}"
