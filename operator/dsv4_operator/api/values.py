"""Values and base class of the specification: durations, quantities, times, bounded text.

Values are written in the notation of Kubernetes and held as plain numbers:

| type       | written              | in memory                   |
|------------|----------------------|-----------------------------|
| `Duration` | `90s`, `1h30m`       | seconds, `float`            |
| `Quantity` | `8Gi`, `500M`, `4096`| bytes, `int`                |
| `Time`     | RFC 3339, UTC        | Unix time in seconds, `float` |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from dsv4_runtime.contract import Document
from dsv4_runtime.util.secrets import has_secret

_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|h|m|s)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
LONGEST_DURATION = 64
"""Limit of the characters of a duration: the sum of a million parts takes seconds."""

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SCALES = {suffix: Fraction(size) for suffix, size in (*_BINARY.items(), *_DECIMAL.items())} | {
    "m": Fraction(1, 10**3),
    "u": Fraction(1, 10**6),
    "n": Fraction(1, 10**9),
}
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_QUANTITY = re.compile(rf"({_NUMBER})(?:([KMGTPE]i|[munkMGTPE])|[eE]([+-]?[0-9]{{1,2}}))?")

DURATION_FORMAT, QUANTITY_FORMAT = "dsv4-duration", "dsv4-quantity"
"""Values of `format` in the JSON schemas of `Duration` and `Quantity`."""
DURATION_PATTERN = r"(?:[0-9]+(?:\.[0-9]{1,3})?(?:h|m|s)|[0-9]+ms)+"
"""Durations in a specification: whole milliseconds."""
QUANTITY_PATTERN = (
    r"(?:[0-9]+(?:[KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?|[0-9]+\.[0-9]{1,3}[kMGTPE]"
    r"|[0-9]*\.(?:0|5|25|75|125|375|625|875)0*[KMGTPE]i)"
)
"""Quantities in a specification: whole bytes, so only fractions of a unit that are whole bytes."""
DURATION_REFUSAL = "is not a duration; write for example 90s, 10m or 1h30m"
QUANTITY_REFUSAL = "is not a quantity; write for example 512Mi or 8Gi"
LONGEST_QUANTITY = 64
"""Limit of the characters of a quantity."""
CONTROL = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f"
"""Control characters except tab, line feed and carriage return, as part of a character class."""

_EARLIEST_TIME, _LATEST_TIME = -1e9, 1e11
"""Unix times of the years 1938 and 5138. Python's calendar has the years 1 to 9999."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_LOOKED_AT = 4096
"""Characters that are checked for a secret before the text is shown."""


def quoted(value: object) -> str:
    """Return `value` for a message: text in quotes and shortened, other values as in YAML.

    Text that looks like a secret is omitted, and control characters are escaped.
    """
    if isinstance(value, str):
        if has_secret(value[:_LOOKED_AT]):
            return "a text that may be a secret"
        value = value if value.isprintable() else repr(value[:60])[1:-1]
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value)


class ValueReason(StrEnum):
    """Identifiers of the problems of one field, for programs."""

    REQUIRED = "Required"
    UNKNOWN_FIELD = "UnknownField"
    WRONG_TYPE = "WrongType"
    NOT_SUPPORTED = "NotSupported"
    OUT_OF_RANGE = "OutOfRange"
    INVALID = "InvalidValue"
    TOO_LONG = "TooLong"
    WRONG_COUNT = "WrongCount"
    DUPLICATE = "Duplicate"


class InvalidValue(ValueError):
    """An invalid value of one field."""

    def __init__(self, value: object, reason: ValueReason, text: str) -> None:
        """Take the parts of a message.

        Args:
            value: for display; None: it may be a secret.
            reason: the kind of the problem.
            text: `PROBLEM; REMEDY`.
        """
        super().__init__(text if value is None else f"{quoted(value)} {text}")
        self.value = value
        self.reason = reason
        self.message, self.remedy = split_remedy(text)


def split_remedy(text: str) -> tuple[str, str]:
    """Return the parts of `PROBLEM; REMEDY`."""
    message, _, remedy = text.partition("; ")
    return message, remedy


