"""Where things are inside a member's container. Storage is where `spec.storage` says, the same as on the node."""

from __future__ import annotations

PLAN = "/etc/dsv4/plan"
PLAN_FILE = "plan.json"
TOKEN = "/etc/dsv4/token"  # noqa: S105  (a directory)
TOKEN_ENTRY = "token"  # noqa: S105
TOKEN_FILE = f"{TOKEN}/{TOKEN_ENTRY}"
STATE = "/run/dsv4"
"""Files of one member of one incarnation, which go with its pod. Short, because Ray has sockets below it."""

TOKEN_KEY = "/etc/dsv4/token-key"  # noqa: S105
TOKEN_KEY_ENTRY = "key"  # noqa: S105
TOKEN_KEY_FILE = f"{TOKEN_KEY}/{TOKEN_KEY_ENTRY}"
"""Of gateways; members have their incarnation's token alone."""
GATEWAY = "/etc/dsv4/gateway"
KEYS = "/etc/dsv4/keys"
KEYS_KEY = "keys"
GATEWAY_PORT = 8000

HEAD_PORTS = {"http": (8000, "api"), "dashboard": (8265, "dashboard"), "agent": (8090, "agent")}
"""Of the head's Service: name to its own port and the name of the pod's, whose number is the plan's."""
