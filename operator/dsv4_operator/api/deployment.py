"""The `DSV4Deployment` object: metadata, annotations, and reading it from YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dsv4_operator.api.cluster import AnnotationKey, LabelKey, LabelValue, Namespace
from dsv4_operator.api.findings import RULES_ERROR, Finding, InvalidDeployment, joined, translate
from dsv4_operator.api.rules import check_spec
from dsv4_operator.api.spec import KUBERAY_BACKEND, DeploymentSpec
from dsv4_operator.api.status import DeploymentStatus, read_status
from dsv4_operator.api.values import Count, InvalidValue, Matches, SpecPart, ValueReason, split_remedy
from dsv4_runtime.contract import Document

API_VERSION: Literal["dsv4.dev/v1beta1"] = "dsv4.dev/v1beta1"
"""Version of new manifests."""

STORED_VERSION: Literal["dsv4.dev/v1alpha1"] = "dsv4.dev/v1alpha1"
"""Version that API servers store, and that the operator reads and writes: definitions of dsv4 0.1.0 have it too, so
definition and operator can be upgraded and rolled back in any order (docs/decisions/0015)."""

API_VERSIONS = (STORED_VERSION, API_VERSION)
"""Accepted versions, which have the same fields, the oldest first."""

KIND: Literal["DSV4Deployment"] = "DSV4Deployment"

LONGEST_NAME = 45
"""Names of members contain the deployment's name, and Kubernetes limits them to 63 characters."""

LONGEST_KUBERAY_NAME = 36
"""KubeRay shortens names of pods to 50 characters before their own end (`PodName`); those of members have 14 after the
deployment's, with two digits for the group and for the rank and five for the incarnation."""

KUBERAY_NAME_REFUSAL = (
    f"is too long for the backend KubeRay; write at most {LONGEST_KUBERAY_NAME} characters, or Pods as backend"
)

NAME_PATTERN = "[a-z]([a-z0-9-]*[a-z0-9])?"
"""Pattern of the whole name."""


TAKEN_PATTERN = "-[0-9]+-(head|i[0-9]+)$"
"""Pattern of name endings used by Services of groups: `chat-0-head` belongs to the deployment `chat`."""


TAKEN_REFUSAL = (
    "has an ending that is reserved for Services of groups, such as -0-head or -0-i1; write a name with another ending"
)


Name = Annotated[
    str,
    Matches(
        NAME_PATTERN, "is not a name; use lower-case letters, digits and dashes, beginning with a letter", LONGEST_NAME
    ),
]


_MOST_ANNOTATION_BYTES = 2**18
"""Limit of API servers for the annotations of an object, in bytes."""


def _texts(value: Any) -> Any:
    # API servers read null as an empty string.
    return {key: "" if text is None else text for key, text in value.items()} if isinstance(value, dict) else value


def _small(annotations: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items())
    if size > _MOST_ANNOTATION_BYTES:
        text = f"has {size} bytes; the maximum is {_MOST_ANNOTATION_BYTES}, so shorten the annotations"
        raise InvalidValue(None, ValueReason.TOO_LONG, text)
    return annotations


class Metadata(SpecPart):
    """Identity of the deployment."""

    name: Name
    """Lower-case letters, digits and dashes, at most 45; not with an end such as `-0-head` or `-0-i1`."""
    namespace: Namespace = "default"
    """Kubernetes namespace."""
    generation: Annotated[Count, Field(ge=0)] = 1
    """Generation of the specification, incremented with every change."""
    uid: str | None = None
    """Set by Kubernetes."""
    labels: Annotated[dict[LabelKey, LabelValue], BeforeValidator(_texts)] = Field(default_factory=dict)
    """Labels for use by clients."""
    annotations: Annotated[dict[AnnotationKey, str], BeforeValidator(_texts), AfterValidator(_small)] = Field(
        default_factory=dict
    )
    """Annotations for use by clients."""


class DSV4Deployment(Document):
    """One DeepSeek-V4 model on one or more groups of machines, kept running."""

    api_version: Annotated[Literal["dsv4.dev/v1alpha1", "dsv4.dev/v1beta1"], AfterValidator(lambda _: API_VERSION)] = (
        API_VERSION
    )
    """`dsv4.dev/v1beta1`. `dsv4.dev/v1alpha1` has the same fields and is converted."""
    kind: Literal["DSV4Deployment"] = KIND
    """`DSV4Deployment`."""
    metadata: Metadata
    """Name, namespace and labels of the deployment."""
    spec: DeploymentSpec
    """Desired state."""
    status: Annotated[DeploymentStatus, BeforeValidator(read_status)] = DeploymentStatus()
    """Observed state."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        findings = check_spec(self.spec)
        # Existing objects from before this rule stay valid.
        if re.search(TAKEN_PATTERN, self.metadata.name) and self.status == DeploymentStatus():
            taken = Finding("metadata.name", "ReservedName", *split_remedy(TAKEN_REFUSAL), self.metadata.name)
            findings = (*findings, taken)
        if self.spec.backend == KUBERAY_BACKEND and len(self.metadata.name) > LONGEST_KUBERAY_NAME:
            long = Finding(
                "metadata.name", ValueReason.TOO_LONG, *split_remedy(KUBERAY_NAME_REFUSAL), self.metadata.name
            )
            findings = (*findings, long)
        if findings:
            message = joined(findings).replace("{", "{{").replace("}", "}}")
            raise PydanticCustomError(RULES_ERROR, message, {"findings": findings})
        return self

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the model names of the API."""
        return self.spec.model.served_names or (self.metadata.name,)


