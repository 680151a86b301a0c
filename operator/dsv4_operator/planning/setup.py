"""Members of a group, and all settings that the specification leaves open, resolved once for everything rendered; time
limits; plan of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import (
    DeploymentStatus,
    DSV4Deployment,
    Finding,
    Hardware,
    InvalidDeployment,
    KvCacheDtype,
    ModelSource,
    NanoSource,
    NetworkMode,
    Reason,
    SecretKeyRef,
    SpeculativeMethod,
    parse,
)
from dsv4_operator.api.findings import joined
from dsv4_operator.api.spec import DeploymentSpec
from dsv4_operator.api.values import format_time, split_remedy
from dsv4_operator.planning.catalog import (
    API_PORT,
    DASHBOARD_PORT,
    NANO,
    Machine,
    Model,
    UnknownCheckpoint,
    machine,
    machine_named,
    model_for,
)
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_operator.planning.images import Device, ImageProfile, own_profile, profile_for, profile_named, profiles
from dsv4_operator.planning.images.surface import Argument, read_arguments
from dsv4_operator.planning.memory import BadDivision, Measured, MemoryPlan, deployment_plan
from dsv4_runtime.contract import MemberPorts, PageCache, Reading, Timeouts, WeightsPlan, WeightsSource
from dsv4_runtime.contract.kernels import OFF, Op, parse_kernel_choice

B12X_FLAGS = {Op.MOE: "--moe-backend", Op.FP8_LINEAR: "--linear-backend"}
"""Flags of vLLM with which b12x computes an operation."""


class PlanRefused(Exception):
    """The specification cannot be planned on these machines."""

    def __init__(self, reason: Reason, *findings: Finding) -> None:
        """Take the reason of the condition, and the refusals."""
        self.reason = reason
        self.findings = findings
        self.message = joined(findings)
        super().__init__(self.message)


class DivisionRefused(PlanRefused):
    """The model cannot be divided as specified."""

    def __init__(self, error: BadDivision, remedy: str = "") -> None:
        """Take the error, and another remedy than its own."""
        self.error = error
        finding = Finding("spec.topology", Reason.PLAN_REFUSED, error.problem, remedy or error.remedy)
        super().__init__(Reason.PLAN_REFUSED, finding)


def refusal(reason: Reason, field: str, value: object, message: str, remedy: str) -> PlanRefused:
    """Return a refusal with one finding that has the same reason."""
    return PlanRefused(reason, Finding(field, reason, message, remedy, value))


@dataclass(frozen=True, slots=True)
class Placement:
    """One member, without its command lines."""

    rank: int
    node: NodeFacts
    devices: int
    ports: MemberPorts


def placements(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[Placement, ...]:
    """Return the members of `group` in rank order.

    Raises:
        PlanRefused: there are too few machines.
    """
    if not facts.isolated:
        return (_shared(deployment, facts, group),)
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    nodes = facts.of_group(group, size)
    if len(nodes) < size and facts.placed is not None:
        message = f"machines are required for group {group}, and {len(nodes)} are available"
        remedy = facts.unfit or "add machines"
        raise refusal(Reason.NODES_MISSING, "spec.topology.nodesPerGroup", size, message, remedy)
    groups = max(deployment.spec.replicas, 1)
    if len(nodes) < size and 0 < (named := len(topology.nodes)) < groups * size:
        message = f"nodes are named, and spec.replicas {groups} × nodesPerGroup {size} requires {groups * size}"
        remedy = "name all of them, or remove the field"
        raise refusal(Reason.NODES_MISSING, "spec.topology.nodes", named, message, remedy)
    if len(nodes) < size:
        fitting = len(facts.nodes) // size
        remedy = f"decrease spec.replicas to {fitting}" if fitting else "decrease spec.topology.nodesPerGroup"
        message = f"× nodesPerGroup {size} requires {groups * size} machines, and {len(facts.nodes)} are available"
        raise refusal(Reason.NODES_MISSING, "spec.replicas", groups, message, f"{remedy}, or add machines")
    head, worker = head_ports(deployment, isolated=True), MemberPorts(agent=deployment.spec.network.ports.agent)
    return tuple(
        Placement(rank, node, topology.devices_per_node, worker if rank else head) for rank, node in enumerate(nodes)
    )


def head_ports(deployment: DSV4Deployment, *, isolated: bool) -> MemberPorts:
    """Return the ports of rank 0, at its own address."""
    ports = deployment.spec.network.ports
    own_network = (
        isolated
        and deployment.spec.topology.hardware is Hardware.CPU
        and deployment.spec.network_mode is NetworkMode.POD_NETWORK
    )
    return MemberPorts(
        agent=ports.agent,
        gcs=ports.gcs,
        # A member in its own network uses the default ports; `ports` are those that its machine publishes.
        dashboard=DASHBOARD_PORT if own_network else ports.dashboard,
        api=API_PORT if own_network else ports.api,
    )


def _shared(deployment: DSV4Deployment, facts: Facts, group: int) -> Placement:
    """Return one member in place of all: members of one machine cannot share its address and ports."""
    topology = deployment.spec.topology
    if not facts.nodes:
        raise refusal(Reason.NODES_MISSING, "", None, "no machine is available", "add a machine")
    if group:
        message = "groups cannot share the ports of this machine"
        raise refusal(Reason.NODES_MISSING, "spec.replicas", deployment.spec.replicas, message, "write 1")
    if topology.hardware is not Hardware.CPU and topology.nodes_per_group > 1:
        message = "machines are required, and only this machine is available"
        remedy = "write 1 with a matching devicesPerNode, or use a cluster"
        count = topology.nodes_per_group
        raise refusal(Reason.NODES_MISSING, "spec.topology.nodesPerGroup", count, message, remedy)
    return Placement(0, facts.nodes[0], topology.world_size, head_ports(deployment, isolated=False))


@dataclass(frozen=True, slots=True)
class Setup:
    """A deployment with its image, machines, model and memory plan."""

    deployment: DSV4Deployment
    facts: Facts
    nodes: tuple[NodeFacts, ...]
    """Machines of the group in rank order: one if all members share it, fewer than required if some are absent."""
    profile: ImageProfile
    machine: Machine
    """The smallest of the machines of the group."""
    model: Model
    memory: MemoryPlan

    @property
    def spec(self) -> DeploymentSpec:
        """Return the specification."""
        return self.deployment.spec

    @property
    def hardware(self) -> Hardware:
        """Return the kind of the machines."""
        return self.spec.topology.hardware

    @property
    def on_cpu(self) -> bool:
        """Return whether the engine computes on the CPU."""
        return self.profile.device is Device.CPU

    @property
    def utilization(self) -> float:
        """Return the share of the device memory for the engine.

        With a cache of fixed size: the share required at the start, because vLLM compares its own default with the
        free memory before it reads the size of the cache.
        """
        engine = self.memory.engine
        if engine.kv_cache_memory is None:
            return engine.gpu_memory_utilization or self.machine.utilization
        rank = max(self.memory.ranks, key=lambda rank: rank.budget_bytes)
        share = -(-100 * rank.budget_bytes // max(rank.memory_bytes, 1)) / 100
        return min(max(share, 0.1), 0.99)

    @property
    def kv_cache_dtype(self) -> str:
        """Return the value of `--kv-cache-dtype`."""
        requested = self.spec.engine.kv_cache_dtype
        return "fp8" if requested is KvCacheDtype.AUTO else str(requested)

    @property
    def draft_tokens(self) -> int:
        """Return the tokens of a draft; 0 without speculative decoding."""
        return self.memory.engine.speculative_tokens

    @property
    def several_machines(self) -> bool:
        """Return whether the group needs a network between machines."""
        return self.spec.topology.nodes_per_group > 1 and not self.facts.one_machine

    @property
    def unsafe_copies(self) -> tuple[str, str]:
        """Return a machine and the reason why copies between the accelerators of one member are not used over PCIe;
        empty if they are, or if the user decides with NCCL_P2P_DISABLE."""
        if self.on_cpu or self.spec.topology.devices_per_node == 1 or self.variable("NCCL_P2P_DISABLE") is not None:
            return "", ""
        return next(((node.name, node.unsafe_copies) for node in self.nodes if node.unsafe_copies), ("", ""))

    def provider(self, op: Op) -> str:
        """Return the provider that `spec.engine.kernels` names for `op`; `stock` if it names none."""
        return parse_kernel_choice(self.memory.engine.kernels, OFF).provider(op)

    def gives(self, flag: str) -> bool:
        """Return whether the user's own arguments contain `flag`, in any of its forms."""
        return next(self._given(flag), None) is not None

    def value(self, flag: str) -> str | None:
        """Return the last value that the user gives to `flag`, else that of the image; None if there is none."""
        given = [argument.values[-1] for argument in self._given(flag) if argument.values and not argument.key]
        return given[-1] if given else self.profile.args.get(flag)

    def json(self, flag: str) -> dict[str, Any]:
        """Return the settings in a flag that takes JSON, from all places where the user gives them."""
        settings: dict[str, Any] = {}
        for argument in self._given(flag):
            for text in argument.values:
                value = _json(text)
                if argument.key:
                    settings[argument.key] = value
                elif isinstance(value, dict):  # the rule `UnknownArgument` reports other values
                    settings |= value
        return settings

    def _given(self, flag: str) -> Iterator[Argument]:
        surface = self.profile.surface
        for argument in read_arguments(self.spec.engine.extra_args):
            if surface.flag(argument.name) == flag:
                yield argument

    def variable(self, name: str) -> str | None:
        """Return the value that the user gives to an environment variable."""
        return next((given.value for given in self.spec.engine.env if given.name == name), None)


