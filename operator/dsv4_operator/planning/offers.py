"""Checkpoints and builds that fit a group of machines, with the settings of the fastest published setups and the
context of each for several users. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import API_VERSION, Executor, Hardware, InvalidDeployment, Severity, parse
from dsv4_operator.planning.catalog import Machine, Model, models
from dsv4_operator.planning.facts import catalog_facts
from dsv4_operator.planning.images import ImageProfile, profile_for, profiles
from dsv4_operator.planning.memory import FitVerdict, MemoryPlan
from dsv4_operator.planning.memory.plan import longest_context
from dsv4_operator.planning.rules import broken_rules
from dsv4_operator.planning.setup import PlanRefused, setup

USERS = (1, 4, 8)
"""Numbers of concurrent requests of the shown contexts."""
_BATCHED_TOKENS = 4096
"""Above 8192, activations need much of the memory that a DGX Spark shares with its processor."""
_CONTEXT, _NANO_CONTEXT = 131_072, 1024
_PAIR = 2
_EXECUTE_MODEL = "15m"
"""The first step on a machine compiles kernels."""


@dataclass(frozen=True, slots=True)
class Published:
    """Settings of the fastest published setup of one kind of machine with one build."""

    hardware: Hardware
    profile: str | None
    """Image profile; None: every other build."""
    drafts: tuple[int, int]
    """DSpark tokens on up to two devices, and on more."""
    speed: str
    """Of one request; empty: none was published."""
    source: str
    date: str
    utilization: float | None = None
    """Share of the memory; None: the default of the machine."""
    variables: tuple[tuple[str, str], ...] = ()
    """For groups of several machines."""


PUBLISHED = (
    Published(
        Hardware.GB10, "spark-b12x", (5, 5), "40.7 tokens/s on two machines",
        "NVIDIA/local-ai-inference-recipes, deepseek-v4-flash-0731/dgx-spark-2gpu", "2026-09-03", 0.85,
        (("VLLM_ENABLE_ROCE_ALLREDUCE", "1"), ("VLLM_ROCE_ALLREDUCE_MAX_SIZE", "2MB")),
    ),
    Published(
        Hardware.GB10, None, (5, 5), "", "ecohash-co/deepseek-v4-flash-dgx-spark-vllm027, vLLM 0.27.1", "2026-08-10",
        0.85,
    ),
    Published(
        Hardware.RTXPRO6000, "rtx-b12x", (5, 5), "212 tokens/s on two devices",
        "local-inference-lab/rtx6kpro, ds4-jovian-community-r29.md", "2026-09-09", 0.975,
    ),
    Published(
        Hardware.RTXPRO6000, None, (5, 3), "133 tokens/s on four devices without drafts",
        "hermia-ai/deepseek-v4-flash-sm120-stock-vllm; drafts: vllm-project/recipes#967", "2026-09-13",
    ),
)  # fmt: skip
"""All start workers without Ray (`executor: MP`), and capture every decode batch of `maxNumSeqs`, as dsv4 does."""


def published(hardware: Hardware, profile: str) -> Published | None:
    """Return the row of `PUBLISHED` for a kind of machine and a build; None if there is none."""
    rows = [one for one in PUBLISHED if one.hardware == hardware and one.profile in (profile, None)]
    return min(rows, key=lambda one: one.profile is None, default=None)


@dataclass(frozen=True, slots=True)
class Division:
    """Layout of a group."""

    nodes: int
    devices: int
    """Of each node."""
    tensor: int
    stages: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint and a build that fit."""

    model: Model
    profile: ImageProfile
    usual: bool
    """Whether the build is the default of the hardware, which `dsv4 up` installs."""
    machine: Machine
    division: Division
    contexts: Mapping[int, int]
    """Greatest context by the number of requests of that length at once; empty for the Nano model."""
    drafts: bool = True
    """Whether the draft heads of the checkpoint are used: they fit, and the build supports them."""

    @property
    def published(self) -> Published | None:
        """Return the published setup whose settings `document` writes."""
        return published(Hardware(self.machine.hardware), self.profile.name) if self.machine.sm else None

    @property
    def engine(self) -> dict[str, Any]:
        """Return the settings of the published setup for this checkpoint and group, below `spec.engine`."""
        row, heads = self.published, self.model.speculative
        if row is None:
            return {}
        found: dict[str, Any] = {"executor": Executor.MP.value} if Executor.MP in self.profile.executors else {}
        if row.utilization is not None:
            found["gpuMemoryUtilization"] = row.utilization
        if self.drafts and heads is not None and heads.method == "dspark":
            tokens = row.drafts[self.division.nodes * self.division.devices > _PAIR]
            found["speculative"] = {"method": "DSpark", "tokens": max(tokens, self.profile.dspark_least_tokens)}
        elif self.drafts and heads is not None:
            found["speculative"] = {"method": "MTP"}
        if row.variables and self.division.nodes > 1:
            found["env"] = [{"name": name, "value": value} for name, value in row.variables]
        return found

    @property
    def context(self) -> int:
        """Return the default context: a power of two up to 131,072 tokens that one request can have."""
        if not self.contexts:
            return _NANO_CONTEXT
        return min(1 << (self.contexts[USERS[0]].bit_length() - 1), _CONTEXT)

    def concurrency(self, users: int, context: int) -> float | None:
        """Return how many requests of `context` tokens fit at once; None for the Nano model."""
        kv = _memory(self, users, context).kv if self.contexts else None
        return kv.concurrency if kv is not None else None


