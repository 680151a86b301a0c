"""Reading a `DSV4Deployment` from text, with refusals that a person can act on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import yaml
from pydantic import ValidationError

from dsv4_operator.api.deployment import API_VERSION, KIND, DSV4Deployment
from dsv4_operator.api.findings import Finding, InvalidDeployment, translate
from dsv4_operator.api.values import quoted

_SERVER_FIELDS = (
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
)
"""Metadata that `kubectl get -o yaml` shows; a manifest may bring it, and nothing here reads it."""

_MOST_VALUES = 20_000
"""Values in metadata and specification. A specification that has all it may have has 2,000; to check ten times as many
takes 0.1 s."""


def load(text: str, hardware: Callable[[], str] | None = None) -> DSV4Deployment:
    """Return the deployment that `text`, YAML or JSON, describes.

    Args:
        text: one document.
        hardware: asked for `spec.topology.hardware` where `text` leaves it out; None: it must be there.

    Raises:
        InvalidDeployment: `text` is not one document of this kind, or breaks a rule. All findings at once.
    """
    document = _document(text)
    spec = document.get("spec") if isinstance(document, dict) else None
    topology = spec.setdefault("topology", {}) if hardware and isinstance(spec, dict) else None
    if hardware and isinstance(topology, dict) and "hardware" not in topology:
        topology["hardware"] = hardware()
    return parse(document)


def parse(data: object) -> DSV4Deployment:
    """Return the deployment in `data`, JSON values with the names of the wire, for example from the Kubernetes API.

    Raises:
        InvalidDeployment: as `load` does.
    """
    if not isinstance(data, dict):
        raise InvalidDeployment([Finding("", f"a {KIND} is a mapping that begins with apiVersion: {API_VERSION}")])
    _expect(data, "kind", KIND)
    _expect(data, "apiVersion", API_VERSION)
    metadata = data.get("metadata")
    if isinstance(metadata, dict):
        kept = {key: value for key, value in metadata.items() if key not in _SERVER_FIELDS}
        data = {**data, "metadata": kept}
    _bound({key: value for key, value in data.items() if key != "status"})
    try:
        # Only the names of the wire: what works here must also work with kubectl.
        return DSV4Deployment.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidDeployment(translate(error, DSV4Deployment)) from None


def _expect(data: dict[str, Any], field: str, wanted: str) -> None:
    if field not in data:
        raise InvalidDeployment([Finding(field, f"is required; write {field}: {wanted}")])
    if data[field] != wanted:
        raise InvalidDeployment([Finding(field, f"{quoted(data[field])} is not known here; write {wanted}")])


def _bound(data: dict[str, Any]) -> None:
    """Refuse what has more values than any deployment, before each of them is looked at."""
    count = 0
    rest: list[dict[Any, Any] | list[Any]] = [data]
    while rest:
        inner = rest.pop()
        values = inner.values() if isinstance(inner, dict) else inner
        count += len(inner)
        if count > _MOST_VALUES:
            raise InvalidDeployment(
                [
                    Finding(
                        "", f"metadata and spec have more than {_MOST_VALUES:,} values; remove what is no deployment's"
                    )
                ]
            )
        rest += [value for value in values if isinstance(value, dict | list)]


def _document(text: str) -> object:
    try:
        documents = [document for document in yaml.load_all(text, Loader=_ManifestLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context or "cannot be read"
        raise InvalidDeployment([Finding("", f"not valid YAML: {where}{problem}")]) from None
    except yaml.YAMLError as error:
        raise InvalidDeployment([Finding("", f"not valid YAML: {' '.join(str(error).split())}")]) from None
    except RecursionError:
        raise InvalidDeployment([Finding("", "mappings and lists are nested too deeply; remove brackets")]) from None
    if not documents:
        raise InvalidDeployment([Finding("", f"the text is empty; begin with apiVersion: {API_VERSION}")])
    if len(documents) > 1:
        raise InvalidDeployment(
            [Finding("", f"the text has {len(documents)} documents; keep one {KIND} a file, without further --- lines")]
        )
    return documents[0]


class _ManifestLoader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: no dates, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the field "{key.value}" is there twice; remove one', key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
