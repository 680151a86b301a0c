"""Policy of the cluster's administrator for the use of nodes: `policy` of the chart's values.

Users with permission to write a DSV4Deployment cause the creation of pods, so access to nodes is refused unless it is
allowed here. The chart enforces the same limits in CEL, generated from this module: `validations` in
`files/security.json`, over the values of `policy` as variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError

from dsv4_operator.api import cel
from dsv4_operator.api.cluster import NetworkMode, ObjectName, ResourceName, SchedulerType, StorageType
from dsv4_operator.api.deployment import DSV4Deployment
from dsv4_operator.api.findings import Finding, joined, translate
from dsv4_operator.api.rules import parts
from dsv4_operator.api.security import (
    ENDPOINT_VARIABLES,
    LINK_LOCAL,
    LINK_LOCAL_REFUSAL,
    REFUSED_VARIABLES,
    URL,
    VARIABLES,
    among,
    flag_reason,
    variable_reason,
)
from dsv4_operator.api.spec import DEFAULT_BACKEND, KUBERAY_BACKEND, DeploymentSpec, Hardware
from dsv4_operator.api.values import Count, Matches, SpecPart, split_remedy

ANY = "*"
"""In a list of namespaces or taints: all of them."""

Root = Annotated[
    str,
    Matches(
        r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+",
        "is not an absolute directory; write for example /var/lib/dsv4, without .. in it",
    ),
]
_Namespace = Annotated[str, Matches(r"\*|[a-z0-9]([a-z0-9-]*[a-z0-9])?", "is not a namespace; write a name, or *", 63)]
_Taint = Annotated[str, Matches(r"\*|[A-Za-z0-9][\w./-]*", "is not the key of a taint; write a key, or *", 317)]
_Backend = Annotated[str, Matches(KUBERAY_BACKEND, f"is not a backend that has a choice; write {KUBERAY_BACKEND}")]
_Flag = Annotated[str, Matches(r"--[a-z0-9][a-z0-9-]*", "is not a flag of vLLM; write the full flag, with dashes", 128)]
_Variable = Annotated[
    str, Matches(r"\*|[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable; write a name, or *", 256)
]
_RuntimeClass = Annotated[
    str,
    Matches(
        r"|[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
        "is not the name of a RuntimeClass; write a name such as nvidia, or nothing",
        253,
    ),
]
_Image = Annotated[
    str, Matches(r"[a-z0-9][\w.:/@-]*", "is not an image; write a name, or a prefix that ends with /, : or @")
]


class PolicyError(ValueError):
    """The policy is invalid; the text contains the field, the value and the remedy."""


class ClusterPolicy(SpecPart):
    """Limits of deployments; the defaults are those of the chart."""

    storage_roots: tuple[Root, ...] = ("/var/lib/dsv4",)
    """Allowed values of `spec.storage.path`. A deployment can access only its own subdirectory."""
    model_roots: tuple[Root, ...] = ("/var/lib/dsv4/models",)
    """Directories that may contain `spec.model.source.path` and `sharedPath`; mounted read-only."""
    host_network_namespaces: tuple[_Namespace, ...] = ()
    """Namespaces whose deployments may use the host network."""
    images: tuple[_Image, ...] = ()
    """Allowed images besides the operator's: whole names, or prefixes that end with `/`, `:` or `@`."""
    any_image_namespaces: tuple[_Namespace, ...] = ()
    """Namespaces whose deployments may run any image."""
    toleration_keys: tuple[_Taint, ...] = ("nvidia.com/gpu",)
    """Keys of the taints that deployments may tolerate."""
    engine_flags: tuple[_Flag, ...] = ()
    """Flags of `security.FLAGS` that are allowed in `spec.engine.extraArgs`."""
    engine_variables: tuple[_Variable, ...] = ()
    """Environment variables allowed in `spec.engine.env` besides those of `security.VARIABLES`."""
    rdma_resources: tuple[ResourceName, ...] = ("rdma/hca_shared_devices_a",)
    """Allowed values of `spec.network.rdmaResource`."""
    claim_templates: tuple[ObjectName, ...] = ()
    """Allowed values of `spec.topology.resourceClaimTemplate`."""
    backends: tuple[_Backend, ...] = ()
    """Allowed values of `spec.backend` besides `Pods`; the chart grants the operator the permissions for these."""
    schedulers: tuple[SchedulerType, ...] = ()
    """Allowed values of `spec.topology.scheduler.type`; the chart grants the operator the permissions for these."""
    device_groups: tuple[Annotated[Count, Field(ge=1, le=2**31 - 1)], ...] = ()
    """Supplementary group ids with which members may open the nodes' devices, if those are not open to all users."""
    runtime_class: _RuntimeClass = ""
    """RuntimeClass of members with GPUs, where the default runtime of nodes does not give them the driver."""


