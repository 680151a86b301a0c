"""Frontend that users reach: one Service, and behind it at least two gateways."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders.member import pod_security, referenced, secret_volume
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

SETTINGS_FILE, ROUTE_FILE = "settings.json", "route.json"

_LAST_SECONDS = 5.0
"""From the end of the drain until the process is killed."""
_REVISION = f"{DOMAIN}/gateway-revision"
"""Label of gateways' pods, the same for all groups: of image and limits."""
GATEWAY_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
"""Resources that a gateway requests: what it takes at rest, so that members lose no room beyond that."""
_PROCESS_BYTES = 128 * 2**20
"""Memory of a gateway's process beside what it keeps for clients: at most 100 MiB were measured."""


def limits(deployment: DSV4Deployment) -> GatewaySettings:
    """Return what every gateway of `deployment` is told; its keys are mounted."""
    spec = deployment.spec.gateway
    return gateway_settings(deployment, drain_seconds=spec.drain, secrets_root=SECRETS_ROOT)


def gateway_route(deployment: DSV4Deployment, group: int, given_up: Sequence[str | None]) -> GatewayRoute:
    """Return where every group is, in every incarnation: its head's Service follows it.

    Args:
        deployment: whose groups they are.
        group: the gateway's own.
        given_up: of each group, why it will not come back by itself; None: it may.
    """
    routes = [_group_route(deployment, index, reason) for index, reason in enumerate(given_up)]
    return GatewayRoute.of(group, routes, TOKEN_KEY_FILE)


def _group_route(deployment: DSV4Deployment, group: int, given_up: str | None) -> GroupRoute:
    host = f"http://{head_name(deployment.metadata.name, group)}.{deployment.metadata.namespace}.svc"
    return GroupRoute(
        group=group,
        agent=f"{host}:{HEAD_PORTS['agent'][0]}",
        api=f"{host}:{HEAD_PORTS['http'][0]}",
        given_up=given_up,
    )


def gateway_config(deployment: DSV4Deployment, group: int, given_up: Sequence[str | None]) -> Manifest:
    """Return the ConfigMap of limits and route. The route may change while the gateway runs; kubelets bring it there
    within about a minute.
    """
    about = metadata(deployment, gateway_name(deployment.metadata.name, group), component=GATEWAY, group=group)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": about,
        "data": {
            SETTINGS_FILE: limits(deployment).to_json(indent=2) + "\n",
            ROUTE_FILE: gateway_route(deployment, group, given_up).to_json(indent=2) + "\n",
        },
    }


def gateways_of(group: int) -> int:
    """Return the number of a group's gateways: two of the first group, one of each other group.

    Each gateway serves every group, so two are enough for a lost node to leave one. The number of a group's gateways
    does not depend on the number of groups, so that scaling ends no gateway but those of removed groups.
    """
    return 1 if group else 2


def gateway_deployment(deployment: DSV4Deployment, group: int, *, image: str) -> Manifest:
    """Return a group's gateways, on different nodes where there are several.

    Other limits or another image replace them, each new one before an old one ends. Routes are not part of the pod
    template: gateways read them again from their ConfigMap, so other groups or other routes replace no gateway.
    """
    name = deployment.metadata.name
    found = labels(name, component=GATEWAY, group=group)
    settings = limits(deployment)
    stamp = {f"{DOMAIN}/settings": _hash(settings.to_json())}
    revision = {_REVISION: _hash(image, settings.to_json())}
    pod = _gateway_pod(deployment, group, image, settings)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, gateway_name(name, group), component=GATEWAY, group=group),
        "spec": {
            "replicas": gateways_of(group),
            "revisionHistoryLimit": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": found},
            "template": {"metadata": {"labels": found | revision, "annotations": stamp}, "spec": pod},
        },
    }


def _gateway_pod(deployment: DSV4Deployment, group: int, image: str, settings: GatewaySettings) -> Manifest:
    name, spec = deployment.metadata.name, deployment.spec
    volumes: dict[str, tuple[Manifest, str]] = {
        "gateway": ({"configMap": {"name": gateway_name(name, group)}}, GATEWAY_DIRECTORY),
        "token-key": (
            secret_volume(token_key_name(name, deployment.metadata.uid), [TOKEN_KEY_ENTRY]),
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
                # One node is enough for all where there is no other.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(name, component=GATEWAY)},
                # Pods of an older version, which end next, must not decide where those of this version go.
                "matchLabelKeys": [_REVISION],
            }
        ],
        "terminationGracePeriodSeconds": math.ceil(settings.lame_duck_seconds + settings.drain_seconds + _LAST_SECONDS),
        "tolerations": [
            # Kubernetes' own 300 s would keep users out for as long after the loss of a node.
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
        # Whether it can answer or hold, of whatever group: while every engine is away, requests wait in here.
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        "livenessProbe": _probe("/healthz", period=10, failures=3),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    # The kubelet's own timeout of 1 s would count a node that is short of processors as a gateway that is broken.
    request = {"path": path, "port": "http"}
    return {"httpGet": request, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def disruption_budget(deployment: DSV4Deployment) -> Manifest:
    """Return the budget that keeps drained nodes from taking all gateways at once."""
    name = deployment.metadata.name
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, f"{name}-gateways"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name, component=GATEWAY)}},
    }


def network_policy(deployment: DSV4Deployment) -> Manifest:
    """Return the NetworkPolicy of who may speak to members, where the network plugin enforces it: each other on every
    port, everybody on the ports that ask for a token. Gloo, NCCL and vLLM's queues between members cannot ask for
    one."""
    name = deployment.metadata.name
    others: Manifest = {"from": [{"podSelector": {"matchLabels": labels(name, component=MEMBER)}}]}
    open_to_all: Manifest = {"ports": [{"protocol": "TCP", "port": target} for _, target in HEAD_PORTS.values()]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, f"{name}-members"),
        "spec": {
            "podSelector": {"matchLabels": labels(name, component=MEMBER)},
            "policyTypes": ["Ingress"],
            "ingress": [others, open_to_all],
        },
    }


def public_service(deployment: DSV4Deployment) -> Manifest:
    """Return the Service that users reach, in front of all gateways."""
    name = deployment.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, name),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(name, component=GATEWAY),
            "ports": [{"name": "http", "port": GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
