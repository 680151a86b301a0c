"""Paths inside a member's container. Storage is where `spec.storage` says, the same as on the node."""

from __future__ import annotations

from dsv4_operator.planning.facts import SECRETS_ROOT

PLAN = "/etc/dsv4/plan"
PLAN_FILE = "plan.json"
TOKEN = "/etc/dsv4/token"  # noqa: S105  (a directory)
TOKEN_ENTRY = "token"  # noqa: S105
TOKEN_FILE = f"{TOKEN}/{TOKEN_ENTRY}"
SECRETS = SECRETS_ROOT
STATE = "/run/dsv4"
"""Files of one member of one incarnation, which go with its pod. Short, because Ray has sockets below it."""

TOKEN_KEY = "/etc/dsv4/token-key"  # noqa: S105
TOKEN_KEY_ENTRY = "key"  # noqa: S105
TOKEN_KEY_FILE = f"{TOKEN_KEY}/{TOKEN_KEY_ENTRY}"
"""Of gateways; members have their incarnation's token alone."""
GATEWAY = "/etc/dsv4/gateway"
GATEWAY_PORT = 8000

HEAD_PORTS = {"http": (8000, "api"), "dashboard": (8265, "dashboard"), "agent": (8090, "agent")}
"""Of the head's Service: name to its own port and the name of the pod's, whose number is the plan's."""


def own_folder(root: str, namespace: str, deployment: str) -> str:
    """Return the one directory below `root`, a node's storage, that the members of a deployment may write."""
    return f"{root}/deployments/{namespace}/{deployment}"


def shared_weights(root: str) -> str:
    """Return the directory of files by their SHA-256 that all members read and none of them writes."""
    return f"{root}/weights"