def parse_policy(text: str) -> ClusterPolicy:
    """Return the policy in `text`, YAML or JSON.

    Raises:
        PolicyError: `text` is invalid.
    """
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise PolicyError(f"invalid YAML: {' '.join(str(error).split())}") from error
    try:
        return ClusterPolicy.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        found = (
            replace(one, field=f"policy.{one.field}") if one.field else one for one in translate(error, ClusterPolicy)
        )
        raise PolicyError(joined(found)) from None


@dataclass(frozen=True, slots=True)
class Request:
    """A deployment in its cluster."""

    spec: DeploymentSpec
    namespace: str
    policy: ClusterPolicy
    runtime_image: str
    """The operator's image, which all deployments may run."""


_PLACES: dict[str, tuple[Any, str, bool]] = {
    "request.spec": (DeploymentSpec, "object.spec", False),
    "request.namespace": (str, "request.namespace", True),
    "request.policy": (ClusterPolicy, "variables", True),
    "request.runtime_image": (str, "variables.runtimeImage", True),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the policy."""

    field: str
    """Path of the limited field below `spec`; `[]` selects every entry of a list."""
    reason: str
    text: str
    """`PROBLEM; REMEDY`."""
    allows: Callable[..., bool]
    """With the request, and with the value if the limit has its own condition."""
    condition: str | None
    """In CEL; None: generated from `allows`."""
    details: Callable[[Request, Any], str] | None
    """Returns `PROBLEM; REMEDY` with the values."""
    value: Callable[[Request, Any], object]
    """Returns the displayed value; None: it is part of the message, or may be a secret."""
    named: str
    """Expression in CEL for the message in place of `text`; empty: `text`."""

    def violations(self, request: Request) -> Iterator[Finding]:
        if self.condition is None:
            broken = [] if self.allows(request) else [(self.field, None)]
        else:
            broken = [entry for entry in parts(request.spec, self.field) if not self.allows(request, entry[1])]
        for path, given in broken:
            text = self.details(request, given) if self.details else self.text
            yield Finding(f"spec.{path}", self.reason, *split_remedy(text), self.value(request, given))

    def validation(self) -> dict[str, str]:
        """Return the limit for a ValidatingAdmissionPolicy, over the values of the chart's `policy` as variables."""
        expression = cel.condition(self.allows, _PLACES) if self.condition is None else self.condition
        if self.named:
            return {"expression": expression, "messageExpression": self.named}
        return {"expression": expression, "message": f"spec.{self.field.partition('[]')[0]}: {self.text}"}


LIMITS: list[Limit] = []
"""All limits in the order of their findings."""

Allows = TypeVar("Allows", bound=Callable[..., bool])


def limit(
    field: str,
    reason: str,
    text: str,
    *,
    condition: str | None = None,
    details: Callable[[Request, Any], str] | None = None,
    value: Callable[[Request, Any], object] = lambda _, given: given,
    named: str = "",
) -> Callable[[Allows], Allows]:
    """Add a limit with the decorated predicate."""

    def added(allows: Allows) -> Allows:
        LIMITS.append(Limit(field, reason, text, allows, condition, details, value, named))
        return allows

    return added


def _not_allowed(remedy: str, field: str, where: str = "on this cluster") -> str:
    return f"is not allowed {where}; {remedy}, or have the administrator of the cluster extend policy.{field}"


def _use(allowed: tuple[str, ...], other: str) -> str:
    return f"use {' or '.join(allowed)}, or {other}" if allowed else other


@limit(
    "storage.path", "StoragePath", _not_allowed("write type EmptyDir", "storageRoots"),
    details=lambda request, _: _not_allowed(_use(request.policy.storage_roots, "write type EmptyDir"), "storageRoots"),
    value=lambda request, _: request.spec.storage.path,
)  # fmt: skip
def _storage_path(request: Request) -> bool:
    return (
        request.spec.storage.type != StorageType.HOST_PATH or request.spec.storage.path in request.policy.storage_roots
    )


def root_of(path: str, roots: tuple[str, ...]) -> str | None:
    """Return the entry of `roots` that is or contains `path`; None if there is none, or `path` contains `..`."""
    found = PurePosixPath(path)
    if ".." in found.parts:
        return None
    return next((root for root in roots if found.is_relative_to(root)), None)


def _below(request: Request, _: str) -> str:
    roots = request.policy.model_roots
    remedy = f"use a directory below {' or '.join(roots)}" if roots else "use huggingFace"
    return _not_allowed(remedy, "modelRoots")


for _field in ("model.source.path", "model.source.sharedPath"):

    @limit(
        _field, "ModelPath", _not_allowed("use huggingFace", "modelRoots"), details=_below,
        condition=(
            f"!has(object.spec.{_field}) || !object.spec.{_field}.split('/').exists(part, part == '..') "
            f"&& variables.modelRoots.exists(root, object.spec.{_field} == root "
            f"|| object.spec.{_field}.startsWith(root + '/'))"
        ),
    )  # fmt: skip
    def _model_path(request: Request, path: str) -> bool:
        return root_of(path, request.policy.model_roots) is not None


def _host_network_text(request: Request, _: object) -> str:
    default = "is the default of several machines and " if request.spec.network.mode is None else ""
    where = f"in the namespace {request.namespace}"
    return default + _not_allowed("write PodNetwork", "hostNetworkNamespaces", where)


@limit(
    "network.mode", "HostNetwork", _not_allowed("write PodNetwork", "hostNetworkNamespaces", "in this namespace"),
    details=_host_network_text, value=lambda request, _: request.spec.network_mode,
)  # fmt: skip
def _host_network(request: Request) -> bool:
    return (
        request.spec.network_mode != NetworkMode.HOST_NETWORK
        or ANY in request.policy.host_network_namespaces
        or request.namespace in request.policy.host_network_namespaces
    )


@limit(
    "network.rdmaResource", "RDMAResource", _not_allowed("write PodNetwork as mode", "rdmaResources"),
    details=lambda request, _: _not_allowed(
        _use(request.policy.rdma_resources, "write PodNetwork as mode"), "rdmaResources"
    ),
    value=lambda request, _: request.spec.network.rdma_resource,
)  # fmt: skip
def _rdma_resource(request: Request) -> bool:
    return (
        request.spec.network_mode != NetworkMode.HOST_NETWORK
        or request.spec.topology.hardware == Hardware.CPU
        or request.spec.network.rdma_resource in request.policy.rdma_resources
    )


@limit(
    "topology.resourceClaimTemplate", "ClaimTemplate",
    _not_allowed("remove spec.topology.resourceClaimTemplate", "claimTemplates"),
    details=lambda request, _: _not_allowed(
        _use(request.policy.claim_templates, "remove spec.topology.resourceClaimTemplate"), "claimTemplates"
    ),
    value=lambda request, _: request.spec.topology.resource_claim_template,
)  # fmt: skip
def _claim_template(request: Request) -> bool:
    return (
        request.spec.topology.resource_claim_template is None
        or request.spec.topology.resource_claim_template in request.policy.claim_templates
    )


@limit(
    "topology.scheduler.type", "Scheduler", _not_allowed("remove spec.topology.scheduler", "schedulers"),
    details=lambda request, _: _not_allowed(
        _use(request.policy.schedulers, "remove spec.topology.scheduler"), "schedulers"
    ),
    value=lambda request, _: request.spec.topology.scheduler and request.spec.topology.scheduler.type,
)  # fmt: skip
def _scheduler(request: Request) -> bool:
    return request.spec.topology.scheduler is None or request.spec.topology.scheduler.type in request.policy.schedulers


@limit(
    "backend", "Backend", _not_allowed(f"write {DEFAULT_BACKEND}", "backends"),
    condition=(
        f"object.spec.?backend.orValue('{DEFAULT_BACKEND}') == '{DEFAULT_BACKEND}' "
        "|| object.spec.backend in variables.backends"
    ),
)  # fmt: skip
def _backend(request: Request, name: str) -> bool:
    return name == DEFAULT_BACKEND or name in request.policy.backends


_ANY_IMAGE = "'*' in variables.anyImageNamespaces || request.namespace in variables.anyImageNamespaces"


def _any_image(request: Request) -> bool:
    """Return whether the namespace may run own images, which can do everything that flags and variables can."""
    namespaces = request.policy.any_image_namespaces
    return ANY in namespaces or request.namespace in namespaces


@limit(
    "engine.image", "Image", _not_allowed("remove it to use the image of the operator", "images", "in this namespace"),
    condition=(
        f"{_ANY_IMAGE} || !has(object.spec.engine) || !has(object.spec.engine.image) "
        "|| object.spec.engine.image == variables.runtimeImage "
        "|| variables.images.exists(one, object.spec.engine.image == one "
        "|| (one.matches('[/:@]$') && object.spec.engine.image.startsWith(one)))"
    ),
    details=lambda request, _: _not_allowed(
        "remove it to use the image of the operator", "images", f"in the namespace {request.namespace}"
    ),
)  # fmt: skip
def _image(request: Request, name: str) -> bool:
    known = (name == one or (one[-1] in "/:@" and name.startswith(one)) for one in request.policy.images)
    return _any_image(request) or name == request.runtime_image or any(known)


def _refused(request: Request, arg: str) -> tuple[str, str]:
    """Return the refused flag in `arg`, without its value, which may be a secret, and the reason."""
    return flag_reason(arg, request.policy.engine_flags) or ("", "")


_FLAG = among("arg", "variables.refusedFlags", "variables.otherFlags")
_ONE_FLAG = among("arg", "[one]", "variables.otherFlags")
_FLAG_TEXT = _not_allowed("remove it", "engineFlags")


@limit(
    "engine.extraArgs[]", "EngineFlag", _FLAG_TEXT,
    condition=f"{_ANY_IMAGE} || !variables.arguments.exists(arg, {_FLAG})",
    details=lambda request, arg: f"{_refused(request, arg)[1]} and {_FLAG_TEXT}",
    value=lambda request, arg: _refused(request, arg)[0],
    named=(
        f"'spec.engine.extraArgs: ' + variables.refusedFlags.filter(one, variables.arguments.exists(arg, {_ONE_FLAG}))"
        f".join(', ') + {cel.literal(f' {_FLAG_TEXT}')}"
    ),
)  # fmt: skip
def _engine_flag(request: Request, arg: str) -> bool:
    return _any_image(request) or flag_reason(arg, request.policy.engine_flags) is None


def _any_of(patterns: Iterable[str]) -> str:
    return cel.literal(f"^({'|'.join(patterns)})$")


@limit(
    "engine.env[].name", "EngineVariable", "a name " + _not_allowed("remove it", "engineVariables"),
    condition=(
        f"{_ANY_IMAGE} || '*' in variables.engineVariables || variables.environment.all(one, one.name in "
        f"variables.engineVariables || (one.name.matches({_any_of(VARIABLES)}) "
        f"&& !one.name.matches({_any_of(REFUSED_VARIABLES)})))"
    ),
    details=lambda request, name: (
        f"{variable_reason(name, request.policy.engine_variables)} and {_not_allowed('remove it', 'engineVariables')}"
    ),
)  # fmt: skip
def _engine_variable(request: Request, name: str) -> bool:
    return _any_image(request) or variable_reason(name, request.policy.engine_variables) is None


@limit(
    "topology.tolerations[].key", "Toleration", "a key " + _not_allowed("remove the toleration", "tolerationKeys"),
    condition=(
        "'*' in variables.tolerationKeys || object.spec.topology.?tolerations.orValue([]).all(one, "
        "one.?key.orValue('') in variables.tolerationKeys)"
    ),
    details=lambda request, key: (
        f"{'' if key else 'is empty, which tolerates every taint, and '}"
        f"{_not_allowed(_use(request.policy.toleration_keys, 'remove the toleration'), 'tolerationKeys')}"
    ),
    value=lambda _, key: key or None,
)  # fmt: skip
def _toleration_key(request: Request, key: str) -> bool:
    return ANY in request.policy.toleration_keys or key in request.policy.toleration_keys


def violations(deployment: DSV4Deployment, policy: ClusterPolicy, runtime_image: str) -> tuple[Finding, ...]:
    """Return the policy violations of `deployment`.

    Args:
        deployment: a valid deployment.
        policy: the policy of the administrator.
        runtime_image: the operator's image, which all deployments may run.
    """
    request = Request(deployment.spec, deployment.metadata.namespace, policy, runtime_image)
    return tuple(found for each in LIMITS for found in each.violations(request))


def validations() -> list[dict[str, str]]:
    """Return all limits for a ValidatingAdmissionPolicy, and the rules that are too expensive for a definition."""
    patterns = ", ".join(map(cel.literal, LINK_LOCAL))
    texts = "(variables.arguments + variables.environment.map(one, one.value))"
    url = cel.literal(f"^(?:{URL.pattern})$")
    return [
        *(each.validation() for each in LIMITS),
        {
            "expression": f"{texts}.all(text, ![{patterns}].exists(pattern, text.matches(pattern)))",
            "message": f"spec.engine: an argument or a variable {LINK_LOCAL_REFUSAL}",
        },
        {
            "expression": f"variables.environment.all(one, !(one.name in {cel.listed(ENDPOINT_VARIABLES)}) "
            f"|| one.value.matches({url}))",
            "message": f"spec.engine.env: the value of an endpoint {URL.refusal}",
        },
    ]
