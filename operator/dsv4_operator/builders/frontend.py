"""Public endpoint of a deployment: one Service in front of at least two gateways."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders.member import pod_security, referenced, secret_volume, service_port
from dsv4_operator.builders.names import (
    DOMAIN,
    GATEWAY,
    GATEWAY_DIRECTORY,
    GATEWAY_PORT,
    HEAD_PORTS,
    MEMBER,
    TOKEN_KEY_DIRECTORY,
    TOKEN_KEY_ENTRY,
    TOKEN_KEY_FILE,
    Manifest,
    gateway_name,
    head_name,
    labels,
    metadata,
    token_key_name,
)
from dsv4_operator.planning.facts import SECRETS_ROOT
from dsv4_operator.planning.rendering import gateway_settings
from dsv4_runtime.contract.gateway import ENVIRONMENT, GatewayRoute, GatewaySettings, GroupRoute
from dsv4_runtime.util import LOG_DEPLOYMENT

SETTINGS_FILE, ROUTE_FILE = "settings.json", "route.json"

_LAST_SECONDS = 5.0
"""Time from the end of the drain until the process is killed."""
_REVISION = f"{DOMAIN}/gateway-revision"
"""Label of gateway pods with the hash of image and limits, the same for all groups."""
GATEWAY_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
"""Resource requests of a gateway: its usage at idle, so that no further resources are withheld from members."""
_PROCESS_BYTES = 128 * 2**20
"""Memory of a gateway process beside its buffers for clients: at most 100 MiB were measured."""

Names = Mapping[int, tuple[str, ...]]
"""Names of the model in each group, by its index."""
_NONE: Mapping[Any, Any] = {}


def limits(deployment: DSV4Deployment, names: Names = _NONE) -> GatewaySettings:
    """Return the settings of every gateway of `deployment`; its keys are mounted.

    They have the `names` of all groups, else those of `deployment`: a change replaces the gateways, which is faster
    than the update of their route.
    """
    about = deployment.metadata
    settings = gateway_settings(
        deployment,
        drain_seconds=deployment.spec.gateway.drain,
        secrets_root=SECRETS_ROOT,
        service_url=f"http://{about.name}.{about.namespace}.svc:{GATEWAY_PORT}",
    )
    found = tuple(dict.fromkeys(name for _, served in sorted(names.items()) for name in served))
    if not found or set(found) == set(settings.served_names):
        return settings
    return settings.model_copy(update={"served_names": found})


def gateway_route(
    deployment: DSV4Deployment, group: int, given_up: Sequence[str | None], names: Names = _NONE
) -> GatewayRoute:
    """Return the addresses of all groups, valid for every incarnation: the Service of the head follows it.

    Args:
        deployment: the deployment of the groups.
        group: group of the gateway.
        given_up: for each group, the reason why it will not recover by itself; None: it may.
        names: names of the model by the index of the group, as far as known.
    """
    (agent, _), (api, _) = HEAD_PORTS["agent"], HEAD_PORTS["http"]
    routes = []
    for index, reason in enumerate(given_up):
        host = f"http://{head_name(deployment.metadata.name, index)}.{deployment.metadata.namespace}.svc"
        places = {"agent": f"{host}:{agent}", "api": f"{host}:{api}"}
        routes.append(GroupRoute(group=index, **places, given_up=reason, served_names=names.get(index, ())))
    dashboard, _ = HEAD_PORTS["dashboard"]
    first = head_name(deployment.metadata.name, 0)
    url = f"http://{first}.{deployment.metadata.namespace}.svc:{dashboard}"
    return GatewayRoute.of(group, routes, TOKEN_KEY_FILE, url)


def gateway_config(
    deployment: DSV4Deployment, group: int, given_up: Sequence[str | None], names: Names = _NONE
) -> Manifest:
    """Return the ConfigMap of limits and route. Kubelets update the route of a running gateway within a minute."""
    about = metadata(deployment, gateway_name(deployment.metadata.name, group), component=GATEWAY, group=group)
    files = {SETTINGS_FILE: limits(deployment, names), ROUTE_FILE: gateway_route(deployment, group, given_up, names)}
    data = {name: document.to_json(indent=2) + "\n" for name, document in files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def gateways_of(group: int) -> int:
    """Return the number of a group's gateways: two for the first group, one for each other group.

    Each gateway serves every group, so with two of them one remains after the loss of a node. The number does not
    depend on the number of groups, so that scaling stops only the gateways of removed groups.
    """
    return 1 if group else 2


def gateway_deployment(
    deployment: DSV4Deployment,
    group: int,
    *,
    image: str,
    variables: Mapping[str, str] = _NONE,
    names: Names = _NONE,
) -> Manifest:
    """Return the Deployment of a group's gateways, on different nodes if there are several; see `Host.variables`.

    A change of limits, of the `names` of all groups together, or of the image replaces them, each new one before an
    old one stops. Routes are not part of the pod template: gateways reread them from their ConfigMap, so a change of
    groups or routes replaces no gateway.
    """
    name = deployment.metadata.name
    found = labels(name, component=GATEWAY, group=group)
    settings = limits(deployment, names)
    hashes = {f"{DOMAIN}/settings": _hash(settings.to_json())}
    revision = {_REVISION: _hash(image, settings.to_json())}
    pod = _gateway_pod(deployment, group, image, settings)
    if variables:
        given = {**variables, LOG_DEPLOYMENT: f"{deployment.metadata.namespace}/{name}"}
        pod["containers"][0]["env"] += [{"name": each, "value": value} for each, value in given.items()]
    about = metadata(deployment, gateway_name(name, group), component=GATEWAY, group=group)
    spec = {
        "replicas": gateways_of(group),
        "revisionHistoryLimit": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": found},
        "template": {"metadata": {"labels": found | revision, "annotations": hashes}, "spec": pod},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}


def _gateway_pod(deployment: DSV4Deployment, group: int, image: str, settings: GatewaySettings) -> Manifest:
    name, spec = deployment.metadata.name, deployment.spec
    volumes: dict[str, tuple[Manifest, str]] = {
        "gateway": ({"configMap": {"name": gateway_name(name, group)}}, GATEWAY_DIRECTORY),
        "token-key": (
            secret_volume(token_key_name(name, deployment.metadata.uid), {TOKEN_KEY_ENTRY: TOKEN_KEY_ENTRY}),
            TOKEN_KEY_DIRECTORY,
        ),
    }
    if spec.gateway.api_keys is not None:
        volumes["keys"] = referenced(spec.gateway.api_keys.secret_key_ref)
    container = _gateway_container(image, settings, {volume: path for volume, (_, path) in volumes.items()})
    if spec.engine.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.engine.image_pull_policy.value
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # All may run on one node if there is no other.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(name, component=GATEWAY)},
                # Pods of an older version, which stop next, must not affect the placement of this version.
                "matchLabelKeys": [_REVISION],
            }
        ],
        "terminationGracePeriodSeconds": math.ceil(settings.lame_duck_seconds + settings.drain_seconds + _LAST_SECONDS),
        "tolerations": [
            # The default of 300 s would prolong an outage after the loss of a node.
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
            for taint in ("not-ready", "unreachable")
        ],
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, (source, _) in volumes.items()],
    }
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.engine.image_pull_secrets]
    return pod


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _gateway_container(image: str, settings: GatewaySettings, mounts: Mapping[str, str]) -> Manifest:
    return {
        "name": "gateway",
        "image": image,
        "command": ["dsv4-gateway"],
        "args": [
            f"--settings={GATEWAY_DIRECTORY}/{SETTINGS_FILE}",
            f"--route={GATEWAY_DIRECTORY}/{ROUTE_FILE}",
            f"--listen=0.0.0.0:{GATEWAY_PORT}",
        ],
        "env": [{"name": variable, "value": value} for variable, value in ENVIRONMENT.items()],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
        "resources": {
            "requests": dict(GATEWAY_REQUESTS),
            "limits": {"memory": str(settings.max_client_bytes + _PROCESS_BYTES)},
        },
        "volumeMounts": [{"name": volume, "mountPath": path, "readOnly": True} for volume, path in mounts.items()],
        # Ready to respond or to hold requests for any group: while all engines are down, requests wait here.
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        # A stopped process is replaced after 6 to 14 s; the readiness probe takes it out of the Service after 2 to 9 s.
        "livenessProbe": _probe("/healthz", period=3, failures=3),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    # With the default timeout of 1 s, CPU pressure on a node would count as a failed gateway.
    request = {"path": path, "port": "http"}
    return {"httpGet": request, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def disruption_budget(deployment: DSV4Deployment) -> Manifest:
    """Return the budget that prevents node drains from stopping all gateways at once.

    Gateways that are not ready, for example because they cannot start, do not delay a drain.
    """
    name = deployment.metadata.name
    about = metadata(deployment, f"{name}-gateways")
    selector = {"matchLabels": labels(name, component=GATEWAY)}
    spec = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": about, "spec": spec}


def network_policy(deployment: DSV4Deployment) -> Manifest:
    """Return the NetworkPolicy for ingress to members, if the network plugin enforces it.

    Members have access to every port of each other, other pods only to ports that require a token. Gloo, NCCL and
    vLLM's queues between members cannot require one.
    """
    name = deployment.metadata.name
    about = metadata(deployment, f"{name}-members")
    from_members: Manifest = {"from": [{"podSelector": {"matchLabels": labels(name, component=MEMBER)}}]}
    from_all: Manifest = {"ports": [{"protocol": "TCP", "port": target} for _, target in HEAD_PORTS.values()]}
    pods = {"matchLabels": labels(name, component=MEMBER)}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [from_members, from_all]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about, "spec": spec}


def public_service(deployment: DSV4Deployment) -> Manifest:
    """Return the public Service in front of all gateways."""
    about = metadata(deployment, deployment.metadata.name)
    ports = [service_port("http", GATEWAY_PORT, "http")]
    selector = labels(deployment.metadata.name, component=GATEWAY)
    spec = {"type": "ClusterIP", "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}
