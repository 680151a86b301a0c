"""Files of the API: samples and field reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_operator.api import Hardware, load
from dsv4_operator.api.documents import reference

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_samples_are_there() -> None:
    assert {path.name for path in EXAMPLES} >= {
        "nano.yaml",
        "flash-2x-spark.yaml",
        "pro-8x-spark.yaml",
        "flash-2x-rtx-pro-6000.yaml",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_sample_is_valid_and_begins_with_a_comment(path: Path) -> None:
    text = path.read_text()
    load(text, lambda: Hardware.RTXPRO6000)
    assert text.startswith("# ")


def test_the_field_reference_is_fresh() -> None:
    page = ROOT / "docs" / "reference" / "api.md"
    assert page.read_text() == reference(), (
        "run: python -m dsv4_operator.api.documents reference > docs/reference/api.md"
    )


def test_every_field_is_described() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    undescribed = {row.split("`")[1] for row in rows if row.endswith("|  |")}
    assert undescribed <= {"name", "pid"}, "only a process speaks for itself"