RESTART_AT = "dsv4.dev/restart-at"
"""A new value, usually the present time, restarts every group, as `kubectl rollout restart` does."""

PAUSED = "dsv4.dev/paused"
"""`true` pauses the reconciliation: no group is formed, ended or recovered; the status is still updated."""


def restart_at(deployment: DSV4Deployment) -> str | None:
    """Return the value of the latest restart request; None if there is none."""
    return deployment.metadata.annotations.get(RESTART_AT)


def is_paused(deployment: DSV4Deployment) -> bool:
    """Return whether the reconciliation is paused."""
    return deployment.metadata.annotations.get(PAUSED, "").lower() == "true"


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
"""Metadata in the output of `kubectl get -o yaml`; accepted in a manifest and ignored."""

_MOST_VALUES = 20_000
"""Limit of values in metadata and specification: ten times the largest valid one; checking them takes 0.1 s."""


def load(text: str, hardware: Callable[[], str] | None = None) -> DSV4Deployment:
    """Return the deployment in `text`, YAML or JSON.

    Args:
        text: one document.
        hardware: returns the default of `spec.topology.hardware`; None: the field is required.

    Raises:
        InvalidDeployment: `text` is not one document of this kind, or breaks a rule. Contains all findings.
    """
    document = read_document(text)
    spec = document.get("spec") if isinstance(document, dict) else None
    topology = spec.setdefault("topology", {}) if hardware and isinstance(spec, dict) else None
    if hardware and isinstance(topology, dict) and "hardware" not in topology:
        topology["hardware"] = hardware()
    return parse(document)


def parse(data: object) -> DSV4Deployment:
    """Return the deployment in `data`, JSON values in the wire format, for example from the Kubernetes API.

    Raises:
        InvalidDeployment: as in `load`.
    """
    if not isinstance(data, dict):
        raise _unreadable("NotAMapping", "the document is not a mapping", f"begin with apiVersion: {API_VERSION}")
    _expect(data, "kind", KIND)
    _expect(data, "apiVersion", API_VERSION, *API_VERSIONS)
    metadata = data.get("metadata")
    if isinstance(metadata, dict):
        kept = {key: value for key, value in metadata.items() if key not in _SERVER_FIELDS}
        data = {**data, "metadata": kept}
    _bound({key: value for key, value in data.items() if key != "status"})
    try:
        # Only wire names: a valid file must also work with kubectl.
        return DSV4Deployment.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidDeployment(translate(error, DSV4Deployment)) from None


def _expect(data: dict[str, Any], field: str, wanted: str, *accepted: str) -> None:
    """Refuse `data` unless its `field` is `wanted` or one of `accepted`."""
    if field not in data:
        raise InvalidDeployment([Finding(field, ValueReason.REQUIRED, "is required", f"add {field}: {wanted}")])
    if data[field] not in (wanted, *accepted):
        remedy = f"write {wanted}"
        raise InvalidDeployment([Finding(field, ValueReason.NOT_SUPPORTED, "is not supported", remedy, data[field])])


def _unreadable(reason: str, message: str, remedy: str) -> InvalidDeployment:
    """Return the error for a text that is not one manifest."""
    return InvalidDeployment([Finding("", reason, message, remedy)])


def _bound(data: dict[str, Any]) -> None:
    """Refuse objects with more values than any valid deployment, before each value is checked."""
    count = 0
    rest: list[dict[Any, Any] | list[Any]] = [data]
    while rest:
        inner = rest.pop()
        values = inner.values() if isinstance(inner, dict) else inner
        count += len(inner)
        if count > _MOST_VALUES:
            problem = f"metadata and spec have more than {_MOST_VALUES:,} values"
            raise _unreadable("TooManyValues", problem, f"remove the values that do not belong to a {KIND}")
        rest += [value for value in values if isinstance(value, dict | list)]


def read_document(text: str, kind: str = KIND, begin: str = f"apiVersion: {API_VERSION}") -> object:
    """Return the only document in `text`, YAML or JSON, as parsed by Kubernetes.

    `kind` and `begin` are its kind and its first line, for messages.

    Raises:
        InvalidDeployment: `text` is not one document.
    """
    try:
        documents = [document for document in yaml.load_all(text, Loader=_ManifestLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem, _, remedy = (error.problem or error.context or "syntax error").partition("; ")
        raise _unreadable("InvalidYAML", f"invalid YAML: {where}{problem}", remedy) from None
    except yaml.YAMLError as error:
        raise _unreadable("InvalidYAML", f"invalid YAML: {' '.join(str(error).split())}", "") from None
    except RecursionError:
        raise _unreadable("TooDeep", "mappings and lists are nested too deeply", "remove brackets") from None
    if not documents:
        raise _unreadable("Empty", "the document is empty", f"begin with {begin}")
    if len(documents) > 1:
        problem = f"the text has {len(documents)} documents"
        raise _unreadable("SeveralDocuments", problem, f"write one {kind} per file, without further --- lines")
    return documents[0]


class _ManifestLoader(yaml.SafeLoader):
    """YAML as parsed by Kubernetes: no dates, no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the field "{key.value}" is a duplicate; remove one', key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # Python refuses to convert thousands of digits, here or for a message.
        if len(node.value) > _MOST_DIGITS:
            problem = f"a number has {len(node.value)} digits; write a smaller one"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(super().construct_yaml_int(node))


_MOST_DIGITS = 200
_ManifestLoader.add_constructor("tag:yaml.org,2002:int", _ManifestLoader.construct_yaml_int)
_ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