def setup(deployment: DSV4Deployment, facts: Facts, group: int = 0) -> Setup:
    """Return the resolved settings of one group.

    Raises:
        PlanRefused: the image is unknown, or the model cannot be divided as specified (`DivisionRefused`).
    """
    nodes = facts.of_group(group, deployment.spec.topology.nodes_per_group) if facts.isolated else facts.nodes[:1]
    smallest = _smallest_machine(deployment.spec.topology.hardware, nodes)
    profile = image_profile(deployment, facts)
    try:
        model = facts.model or model_for(deployment.spec.model)
    except UnknownCheckpoint as error:
        raise PlanRefused(Reason.PLAN_REFUSED, error.finding) from None
    try:
        measured = measured_here(deployment, facts, model, smallest)
        memory = deployment_plan(deployment, model, smallest, profile, measured)
    except BadDivision as error:
        raise DivisionRefused(error) from None
    except ValueError as error:
        finding = Finding("spec.topology", Reason.PLAN_REFUSED, *split_remedy(str(error)))
        raise PlanRefused(Reason.PLAN_REFUSED, finding) from None
    return Setup(deployment, facts, nodes, profile, smallest, model, memory)


def with_settings(deployment: DSV4Deployment, settings: Mapping[str, object]) -> DSV4Deployment:
    """Return `deployment` with other values by their paths below `spec`; None restores the default of a field.

    A change of the number of devices also restores the default of `tensorParallelSize`, unless that is changed too.

    Raises:
        InvalidDeployment: the result is invalid, or a path leads through a value that is no mapping.
    """
    return parse(changed_document(deployment, settings))