@dataclass(frozen=True, slots=True)
class Matches:
    """Metadata of a text field: accepted values, for Python and the Kubernetes API server."""

    pattern: str
    """Pattern of the whole text, in the common syntax of Python's `re` and RE2; `\\w` is ASCII."""
    refusal: str
    """Message for any other text, with the remedy: `is not …; write …`."""
    longest: int = 1024
    """Maximum number of characters."""
    shown: str = r"(?s:.*)"
    """Pattern of texts that a message may show; excludes texts that may contain a secret."""
    never: tuple[tuple[str, str], ...] = ()
    """Patterns that must not occur in the text, each with its message."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        given = handler(schema)
        return {
            **given,
            "maxLength": self.longest,
            "texts": [*given.get("texts", ()), (f"^(?:{self.pattern})$", True, self.refusal)]
            + [(pattern, False, refusal) for pattern, refusal in self.never],
        }

    def _check(self, value: str) -> str:
        shown = value if re.fullmatch(self.shown, value, re.ASCII) else None
        if len(value) > self.longest:
            text = f"has {len(value)} characters; the maximum is {self.longest}"
            raise InvalidValue(shown, ValueReason.TOO_LONG, text)
        if not re.fullmatch(self.pattern, value, re.ASCII):
            raise InvalidValue(shown, ValueReason.INVALID, self.refusal)
        for pattern, refusal in self.never:
            if re.search(pattern, value, re.ASCII):
                raise InvalidValue(shown, ValueReason.INVALID, refusal)
        return value


@dataclass(frozen=True, slots=True)
class Between:
    """Metadata of a `Duration` or a `Quantity`: bounds, for Python and the Kubernetes API server."""

    least: str
    """In user notation, like the others."""
    most: str
    example: str | None = None
    """Remedy in the message."""

    @property
    def refusal(self) -> str:
        """Return the message for any other value."""
        example = f", for example {self.example}" if self.example else ""
        return f"is out of range; write {self.least} to {self.most}{example}"

    @property
    def written(self) -> dict[str, str]:
        """Return the bounds and their message as a part of a JSON schema."""
        return {"least": self.least, "most": self.most, "refusal": self.refusal}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "between": self.written}

    def _check(self, value: float) -> float:
        parse, write = _READERS[isinstance(value, int)]
        if not parse(self.least) <= value <= parse(self.most):
            # Larger fractions have lost digits, and would be shown differently.
            shown = write(value) if isinstance(value, int) or value < _EXACT_SECONDS else None
            raise InvalidValue(shown, ValueReason.OUT_OF_RANGE, self.refusal)
        return value


SPACES = r"\x85\xa0" "\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode white space beyond ASCII, as part of a character class: `\\s` is ASCII."""
_EXACT_SECONDS = 2**43

TEXT = rf"[^{CONTROL}\t\n\r]*"
"""Text of one line, without control characters."""
AbsolutePath = Annotated[
    str,
    Matches(
        rf"/[^:{CONTROL}\t\n\r]*",
        "is not an absolute path; begin it with /, without colons and control characters",
        4096,
    ),
]


def parse_duration(value: object) -> float:
    """Return the seconds of a duration such as `90s`, `1h30m` or `250ms`; numbers are seconds.

    Raises:
        ValueError: `value` is no duration, or is finer than a millisecond.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _seconds(value)
    if isinstance(value, str) and len(value) <= LONGEST_DURATION and _DURATION.fullmatch(value):
        milliseconds = sum(Fraction(number) * _MILLISECONDS[unit] for number, unit in _DURATION_PART.findall(value))
        if milliseconds.denominator != 1:
            text = "is finer than a millisecond; round it, for example 250ms"
            raise InvalidValue(value, ValueReason.INVALID, text)
        return int(milliseconds) / 1000
    raise InvalidValue(value, ValueReason.INVALID, DURATION_REFUSAL)


def format_duration(seconds: float) -> str:
    """Return the shortest notation of `seconds`, a duration of at least 0: `1h30m`, `90s` becomes `1m30s`."""
    rest = round(seconds * 1000)
    parts = []
    for unit, size in _MILLISECONDS.items():
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


@lru_cache(maxsize=4096)
def quantity(text: str) -> Fraction:
    """Return the value of a Kubernetes quantity: `250m`, `1.5Gi`, `100u`, `1E` or `12e6`.

    Raises:
        ValueError: `text` is no quantity.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidValue(text, ValueReason.INVALID, QUANTITY_REFUSAL)
    number, suffix, exponent = match.groups()
    scale = _SCALES[suffix] if suffix else Fraction(10) ** int(exponent or 0)
    return Fraction(number) * scale


