"""Pod of a member with its security context, and the other objects of a group: plan, Services, Secrets, pod group.

With `spec.topology.scheduler`, all members of an incarnation are one group of that scheduler, which places all of them
or none. Sources of the names: Kueue v0.20 (`pkg/controller/jobs/pod/constants`), Volcano
(`apis/scheduling/v1beta1/labels.go`), scheduler-plugins (`apis/scheduling/v1alpha1`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dsv4_operator.api import (
    ClusterPolicy,
    DSV4Deployment,
    Hardware,
    NetworkMode,
    SchedulerType,
    SecretKeyRef,
    StorageType,
)
from dsv4_operator.api.policy import root_of
from dsv4_operator.api.spec import KUBERAY_BACKEND
from dsv4_operator.builders import names
from dsv4_operator.builders.names import (
    COMPONENT,
    HEAD_PORTS,
    MEMBER,
    PLAN_DIRECTORY,
    PLAN_FILE,
    STATE_DIRECTORY,
    TOKEN_DIRECTORY,
    TOKEN_ENTRY,
    TOKEN_KEY_ENTRY,
    Manifest,
    head_name,
    incarnation_name,
    labels,
    member_name,
    metadata,
    mounted_name,
    own_folder,
    shared_weights,
    token_key_name,
)
from dsv4_operator.planning.facts import SECRETS_ROOT
from dsv4_runtime.contract import GroupPlan, MemberPlan
from dsv4_runtime.contract.plan import RAY_COMMAND

GPU = "nvidia.com/gpu"
_CLAIM = "devices"
"""Name of the resource claim within a pod."""

USER = 65532
"""User and group of members and gateways, as in `runtime/Dockerfile`."""
_READABLE = 0o440
LOCK_MEMORY = ("dsv4-lock-memory", "--inh-caps=+ipc_lock", "--ambient-caps=+ipc_lock")
"""Prefix of a command that keeps IPC_LOCK: for users other than root, Linux drops capabilities at the first exec of a
program whose file does not have them (`runtime/image.py`)."""

_CPU_MILLIS = {hardware: 500 if hardware is Hardware.CPU else 4000 for hardware in Hardware}
"""CPU request of a member for its agent, Ray and vLLM's API process beside idle neighbours."""
_LIMIT_FACTOR = 2
"""Memory limit of a member relative to its planned memory: see `_memory_limit`."""
_TERMINATION_MESSAGE = "/dev/termination-log"
_DRAIN_SLACK_SECONDS = 3.0
_STARTUP_SLACK_SECONDS = 60.0
_PROBE_SECONDS = 2


def requests(deployment: DSV4Deployment, memory_bytes: int) -> dict[str, int]:
    """Return the resource requests of a member: processors in thousandths, memory in bytes, devices by count.

    Args:
        deployment: the specification.
        memory_bytes: `Expectations.memory_bytes` of the plan.
    """
    topology = deployment.spec.topology
    wanted = {"cpu": _CPU_MILLIS[topology.hardware], "memory": memory_bytes}
    if topology.hardware is not Hardware.CPU and topology.resource_claim_template is None:
        wanted[GPU] = topology.devices_per_node
    if needs_rdma(deployment):
        wanted[deployment.spec.network.rdma_resource] = 1
    return wanted


def needs_rdma(deployment: DSV4Deployment) -> bool:
    """Return whether members get RDMA devices and may lock memory for them; they must use the network of the node."""
    spec = deployment.spec
    return (
        spec.topology.hardware is not Hardware.CPU
        and spec.topology.nodes_per_group > 1
        and spec.network_mode is NetworkMode.HOST_NETWORK
        and spec.network.fabric.require_rdma is not False
    )


@dataclass(frozen=True, slots=True)
class Host:
    """Settings of the cluster administrator for members."""

    policy: ClusterPolicy
    runtime_image: str
    """Image of the administrator, the only image with access to a directory of the node as root."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of agents and gateways: the format of logs, and the receiver of traces."""