def offers(machine: Machine, nodes: int, devices: int) -> list[Offer]:
    """Return the checkpoints and builds that fit `nodes` machines with `devices` GPUs each, in the order of the
    catalog, of each checkpoint the default build first.

    Without GPUs: the Nano model on the processors.
    """
    found = []
    usual = profile_for(None, Hardware(machine.hardware))
    builds = sorted(profiles(), key=lambda one: one is not usual)
    for model in models():
        for profile in builds:
            if machine.hardware not in profile.hardware or (not model.repo if machine.sm else model.name != "Nano"):
                continue
            if (offer := _offer(model, profile, machine, nodes, devices, usual=profile is usual)) is not None:
                found.append(offer)
    return found


def _offer(
    model: Model, profile: ImageProfile, machine: Machine, nodes: int, devices: int, *, usual: bool
) -> Offer | None:
    for division in _divisions(nodes, devices):
        offer = Offer(model, profile, usual, machine, division, {})
        drafting = _fitting(offer)
        if drafting is not None and (not machine.sm or drafting.contexts[USERS[0]] >= _CONTEXT):
            return drafting
        # The memory of the draft layers is worth more than their speed.
        plain = _fitting(replace(offer, drafts=False)) if machine.sm else None
        if found := max(filter(None, (drafting, plain)), key=lambda one: one.contexts[USERS[0]], default=None):
            return found
    return None


def _fitting(offer: Offer) -> Offer | None:
    """Return the offer with its contexts; None if it breaks a rule or does not fit."""
    machine = offer.machine
    try:
        deployment = parse(document("offer", offer, {"path": f"/{offer.model.name}"} if machine.sm else NANO_SOURCE))
        chosen = setup(deployment, catalog_facts(deployment, machine, state_root="/s", weights_root="/w"))
    except (InvalidDeployment, PlanRefused):
        return None
    if any(finding.severity is Severity.REFUSE for finding in broken_rules(chosen)):
        return None
    if not machine.sm:
        return offer
    if chosen.memory.verdict is not FitVerdict.FITS:
        return None
    # `chosen` is planned for the default number of users of `document`.
    plans = {users: chosen.memory if users == USERS[1] else _memory(offer, users) for users in USERS}
    return replace(offer, contexts={users: longest_context(plan, users) for users, plan in plans.items()})


def _divisions(nodes: int, devices: int) -> Iterator[Division]:
    """Yield the layouts over all devices, the widest tensor parallelism first."""
    world = nodes * devices
    for tensor in sorted((size for size in range(1, world + 1) if world % size == 0), reverse=True):
        yield Division(nodes, devices, tensor, world // tensor)


def _memory(offer: Offer, users: int, context: int | None = None) -> MemoryPlan:
    deployment = parse(document("offer", offer, {"path": f"/{offer.model.name}"}, users=users, context=context))
    facts = catalog_facts(deployment, offer.machine, state_root="/s", weights_root="/w")
    return setup(deployment, facts).memory


NANO_SOURCE: Mapping[str, Any] = {"nano": {"seed": 0, "precision": "bf16"}}
"""Source of the Nano model, which every machine generates."""


def document(
    name: str,
    offer: Offer,
    source: Mapping[str, Any],
    *,
    users: int = USERS[1],
    context: int | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest of an offer.

    Args:
        name: of the deployment.
        offer: checkpoint, build and layout.
        source: value of `spec.model.source`.
        users: requests that are computed at once.
        context: tokens of a request. Default: the longest that fits.
        gateway: value of `spec.gateway`.
    """
    division = offer.division
    gpus = bool(offer.machine.sm)
    model: dict[str, Any] = {"variant": offer.model.variant, "source": dict(source)}
    if gpus:
        model["checkpoint"] = offer.model.name
        model["servedNames"] = [offer.model.repo.rpartition("/")[2].lower()]
    topology: dict[str, Any] = {
        "hardware": offer.machine.hardware,
        "nodesPerGroup": division.nodes,
        "devicesPerNode": division.devices,
        "tensorParallelSize": division.tensor,
    }
    if division.stages > 1:
        topology["pipelineParallelSize"] = division.stages
    engine: dict[str, Any] = {} if offer.usual else {"profile": offer.profile.name}
    if context is not None:
        engine["maxModelLen"] = context
    engine |= {"maxNumSeqs": users, "maxNumBatchedTokens": _BATCHED_TOKENS if gpus else 512, **offer.engine}
    if gpus:
        engine["timeouts"] = {"executeModel": _EXECUTE_MODEL}
    spec: dict[str, Any] = {"model": model, "topology": topology, "engine": engine}
    if gateway:
        spec["gateway"] = dict(gateway)
    return {"apiVersion": API_VERSION, "kind": "DSV4Deployment", "metadata": {"name": name}, "spec": spec}
