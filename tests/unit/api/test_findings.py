"""Findings as text and as documents."""

from __future__ import annotations

import json

import pytest

from dsv4_operator.api import Finding, Hardware, Severity
from dsv4_operator.api.findings import joined

TOKEN = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (Finding("spec.a", "X", "is wrong", "write 1", 5), "spec.a: 5 is wrong; write 1"),
        (Finding("spec.a", "X", "is wrong", "write 1", "5"), 'spec.a: "5" is wrong; write 1'),
        (Finding("spec.a", "X", "is wrong", "", Hardware.GB10), "spec.a: GB10 is wrong"),
        (Finding("spec.a", "X", "is wrong", "", False), "spec.a: false is wrong"),
        (Finding("spec.a", "X", "is wrong", "remove it"), "spec.a: is wrong; remove it"),
        (Finding("", "X", "the document is empty", "write one"), "the document is empty; write one"),
        (Finding("spec.a", "X", "is wrong", "", ""), 'spec.a: "" is wrong'),
        (Finding("spec.a", "X", "is wrong", "", [1]), "spec.a: a list is wrong"),
    ],
)
def test_the_text_has_field_value_message_and_remedy(finding: Finding, text: str) -> None:
    assert str(finding) == text


def test_several_findings_are_one_line() -> None:
    assert joined([Finding("a", "X", "is wrong"), Finding("b", "Y", "is wrong")]) == "a: is wrong; b: is wrong"


@pytest.mark.parametrize("value", [5, 0.5, True, None, "text", Hardware.GB10])
def test_a_document_has_the_value_itself(value: object) -> None:
    found = Finding("spec.a", "X", "is wrong", "write 1", value, Severity.WARN).to_dict()
    assert json.loads(json.dumps(found)) == {
        "field": "spec.a",
        "value": value,
        "reason": "X",
        "message": "is wrong",
        "remedy": "write 1",
        "severity": "warn",
    }


@pytest.mark.parametrize("value", [TOKEN, f"x={TOKEN}", f"https://a:{TOKEN}@b"])
def test_a_value_that_may_be_a_secret_is_omitted(value: str) -> None:
    finding = Finding("spec.a", "X", "is wrong", "remove it", value)
    assert TOKEN[8:] not in str(finding) + json.dumps(finding.to_dict())