def changed_document(deployment: DSV4Deployment, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the manifest of `with_settings`, which may be invalid."""
    document = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    document |= {"apiVersion": deployment.api_version, "kind": deployment.kind}
    spec = document.setdefault("spec", {})
    if _TENSOR not in settings and settings.keys() & _DEVICES:
        spec.get("topology", {}).pop("tensorParallelSize", None)
    for path, value in settings.items():
        _set_field(spec, path.split("."), value)
    return document


_TENSOR = "topology.tensorParallelSize"
_DEVICES = {"topology.nodesPerGroup", "topology.devicesPerNode", "topology.pipelineParallelSize"}


def _set_field(document: dict[str, Any], path: Sequence[str], value: object) -> None:
    *outer, last = path
    for number, name in enumerate(outer, start=1):
        inner = document.setdefault(name, {})
        if not isinstance(inner, dict):
            field = f"spec.{'.'.join(path[:number])}"
            raise InvalidDeployment(
                [Finding(field, "NoMapping", "is not a mapping", "change the field itself")],
            )
        document = inner
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


def _smallest_machine(hardware: Hardware, nodes: tuple[NodeFacts, ...]) -> Machine:
    known = [_catalog_machine(node) for node in nodes if node.machine]
    if hardware is Hardware.CPU:
        memory = min((node.memory_bytes for node in nodes), default=0)
        return replace(machine(hardware), memory_bytes=memory)
    fitting = [one for one in known if one.hardware == hardware]
    smallest = min(fitting, key=lambda one: one.memory_bytes, default=machine(hardware))
    reported = [gpu.memory_bytes for node in nodes for gpu in node.gpus if gpu.memory_bytes is not None]
    return replace(smallest, memory_bytes=min([smallest.memory_bytes, *reported]))


def _catalog_machine(node: NodeFacts) -> Machine:
    try:
        return machine_named(node.machine or "")
    except KeyError as error:
        message = f"the machine {node.name} is not supported: {error.args[0]}"
        raise refusal(Reason.HARDWARE_UNSUPPORTED, "", None, message, "use another machine") from None


def measured_here(deployment: DSV4Deployment, facts: Facts, model: Model, kind: Machine) -> Measured | None:
    """Return the logged memory of an earlier start with the same model, image and machine; None without one."""
    of = memory_of(deployment, model, kind, image_profile(deployment, facts))
    return next((measured for measured in facts.measured if measured.of == of), None)


def measured_of(status: DeploymentStatus, before: int | None = None) -> tuple[Measured, ...]:
    """Return the logged memory of a deployment's groups, of incarnations below `before`, the latest first."""
    known = [group.measured for group in status.groups if group.measured is not None]
    return tuple(
        Measured(each.of, format_time(each.time or 0.0)[:10], {item.item: item.difference for item in each.items})
        for each in sorted(known, key=lambda each: -(each.time or 0.0))
        if before is None or each.incarnation < before
    )


def memory_of(deployment: DSV4Deployment, model: Model, kind: Machine, profile: ImageProfile) -> str:
    """Return the subject of memory figures (model, engine, machine). Differences apply to the same subject only.

    The engine is an image, a profile with other figures of memory than its own, or a build with its figures: logged
    differences refer to the planned figures of that profile or build.
    """
    engine = deployment.spec.engine
    usual = profile_for(engine.image, deployment.spec.topology.hardware)
    of = [engine.image] if engine.image else []
    if (build := engine.build) is not None:
        figures = (("weightsFactor", build.weights_factor), ("nonTorchGib", build.non_torch_gib))
        given = [f"{name} {value:g}" for name, value in figures if value is not None]
        of.append(" ".join([profile.name, *given]))
    elif (engine.profile and not engine.image) or usual is None or profile.build != usual.build:
        of.append(profile.name)
    return f"{model.name} in {' as '.join(of) or 'the default image'} on {kind.id}"


def image_profile(deployment: DSV4Deployment, facts: Facts | None = None) -> ImageProfile:
    """Return the profile of the deployment's image, or of the vLLM installed on its machines.

    Raises:
        PlanRefused: no profile describes it.
    """
    engine, hardware = deployment.spec.engine, deployment.spec.topology.hardware
    named = engine.build.base if engine.build else engine.profile
    if named is not None:
        try:
            return own_profile(engine.build) if engine.build else profile_named(named)
        except KeyError:
            names = ", ".join(one.name for one in profiles())
            field = "spec.engine.build.base" if engine.build else "spec.engine.profile"
            finding = Finding(field, "UnknownProfile", "is unknown", f"use one of {names}", named)
            raise PlanRefused(Reason.PLAN_REFUSED, finding) from None
    if facts is not None and facts.profile is not None:
        return facts.profile
    profile = profile_for(engine.image, hardware)
    if profile is None:
        names = ", ".join(one.name for one in profiles() if hardware in one.hardware)
        remedy = f"set spec.engine.profile to the profile of a similar image, one of {names}"
        finding = Finding("spec.engine.image", "UnknownImage", "has no image profile", remedy, engine.image)
        raise PlanRefused(Reason.PLAN_REFUSED, finding)
    return profile


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_PREFLIGHT_SECONDS = 30.0
_CPU_EXECUTE_SECONDS, _CPU_FIRST_TOKEN_SECONDS = 300.0, 120.0
_EXECUTE_SECONDS = 900.0
"""A step that compiles on a cold machine took longer than the 300 s of vLLM's default; 900 to 1800 s are in use."""
_DISK_BYTES_PER_SECOND = 1e9
"""Assumed before measurement; NVMe drives read several times as fast."""
_DOWNLOAD_BYTES_PER_SECOND = 10e6
_COMPILE_SECONDS = 1200.0
"""Kernels, graphs and warm-up on a machine without any cache: 5 to 13 minutes for Flash, 12 for Pro."""
_WARM_SECONDS = 180.0
"""The same with the caches of an earlier start."""
_SLACK = 2.0
_STAGING_SECONDS = 120.0


def timeouts(chosen: Setup) -> Timeouts:
    """Return the time limits of a start in seconds: those of the specification, else from the size of the checkpoint.

    If a disk is slower than assumed here, the agent of the head extends the limit of the load accordingly.
    """
    given = chosen.spec.engine.timeouts
    source = chosen.spec.model.source
    size = chosen.model.checkpoint_bytes
    reading = size / _DISK_BYTES_PER_SECOND
    if chosen.on_cpu:
        staging, load, first_token = NANO.staging_seconds, NANO.load_seconds, _CPU_FIRST_TOKEN_SECONDS
    else:
        download = 0.0 if source.path is not None else size / _DOWNLOAD_BYTES_PER_SECOND
        staging = math.ceil(_STAGING_SECONDS + _SLACK * reading + download)
        load = math.ceil(_COMPILE_SECONDS + _SLACK * reading)
        first_token = execute_model_seconds(chosen) + 60.0
    adjust_load = not given.load and not chosen.on_cpu
    return Timeouts(
        preflight=_PREFLIGHT_SECONDS,
        staging=given.staging or staging,
        formation=given.formation,
        load=given.load or load,
        reading=Reading(size=size, bytes_per_second=_DISK_BYTES_PER_SECOND, slack=_SLACK) if adjust_load else None,
        first_token=given.first_token or first_token,
        drain=given.drain,
    )


def execute_model_seconds(chosen: Setup) -> float:
    """Return the time limit of one step of the engine in seconds."""
    given = chosen.spec.engine.timeouts.execute_model
    return given or (_CPU_EXECUTE_SECONDS if chosen.on_cpu else _EXECUTE_SECONDS)


def ready_seconds(chosen: Setup) -> float:
    """Return the expected duration of a start with the caches of an earlier one, in seconds."""
    if chosen.on_cpu:
        return NANO.ready_seconds
    return chosen.model.checkpoint_bytes / _DISK_BYTES_PER_SECOND + _WARM_SECONDS


def weights_plan(
    deployment: DSV4Deployment, weights_root: str, secrets_root: str, shared: str | None = None
) -> WeightsPlan:
    """Return the plan for the checkpoint that every member must have.

    Checkpoints from different sources, or of different commits, have different directories below `weights_root`. A
    secret is a file below `secrets_root`; the plan contains its path only. `shared` is `Facts.shared_weights`.
    """
    spec = deployment.spec
    source = spec.model.source
    if source.nano is not None:
        return _nano(source.nano, weights_root)
    plan = _origin(source)
    staging = spec.model.staging
    unified = spec.topology.hardware is Hardware.GB10
    return plan.model_copy(
        update={
            "path": plan.path or f"{weights_root}/{_directory(plan)}",
            "credentials_file": secret_file(source.secret_key_ref, secrets_root),
            "shared": shared if source.path is None else None,
            "streams": staging.streams,
            "bandwidth_bytes": staging.bandwidth_limit,
            "from_members": staging.from_members,
            "verify": staging.verify,
            "prefetch": staging.prefetch,
            "page_cache": staging.page_cache or (PageCache.UNIFIED if unified else PageCache.WARM),
            "pipeline_stages": spec.topology.pipeline_parallel_size,
        }
    )


def secret_file(ref: SecretKeyRef | None, secrets_root: str) -> str | None:
    """Return the path of the referenced secret on a member."""
    return f"{secrets_root}/{ref.name}/{ref.key}" if ref is not None else None


def _nano(source: NanoSource, weights_root: str) -> WeightsPlan:
    drafts = None if source.drafts is SpeculativeMethod.NONE else source.drafts.lower()
    name = "-".join(filter(None, (f"nano-s{source.seed}-{source.precision}", drafts)))
    return WeightsPlan(
        source=WeightsSource.NANO,
        path=f"{weights_root}/{name}",
        seed=source.seed,
        precision=source.precision,
        drafts=drafts,
    )


def _origin(source: ModelSource) -> WeightsPlan:
    if source.path is not None:
        return WeightsPlan(source=WeightsSource.PATH, path=source.path)
    if source.shared_path is not None:
        return WeightsPlan(source=WeightsSource.SHARED_PATH, path="", origin=source.shared_path)
    if source.http is not None:
        return WeightsPlan(source=WeightsSource.HTTP, path="", origin=source.http.url.rstrip("/"))
    if source.s3 is not None:
        return WeightsPlan(
            source=WeightsSource.S3,
            path="",
            origin=f"s3://{source.s3.bucket}/{source.s3.prefix.strip('/')}".rstrip("/"),
            endpoint=source.s3.endpoint,
            region=source.s3.region,
        )
    if source.hugging_face is None:
        raise ValueError("a nano checkpoint is made, not staged")
    return WeightsPlan(
        source=WeightsSource.HUGGING_FACE,
        path="",
        origin=source.hugging_face.repo,
        revision=source.hugging_face.revision,
        endpoint=source.hugging_face.endpoint,
    )


def _directory(plan: WeightsPlan) -> str:
    """Return a readable name with enough of a digest to be unique to the checkpoint."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", (plan.origin or "").removeprefix("s3://").split("://")[-1]).strip("-.")
    digest = hashlib.sha256(plan.identity.encode()).hexdigest()[:12]
    return f"{readable[-80:].strip('-.')}-{(plan.revision or digest)[:12]}"
