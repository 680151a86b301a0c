"""Checkpoints and builds that fit a group of machines, with the context of each for several users. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api import Hardware, InvalidDeployment, Severity, parse
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
_EXECUTE_MODEL = "15m"
"""The first step on a machine compiles kernels."""


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
        try:
            deployment = parse(document("offer", offer, {"path": f"/{model.name}"} if machine.sm else NANO_SOURCE))
            chosen = setup(deployment, catalog_facts(deployment, machine, state_root="/s", weights_root="/w"))
        except (InvalidDeployment, PlanRefused):
            continue
        if any(finding.severity is Severity.REFUSE for finding in broken_rules(chosen)):
            continue
        if not machine.sm:
            return offer
        if chosen.memory.verdict is FitVerdict.FITS:
            contexts = {users: longest_context(_memory(offer, users), users) for users in USERS}
            return Offer(model, profile, usual, machine, division, contexts)
    return None


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
    engine |= {"maxNumSeqs": users, "maxNumBatchedTokens": _BATCHED_TOKENS if gpus else 512}
    if gpus:
        engine["timeouts"] = {"executeModel": _EXECUTE_MODEL}
    spec: dict[str, Any] = {"model": model, "topology": topology, "engine": engine}
    if gateway:
        spec["gateway"] = dict(gateway)
    return {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": {"name": name}, "spec": spec}
