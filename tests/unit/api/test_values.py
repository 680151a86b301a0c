"""Durations, quantities and times are the same after formatting and parsing."""

from datetime import datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api.values import (
    format_duration,
    format_quantity,
    format_time,
    parse_duration,
    parse_quantity,
    parse_time,
    quantity,
)


@given(st.integers(0, 10 * 365 * 86_400_000))
def test_durations_survive(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 2**63))
def test_quantities_survive(count: int) -> None:
    assert parse_quantity(format_quantity(count)) == count


@given(st.integers(0, 4_000_000_000_000))
def test_times_survive(milliseconds: int) -> None:
    time = milliseconds / 1000
    assert parse_time(format_time(time)) == time


@given(st.floats(0, 4e9))
def test_times_are_stable_after_one_reading(time: float) -> None:
    once = parse_time(format_time(time))
    assert format_time(once) == format_time(time)
    assert once == round(once, 3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("0s", 0), ("1m0.5s", 60.5), ("24h", 86400)],
)
def test_durations_that_kubernetes_reads(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(90, "1m30s"), (5400, "1h30m"), (0, "0s"), (0.25, "250ms"), (3600, "1h"), (60.5, "1m500ms")]
)
def test_the_shortest_way_to_write_a_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("text", ["", "10", "10 m", "1d", "-5s", "1h 30m", "m", "5S", "0.0001s", "1e3s", "٣s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"for example"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8Gi", 8 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("500M", 500_000_000),
        ("4096", 4096),
        ("129e6", 129_000_000),
        ("1k", 1000),
    ],
)
def test_quantities_that_kubernetes_reads(text: str, count: int) -> None:
    assert parse_quantity(text) == count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("250m", Fraction(1, 4)),
        ("100u", Fraction(1, 10_000)),
        ("5n", Fraction(5, 10**9)),
        ("1Pi", 2**50),
        ("3Ei", 3 * 2**60),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1E3", 1000),
        ("12e-1", Fraction(6, 5)),
        ("1.", 1),
        (".5Ki", 512),
        ("+1k", 1000),
        ("-1Mi", -(2**20)),
    ],
)
def test_every_suffix_of_kubernetes_is_a_quantity(text: str, number: Fraction) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(
    "text", ["", ".", "1K", "1 Gi", "1ki", "1mi", "0x10", "1e", "1e3Gi", "1_000", "inf", "\u0661Gi"]
)
def test_other_texts_are_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write for example"):
        quantity(text)


def test_quantities_of_others_do_not_fill_the_memory() -> None:
    limit = quantity.cache_info().maxsize
    assert limit is not None
    for number in range(2 * limit):
        quantity(f"{number}Mi")
    assert quantity.cache_info().currsize <= limit


@pytest.mark.parametrize("value", ["", "8GB", "8 Gi", "-1", "0.5", "100m", 1.5, True, None, -1, "8gi", "1e999"])
def test_invalid_quantities_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"for example"):
        parse_quantity(value)


@pytest.mark.parametrize(
    ("count", "text"), [(8 * 2**30, "8Gi"), (2_000_000_000, "2G"), (0, "0"), (1025, "1025"), (3 * 2**29, "1536Mi")]
)
def test_the_shortest_way_to_write_a_quantity(count: int, text: str) -> None:
    assert format_quantity(count) == text


def test_a_time_is_read_in_any_zone_and_written_in_utc() -> None:
    assert format_time(parse_time("2026-01-31T13:00:00.250+01:00")) == "2026-01-31T12:00:00.250Z"
    assert format_time(0) == "1970-01-01T00:00:00Z"


@given(st.datetimes(timezones=st.timezones()))
def test_every_accepted_time_can_be_written(moment: datetime) -> None:
    try:
        time = parse_time(moment.isoformat())
    except ValueError:
        # Beyond the years of the calendar in UTC, or near them.
        assert not 1938 < moment.year < 5138
        return
    assert parse_time(format_time(time)) == time


NOT_TIMES = ["yesterday", "2026-01-31", "2026-01-31T12:00:00", "0001-01-01T00:00:00+14:00", None, True, float("nan")]


@pytest.mark.parametrize("value", NOT_TIMES)
def test_invalid_times_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_time(value)
