"""Revision of a specification: changes that require a new incarnation, earlier and last valid specifications.

A deployment continues with its last valid specification while the current one is refused. A specification may be
refused although its groups run: a rule became stricter with an upgrade of the operator, or the API server did not check
it. The text in `status.rollout.accepted` was valid when it was written, so if it breaks one of the current rules, it is
parsed without them.
"""

from __future__ import annotations

import hashlib
import json
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, Metadata
from dsv4_operator.api.deployment import RESTART_AT, restart_at
from dsv4_operator.api.spec import DeploymentSpec
from dsv4_operator.api.values import parse_duration, parse_quantity

APPLIED_WITHOUT_RESTART = {"suspend", "replicas", "recovery", "rollout", "gateway"}
"""Fields of the specification that change without a new incarnation."""
_AS_STORED: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True, "warnings": False}
_formed: dict[int, tuple[weakref.ref[DSV4Deployment], str]] = {}
"""Results of `formed_from` by the id of a deployment, while it exists."""


def formed_from(deployment: DSV4Deployment) -> str:
    """Return the part of `deployment` that determines its members, as JSON text.

    Fields with their default are omitted, so a later version with more fields restarts no group.
    """
    # Called ten times in a reconcile for an object that does not change.
    known = _formed.get(id(deployment))
    if known is not None and known[0]() is deployment:
        return known[1]
    spec = deployment.spec.model_dump(exclude=APPLIED_WITHOUT_RESTART, exclude_defaults=True, **_AS_STORED)
    if restart_at(deployment) is not None:
        spec[RESTART_AT] = restart_at(deployment)
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    key = id(deployment)
    _formed[key] = weakref.ref(deployment, lambda _: _formed.pop(key, None)), text
    return text


@lru_cache(maxsize=1024)
def revision_of(formed: str) -> str:
    """Return the fingerprint of a text of `formed_from`."""
    return hashlib.sha256(formed.encode()).hexdigest()[:12]


def revision(deployment: DSV4Deployment) -> str:
    """Return a fingerprint of the part that determines the members; a change requires a new incarnation."""
    return revision_of(formed_from(deployment))


def same_specification(one: str, other: str) -> bool:
    """Return whether two texts of `formed_from` differ at most in the time of the requested restart."""
    return parts(one)[0] == parts(other)[0]


def as_formed_from(deployment: DSV4Deployment, formed: str) -> DSV4Deployment | None:
    """Return `deployment` with the members of an earlier `formed_from` and its other fields unchanged.

    None if this version of dsv4 reads `formed` differently from the version that wrote it, because the members would
    differ from those that served.
    """
    spec, restart = parts(formed)
    now = deployment.spec.model_dump(mode="json", by_alias=True, include=APPLIED_WITHOUT_RESTART, exclude_none=True)
    annotations = {name: value for name, value in deployment.metadata.annotations.items() if name != RESTART_AT}
    if restart is not None:
        annotations[RESTART_AT] = restart
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    try:
        # With its status: rules for new objects do not apply, and groups keep their nodes.
        made = DSV4Deployment.model_validate(
            {"metadata": metadata, "spec": {**spec, **now}, "status": deployment.status}
        )
    except ValidationError:
        return None
    return made if formed_from(made) == formed else None


def parts(formed: str) -> tuple[dict[str, Any], str | None]:
    """Return the specification in a text of `formed_from` and the time of the last requested restart.

    Empty if the text is invalid.
    """
    try:
        spec = json.loads(formed)
    except ValueError:
        return {}, None
    if not isinstance(spec, dict):
        return {}, None
    restart = spec.pop(RESTART_AT, None)
    return spec, restart if isinstance(restart, str) else None


_applied: dict[int, tuple[weakref.ref[DSV4Deployment], str, str]] = {}
"""Arguments and results of `accepted_text` by the id of a deployment, while it exists."""
_GONE = frozenset({GroupPhase.SUSPENDED, GroupPhase.STOPPED})


@dataclass(frozen=True, slots=True)
class Accepted:
    """A stored specification that was valid."""

    generation: int
    """Its `metadata.generation`."""
    formed: str
    """Part that determines the members (`formed_from`)."""
    applied: Mapping[str, Any]
    """Part that applies without a restart."""


@dataclass(frozen=True, slots=True)
class LastValid:
    """A deployment with its last valid specification."""

    deployment: DSV4Deployment
    formable: bool = True
    """Whether members may be formed from it; if not, it is only observed and stopped."""


class _Unreadable(Exception):
    """The stored specification does not have the form of a specification."""


def accepted_text(deployment: DSV4Deployment, formed: str) -> str:
    """Return the specification of `deployment` with the members of `formed`, in the format of `read_accepted`."""
    known = _applied.get(id(deployment))
    if known is not None and known[0]() is deployment and known[1] == formed:
        return known[2]
    applied = deployment.spec.model_dump(include=APPLIED_WITHOUT_RESTART, exclude_defaults=True, **_AS_STORED)
    document = {"generation": deployment.metadata.generation, "formed": formed, "applied": applied}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    key = id(deployment)
    _applied[key] = weakref.ref(deployment, lambda _: _applied.pop(key, None)), formed, text
    return text


