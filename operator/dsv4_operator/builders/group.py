"""Objects that a group has beside its pods: names, the plan, the token."""

from __future__ import annotations

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders import paths
from dsv4_operator.builders.names import (
    MEMBER,
    Manifest,
    head_name,
    incarnation_name,
    labels,
    metadata,
    mounted_name,
    token_key_name,
)
from dsv4_runtime.contract import GroupPlan


def plan_config(deployment: DSV4Deployment, plan: GroupPlan) -> Manifest:
    """Return the ConfigMap with the plan, as its members read it.

    Immutable, as the plan itself: kubelets need not watch it.
    """
    name = mounted_name(plan.deployment, deployment.metadata.uid, plan.group, plan.incarnation)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, name, group=plan.group, incarnation=plan.incarnation),
        "data": {paths.PLAN_FILE: plan.to_json(indent=2) + "\n"},
        "immutable": True,
    }


def incarnation_service(deployment: DSV4Deployment, group: int, incarnation: int) -> Manifest:
    """Return the Service that gives the members of one incarnation DNS names.

    They resolve before members are ready: that is when they form.
    """
    name = incarnation_name(deployment.metadata.name, group, incarnation)
    chosen = labels(deployment.metadata.name, component=MEMBER, group=group, incarnation=incarnation)
    port, target = paths.HEAD_PORTS["agent"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, name, group=group, incarnation=incarnation),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": chosen,
            "ports": [{"name": "agent", "port": port, "targetPort": target, "protocol": "TCP"}],
        },
    }


def head_service(deployment: DSV4Deployment, group: int, incarnation: int) -> Manifest:
    """Return the Service of the head of `incarnation`, ready or not: the gateway asks its agent how the engine is."""
    name = deployment.metadata.name
    chosen = labels(name, component=MEMBER, group=group, incarnation=incarnation, rank=0)
    ports = [
        {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}
        for name, (port, target) in paths.HEAD_PORTS.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, head_name(name, group), group=group),
        "spec": {"type": "ClusterIP", "publishNotReadyAddresses": True, "selector": chosen, "ports": ports},
    }


def token_key_secret(deployment: DSV4Deployment, key: str) -> Manifest:
    """Return the Secret with the key that tokens are made with, for gateways. Made once for a deployment.

    Not immutable: gateways that run receive the key of a Secret that is deleted and created again.
    """
    name = token_key_name(deployment.metadata.name, deployment.metadata.uid)
    return _secret(metadata(deployment, name), paths.TOKEN_KEY_ENTRY, key)


def token_secret(deployment: DSV4Deployment, group: int, incarnation: int, token: str) -> Manifest:
    """Return the Secret with the token that Ray, the agents and the dashboard of one incarnation ask for.

    It goes with the incarnation. Immutable, as the token is.
    """
    name = mounted_name(deployment.metadata.name, deployment.metadata.uid, group, incarnation)
    about = metadata(deployment, name, group=group, incarnation=incarnation)
    return _secret(about, paths.TOKEN_ENTRY, token) | {"immutable": True}


def _secret(about: Manifest, entry: str, text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": about,
        "type": "Opaque",
        "stringData": {entry: text},
    }