def parse_quantity(value: object) -> int:
    """Return the bytes of a quantity such as `8Gi`, `1.5Gi`, `500M` or `4096`.

    Raises:
        ValueError: `value` is no quantity, or no non-negative whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise InvalidValue(value, ValueReason.INVALID, QUANTITY_REFUSAL)
    count = quantity(value)
    if count.denominator != 1 or count < 0:
        raise InvalidValue(value, ValueReason.INVALID, "is not a whole number of bytes; write for example 8Gi")
    return int(count)


def format_quantity(count: int) -> str:
    """Return the shortest exact notation of `count` bytes; the binary one of two with equal length."""
    units = {**_BINARY, **_DECIMAL}
    exact = [f"{count // size}{suffix}" for suffix, size in units.items() if count and count % size == 0]
    return min((*exact, str(count)), key=len)


def parse_time(value: object) -> float:
    """Return the Unix time of an RFC 3339 text, to the millisecond; numbers are Unix times already.

    Raises:
        ValueError: `value` is no time, or has no time zone.
    """
    time = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if isinstance(value, str):
        with suppress(ValueError):
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is not None:
                time = round((moment - _EPOCH) / timedelta(milliseconds=1)) / 1000
    # Others could not be written again.
    if _EARLIEST_TIME <= time <= _LATEST_TIME:
        return round(float(time), 3)
    text = "is not a time; write it in RFC 3339 format, for example 2026-01-31T12:00:00Z"
    raise InvalidValue(value, ValueReason.INVALID, text)


def format_time(time: float) -> str:
    """Return `time`, a Unix time, as RFC 3339 in UTC; with milliseconds only if they are not 0."""
    moment = _EPOCH + timedelta(milliseconds=round(time * 1000))
    precision = "milliseconds" if moment.microsecond else "seconds"
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def _seconds(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise InvalidValue(value, ValueReason.INVALID, "is not a duration; write for example 90s")
    return float(value)


def _written_duration(value: Any) -> float:
    # A bare number in a manifest has no unit; a Python default (float) is in seconds.
    if isinstance(value, int) and not isinstance(value, bool):
        raise InvalidValue(value, ValueReason.INVALID, f"has no unit; write for example {value}s")
    if isinstance(value, str) and not re.fullmatch(DURATION_PATTERN, value[: LONGEST_DURATION + 1]):
        raise InvalidValue(value, ValueReason.INVALID, DURATION_REFUSAL)
    return parse_duration(value)


def _written_quantity(value: Any) -> int:
    if isinstance(value, str) and (len(value) > LONGEST_QUANTITY or not re.fullmatch(QUANTITY_PATTERN, value)):
        raise InvalidValue(value, ValueReason.INVALID, QUANTITY_REFUSAL)
    return parse_quantity(value)


LONGEST = Between("0s", "8760h")
"""Bounds of every duration: clocks and Kubernetes objects need not support more than a year."""
LARGEST = Between("0", "1Ei")
"""Bounds of every quantity, within a signed 64-bit integer."""

BoundedDuration = Annotated[
    float,
    BeforeValidator(_written_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": DURATION_FORMAT}),
]
"""Seconds; notation `90s` or `1h30m`. For fields with their own `Between`."""

Duration = Annotated[BoundedDuration, LONGEST]
"""Seconds; notation `90s` or `1h30m`."""

BoundedQuantity = Annotated[
    int,
    BeforeValidator(_written_quantity),
    PlainSerializer(format_quantity, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": QUANTITY_FORMAT}),
]
"""Bytes; notation `512Mi` or `8Gi`. For fields with their own `Between`."""

Quantity = Annotated[BoundedQuantity, LARGEST]
"""Bytes; notation `512Mi` or `8Gi`."""

Time = Annotated[
    float,
    BeforeValidator(parse_time),
    PlainSerializer(format_time, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Unix time in seconds; notation RFC 3339 in UTC, to the millisecond."""

_READERS: Mapping[bool, tuple[Any, Any]] = {
    True: (parse_quantity, format_quantity),
    False: (parse_duration, format_duration),
}
"""Parser and formatter of whole numbers (bytes) and of others (seconds)."""


Count = Annotated[int, Field(strict=True)]
"""A whole number; text and fractions are refused, not converted."""

PortNumber = Annotated[Count, Field(ge=1024, le=65535)]


class SpecPart(Document):
    """A part of the specification."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Drop known fields that are null, as API servers do."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {field.alias for field in cls.model_fields.values()} | set(cls.model_fields)
        return {name: value for name, value in data.items() if value is not None or name not in known}
