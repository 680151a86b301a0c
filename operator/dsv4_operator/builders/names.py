"""Names of dsv4's objects on a cluster, and the labels that they are found by."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from dsv4_operator.api import API_VERSION, KIND, DSV4Deployment

DOMAIN = API_VERSION.partition("/")[0]

NAME, MANAGED_BY, COMPONENT = (f"app.kubernetes.io/{part}" for part in ("name", "managed-by", "component"))
DEPLOYMENT, GROUP, INCARNATION, RANK = (f"{DOMAIN}/{part}" for part in ("deployment", "group", "incarnation", "rank"))

MANAGER = "dsv4-operator"
MEMBER, GATEWAY, EVIDENCE = "member", "gateway", "evidence"

_NUMBER = "(0|[1-9][0-9]{0,8})"
_MEMBER_NAME = re.compile(rf"(.+)-{_NUMBER}-i{_NUMBER}-r{_NUMBER}")

Manifest = dict[str, Any]
"""One object of Kubernetes, or a part of one, in the JSON form of the wire."""

PLAN_DIRECTORY = "/etc/dsv4/plan"
PLAN_FILE = "plan.json"
TOKEN_DIRECTORY = "/etc/dsv4/token"  # noqa: S105  (a directory)
TOKEN_ENTRY = "token"  # noqa: S105
TOKEN_FILE = f"{TOKEN_DIRECTORY}/{TOKEN_ENTRY}"
STATE_DIRECTORY = "/run/dsv4"
"""Files of one member of one incarnation, which go with its pod. Short, because Ray has sockets below it."""

TOKEN_KEY_DIRECTORY = "/etc/dsv4/token-key"  # noqa: S105
TOKEN_KEY_ENTRY = "key"  # noqa: S105
TOKEN_KEY_FILE = f"{TOKEN_KEY_DIRECTORY}/{TOKEN_KEY_ENTRY}"
"""Of gateways; members have their incarnation's token alone."""
GATEWAY_DIRECTORY = "/etc/dsv4/gateway"
GATEWAY_PORT = 8000

HEAD_PORTS = {"http": (8000, "api"), "dashboard": (8265, "dashboard"), "agent": (8090, "agent")}
"""Of the head's Service: name to its own port and the name of the pod's, whose number is the plan's."""


def part(value: Any, *path: str) -> Mapping[str, Any]:
    """Return the mapping at `path` in `value`; an empty one where there is something else, or nothing."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def parts(value: Any, *path: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at `path` in `value`; none where there is something else, or nothing."""
    found = part(value, *path[:-1]).get(path[-1])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def labels(deployment: str, **more: object) -> dict[str, str]:
    """Return the labels of an object of `deployment`.

    Those of `component`, `group`, `incarnation` and `rank` are among them where given.
    """
    keys = {"component": COMPONENT, "group": GROUP, "incarnation": INCARNATION, "rank": RANK}
    found = {NAME: "dsv4", MANAGED_BY: MANAGER, DEPLOYMENT: deployment}
    return found | {keys[name]: str(value) for name, value in more.items()}


def selector(wanted: Mapping[str, str]) -> str:
    """Return `wanted` as the API server takes it in a query."""
    return ",".join(f"{name}={value}" for name, value in wanted.items())


def metadata(deployment: DSV4Deployment, name: str, **more: object) -> dict[str, object]:
    """Return the metadata of an object that goes when `deployment` goes: Kubernetes' garbage collector removes it."""
    return {
        "name": name,
        "namespace": deployment.metadata.namespace,
        "labels": labels(deployment.metadata.name, **more),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": deployment.metadata.name,
                "uid": deployment.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def controller_of(manifest: Manifest) -> dict[str, Any] | None:
    """Return the reference to the object that controls this one; None without one. There is one at most."""
    references = parts(manifest, "metadata", "ownerReferences")
    return next((dict(one) for one in references if one.get("controller")), None)


def belongs(manifest: Manifest, uid: str | None) -> bool:
    """Tell whether the object that the API server has belongs to the deployment with `uid`. A name proves nothing."""
    controller = controller_of(manifest)
    return controller is not None and bool(uid) and controller.get("uid") == uid


def number(manifest: Manifest, label: str) -> int | None:
    """Return the number in a label of an object that the API server has; None: somebody removed or changed it."""
    text = part(manifest, "metadata", "labels").get(label)
    return int(text) if isinstance(text, str) and re.fullmatch(_NUMBER, text) else None


def incarnation_name(deployment: str, group: int, incarnation: int) -> str:
    """Return the name of the headless Service of one incarnation."""
    return f"{deployment}-{group}-i{incarnation}"


def mounted_name(deployment: str, uid: str | None, group: int, incarnation: int) -> str:
    """Return the name of the plan's ConfigMap and of the token's Secret of one incarnation.

    Kubelets keep immutable objects by name for as long as a pod of their node mounts one: a deployment that is deleted
    and created again needs names that its predecessor never had.
    """
    return f"{incarnation_name(deployment, group, incarnation)}-{_digest(uid)}"


def member_name(deployment: str, group: int, incarnation: int, rank: int) -> str:
    """Return the name of the pod of one member."""
    return f"{incarnation_name(deployment, group, incarnation)}-r{rank}"


def parse_member_name(name: str) -> tuple[str, int, int, int] | None:
    """Return deployment, group, incarnation and rank in what `member_name` returned; None if `name` is no such name."""
    found = _MEMBER_NAME.fullmatch(name)
    return (found[1], int(found[2]), int(found[3]), int(found[4])) if found is not None else None


def member_address(namespace: str, deployment: str, group: int, incarnation: int | str, rank: int) -> str:
    """Return the DNS name of one member on the pod network.

    The cluster's domain is left to the resolver's search list.
    """
    service = f"{deployment}-{group}-i{incarnation}"
    return f"{service}-r{rank}.{service}.{namespace}.svc"


def head_name(deployment: str, group: int) -> str:
    """Return the name of the Service of rank 0 of the present incarnation."""
    return f"{deployment}-{group}-head"


def gateway_name(deployment: str, group: int) -> str:
    """Return the name of the Deployment and the ConfigMap of a group's gateway."""
    return f"{deployment}-{group}-gateway"


def token_key_name(deployment: str, uid: str | None) -> str:
    """Return the name of the Secret with the key that the tokens of the deployment's incarnations are made with.

    See `mounted_name` for the suffix.
    """
    return f"{earlier_token_key_name(deployment)}-{_digest(uid)}"


def earlier_token_key_name(deployment: str) -> str:
    """Return the name that the Secret with the token key had before it contained the UID.

    Deployments that were formed then go on with the key in it.
    """
    return f"{deployment}-token-key"


def evidence_name(deployment: str, group: int, incarnation: int) -> str:
    """Return the name of the ConfigMap with what was kept of an incarnation that died."""
    return f"{deployment}-{group}-evidence-{incarnation}"


def _digest(uid: str | None) -> str:
    return hashlib.sha256((uid or "").encode()).hexdigest()[:8]


def own_folder(root: str, namespace: str, deployment: str) -> str:
    """Return the one directory below `root`, a node's storage, that the members of a deployment may write."""
    return f"{root}/deployments/{namespace}/{deployment}"


def shared_weights(root: str) -> str:
    """Return the directory of files by their SHA-256 that all members read and none of them writes."""
    return f"{root}/weights"
