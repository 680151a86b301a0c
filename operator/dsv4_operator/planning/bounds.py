"""Weights, time limits, and what must be true of the machines."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_operator.api import DSV4Deployment, Reason
from dsv4_operator.planning.catalog import GIB, NANO
from dsv4_operator.planning.command_lines import kv_cache_bytes
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Seat
from dsv4_operator.planning.refused import PlanRefused
from dsv4_runtime.contract import Expectations, Timeouts, WeightsPlan, WeightsSource

_PREFLIGHT_SECONDS = 30.0


def weights_plan(deployment: DSV4Deployment, facts: Facts) -> WeightsPlan:
    """The checkpoint that every member must have."""
    source = deployment.spec.model.source
    if source.nano is not None:
        return WeightsPlan(
            source=WeightsSource.NANO,
            path=f"{facts.weights_root}/nano-s{source.nano.seed}-{source.nano.precision}",
            seed=source.nano.seed,
            precision=source.nano.precision,
        )
    if source.path is not None:
        return WeightsPlan(source=WeightsSource.PATH, path=source.path)
    raise PlanRefused(
        Reason.PLAN_REFUSED,
        "spec.model.source.huggingFace: downloading is not part of this version; give path or nano instead",
    )


def timeouts(deployment: DSV4Deployment) -> Timeouts:
    """The bounds of a start, in seconds."""
    given = deployment.spec.engine.timeouts
    return Timeouts(
        preflight=_PREFLIGHT_SECONDS,
        staging=given.staging or NANO.staging_seconds,
        formation=given.formation,
        load=given.load or NANO.load_seconds,
        first_token=given.first_token,
        drain=given.drain,
    )


def expectations(deployment: DSV4Deployment, members: Sequence[Seat]) -> Expectations:
    """What must be true on every member.

    Raises:
        PlanRefused: a machine has too little memory.
    """
    devices = max(seat.devices for seat in members)
    needed = NANO.head_bytes + devices * (NANO.rank_bytes + kv_cache_bytes(deployment))
    for seat in members:
        if seat.node.memory_bytes < needed:
            raise PlanRefused(
                Reason.MEMORY_SHORT,
                f"the machine {seat.node.name} has {seat.node.memory_bytes / GIB:.1f} GiB of free memory, and a member "
                f"needs {needed / GIB:.1f} GiB; end other programs, lower spec.engine.kvCacheMemory, "
                "or use a machine with more memory",
            )
    return Expectations(
        world_size=deployment.spec.topology.world_size,
        memory_bytes=needed,
        shm_bytes=NANO.object_store_bytes + NANO.queue_bytes,
        ready_seconds=NANO.ready_seconds,
    )
