"""What users reach: one Service, and behind it a gateway for every group."""

from __future__ import annotations

import hashlib
import math

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders import places
from dsv4_operator.builders.names import (
    DOMAIN,
    GATEWAY,
    MEMBER,
    Manifest,
    gateway_name,
    head_name,
    labels,
    metadata,
    token_name,
)
from dsv4_operator.planning.gateway import gateway_settings
from dsv4_runtime.contract.gateway import ENVIRONMENT, GatewayRoute, GatewaySettings

SETTINGS_FILE, ROUTE_FILE = "settings.json", "route.json"

_LAST_SECONDS = 5.0
"""From the end of the drain until the process is killed."""


def limits(deployment: DSV4Deployment) -> GatewaySettings:
    """What every gateway of `deployment` is told; its keys are mounted."""
    spec = deployment.spec.gateway
    keys = f"{places.KEYS}/{places.KEYS_KEY}" if spec.api_keys_secret is not None else None
    return gateway_settings(deployment, drain_seconds=spec.drain, api_keys_file=keys)


def gateway_route(deployment: DSV4Deployment, group: int, given_up: str | None) -> GatewayRoute:
    """Where the group is, in every incarnation: the head's Service follows it."""
    host = f"http://{head_name(deployment.metadata.name, group)}.{deployment.metadata.namespace}.svc"
    return GatewayRoute(
        agent=f"{host}:{places.HEAD_PORTS['agent'][0]}",
        api=f"{host}:{places.HEAD_PORTS['http'][0]}",
        token_file=places.TOKEN_FILE,
        given_up=given_up,
    )


def gateway_config(deployment: DSV4Deployment, group: int, given_up: str | None) -> Manifest:
    """Limits and route. The route may change while the gateway runs; kubelets bring it there within about a minute."""
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


def gateway_deployment(deployment: DSV4Deployment, group: int, *, image: str) -> Manifest:
    """One gateway. Other limits replace it, the new one first; another route does not."""
    name, spec = deployment.metadata.name, deployment.spec
    found = labels(name, component=GATEWAY, group=group)
    settings = limits(deployment).to_json()
    volumes: dict[str, tuple[Manifest, str]] = {
        "gateway": ({"configMap": {"name": gateway_name(name, group)}}, places.GATEWAY),
        "token": ({"secret": {"secretName": token_name(name)}}, places.TOKEN),
    }
    if spec.gateway.api_keys_secret is not None:
        volumes["keys"] = ({"secret": {"secretName": spec.gateway.api_keys_secret}}, places.KEYS)
    container: Manifest = {
        "name": "gateway",
        "image": image,
        "command": ["dsv4-gateway"],
        "args": [
            f"--settings={places.GATEWAY}/{SETTINGS_FILE}",
            f"--route={places.GATEWAY}/{ROUTE_FILE}",
            f"--listen=0.0.0.0:{places.GATEWAY_PORT}",
        ],
        "env": [{"name": variable, "value": value} for variable, value in ENVIRONMENT.items()],
        "ports": [{"name": "http", "containerPort": places.GATEWAY_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "volumeMounts": [
            {"name": volume, "mountPath": path, "readOnly": True} for volume, (_, path) in volumes.items()
        ],
        # Whether it listens, not whether the engine answers: while the engine is away, requests wait in here.
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10, "failureThreshold": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if spec.engine.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.engine.image_pull_policy.value
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(spec.gateway.drain + _LAST_SECONDS),
        "tolerations": [
            # Kubernetes' own 300 s would keep users out for as long after the loss of a node.
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
            for taint in ("not-ready", "unreachable")
        ],
        # The user is the image's: one that is forced may not be able to read the Python that the image has.
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, (source, _) in volumes.items()],
    }
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.engine.image_pull_secrets]
    stamp = {f"{DOMAIN}/settings": hashlib.sha256(settings.encode()).hexdigest()[:16]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, gateway_name(name, group), component=GATEWAY, group=group),
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": found},
            "template": {"metadata": {"labels": found, "annotations": stamp}, "spec": pod},
        },
    }


def network_policy(deployment: DSV4Deployment) -> Manifest:
    """Who may speak to members, where the network plugin enforces it: each other on every port, everybody on the ports
    that ask for a token. Gloo, NCCL and vLLM's queues between members cannot ask for one."""
    name = deployment.metadata.name
    others: Manifest = {"from": [{"podSelector": {"matchLabels": labels(name, component=MEMBER)}}]}
    open_to_all: Manifest = {"ports": [{"protocol": "TCP", "port": target} for _, target in places.HEAD_PORTS.values()]}
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
    """The Service that users reach, in front of all gateways."""
    name = deployment.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, name),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(name, component=GATEWAY),
            "ports": [{"name": "http", "port": places.GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
