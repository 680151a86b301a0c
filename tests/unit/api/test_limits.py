"""Manifests that are far too large are refused quickly, because the operator parses them on its event loop."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from dsv4_operator.api import InvalidDeployment, parse

NANO = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU}
"""


def changed(path: str, value: object) -> Any:
    """Return a manifest with the field at `path` set to `value`."""
    data = yaml.safe_load(NANO)
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return data


def test_the_number_of_reported_findings_is_bounded() -> None:
    with pytest.raises(InvalidDeployment) as caught:
        parse(changed("spec.engine", {f"field{number}": 1 for number in range(50)}))
    found = caught.value.findings
    assert len(found) == len(str(caught.value).splitlines()) == 21
    assert (found[0].field, found[0].reason) == ("spec.engine.field0", "UnknownField")
    assert (found[-1].field, found[-1].reason) == ("", "MoreFindings")
    assert "30" in found[-1].message


@pytest.mark.parametrize("path", ["spec", "spec.topology.tolerations", "metadata.labels"])
def test_no_object_takes_long_to_refuse(path: str) -> None:
    many: object = {f"k{number:06d}": 1 for number in range(250_000)}
    if path == "spec.topology.tolerations":
        many = [{"a": 1}] * 350_000
    data = changed(path, many)
    began = time.thread_time()
    with pytest.raises(InvalidDeployment) as caught:
        parse(data)
    # 2 ms measured; 6 s with a separate message for each value.
    assert time.thread_time() - began < 0.5
    assert [found.reason for found in caught.value.findings] == ["TooManyValues"]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("spec." + "k" * 2_800_000, 1, "spec." + "k" * 317 + "...: unknown field; "),
        ("spec.engine.timeouts.load", "1s" * 1_400_000, '1s1..." is not a duration; '),
        ("spec.engine.kvCacheMemory", "1" * 2_800_000, "spec.engine.kvCacheMemory: "),
    ],
    ids=["name", "duration", "quantity"],
)
def test_no_text_takes_long_to_refuse(path: str, value: object, sentence: str) -> None:
    data = changed(path, value)
    began = time.thread_time()
    with pytest.raises(InvalidDeployment) as caught:
        parse(data)
    # 10 ms measured; durations of 2.8 MB took 6 s without the limit.
    assert time.thread_time() - began < 0.5
    assert sentence in str(caught.value)
