"""Members of a group, and all settings that the specification leaves open, resolved once for everything rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import (
    DSV4Deployment,
    Finding,
    Hardware,
    InvalidDeployment,
    KvCacheDtype,
    NetworkMode,
    Reason,
    parse,
)
from dsv4_operator.api.findings import joined
from dsv4_operator.api.spec import DeploymentSpec
from dsv4_operator.api.values import split_remedy
from dsv4_operator.planning.catalog import (
    API_PORT,
    DASHBOARD_PORT,
    Machine,
    Model,
    UnknownCheckpoint,
    machine,
    machine_named,
    model_for,
)
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_operator.planning.images import Device, ImageProfile, profile_for, profile_named, profiles
from dsv4_operator.planning.images.surface import Argument, read_arguments
from dsv4_operator.planning.memory import BadDivision, Measured, MemoryPlan, deployment_plan
from dsv4_runtime.contract import MemberPorts


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
    if len(nodes) < size:
        groups = deployment.spec.replicas
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
    document = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    document |= {"apiVersion": deployment.api_version, "kind": deployment.kind}
    spec = document.setdefault("spec", {})
    if _TENSOR not in settings and settings.keys() & _DEVICES:
        spec.get("topology", {}).pop("tensorParallelSize", None)
    for path, value in settings.items():
        _set_field(spec, path.split("."), value)
    return parse(document)


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
    of = memory_of(deployment, model, kind)
    return next((measured for measured in facts.measured if measured.of == of), None)


def memory_of(deployment: DSV4Deployment, model: Model, kind: Machine) -> str:
    """Return the subject of memory figures (model, image, machine). Differences apply to the same subject only."""
    engine = deployment.spec.engine
    return f"{model.name} in {engine.image or engine.profile or 'the default image'} on {kind.id}"


def image_profile(deployment: DSV4Deployment, facts: Facts | None = None) -> ImageProfile:
    """Return the profile of the deployment's image, or of the vLLM installed on its machines.

    Raises:
        PlanRefused: no profile describes it.
    """
    engine, hardware = deployment.spec.engine, deployment.spec.topology.hardware
    if engine.profile is not None:
        try:
            return profile_named(engine.profile)
        except KeyError:
            names = ", ".join(one.name for one in profiles())
            finding = Finding(
                "spec.engine.profile", "UnknownProfile", "is unknown", f"use one of {names}", engine.profile
            )
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
