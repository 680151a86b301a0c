"""Findings for values out of range have the field and the violated bound, in the notation of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.api import Finding, InvalidDeployment, parse
from dsv4_operator.api.values import format_duration, format_quantity, parse_duration, parse_quantity
from dsv4_testkit.specifications import fields, placed

RANGE = re.compile(r"is out of range; write (\S+?) to (\S+?)(?:, for example .*)?")


def refusal(path: str, value: Any) -> Finding:
    with pytest.raises(InvalidDeployment) as caught:
        parse(placed(path, value))
    here = "spec." + path.replace("[]", "[0]")
    return next(one for one in caught.value.findings if one.field == here)


def ranges() -> Iterator[tuple[str, str, str]]:
    """Yield path and bounds of each duration, quantity and fraction in the definition."""
    for path, schema in fields():
        for one in schema.get("x-kubernetes-validations", ()):
            if found := RANGE.fullmatch(one["message"]):
                yield path, found[1], found[2]


def numbers() -> Iterator[tuple[str, int, int]]:
    for path, schema in fields():
        if schema.get("type") == "integer":
            yield path, schema["minimum"], schema["maximum"]


def test_every_kind_of_bound_is_there() -> None:
    found = {path for path, _, _ in ranges()}
    assert {"gateway.drain", "gateway.maxHeldBytes", "engine.gpuMemoryUtilization", "recovery.nodeLoss.after"} <= found
    assert len(found) == 23


@pytest.mark.parametrize(("path", "least", "most"), list(ranges()))
@settings(deadline=None)
@given(data=st.data())
def test_a_value_out_of_range_is_refused_with_its_bounds(path: str, least: str, most: str, data: st.DataObject) -> None:
    value: Any
    if most.endswith("h"):
        low, high = parse_duration(least), parse_duration(most)
        inside = st.integers(round(low * 1000), round(high * 1000)).map(lambda ms: format_duration(ms / 1000))
        above = st.integers(round(high * 1000) + 1, 10**15).map(lambda ms: f"{ms}ms")
        below = st.just("0s") if low > 0 else above
    elif most.endswith("i"):
        low, high = parse_quantity(least), parse_quantity(most)
        inside = st.integers(int(low), int(high)).flatmap(
            lambda count: st.sampled_from((count, format_quantity(count)))
        )
        above = st.integers(int(high) + 1, 10**30).flatmap(lambda count: st.sampled_from((count, str(count))))
        below = st.integers(0, int(low) - 1) if low > 0 else above
    else:
        low, high = float(least), float(most)
        inside = st.floats(low, high)
        above = st.floats(high, 1e9, exclude_min=True)
        below = st.floats(-1e9, low, exclude_max=True)
    value = data.draw(st.one_of(above, below))
    found = refusal(path, value)
    assert least in found.remedy or most in found.remedy
    assert found.reason == "OutOfRange"
    if isinstance(value, int | float) and not most.endswith(("h", "i")):
        assert (most if value > high else least).rstrip("0").rstrip(".") in found.remedy
    other = placed(path, data.draw(inside))
    assert not refuses(other, path)


def refuses(manifest: dict[str, Any], path: str) -> bool:
    """Return whether the bounds of the field itself are a reason for refusal."""
    try:
        parse(manifest)
    except InvalidDeployment as error:
        return any(one.field == f"spec.{path}" and one.reason == "OutOfRange" for one in error.findings)
    return False


@pytest.mark.parametrize(("path", "least", "most"), list(numbers()))
def test_a_whole_number_out_of_range_is_refused_with_the_bound_that_it_passed(path: str, least: int, most: int) -> None:
    below, above = refusal(path, least - 1), refusal(path, most + 1)
    assert (below.value, below.reason, below.remedy) == (least - 1, "OutOfRange", f"the minimum is {least}")
    assert (above.value, above.reason, above.remedy) == (most + 1, "OutOfRange", f"the maximum is {most}")


@pytest.mark.parametrize(
    ("path", "value", "remedy"),
    [
        ("engine.gpuMemoryUtilization", 2, "the maximum is 0.99"),
        ("gateway.requestTimeout", "0s", "write 1ms to 8760h, for example 1h"),
        ("model.staging.bandwidthLimit", "1Ki", "write 64Ki to 1Ei"),
        ("gateway.maxBodyBytes", "2Gi", "write 1Ki to 1Gi"),
    ],
)
def test_bounds_in_the_notation_of_the_field(path: str, value: object, remedy: str) -> None:
    found = refusal(path, value)
    assert (found.value, found.remedy) == (value, remedy)
