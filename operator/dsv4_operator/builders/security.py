"""As whom the containers of members and gateways run, and what they may."""

from __future__ import annotations

from dsv4_operator.api import SecretKeyRef
from dsv4_operator.builders import paths
from dsv4_operator.builders.names import Manifest

USER = 65532
"""User and group of members and gateways; `runtime/Dockerfile` makes the same."""
_READABLE = 0o440
LOCK_MEMORY = ("dsv4-lock-memory", "--inh-caps=+ipc_lock", "--ambient-caps=+ipc_lock")
"""The beginning of a command that keeps IPC_LOCK: Linux takes capabilities from a user that is not root at the first
program that it starts, unless that program's file has them (`runtime/lock_memory.py`)."""


def pod_security(groups: tuple[int, ...] = ()) -> Manifest:
    """Return the `securityContext` of a pod whose containers are nobody on the node.

    Args:
        groups: further groups, of devices that not everybody may open.
    """
    found: Manifest = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        # Of what the pod mounts and others write: Secrets are readable to this group alone.
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return found | ({"supplementalGroups": list(groups)} if groups else {})


def secret_volume(name: str, keys: list[str]) -> Manifest:
    """Return the source of a volume with the entries `keys` of the Secret `name`."""
    items = [{"key": key, "path": key} for key in keys]
    return {"secret": {"secretName": name, "items": items, "defaultMode": _READABLE}}


def referenced(ref: SecretKeyRef) -> tuple[Manifest, str]:
    """Return the source of the volume with what `ref` names, and where it is mounted: the plan has its path."""
    return secret_volume(ref.name, [ref.key]), f"{paths.SECRETS}/{ref.name}"