def read_accepted(text: str) -> Accepted | None:
    """Parse a text of `accepted_text`; None if `text` is empty or invalid."""
    try:
        document = json.loads(text) if text else None
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    generation, formed, applied = (document.get(name) for name in ("generation", "formed", "applied"))
    if not isinstance(generation, int) or not isinstance(formed, str) or not isinstance(applied, dict):
        return None
    return Accepted(generation, formed, applied)


def last_valid(manifest: Mapping[str, Any], status: DeploymentStatus) -> LastValid | None:
    """Return the deployment in `manifest`, whose specification is refused, with its last valid specification.

    That is the first valid one of: `status.rollout.accepted`; the specification in the manifest if a group was formed
    from it; `status.rollout.served`; for groups that only have to be observed and stopped the specification in the
    manifest. `suspend: true` and `replicas: 0` apply even if the rest is refused.

    Args:
        manifest: object of the API server.
        status: the last written status.

    Returns:
        None if no group has to be supervised, or no specification can be parsed.
    """
    if all(group.incarnation == 0 for group in status.groups):
        return None
    spec = manifest.get("spec")
    present: Mapping[str, Any] = spec if isinstance(spec, dict) else {}
    # The API server accepts only text here, so other values contain no request for a restart.
    metadata = {**manifest["metadata"], "labels": {}}
    annotations = metadata.get("annotations")
    texts = annotations.items() if isinstance(annotations, dict) else ()
    metadata["annotations"] = {name: text for name, text in texts if isinstance(text, str)}
    stopped = {name: value for name, value in (("suspend", True), ("replicas", 0)) if present.get(name) is value}
    accepted = read_accepted(status.rollout.accepted)
    if accepted is not None:
        metadata["generation"] = accepted.generation
        found = _formed_again(metadata, accepted.formed, {**accepted.applied, **stopped})
        if found is not None:
            return LastValid(found)
    applied = {name: value for name, value in present.items() if name in APPLIED_WITHOUT_RESTART}
    same = _made(metadata, present)
    if same is not None and any(group.revision == revision(same) for group in status.groups):
        return LastValid(same)
    if status.rollout.served:
        found = _formed_again(metadata, status.rollout.served, applied)
        if found is not None:
            return LastValid(found)
    if same is None:
        return None
    groups = [group.index + 1 for group in status.groups if group.phase not in _GONE]
    replicas = max([same.spec.replicas, *groups]) if "replicas" not in stopped else 0
    return LastValid(
        same.model_copy(update={"spec": same.spec.model_copy(update={"replicas": replicas})}), formable=False
    )


def _formed_again(metadata: Mapping[str, Any], formed: str, applied: Mapping[str, Any]) -> DSV4Deployment | None:
    """Return the deployment with the members of `formed`; None if it is parsed differently."""
    spec, _ = parts(formed)
    made = _made(metadata, {**spec, **applied})
    return made if made is not None and parts(formed_from(made))[0] == spec else None


def _made(metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> DSV4Deployment | None:
    """Return the deployment, parsed without the rules that it breaks; None if its form is invalid."""
    try:
        return DSV4Deployment.model_construct(metadata=_model(Metadata, metadata), spec=_model(DeploymentSpec, spec))
    except _Unreadable:
        return None


def _model(model: type[BaseModel], data: Mapping[str, Any]) -> Any:
    """Return `data` as `model`, with a check of the types of its fields only.

    Raises:
        _Unreadable: a required field is missing, or a value does not have the type of its field.
    """
    try:
        return model.model_validate(data, by_alias=True, by_name=False)
    except ValidationError:
        pass
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in data:
            annotation: Any = field.annotation
            declared = Annotated[annotation, *field.metadata] if field.metadata else annotation
            values[name] = _value(declared, data[key])
        elif field.is_required():
            raise _Unreadable(key)
    return model.model_construct(**values)


def _value(declared: Any, value: Any) -> Any:
    try:
        return TypeAdapter(declared).validate_python(value, by_alias=True, by_name=False)
    except ValidationError:
        pass
    kind, inner = get_origin(declared), get_args(declared)
    if kind is Annotated:
        return _value(inner[0], value)
    if kind in (Union, types.UnionType):
        for one in inner:
            try:
                return _value(one, value)
            except _Unreadable:
                continue
    elif kind in (tuple, list) and isinstance(value, list):
        return kind(_value(inner[0], one) for one in value)
    elif kind is dict and isinstance(value, Mapping):
        return {name: _value(inner[1], one) for name, one in value.items()}
    elif isinstance(declared, type) and issubclass(declared, BaseModel) and isinstance(value, Mapping):
        return _model(declared, value)
    elif isinstance(declared, type) and issubclass(declared, Enum) and isinstance(value, str):
        # A value of another version; it equals no value of this one.
        return value
    elif declared in (float, int) and isinstance(value, str):
        try:
            return parse_duration(value) if declared is float else parse_quantity(value)
        except ValueError:
            raise _Unreadable(value) from None
    raise _Unreadable(str(declared))
