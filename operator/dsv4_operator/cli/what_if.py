"""`--what-if key=value`: a deployment with some fields changed, checked as if the file said so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, parse
from dsv4_operator.cli.errors import bad_input

_FOLLOWS = "tensorParallelSize"
_LEADS = ("nodesPerGroup", "devicesPerNode", "pipelineParallelSize")


def changed(deployment: DSV4Deployment, changes: Sequence[str]) -> DSV4Deployment:
    """Return `deployment` with `changes` made, each `engine.maxNumBatchedTokens=4096`: a path below `spec`, and YAML.

    `null` takes a field back to its default. A change of the number of devices takes `tensorParallelSize` back too,
    unless that is changed as well.

    Raises:
        CommandError: a change cannot be read, or the result is not a valid deployment.
    """
    if not changes:
        return deployment
    document = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    document |= {"apiVersion": deployment.api_version, "kind": deployment.kind}
    spec = document.setdefault("spec", {})
    read = [_read(change) for change in changes]
    for path, value in read:
        _set(spec, path, value)
    topology = [path[1] for path, _ in read if path[0] == "topology" and len(path) == 2]
    if _FOLLOWS not in topology and any(name in topology for name in _LEADS):
        spec.get("topology", {}).pop(_FOLLOWS, None)
    try:
        return parse(document)
    except InvalidDeployment as error:
        raise bad_input(*(f"--what-if: {finding}" for finding in error.findings)) from None


def _read(change: str) -> tuple[list[str], Any]:
    key, equals, text = change.partition("=")
    path = key.strip().removeprefix("spec.").split(".")
    if not equals or not all(path):
        raise bad_input(f"--what-if {change!r} is no change; write for example engine.maxNumBatchedTokens=4096")
    try:
        return path, yaml.safe_load(text)
    except yaml.YAMLError:
        raise bad_input(f"--what-if {change!r}: the value is not valid YAML") from None


def _set(place: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *outer, last = path
    for number, name in enumerate(outer, start=1):
        inner = place.setdefault(name, {})
        if not isinstance(inner, dict):
            raise bad_input(f"--what-if: spec.{'.'.join(path[:number])} has no fields of its own")
        place = inner
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
