"""Findings about a specification (refusals, warnings, advice) as data, their text, and the translation of pydantic's
errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsv4_operator.api.values import InvalidValue, ValueReason, quoted, split_remedy
from dsv4_runtime.util.secrets import has_secret

RULES_ERROR = "dsv4_rules"
"""Type of a pydantic error whose context contains findings."""
MOST_FINDINGS = 20
"""Limit of reported findings: each unknown name is compared with all known ones."""
_LONGEST_STEP = 317
"""Characters of a name in a path: the longest key of a label."""
_LONGEST_NAME = 64
"""Longest name that is compared with known ones."""


class Severity(StrEnum):
    """Consequence of a finding."""

    REFUSE = "refuse"
    """There is no plan."""
    WARN = "warn"
    """There is a plan with a warning."""
    ADVISE = "advise"
    """One change that would make the plan fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a specification, or of the machines for it."""

    field: str
    """Path of the field, `spec.engine.maxModelLen` or `spec.engine.env[0].name`; empty: the document or a machine."""
    reason: str
    """Identifier of the problem in CamelCase, for programs: a `ValueReason`, or the name of a rule."""
    message: str
    """The problem, as a predicate of the field and its value."""
    remedy: str = ""
    value: object = None
    """Value of the field; None: it has none, or it may be a secret."""
    severity: Severity = Severity.REFUSE

    def __str__(self) -> str:
        """Return `FIELD: VALUE MESSAGE; REMEDY`, the text of all commands, conditions and events."""
        value = "" if self.value is None else f"{_shown(self.value)} "
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.field}: {value}{self.message}{remedy}" if self.field else f"{value}{self.message}{remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values; text that looks like a secret is omitted."""
        value = self.value
        if not isinstance(value, bool | int | float | None):
            value = _shown(value).removeprefix('"').removesuffix('"')
        return {
            "field": self.field,
            "value": value,
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "severity": str(self.severity),
        }


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Enum) else quoted(value)


def joined(findings: Iterable[Finding]) -> str:
    """Return findings as one line, for conditions, events and answers of the API server."""
    return "; ".join(map(str, findings))


class InvalidDeployment(ValueError):
    """An invalid `DSV4Deployment`; its text has one line per finding."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


def translate(error: ValidationError, model: type[BaseModel]) -> tuple[Finding, ...]:
    """Return the first findings of pydantic's `error` about `model`, in order, and the number of further ones."""
    findings: list[Finding] = []
    details = error.errors(include_url=False)
    for number, detail in enumerate(details):
        if len(findings) >= MOST_FINDINGS:
            rest = f"{len(details) - number} more findings"
            findings.append(Finding("", "MoreFindings", rest, "correct the ones above first"))
            break
        if detail["type"] == "too_short" and any(_within(other["loc"], detail["loc"]) for other in details):
            continue  # Counts only the valid entries.
        if detail["type"] == RULES_ERROR:
            findings += detail["ctx"]["findings"]
        else:
            findings.append(_finding(detail, model))
    return tuple(findings)


