"""Documents generated from the models and rules, by the name of the document:

python -m dsv4_operator.api.documents reference > docs/reference/api.md
python -m dsv4_operator.api.documents security > charts/dsv4-operator/files/security.json
python -m dsv4_operator.api.documents trust    # tables of docs/trust.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dsv4_operator.api import values
from dsv4_operator.api.crd import attribute_texts
from dsv4_operator.api.deployment import DSV4Deployment
from dsv4_operator.api.findings import model_in
from dsv4_operator.api.policy import validations
from dsv4_operator.api.security import FLAGS, OTHER_FLAGS, REFUSED_VARIABLES, VARIABLES, spellings
from dsv4_operator.api.status import ConditionType, DeploymentPhase, GroupPhase, Reason
from dsv4_runtime.contract import Cause, Phase

_INTRODUCTION = """# DSV4Deployment

The one object that users write, `apiVersion: dsv4.dev/v1beta1` ([versions](../operator.md#api-versions)).
`dsv4 up FILE` reads it from a file. Samples are in `examples/`. This page is generated from the models
(`python -m dsv4_operator.api.documents reference`).

Durations are written `90s`, `10m` or `1h30m`; quantities `512Mi` or `8Gi`; times in the status are RFC 3339 in UTC.
Unknown fields are refused.
"""
_MARKS = (
    (get_args(values.Duration)[1], "duration"),
    (get_args(values.Quantity)[1], "quantity"),
    (get_args(values.Time)[1], "time"),
)
"""Field metadata that marks the types of `values`."""
_FEW = 6
_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def reference() -> str:
    """Return the reference as Markdown."""
    texts = attribute_texts(DSV4Deployment)
    sections = [
        _INTRODUCTION,
        *(
            line
            for name in ("metadata", "spec", "status")
            for line in _tables(name, DSV4Deployment.model_fields[name], texts[name])
        ),
        _vocabulary("Conditions", ConditionType),
        _vocabulary("Reasons of conditions and events", Reason),
        _vocabulary("Phases of a deployment (`status.phase`)", DeploymentPhase),
        _vocabulary("Phases of a group (`status.groups[].phase`)", GroupPhase),
        _vocabulary("Phases of a member (`status.groups[].members[].phase`)", Phase),
        _vocabulary("Causes (`status.groups[].lastFailure.cause`)", Cause),
    ]
    return "\n".join(sections)


def _tables(path: str, field: FieldInfo, text: str) -> Iterator[str]:
    """Yield the table of `field`'s model, then those of nested models."""
    model = model_in(field.annotation)
    if model is None:
        return
    texts = attribute_texts(model)
    rows = [_row(name, part, texts.get(name, "")) for name, part in model.model_fields.items()]
    text = " ".join((text or model.__doc__ or "").split())
    yield f"## {path}\n\n{text}\n\n| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for name, part in model.model_fields.items():
        suffix = "[]" if _is_list(part.annotation) else ""
        yield from _tables(f"{path}.{part.alias or name}{suffix}", part, texts.get(name, ""))


def _row(name: str, field: FieldInfo, text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return f"| `{field.alias or name}` | {_type(field)} | {_default(field)} | {text} |"


def _type(field: FieldInfo) -> str:
    return _with_metadata(_named(field.annotation), field.metadata)


def _named(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_metadata(_named(args[0]), _flat(args[1:]))
    if origin in (Union, UnionType):
        return " or ".join(_named(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in args)
    if origin is tuple:
        return f"list of {_named(args[0])}"
    if origin is dict:
        return "map of string to string"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        words = list(annotation)
        return ", ".join(f"`{word}`" for word in words) if len(words) <= _FEW else "enum, below"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    return _NAMES[annotation]


def _with_metadata(name: str, metadata: Sequence[Any]) -> str:
    for mark, ours in _MARKS:
        if mark in metadata:
            bounds = [item for item in metadata if isinstance(item, values.Between)]
            return f"{ours}, {bounds[-1].least} to {bounds[-1].most}" if bounds else ours
    least = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    most = next((item.le for item in metadata if isinstance(item, Le)), None)
    if least is None:
        return name
    return f"{name} from {least}" if most is None else f"{name}, {least} to {most}"


def _flat(metadata: Sequence[Any]) -> list[Any]:
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None or default is PydanticUndefined or isinstance(default, BaseModel) or default in ((), ""):
        return ""
    if _type(field).startswith("duration"):
        return f"`{values.format_duration(default)}`"
    if _type(field).startswith("quantity"):
        return f"`{values.format_quantity(default)}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) is tuple:
        return True
    return get_origin(annotation) in (Union, UnionType) and any(map(_is_list, get_args(annotation)))


def _vocabulary(title: str, words: type[StrEnum]) -> str:
    return f"## {title}\n\n" + ", ".join(f"`{word}`" for word in words) + "\n"


def security_tables() -> dict[str, object]:
    """Return the tables for the chart: flags, and the validations of its policy in CEL."""
    return {
        "flags": {flag: spellings(flag) for flag in FLAGS},
        "otherFlags": list(OTHER_FLAGS),
        "validations": validations(),
    }


def security_markdown() -> str:
    """Return the tables of docs/trust.md."""
    rows = ["| flags | reason |", "|---|---|"]
    for reason in dict.fromkeys(FLAGS.values()):
        flags = ", ".join(f"`{flag}`" for flag, why in FLAGS.items() if why == reason)
        rows.append(f"| {flags} | {reason} |")
    rows += ["", "| accepted variables | meaning |", "|---|---|"]
    rows += [f"| `{_in_table(pattern)}` | {meaning} |" for pattern, meaning in VARIABLES.items()]
    rows += ["", "| refused variables | reason |", "|---|---|"]
    rows += [f"| `{_in_table(pattern)}` | {reason} |" for pattern, reason in REFUSED_VARIABLES.items()]
    return "\n".join(rows) + "\n"


def _in_table(pattern: str) -> str:
    return pattern.replace("|", "\\|")


_DOCUMENTS = {
    "reference": reference,
    "security": lambda: json.dumps(security_tables(), indent=2, ensure_ascii=False) + "\n",
    "trust": security_markdown,
}

if __name__ == "__main__":
    sys.stdout.write(_DOCUMENTS[sys.argv[1]]())
