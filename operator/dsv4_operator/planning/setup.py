"""Setup of a deployment: every choice that the specification leaves open, made once for all that is rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import DSV4Deployment, Hardware, KvCacheDtype, Reason, SpeculativeMethod
from dsv4_operator.api.values import quoted
from dsv4_operator.planning.catalog import Machine, Model, UnknownCheckpoint, machine, machine_named, model_for
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_operator.planning.images import (
    Argument,
    Device,
    ImageProfile,
    profile_for,
    profile_named,
    profiles,
    read_arguments,
)
from dsv4_operator.planning.memory import Measured, MemoryPlan, deployment_plan
from dsv4_operator.planning.refused import PlanRefused


@dataclass(frozen=True, slots=True)
class Setup:
    """A deployment with its image, its machines and its model."""

    deployment: DSV4Deployment
    facts: Facts
    nodes: tuple[NodeFacts, ...]
    """The group's machines, in rank order; one for all members where they share it, fewer than needed if they are not
    there."""
    profile: ImageProfile
    machine: Machine
    """The weakest of the group's machines."""
    model: Model
    memory: MemoryPlan

    @property
    def hardware(self) -> Hardware:
        """Return the kind of the machines."""
        return self.deployment.spec.topology.hardware

    @property
    def on_cpu(self) -> bool:
        """Tell whether the engine computes on the CPU."""
        return self.profile.device is Device.CPU

    @property
    def max_model_len(self) -> int:
        """Return the longest request in tokens."""
        return self.memory.engine.max_model_len

    @property
    def utilization(self) -> float:
        """Return the share of a device's memory for the engine. With a cache of fixed size: the share that the start
        needs, because vLLM compares its own default with the free memory before it looks at the size of the cache.
        """
        engine = self.memory.engine
        if engine.kv_cache_memory is None:
            return engine.gpu_memory_utilization or self.machine.utilization
        rank = max(self.memory.ranks, key=lambda rank: rank.budget_bytes)
        share = -(-100 * rank.budget_bytes // max(rank.memory_bytes, 1)) / 100
        return min(max(share, 0.1), 0.99)

    @property
    def kv_cache_dtype(self) -> str:
        """Return the name as vLLM calls it."""
        asked = self.deployment.spec.engine.kv_cache_dtype
        return "fp8" if asked is KvCacheDtype.AUTO else str(asked)

    @property
    def async_scheduling(self) -> bool:
        """Tell whether vLLM prepares the next step while one runs: as asked for, where the executor can."""
        return self.memory.engine.async_scheduling

    @property
    def draft_tokens(self) -> int:
        """Return the tokens of a draft; 0 without speculative decoding."""
        asked = self.deployment.spec.engine.speculative
        if asked.method is SpeculativeMethod.NONE:
            return 0
        return asked.tokens or (self.model.speculative.tokens if self.model.speculative else 1)

    @property
    def several_machines(self) -> bool:
        """Tell whether the group needs a network between machines."""
        return self.deployment.spec.topology.nodes_per_group > 1 and not self.facts.one_machine

    def gives(self, flag: str) -> bool:
        """Tell whether the user's own arguments have `flag`, in any of its forms."""
        return next(self._given(flag), None) is not None

    def value(self, flag: str) -> str | None:
        """Return the value of `flag`: the user's last, else the image's own; None if there is none."""
        given = [argument.values[-1] for argument in self._given(flag) if argument.values and not argument.key]
        return given[-1] if given else self.profile.args.get(flag)

    def json(self, flag: str) -> dict[str, Any]:
        """Return the settings in a flag that takes JSON, from all places where the user gives them."""
        settings: dict[str, Any] = {}
        for argument in self._given(flag):
            for value in argument.values:
                settings |= {argument.key: _json(value)} if argument.key else _object(value)
        return settings

    def _given(self, flag: str) -> Iterator[Argument]:
        surface = self.profile.surface
        for argument in read_arguments(self.deployment.spec.engine.extra_args):
            if surface.flag(argument.name) == flag:
                yield argument

    def variable(self, name: str) -> str | None:
        """Return the value that the user gives to an environment variable."""
        return next((given.value for given in self.deployment.spec.engine.env if given.name == name), None)


def setup(deployment: DSV4Deployment, facts: Facts, group: int = 0) -> Setup:
    """Return the choices for one group.

    Raises:
        PlanRefused: the image is not known, or the model cannot be divided as asked.
    """
    nodes = _nodes(deployment, facts, group)
    found = _machine(deployment.spec.topology.hardware, nodes)
    profile = image_profile(deployment, facts)
    try:
        model = facts.model or model_for(deployment.spec.model)
    except UnknownCheckpoint as error:
        raise PlanRefused(Reason.PLAN_REFUSED, str(error)) from None
    try:
        memory = deployment_plan(deployment, model, found, profile, measured_here(deployment, facts, model, found))
    except ValueError as error:
        raise PlanRefused(Reason.PLAN_REFUSED, f"spec.topology: {error}") from None
    return Setup(deployment, facts, nodes, profile, found, model, memory)


def _nodes(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[NodeFacts, ...]:
    if not facts.isolated:
        return facts.nodes[:1]
    return facts.of_group(group, deployment.spec.topology.nodes_per_group)


def _machine(hardware: Hardware, nodes: tuple[NodeFacts, ...]) -> Machine:
    known = [_named(node) for node in nodes if node.machine]
    if hardware is Hardware.CPU:
        memory = min((node.memory_bytes for node in nodes), default=0)
        return replace(machine(hardware), memory_bytes=memory)
    fitting = [one for one in known if one.hardware == hardware]
    found = min(fitting, key=lambda one: one.memory_bytes, default=machine(hardware))
    told = [gpu.memory_bytes for node in nodes for gpu in node.gpus if gpu.memory_bytes is not None]
    return replace(found, memory_bytes=min([found.memory_bytes, *told]))


def _named(node: NodeFacts) -> Machine:
    try:
        return machine_named(node.machine or "")
    except KeyError as error:
        raise PlanRefused(Reason.HARDWARE_UNSUPPORTED, f"the machine {node.name}: {error.args[0]}") from None


def measured_here(deployment: DSV4Deployment, facts: Facts, model: Model, kind: Machine) -> Measured | None:
    """Return what an earlier start of the same model, image and machine logged; None without one."""
    of = memory_of(deployment, model, kind)
    return next((measured for measured in facts.measured if measured.of == of), None)


def memory_of(deployment: DSV4Deployment, model: Model, kind: Machine) -> str:
    """Return what memory figures are about: a difference of one is none of another's."""
    engine = deployment.spec.engine
    return f"{model.name} in {engine.image or engine.profile or 'the default image'} on {kind.id}"


def image_profile(deployment: DSV4Deployment, facts: Facts | None = None) -> ImageProfile:
    """Return what is in the deployment's image, or installed on its machines.

    Raises:
        PlanRefused: no profile describes it.
    """
    engine, hardware = deployment.spec.engine, deployment.spec.topology.hardware
    if engine.profile is not None:
        try:
            return profile_named(engine.profile)
        except KeyError:
            names = ", ".join(one.name for one in profiles())
            text = f"spec.engine.profile: {quoted(engine.profile)} is unknown; use one of {names}"
            raise PlanRefused(Reason.PLAN_REFUSED, text) from None
    if facts is not None and facts.profile is not None:
        return facts.profile
    profile = profile_for(engine.image, hardware)
    if profile is None:
        names = ", ".join(one.name for one in profiles() if hardware in one.hardware)
        raise PlanRefused(
            Reason.PLAN_REFUSED,
            f"spec.engine.image: no image profile describes {quoted(engine.image)}; "
            f"say with spec.engine.profile which of {names} it is built like",
        )
    return profile


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object(text: str) -> dict[str, Any]:
    """Return the settings in `text`; none where it is no JSON object, which is another rule's to say."""
    value = _json(text)
    return value if isinstance(value, dict) else {}