def _within(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def dotted(location: Sequence[int | str]) -> str:
    """Return a location such as `("spec", "engine", "env", 0, "name")` as `spec.engine.env[0].name`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif has_secret(step):
            text += ".(a name that may be a secret)"
        else:
            text += f".{step}" if len(step) <= _LONGEST_STEP else f".{step[:_LONGEST_STEP]}..."
    return text.removeprefix(".")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown `name`: the nearest known one, or the list of all."""
    names = list(known)
    nearest = len(name) <= _LONGEST_NAME and (
        get_close_matches(name, names, n=1, cutoff=0.6) or [other for other in names if other.lower() == name.lower()]
    )
    return f"did you mean {nearest[0]}?" if nearest else f"supported: {', '.join(names)}"


def _finding(detail: ErrorDetails, model: type[BaseModel]) -> Finding:
    location, kind, value, context = detail["loc"], detail["type"], detail["input"], detail.get("ctx", {})
    field = dotted(location[:-2] if location[-1:] == ("[key]",) else location)
    if kind == "extra_forbidden":
        *parent, name = location
        return Finding(field, ValueReason.UNKNOWN_FIELD, "unknown field", suggest(str(name), _fields_at(model, parent)))
    if kind == "missing":
        name = str(location[-1])
        return Finding(field, ValueReason.REQUIRED, "is required", f"add {_REQUIRED.get(name, f'{name}: VALUE')}")
    if kind == "value_error":
        error = context["error"]
        if isinstance(error, InvalidValue):
            return Finding(field, error.reason, error.message, error.remedy, error.value)
        return Finding(field, ValueReason.INVALID, *split_remedy(str(error)))
    if kind in _LENGTHS:
        message = f"has {context['actual_length']} entries"
        return Finding(field, ValueReason.WRONG_COUNT, message, _LENGTHS[kind].format(**context))
    # Invalid text for the engine and invalid URLs may contain a secret.
    private = _PRIVATE & set(location) and isinstance(value, str) and _SECRET_WORD.search(value[:_LOOKED_AT])
    reason, message, remedy = _problem(kind, value, context, detail["msg"])
    if private or value is None:
        return Finding(field, reason, f"{'null' if value is None else 'the value'} {message}", remedy)
    return Finding(field, reason, message, remedy, value)


def _problem(kind: str, value: Any, context: Mapping[str, Any], text: str) -> tuple[ValueReason, str, str]:
    if kind == "string_type" and isinstance(value, bool):
        words = "on and yes" if value else "off and no"
        example = "on" if value else "off"
        return (
            ValueReason.WRONG_TYPE,
            "is not text",
            f'put it in quotes, for example "{example}": YAML reads {words} as {str(value).lower()}',
        )
    if kind in _TYPES:
        return ValueReason.WRONG_TYPE, *split_remedy(f"is not {_TYPES[kind]}")
    if kind == "enum":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return ValueReason.NOT_SUPPORTED, "is not supported", f"use one of {choices}"
    if kind in _BOUNDS:
        return ValueReason.OUT_OF_RANGE, "is out of range", _BOUNDS[kind].format(**context)
    if kind == "string_too_long":
        return ValueReason.TOO_LONG, f"has {len(value)} characters", f"the maximum is {context['max_length']}"
    return ValueReason.INVALID, f"is not valid: {text}", ""


_PRIVATE = frozenset({"value", "extraArgs", "url", "endpoint"})
"""Fields whose values are omitted from messages if they contain a word for a secret."""
_SECRET_WORD = re.compile(r"(?i)key|token|secret|passw|credential|[@?#]")
_LOOKED_AT = 4096
_REQUIRED = {
    "metadata": "metadata: with name: below it",
    "name": "name: with lower-case letters, digits and dashes",
    "spec": "spec: with model: and topology: below it",
    "model": "model: with variant: and source: below it",
    "variant": "variant: Flash, Pro or Nano",
    "source": "source: with path:, huggingFace: or another source below it",
    "topology": "topology: with hardware: below it",
    "repo": "repo: OWNER/NAME",
    "revision": "revision: with the 40 hex digits of a commit, so that the weights cannot change",
}
"""Remedies for fields without a default."""
_TYPES = {
    "int_type": "a whole number; write it without quotes and without a fraction",
    "int_from_float": "a whole number; write it without a fraction",
    "float_type": "a number; write it without quotes, for example 0.8",
    "bool_type": "true or false; write one of them without quotes",
    "string_type": 'text; put it in quotes, for example "1"',
    "model_type": "a mapping; write its fields indented below it",
    "model_attributes_type": "a mapping; write its fields indented below it",
    "dict_type": "a mapping; write one NAME: VALUE per line below it",
    "tuple_type": "a list; write one entry per line, each after a dash",
}
_BOUNDS = {
    "greater_than_equal": "the minimum is {ge}",
    "less_than_equal": "the maximum is {le}",
}
_LENGTHS = {
    "too_short": "the minimum is {min_length}",
    "too_long": "the maximum is {max_length}",
}


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the wire names of the fields of the mapping at `location`."""
    current: type[BaseModel] | None = model
    for step in location:
        if isinstance(step, str) and current is not None:
            fields = {field.alias or name: field for name, field in current.model_fields.items()}
            current = model_in(fields[step].annotation) if step in fields else None
    if current is None:
        return []
    return [field.alias or name for name, field in current.model_fields.items()]


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in `annotation`: itself, an option, or the entries of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, Annotated):
        return next(filter(None, map(model_in, get_args(annotation))), None)
    return None
