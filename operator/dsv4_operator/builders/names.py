"""Names and labels of dsv4's objects on a cluster, and paths inside the containers.

The storage of members has the path of `spec.storage`, as on the node.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from dsv4_operator.api import KIND, STORED_VERSION, DSV4Deployment

DOMAIN = STORED_VERSION.partition("/")[0]

NAME, MANAGED_BY, COMPONENT = (f"app.kubernetes.io/{part}" for part in ("name", "managed-by", "component"))
DEPLOYMENT, GROUP, INCARNATION, RANK = (f"{DOMAIN}/{part}" for part in ("deployment", "group", "incarnation", "rank"))

MANAGER = "dsv4-operator"
MEMBER, GATEWAY, EVIDENCE = "member", "gateway", "evidence"

_NUMBER = "(0|[1-9][0-9]{0,8})"
_RANDOM = "[a-z0-9]{5}"
_MEMBER_NAME = re.compile(rf"(.+)-{_NUMBER}-i{_NUMBER}-(?:r{_NUMBER}(?:-worker-{_RANDOM})?|head(?:-{_RANDOM})?)")

RAY_CLUSTER = "RayCluster"
OWNER_UID = f"{DOMAIN}/owner-uid"
"""Annotation of pods that KubeRay makes: UID of their deployment. Their controller is the RayCluster, and KubeRay
accepts no owners in templates."""
HELD = f"{DOMAIN}/held"
"""Finalizer of pods that KubeRay makes: it makes no other pod of a rank while the ended one exists."""

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

PLAN_DIRECTORY = "/etc/dsv4/plan"
PLAN_FILE = "plan.json"
TOKEN_DIRECTORY = "/etc/dsv4/token"  # noqa: S105  (a directory)
TOKEN_ENTRY = "token"  # noqa: S105
TOKEN_FILE = f"{TOKEN_DIRECTORY}/{TOKEN_ENTRY}"
STATE_DIRECTORY = "/run/dsv4"
"""Files of one member of one incarnation, removed with its pod. Short, because it contains sockets of Ray."""

TOKEN_KEY_DIRECTORY = "/etc/dsv4/token-key"  # noqa: S105
TOKEN_KEY_ENTRY = "key"  # noqa: S105
TOKEN_KEY_FILE = f"{TOKEN_KEY_DIRECTORY}/{TOKEN_KEY_ENTRY}"
"""Key of the gateways; members have the token of their incarnation only."""
GATEWAY_DIRECTORY = "/etc/dsv4/gateway"
GATEWAY_PORT = 8000

HEAD_PORTS = {"http": (8000, "api"), "dashboard": (8265, "dashboard"), "agent": (8090, "agent")}
"""Ports of the head Service by name: its own number, and the name of the pod's port, whose number is in the plan."""


def part(value: Any, *path: str) -> Mapping[str, Any]:
    """Return the mapping at `path` in `value`; an empty one if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def parts(value: Any, *path: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at `path` in `value`; an empty list if there is none."""
    found = part(value, *path[:-1]).get(path[-1])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def labels(deployment: str, **more: object) -> dict[str, str]:
    """Return the labels of an object of `deployment`, with `component`, `group`, `incarnation` and `rank` if given."""
    keys = {"component": COMPONENT, "group": GROUP, "incarnation": INCARNATION, "rank": RANK}
    found = {NAME: "dsv4", MANAGED_BY: MANAGER, DEPLOYMENT: deployment}
    return found | {keys[name]: str(value) for name, value in more.items()}


def selector(wanted: Mapping[str, str]) -> str:
    """Return `wanted` as a label selector for a query to the API server."""
    return ",".join(f"{name}={value}" for name, value in wanted.items())


def metadata(deployment: DSV4Deployment, name: str, **more: object) -> dict[str, Any]:
    """Return the metadata of an object that the garbage collector of Kubernetes removes with `deployment`."""
    about = deployment.metadata
    # Another version would change every object of every deployment.
    owner = {"apiVersion": STORED_VERSION, "kind": KIND, "name": about.name, "uid": about.uid}
    return {
        "name": name,
        "namespace": about.namespace,
        "labels": labels(about.name, **more),
        "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
    }


