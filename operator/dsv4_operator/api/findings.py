"""Findings of what is wrong with a manifest, in sentences that name the field, the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsv4_operator.api.values import quoted
from dsv4_runtime.util.secrets import has_secret

RULES_ERROR = "dsv4_rules"
"""Type of the pydantic error whose context holds findings of our own."""
MOST_FINDINGS = 20
"""Findings that are told one by one: nobody reads more, and each unknown name is compared with all known ones."""
_LONGEST_STEP = 317
"""Characters of a name that are shown in a path: those of the longest label's key."""
_LONGEST_NAME = 64
"""Characters of a name that may be a known one's misspelling."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    path: str
    """The field, as `spec.engine.maxModelLen` or `spec.engine.env[0].name`; empty for the whole text."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidDeployment(ValueError):
    """A text or an object that is no valid `DSV4Deployment`; its text has one line a finding."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


def translate(error: ValidationError, model: type[BaseModel]) -> tuple[Finding, ...]:
    """Return the first findings behind pydantic's `error` about `model`, in its order, and how many more there are."""
    findings: list[Finding] = []
    details = error.errors(include_url=False)
    for number, detail in enumerate(details):
        if len(findings) >= MOST_FINDINGS:
            findings.append(Finding("", f"{len(details) - number} more findings; correct the ones above first"))
            break
        if detail["type"] == "too_short" and any(_within(other["loc"], detail["loc"]) for other in details):
            continue  # It only counts the entries that were right.
        if detail["type"] == RULES_ERROR:
            findings += detail["ctx"]["findings"]
        else:
            location = detail["loc"][:-2] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
            findings.append(Finding(dotted(location), _sentence(detail, model)))
    return tuple(findings)


def _within(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def dotted(location: Sequence[int | str]) -> str:
    """Return `("spec", "engine", "env", 0, "name")` as `spec.engine.env[0].name`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif has_secret(step):
            text += ".(a name that looks like a secret)"
        else:
            text += f".{step}" if len(step) <= _LONGEST_STEP else f".{step[:_LONGEST_STEP]}..."
    return text.removeprefix(".")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown `name`: the nearest known one, or all of them."""
    names = list(known)
    nearest = len(name) <= _LONGEST_NAME and (
        get_close_matches(name, names, n=1, cutoff=0.6) or [other for other in names if other.lower() == name.lower()]
    )
    return f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(names)}"


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # Text for the engine and URLs may have a secret in them, whatever is wrong with them.
    private = _PRIVATE & set(detail["loc"]) and isinstance(value, str) and _SECRET_WORD.search(value[:_LOOKED_AT])
    shown = "the value" if private else quoted(value)
    if kind == "extra_forbidden":
        *parent, name = detail["loc"]
        return f"unknown field; {suggest(str(name), _fields_at(model, parent))}"
    if kind == "missing":
        name = str(detail["loc"][-1])
        return f"is required; write {_REQUIRED.get(name, f'{name}: and its value')}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        return f"{shown} is not {_WANTED[kind]}"
    if kind == "enum":
        return f"{shown} is unknown; use one of {_choices(context)}"
    if kind in _BOUNDS:
        return f"{shown} is out of range; {_BOUNDS[kind].format(**context)}"
    if kind in _LENGTHS:
        return f"has {context['actual_length']} entries; {_LENGTHS[kind].format(**context)}"
    if kind == "string_too_long":
        return f"{shown} has {len(value)} characters; the most is {context['max_length']}"
    return f"{shown} cannot be used: {detail['msg']}"


_PRIVATE = frozenset({"value", "extraArgs", "url", "endpoint"})
"""Fields whose values no refusal shows where they speak of a secret."""
_SECRET_WORD = re.compile(r"(?i)key|token|secret|passw|credential|[@?#]")
_LOOKED_AT = 4096
_REQUIRED = {
    "metadata": "metadata: with name: below it",
    "name": "name: and lower-case letters, digits and dashes",
    "spec": "spec: with model: and topology: below it",
    "model": "model: with variant: and source: below it",
    "variant": "variant: Flash, Pro or Nano",
    "source": "source: with path:, huggingFace: or another place below it",
    "topology": "topology: with hardware: below it",
    "repo": "repo: OWNER/NAME",
    "revision": "revision: and the 40 hex digits of the commit, so that the weights cannot change",
}
"""Remedies for fields without a default."""
_WANTED = {
    "int_type": "a whole number; write it without quotes and without a fraction",
    "int_from_float": "a whole number; write it without a fraction",
    "float_type": "a number; write it without quotes, for example 0.8",
    "bool_type": "true or false; write one of them without quotes",
    "string_type": 'text; put it in quotes, for example "1"',
    "model_type": "a mapping; write its fields indented below it",
    "model_attributes_type": "a mapping; write its fields indented below it",
    "dict_type": "a mapping; write one NAME: VALUE a line below it",
    "tuple_type": "a list; write one entry a line, each after a dash",
}
_BOUNDS = {
    "greater_than_equal": "the least is {ge}",
    "less_than_equal": "the most is {le}",
}
_LENGTHS = {
    "too_short": "at least {min_length} needed",
    "too_long": "at most {max_length} allowed",
}


def _choices(context: Mapping[str, Any]) -> str:
    return str(context["expected"]).replace("'", "").replace(" or ", ", ")


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the names on the wire of the fields that the mapping at `location` may have."""
    current: type[BaseModel] | None = model
    for step in location:
        if isinstance(step, str) and current is not None:
            fields = {field.alias or name: field for name, field in current.model_fields.items()}
            current = _model_in(fields[step].annotation) if step in fields else None
    if current is None:
        return []
    return [field.alias or name for name, field in current.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that `annotation` is, or holds as an option or as the entries of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, UnionType, tuple}:
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None
