"""Policy of the cluster's administrator for the use of nodes: `policy` of the chart's values.

Users with permission to write a DSV4Deployment cause the creation of pods, so access to nodes is refused unless it is
allowed here. The chart enforces the same policy in CEL (`templates/policy.yaml`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from dsv4_operator.api.cluster import NetworkMode, ResourceName, StorageType
from dsv4_operator.api.deployment import DSV4Deployment
from dsv4_operator.api.rules import Finding, translate
from dsv4_operator.api.security import flag_reason, variable_reason
from dsv4_operator.api.spec import Hardware
from dsv4_operator.api.values import Count, Matches, SpecPart, quoted

ANY = "*"
"""In a list of namespaces or taints: all of them."""

Root = Annotated[
    str,
    Matches(
        r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+",
        "is no directory to allow; write for example /var/lib/dsv4, without .. in it",
    ),
]
_Namespace = Annotated[
    str, Matches(r"\*|[a-z0-9]([a-z0-9-]*[a-z0-9])?", "is not a namespace; write its name, or *", 63)
]
_Taint = Annotated[str, Matches(r"\*|[A-Za-z0-9][\w./-]*", "is not the key of a taint; write it, or *", 317)]
_Flag = Annotated[str, Matches(r"--[a-z0-9][a-z0-9-]*", "is not a flag of vLLM; write it in full, with dashes", 128)]
_Variable = Annotated[
    str, Matches(r"\*|[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable; write it, or *", 256)
]
_Image = Annotated[
    str, Matches(r"[a-z0-9][\w.:/@-]*", "is neither an image nor a beginning of one that ends with /, : or @")
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
    device_groups: tuple[Annotated[Count, Field(ge=1, le=2**31 - 1)], ...] = ()
    """Supplementary group ids with which members may open the nodes' devices, if those are not open to all users."""


def parse_policy(text: str) -> ClusterPolicy:
    """Return the policy in `text`, YAML or JSON.

    Raises:
        PolicyError: `text` is invalid.
    """
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise PolicyError(f"not valid YAML: {' '.join(str(error).split())}") from error
    try:
        return ClusterPolicy.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise PolicyError(
            "; ".join(f"policy.{found}" if found.path else str(found) for found in translate(error, ClusterPolicy))
        ) from None


def violations(deployment: DSV4Deployment, policy: ClusterPolicy, runtime_image: str) -> tuple[Finding, ...]:
    """Return the policy violations of `deployment`.

    Args:
        deployment: a valid deployment.
        policy: the policy of the administrator.
        runtime_image: the operator's image, which all deployments may run.
    """
    return (
        *_directories(deployment, policy),
        *_network(deployment, policy),
        *_image(deployment, policy, runtime_image),
        *_settings(deployment, policy),
        *_tolerations(deployment, policy),
    )


def root_of(path: str, roots: tuple[str, ...]) -> str | None:
    """Return the entry of `roots` that is or contains `path`; None if there is none, or `path` contains `..`."""
    found = PurePosixPath(path)
    if ".." in found.parts:
        return None
    return next((root for root in roots if found.is_relative_to(root)), None)


def _directories(deployment: DSV4Deployment, policy: ClusterPolicy) -> Iterator[Finding]:
    storage, source = deployment.spec.storage, deployment.spec.model.source
    if storage.type is StorageType.HOST_PATH and storage.path not in policy.storage_roots:
        yield Finding(
            "spec.storage.path",
            f"{quoted(storage.path)} is not allowed on this cluster; {_choose(policy.storage_roots)}, write type "
            "EmptyDir, or have the administrator add it to policy.storageRoots",
        )
    for name, path in (("path", source.path), ("sharedPath", source.shared_path)):
        if path is not None and root_of(path, policy.model_roots) is None:
            below = (
                f"use a directory below {', '.join(policy.model_roots)}" if policy.model_roots else "use huggingFace"
            )
            yield Finding(
                f"spec.model.source.{name}",
                f"{quoted(path)} is not allowed on this cluster; {below}, or have the administrator add a directory "
                "above it to policy.modelRoots",
            )


def _network(deployment: DSV4Deployment, policy: ClusterPolicy) -> Iterator[Finding]:
    spec, namespace = deployment.spec, deployment.metadata.namespace
    if spec.network_mode is not NetworkMode.HOST_NETWORK:
        return
    if not _listed(namespace, policy.host_network_namespaces):
        mode = "HostNetwork" if spec.network.mode is not None else "HostNetwork, the default of several machines,"
        yield Finding(
            "spec.network.mode",
            f"{mode} is not allowed in the namespace {namespace}; write PodNetwork, or have the administrator add the "
            "namespace to policy.hostNetworkNamespaces",
        )
    if spec.topology.hardware is not Hardware.CPU and spec.network.rdma_resource not in policy.rdma_resources:
        yield Finding(
            "spec.network.rdmaResource",
            f"{quoted(spec.network.rdma_resource)} is not allowed on this cluster; {_choose(policy.rdma_resources)}, "
            "or have the administrator add it to policy.rdmaResources",
        )


def _settings(deployment: DSV4Deployment, policy: ClusterPolicy) -> Iterator[Finding]:
    engine = deployment.spec.engine
    if _listed(deployment.metadata.namespace, policy.any_image_namespaces):
        return  # Own images can do everything that these settings can.
    for index, arg in enumerate(engine.extra_args):
        if found := flag_reason(arg, policy.engine_flags):
            flag, reason = found
            yield Finding(
                f"spec.engine.extraArgs[{index}]",
                f"{flag} {reason} and is not allowed on this cluster; remove it, or have the administrator add it to "
                "policy.engineFlags",
            )
    for index, variable in enumerate(engine.env):
        why = variable_reason(variable.name, policy.engine_variables)
        if why is not None:
            yield Finding(
                f"spec.engine.env[{index}].name",
                f"{quoted(variable.name)} is not allowed on this cluster, because it {why}; remove it, or have the "
                "administrator add it to policy.engineVariables",
            )


def _image(deployment: DSV4Deployment, policy: ClusterPolicy, runtime_image: str) -> Iterator[Finding]:
    image, namespace = deployment.spec.engine.image, deployment.metadata.namespace
    if image is None or image == runtime_image or _listed(namespace, policy.any_image_namespaces):
        return
    if not any(image == one or (one[-1] in "/:@" and image.startswith(one)) for one in policy.images):
        yield Finding(
            "spec.engine.image",
            f"{quoted(image)} is not allowed in the namespace {namespace}; remove it for the cluster's own image, or "
            "have the administrator add it to policy.images",
        )


def _tolerations(deployment: DSV4Deployment, policy: ClusterPolicy) -> Iterator[Finding]:
    for index, toleration in enumerate(deployment.spec.topology.tolerations):
        if not _listed(toleration.key, policy.toleration_keys):
            what = quoted(toleration.key) if toleration.key else "every taint"
            yield Finding(
                f"spec.topology.tolerations[{index}].key",
                f"{what} may not be tolerated on this cluster; {_choose(policy.toleration_keys)}, or have the "
                "administrator add it to policy.tolerationKeys",
            )


def _listed(name: str, allowed: tuple[str, ...]) -> bool:
    return ANY in allowed or (bool(name) and name in allowed)


def _choose(allowed: tuple[str, ...]) -> str:
    return f"use {' or '.join(allowed)}" if allowed else "nothing is"