def member_pod(deployment: DSV4Deployment, plan: GroupPlan, rank: int, *, host: Host) -> Manifest:
    """Return the pod of the member `rank`.

    Args:
        deployment: the specification of `plan`; owns the pod.
        plan: plan of the incarnation.
        rank: rank of the member.
        host: permissions on its node; `deployment` complies with them (`api.policy.violations`).
    """
    member = plan.members[rank]
    name, group, incarnation = deployment.metadata.name, plan.group, plan.incarnation
    on_host = deployment.spec.network_mode is NetworkMode.HOST_NETWORK
    volumes = dict(_volumes(deployment, plan, host.policy))
    engine, topology = deployment.spec.engine, deployment.spec.topology
    image = engine.image or host.runtime_image
    marks = membership(deployment, group, incarnation)
    spec: Manifest = {
        "hostname": member_name(name, group, incarnation, rank),
        "subdomain": incarnation_name(name, group, incarnation),
        # Any exit of a member is a failure of its group; the operator decides about the recovery.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(plan.timeouts.drain + _DRAIN_SLACK_SECONDS),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(host.policy.device_groups),
        "affinity": _affinity(deployment, member),
        "containers": [_container(deployment, plan, member, image, volumes, host.variables)],
        "volumes": [{"name": volume, **source} for volume, (source, _) in volumes.items()],
        **marks.spec,
    }
    if topology.resource_claim_template is not None:
        claim = {"name": _CLAIM, "resourceClaimTemplateName": topology.resource_claim_template}
        spec["resourceClaims"] = [claim]
    if topology.hardware is not Hardware.CPU and host.policy.runtime_class:
        spec["runtimeClassName"] = host.policy.runtime_class
    if topology.scheduler is not None:
        spec["nodeSelector"] = dict(topology.node_selector)
        spec["topologySpreadConstraints"] = [spread(deployment, group)]
    if deployment.spec.storage.type is StorageType.HOST_PATH:
        spec["initContainers"] = [_folder_owner(deployment, host.runtime_image)]
    if on_host:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if topology.tolerations:
        spec["tolerations"] = [
            {name: value for name, value in toleration.to_dict().items() if value != ""}
            for toleration in topology.tolerations
        ]
    if engine.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in engine.image_pull_secrets]
    about = metadata(
        deployment,
        member_name(name, group, incarnation, rank),
        component=MEMBER,
        group=group,
        incarnation=incarnation,
        rank=rank,
    )
    about["labels"] |= marks.labels
    if marks.annotations:
        about["annotations"] = dict(marks.annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def _container(
    deployment: DSV4Deployment,
    plan: GroupPlan,
    member: MemberPlan,
    image: str,
    volumes: dict[str, tuple[Manifest, Manifest]],
    variables: Mapping[str, str],
) -> Manifest:
    # Before it responds, the agent waits for its own address and those of the other members.
    startup_seconds = plan.timeouts.formation + plan.timeouts.preflight + _STARTUP_SLACK_SECONDS
    evidence = f"{_own_folder(deployment)}/evidence/g{plan.group}"
    arguments = [f"--plan={PLAN_DIRECTORY}/{PLAN_FILE}", f"--rank={member.rank}"]
    arguments += [f"--directory={STATE_DIRECTORY}/i{plan.incarnation}/m{member.rank}", f"--evidence={evidence}"]
    arguments += ["--echo", f"--exit-message={_TERMINATION_MESSAGE}"]
    container: Manifest = {
        "name": "agent",
        "image": image,
        "command": [*(LOCK_MEMORY if needs_rdma(deployment) else ()), "dsv4-agent"],
        "args": arguments,
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in member.ports.model_dump(exclude_none=True).items()
        ],
        "resources": _resources(deployment, plan),
        "volumeMounts": [{"name": volume, **mount} for volume, (_, mount) in volumes.items()],
        # The kubelet probes the agent only. Agent and operator supervise the engine.
        "startupProbe": _probe("/livez", _PROBE_SECONDS, startup_seconds),
        "livenessProbe": _probe("/livez", 10, 60.0),
        "readinessProbe": _probe("/readyz", _PROBE_SECONDS, 2.0 * _PROBE_SECONDS),
        "terminationMessagePath": _TERMINATION_MESSAGE,
        # If the agent cannot be started; it keeps its own messages there.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if needs_rdma(deployment) else {})},
        },
    }
    # The image may lack the user, and libraries read its home and name.
    environment: list[Manifest] = [{"name": "HOME", "value": STATE_DIRECTORY}, {"name": "USER", "value": "dsv4"}]
    if deployment.spec.network_mode is NetworkMode.POD_NETWORK or deployment.spec.topology.scheduler is not None:
        # The plan has names: its author did not know the addresses.
        arguments.append("--address=$(DSV4_POD_IP)")
        environment.append({"name": "DSV4_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    environment += [{"name": name, "value": value} for name, value in variables.items()]
    container["env"] = environment
    if deployment.spec.engine.image_pull_policy is not None:
        container["imagePullPolicy"] = deployment.spec.engine.image_pull_policy.value
    return container


def _probe(path: str, period: int, limit: float) -> Manifest:
    request, failures = {"path": path, "port": "agent"}, math.ceil(limit / period)
    return {"httpGet": request, "periodSeconds": period, "timeoutSeconds": period, "failureThreshold": failures}


def _resources(deployment: DSV4Deployment, plan: GroupPlan) -> Manifest:
    wanted = requests(deployment, plan.expectations.memory_bytes)
    devices = {name: str(count) for name, count in wanted.items() if "/" in name}
    claimed = deployment.spec.topology.resource_claim_template is not None
    return {
        "requests": {"cpu": f"{wanted['cpu']}m", "memory": str(wanted["memory"]), **devices},
        "limits": {"memory": str(_memory_limit(plan)), **devices},
        **({"claims": [{"name": _CLAIM}]} if claimed else {}),
    }


def _memory_limit(plan: GroupPlan) -> int:
    """Return the limit in bytes at which the kernel kills a leaking member, before others on the same node.

    Healthy members must stay well below it, because the exit of one member restarts its whole group. The limit includes
    the page cache, so a limit near the plan would evict the weights that the next start reads from there. It also
    includes /dev/shm and, on unified memory, an unpredictable part of the driver's allocations for the GPU.
    """
    expected = plan.expectations
    return _LIMIT_FACTOR * (expected.memory_bytes + expected.shm_bytes) + (expected.weights_bytes or 0)


def _affinity(deployment: DSV4Deployment, member: MemberPlan) -> Manifest:
    """Return the affinity to the node of the plan; the scheduler still checks the fit and reports a failure."""
    topology = deployment.spec.topology
    found: Manifest = {}
    if member.node is not None:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [member.node]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        found["nodeAffinity"] = required
    if topology.exclusive:
        other = {
            "labelSelector": {"matchLabels": {COMPONENT: MEMBER, "app.kubernetes.io/name": "dsv4"}},
            "namespaceSelector": {},
            "topologyKey": "kubernetes.io/hostname",
        }
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [other]}
    return found


def _folder_owner(deployment: DSV4Deployment, runtime_image: str) -> Manifest:
    """Return the init container that changes the owner of a new directory from root to the user of the members.

    It mounts that directory only and runs the image of the administrator, not one of the specification.
    """
    folder = _own_folder(deployment)
    script = f'[ "$(stat -c %u "$0")" = {USER} ] || {{ chmod 0700 "$0" && chown {USER}:{USER} "$0"; }}'
    return {
        "name": "folder",
        "image": runtime_image,
        "command": ["/bin/sh", "-c", script, folder],
        "volumeMounts": [{"name": "storage", "mountPath": folder}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
    }


def _own_folder(deployment: DSV4Deployment) -> str:
    metadata = deployment.metadata
    return own_folder(deployment.spec.storage.path, metadata.namespace, metadata.name)


def _volumes(
    deployment: DSV4Deployment, plan: GroupPlan, policy: ClusterPolicy
) -> Iterator[tuple[str, tuple[Manifest, Manifest]]]:
    """Yield name, source and mount of every volume."""
    config = mounted_name(plan.deployment, deployment.metadata.uid, plan.group, plan.incarnation)
    memory = {"medium": "Memory", "sizeLimit": str(plan.expectations.shm_bytes)}
    yield "plan", ({"configMap": {"name": config}}, {"mountPath": PLAN_DIRECTORY, "readOnly": True})
    secret, entry = _token_place(deployment, plan.group, plan.incarnation)
    token = secret_volume(secret, {entry: TOKEN_ENTRY})
    yield "token", (token, {"mountPath": TOKEN_DIRECTORY, "readOnly": True})
    yield "state", ({"emptyDir": {}}, {"mountPath": STATE_DIRECTORY})
    yield "shm", ({"emptyDir": memory}, {"mountPath": "/dev/shm"})  # noqa: S108
    storage, folder = deployment.spec.storage, _own_folder(deployment)
    if storage.type is StorageType.HOST_PATH:
        # All parent directories belong to root, so that members cannot create links there.
        yield "storage", ({"hostPath": {"path": folder, "type": "DirectoryOrCreate"}}, {"mountPath": folder})
        shared = shared_weights(storage.path)
        source: Manifest = {"hostPath": {"path": shared, "type": "DirectoryOrCreate"}}
        yield "weights", (source, {"mountPath": shared, "readOnly": True})
    else:
        yield "storage", ({"emptyDir": {}}, {"mountPath": folder})
    model = deployment.spec.model.source
    if model.secret_key_ref is not None:
        source, place = referenced(model.secret_key_ref)
        yield "secret", (source, {"mountPath": place, "readOnly": True})
    path = model.path or model.shared_path
    root = root_of(path, policy.model_roots) if path is not None else None
    if path is not None and root is not None:
        # Mounted as a subpath of the allowed root: the kubelet follows no link out of it.
        below = str(PurePosixPath(path).relative_to(root))
        mount: Manifest = {"mountPath": path, "readOnly": True}
        # A missing directory is created empty, so that the agent reports the missing files; a pod would only wait.
        source = {"hostPath": {"path": root, "type": "DirectoryOrCreate"}}
        yield "model", (source, mount if below == "." else mount | {"subPath": below})


def plan_config(deployment: DSV4Deployment, plan: GroupPlan) -> Manifest:
    """Return the ConfigMap with the plan for its members; immutable, so that kubelets need not watch it."""
    name = mounted_name(plan.deployment, deployment.metadata.uid, plan.group, plan.incarnation)
    about = metadata(deployment, name, group=plan.group, incarnation=plan.incarnation)
    data = {PLAN_FILE: plan.to_json(indent=2) + "\n"}
    if deployment.spec.backend == KUBERAY_BACKEND:
        data[_NO_WAIT] = _NO_WAIT_SCRIPT
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data, "immutable": True}


KUBERAY_API = "ray.io/v1"
LEAST_KUBERAY = "1.5"
"""The first with `authOptions`, without which Ray's dashboard would need no token."""
_RAY_VERSION = "2.60.0"
"""KubeRay compares it with 2.52, from which on Ray has tokens, and 2.53 for probes, which the template has itself."""
_OWN_COMMAND = "ray.io/overwrite-container-cmd"
"""Annotation: KubeRay leaves the command of the container and passes its `ray start` in the environment."""
_KUBERAY_TOKEN = "auth_token"  # noqa: S105  (a name)
_NO_WAIT = "no-wait.sh"
"""Entry of the plan's ConfigMap, and the `BASH_ENV` of the pods: it ends KubeRay's init container, a bash script that
waits for the GCS of rank 0. That one starts after the weights are staged and the network is verified, which the agents
of all ranks do at the same time; they wait for the GCS themselves."""
_NO_WAIT_SCRIPT = f'[ -n "${RAY_COMMAND}" ] || exit 0\n'
"""The variable exists in the container of the agent only, where the file changes nothing."""
_ADDED_BY_KUBERAY = frozenset({"head", "block"})


def ray_cluster(deployment: DSV4Deployment, plan: GroupPlan, pods: Sequence[Manifest]) -> Manifest:
    """Return the RayCluster of one incarnation.

    Every member is a group of one pod: members differ in node and rank. Autoscaler and fault tolerance of the GCS are
    off; the finalizer of the pods keeps KubeRay from replacing an ended one.

    Args:
        deployment: the specification of `plan`; owns the object.
        plan: plan of the incarnation.
        pods: the pods of all ranks in order, as `member_pod` returns them.

    Source: KubeRay 1.6.2, `ray-operator/controllers/ray/common/pod.go`.
    """
    head, *workers = (
        {"rayStartParams": ray_start_params(member.ray_args), "template": _ray_template(pod, deployment)}
        for member, pod in zip(plan.members, pods, strict=True)
    )
    one = {"replicas": 1, "minReplicas": 1, "maxReplicas": 1, "numOfHosts": 1}
    identity = ray_cluster_identity(deployment, plan)
    return {
        **identity,
        "metadata": identity["metadata"] | {"annotations": {_OWN_COMMAND: "true"}},
        "spec": {
            "rayVersion": _RAY_VERSION,
            "enableInTreeAutoscaling": False,
            "authOptions": {"mode": "token"},
            "headGroupSpec": head,
            "workerGroupSpecs": [{"groupName": f"r{rank}", **one, **group} for rank, group in enumerate(workers, 1)],
        },
    }


def ray_cluster_name(plan: GroupPlan) -> str:
    """Return the name of the RayCluster of the plan's incarnation."""
    return incarnation_name(plan.deployment, plan.group, plan.incarnation)


def ray_cluster_identity(deployment: DSV4Deployment, plan: GroupPlan) -> Manifest:
    """Return kind, metadata and owner of the RayCluster of the plan's incarnation."""
    about = metadata(deployment, ray_cluster_name(plan), group=plan.group, incarnation=plan.incarnation)
    return {"apiVersion": KUBERAY_API, "kind": names.RAY_CLUSTER, "metadata": about}


def ray_start_params(args: Sequence[str]) -> dict[str, str]:
    """Return the arguments of `ray start` as KubeRay's `rayStartParams`.

    KubeRay adds `--head` and `--block`, writes `true` as a flag without a value, and drops `false`.
    """
    pairs = (arg.removeprefix("--").partition("=") for arg in args if arg.startswith("--"))
    return {
        name: "no" if value == "false" else value or "true" for name, _, value in pairs if name not in _ADDED_BY_KUBERAY
    }


def _ray_template(pod: Manifest, deployment: DSV4Deployment) -> Manifest:
    agent, *others = pod["spec"]["containers"]
    environment = [*agent["env"], {"name": "BASH_ENV", "value": f"{PLAN_DIRECTORY}/{_NO_WAIT}"}]
    annotations = {**names.part(pod, "metadata", "annotations"), names.OWNER_UID: str(deployment.metadata.uid)}
    about = {"labels": pod["metadata"]["labels"], "annotations": annotations, "finalizers": [names.HELD]}
    return {"metadata": about, "spec": {**pod["spec"], "containers": [{**agent, "env": environment}, *others]}}


def incarnation_service(deployment: DSV4Deployment, group: int, incarnation: int) -> Manifest:
    """Return the headless Service for the DNS names of one incarnation's members; they resolve before readiness."""
    name = incarnation_name(deployment.metadata.name, group, incarnation)
    chosen = labels(deployment.metadata.name, component=MEMBER, group=group, incarnation=incarnation)
    about = metadata(deployment, name, group=group, incarnation=incarnation)
    ports = [service_port("agent", *HEAD_PORTS["agent"])]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": chosen, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}


def head_service(deployment: DSV4Deployment, group: int, incarnation: int) -> Manifest:
    """Return the Service of the head of `incarnation`, ready or not: gateways read the engine state there."""
    name = deployment.metadata.name
    chosen = labels(name, component=MEMBER, group=group, incarnation=incarnation, rank=0)
    about = metadata(deployment, head_name(name, group), group=group)
    ports = [service_port(name, *port) for name, port in HEAD_PORTS.items()]
    spec = {"type": "ClusterIP", "publishNotReadyAddresses": True, "selector": chosen, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}


def service_port(name: str, port: int, target: str) -> Manifest:
    """Return one TCP port of a Service; `target` is the name of the pod's port."""
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def token_key_secret(deployment: DSV4Deployment, key: str) -> Manifest:
    """Return the Secret with the key for tokens, for gateways; created once for a deployment.

    Not immutable, so that running gateways receive the key of a Secret that is deleted and created again.
    """
    name = token_key_name(deployment.metadata.name, deployment.metadata.uid)
    return _secret(metadata(deployment, name), TOKEN_KEY_ENTRY, key)


def token_secret(deployment: DSV4Deployment, group: int, incarnation: int, token: str) -> Manifest:
    """Return the Secret with the token that Ray, agents and dashboard of one incarnation require.

    Immutable, except where KubeRay and `kubectl ray get token` determine the name, which a later deployment may use.
    """
    name, entry = _token_place(deployment, group, incarnation)
    about = metadata(deployment, name, group=group, incarnation=incarnation)
    return _secret(about, entry, token) | ({} if deployment.spec.backend == KUBERAY_BACKEND else {"immutable": True})


def _token_place(deployment: DSV4Deployment, group: int, incarnation: int) -> tuple[str, str]:
    """Return name and entry of the Secret with the token of one incarnation."""
    name = deployment.metadata.name
    if deployment.spec.backend == KUBERAY_BACKEND:
        return incarnation_name(name, group, incarnation), _KUBERAY_TOKEN
    return mounted_name(name, deployment.metadata.uid, group, incarnation), TOKEN_ENTRY


def _secret(about: Manifest, entry: str, text: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "stringData": {entry: text}}


def pod_security(groups: tuple[int, ...] = ()) -> Manifest:
    """Return the `securityContext` of a pod whose containers run as an unprivileged user.

    Args:
        groups: additional groups for devices with restricted access.
    """
    found: Manifest = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        # Owner group of mounted volumes: Secrets are readable for this group only.
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return found | ({"supplementalGroups": list(groups)} if groups else {})


def secret_volume(name: str, files: Mapping[str, str]) -> Manifest:
    """Return the source of a volume with entries of the Secret `name` as files, whose names `files` has by entry."""
    items = [{"key": key, "path": path} for key, path in files.items()]
    return {"secret": {"secretName": name, "items": items, "defaultMode": _READABLE}}


def referenced(ref: SecretKeyRef) -> tuple[Manifest, str]:
    """Return the volume source of the referenced Secret and its mount path, which the plan contains."""
    return secret_volume(ref.name, {ref.key: ref.key}), f"{SECRETS_ROOT}/{ref.name}"


SCHEDULER = f"{names.DOMAIN}/scheduler"
"""Label of members whose node a scheduler chooses; its value is a `SchedulerType`."""

_KUEUE = "kueue.x-k8s.io"
_REFUSALS = (("Unschedulable", "True"), ("QuotaReserved", "False"), ("Admitted", "False"))
"""Conditions of the objects of all schedulers, by type and status, whose message is the reason of a wait."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Marks of a pod that belongs to a group of some scheduler."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, object]


def membership(deployment: DSV4Deployment, group: int, incarnation: int) -> Membership:
    """Return the marks of the members of one incarnation; empty if dsv4 chooses their nodes."""
    scheduler = deployment.spec.topology.scheduler
    if scheduler is None:
        return Membership({}, {}, {})
    name = names.incarnation_name(deployment.metadata.name, group, incarnation)
    labels = {SCHEDULER: scheduler.type.value}
    match scheduler.type:
        case SchedulerType.KUEUE:
            return Membership(
                labels | {f"{_KUEUE}/queue-name": scheduler.queue or "", f"{_KUEUE}/pod-group-name": name},
                {
                    f"{_KUEUE}/pod-group-total-count": str(deployment.spec.topology.nodes_per_group),
                    # The group ends with its members; its successor is another group, not replacement pods.
                    f"{_KUEUE}/retriable-in-group": "false",
                },
                # Kueue adds this gate itself. A namespace that it does not manage gets no pods past the quota.
                {"schedulingGates": [{"name": f"{_KUEUE}/admission"}]},
            )
        case SchedulerType.VOLCANO:
            return Membership(labels, {"scheduling.k8s.io/group-name": name}, {"schedulerName": "volcano"})
        case SchedulerType.COSCHEDULING:
            marks = labels | {"scheduling.x-k8s.io/pod-group": name}
            return Membership(marks, {}, {"schedulerName": "scheduler-plugins-scheduler"})


API_VERSIONS = {
    SchedulerType.VOLCANO: "scheduling.volcano.sh/v1beta1",
    SchedulerType.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
}
"""Schedulers with a `PodGroup`."""


def pod_group(deployment: DSV4Deployment, group: int, incarnation: int, requests: Mapping[str, int]) -> Manifest | None:
    """Return the `PodGroup` of one incarnation; None if its scheduler needs none.

    Args:
        deployment: the specification; owns the object.
        group: index of the group.
        incarnation: its number.
        requests: requests of one member: processors in thousandths, memory in bytes, devices by count.
    """
    scheduler, size = deployment.spec.topology.scheduler, deployment.spec.topology.nodes_per_group
    if scheduler is None or scheduler.type not in API_VERSIONS:
        return None
    total = {name: f"{size * number}m" if name == "cpu" else str(size * number) for name, number in requests.items()}
    spec: Manifest = {"minMember": size, "minResources": total}
    if scheduler.queue is not None:
        spec["queue"] = scheduler.queue
    name = names.incarnation_name(deployment.metadata.name, group, incarnation)
    about = names.metadata(deployment, name, group=group, incarnation=incarnation)
    return {"apiVersion": API_VERSIONS[scheduler.type], "kind": "PodGroup", "metadata": about, "spec": spec}


def spread(deployment: DSV4Deployment, group: int) -> Manifest:
    """Return the constraint that spreads the members of one group over nodes.

    It is a preference, as in dsv4's own choice of nodes: `exclusiveNodes` requires one member per node by an
    anti-affinity, and the network of the nodes by the ports of the agents.
    """
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.labels(deployment.metadata.name, component=names.MEMBER, group=group)},
    }


def reason_of(live: Manifest | None) -> str:
    """Return the reason why the group of a `PodGroup` or `Workload` waits; empty if its scheduler gives none."""
    conditions = names.parts(live, "status", "conditions")
    for kind, status in _REFUSALS:
        for one in conditions:
            if (one.get("type"), one.get("status")) == (kind, status) and one.get("message"):
                return str(one["message"])[:500]
    return ""


_TAKEN_BACK = frozenset({"EvictionByEvictionAPI", "PreemptionByScheduler"})
"""Reasons of `DisruptionTarget` with which users and schedulers take a node back; the others follow from its loss."""


def removal_of(pod: Manifest) -> str | None:
    """Return the reason why a scheduler or an eviction takes the node from `pod`; None while nothing does."""
    if not pod["metadata"].get("deletionTimestamp"):
        return None
    placed = SCHEDULER in names.part(pod, "metadata", "labels")
    for one in names.parts(pod, "status", "conditions"):
        disrupted = one.get("type") in ("TerminationTarget", "DisruptionTarget") and one.get("status") == "True"
        if disrupted and (placed or one.get("reason") in _TAKEN_BACK):
            return ": ".join(str(one[key]) for key in ("reason", "message") if one.get(key))[:500]
    return "no reason given" if placed else None


def is_queued(pod: Manifest) -> bool:
    """Return whether a scheduler is to choose the node of `pod` and has not done so."""
    return SCHEDULER in names.part(pod, "metadata", "labels") and not names.part(pod, "spec").get("nodeName")