def controller_of(manifest: Manifest) -> dict[str, Any] | None:
    """Return the reference to the controller of the object; None without one. There is at most one."""
    references = parts(manifest, "metadata", "ownerReferences")
    return next((dict(one) for one in references if one.get("controller")), None)


def owner_uid(manifest: Manifest) -> str | None:
    """Return the UID of the deployment to which an object of the API server belongs; None if it belongs to none."""
    controller = controller_of(manifest)
    if controller is None:
        return None
    if controller.get("kind") == RAY_CLUSTER:
        return part(manifest, "metadata", "annotations").get(OWNER_UID)
    return controller.get("uid")


def belongs(manifest: Manifest, uid: str | None) -> bool:
    """Return whether an object of the API server belongs to the deployment with `uid`; its name is no proof."""
    return bool(uid) and owner_uid(manifest) == uid


def number(manifest: Manifest, label: str) -> int | None:
    """Return the number in a label of an object of the API server; None if it was removed or changed."""
    text = part(manifest, "metadata", "labels").get(label)
    return int(text) if isinstance(text, str) and re.fullmatch(_NUMBER, text) else None


def incarnation_name(deployment: str, group: int, incarnation: int) -> str:
    """Return the name of the headless Service of one incarnation."""
    return f"{deployment}-{group}-i{incarnation}"


def mounted_name(deployment: str, uid: str | None, group: int, incarnation: int) -> str:
    """Return the name of the plan's ConfigMap and of the token's Secret of one incarnation.

    Kubelets cache immutable objects by name while a pod of their node mounts one, so a deployment that is deleted and
    created again needs names that its predecessor did not use.
    """
    return f"{incarnation_name(deployment, group, incarnation)}-{_digest(uid)}"


def member_name(deployment: str, group: int, incarnation: int, rank: int) -> str:
    """Return the name of the pod of one member."""
    return f"{incarnation_name(deployment, group, incarnation)}-r{rank}"


def parse_member_name(name: str) -> tuple[str, int, int, int] | None:
    """Return deployment, group, incarnation and rank in the name of a member's pod; None if it is another name.

    KubeRay adds the type of the Ray node and a random end, `-head-x7k2p` for rank 0 and `-r1-worker-x7k2p`.
    """
    found = _MEMBER_NAME.fullmatch(name)
    return (found[1], int(found[2]), int(found[3]), int(found[4] or 0)) if found is not None else None


def planned_name(name: str) -> str:
    """Return the name of `member_name` for the name of a member's pod; other names are unchanged."""
    found = parse_member_name(name)
    return member_name(*found) if found is not None else name


def member_address(namespace: str, deployment: str, group: int, incarnation: int | str, rank: int) -> str:
    """Return the DNS name of one member on the pod network; the resolver's search list adds the cluster domain."""
    service = f"{deployment}-{group}-i{incarnation}"
    return f"{service}-r{rank}.{service}.{namespace}.svc"


def head_name(deployment: str, group: int) -> str:
    """Return the name of the Service of rank 0 of the current incarnation."""
    return f"{deployment}-{group}-head"


def gateway_name(deployment: str, group: int) -> str:
    """Return the name of the Deployment and the ConfigMap of a group's gateway."""
    return f"{deployment}-{group}-gateway"


def token_key_name(deployment: str, uid: str | None) -> str:
    """Return the name of the Secret with the key for the tokens of all incarnations; suffix as in `mounted_name`."""
    return f"{deployment}-token-key-{_digest(uid)}"


def evidence_name(deployment: str, group: int, incarnation: int) -> str:
    """Return the name of the ConfigMap with the evidence of a failed incarnation."""
    return f"{deployment}-{group}-evidence-{incarnation}"


def _digest(uid: str | None) -> str:
    return hashlib.sha256((uid or "").encode()).hexdigest()[:8]


def own_folder(root: str, namespace: str, deployment: str) -> str:
    """Return the only directory in the node's storage `root` that members of a deployment may write."""
    return f"{root}/deployments/{namespace}/{deployment}"


def shared_weights(root: str) -> str:
    """Return the directory of files by their SHA-256, read-only for all members."""
    return f"{root}/weights"
