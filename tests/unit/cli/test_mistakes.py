"""A hundred mistakes in manifests: each answer is one sentence with field, value and remedy, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mistakes import GOOD, MISTAKES, SHOWN, manifest

from dsv4_operator.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "mistakes.md"


def answer(document: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = folder / "flash.json"
    file.write_text(json.dumps(document))
    code = main.run(["plan", str(file), "--state-dir", str(folder / "state")])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if code == 0:
        return []
    assert code == 2
    told = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    return told or [line for line in out.splitlines() if line.startswith(("It does not fit", "  - "))]


def test_there_are_a_hundred_and_the_good_one_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MISTAKES) >= 100
    assert answer(GOOD, tmp_path, capsys) == []


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: f"{number}-{MISTAKES[number][0]}")
def test_a_mistake_is_answered(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    field, value, words = MISTAKES[number]
    told = answer(manifest(field, value), tmp_path, capsys)
    assert told, "it is taken"
    whole = " ".join(told)
    for word in words:
        assert word in whole
    if not told[0].startswith("It does not fit"):
        assert len(told) == 1, told
        assert field.rsplit(".", 1)[-1].split("Group")[0] in whole or "tensorParallelSize" in whole


def test_the_page_shows_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    assert len(SHOWN) == 10
    for number in SHOWN:
        field, value, _ = MISTAKES[number]
        for line in answer(manifest(field, value), tmp_path, capsys):
            shown = line.replace(str(tmp_path / "flash.json"), "flash.yaml")
            assert shown in page, f"{field}: {shown}"
