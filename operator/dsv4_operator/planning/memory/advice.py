"""Changes of the specification that would make a plan fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from dsv4_operator.planning.catalog.records import Part
from dsv4_operator.planning.memory.plan import gib, memory_plan
from dsv4_operator.planning.memory.records import MemoryPlan
from dsv4_operator.planning.memory.weights import rank_weights

LEAST_CONTEXT = 1024
"""The shortest `maxModelLen` that is advised, and its step."""
_FEWEST_BATCHED = 512
_LEAST_SHARE = 0.1
_MOST_NODES = 16
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the specification that would make it fit."""

    text: str
    """For people: field, value and effect."""
    plan: MemoryPlan
    """With the change made."""


def advice(plan: MemoryPlan) -> Iterator[Change]:
    """Yield the smallest changes that would make `plan` fit, least painful first.

    Where none is enough alone, all together. Each is sought when it is asked for. None for a plan that fits, and where
    nothing helps.
    """
    if not plan.fits and plan.kv is not None:
        yield from _other_settings(plan)
        found = _more_devices(plan)
        engine = plan.engine
        if found is None and (engine.kv_cache_memory is not None or engine.gpu_memory_utilization is not None):
            # What suits no number of machines may be a bad share of their memory.
            field = "gpuMemoryUtilization" if engine.kv_cache_memory is None else "kvCacheMemory"
            found = _more_devices(
                _with(plan, kv_cache_memory=None, gpu_memory_utilization=None), f"engine.{field} left out, "
            )
        if found is not None:
            yield found


def longest_context(plan: MemoryPlan) -> int:
    """Return the greatest `max_model_len`, in whole 1024 tokens, with which `plan` would fit; 0 if none."""
    if not _with(plan, max_model_len=LEAST_CONTEXT).fits:
        return 0
    low, high = 1, plan.model.max_positions // LEAST_CONTEXT
    while low < high:
        middle = (low + high + 1) // 2
        if _with(plan, max_model_len=middle * LEAST_CONTEXT).fits:
            low = middle
        else:
            high = middle - 1
    return low * LEAST_CONTEXT


def _other_settings(plan: MemoryPlan) -> Iterator[Change]:
    if any(rank.items[0].bytes > rank.memory_bytes for rank in _with(plan, speculative_tokens=0).ranks):
        # Only draft layers can be left out of the weights.
        return
    for changes in (_settings(plan), _settled_and_fewer(plan), _together(plan)):
        found = False
        for change in changes:
            if change.plan.fits:
                found = True
                yield change
        if found:
            return


def _settings(plan: MemoryPlan) -> Iterator[Change]:
    engine = plan.engine
    if engine.kv_cache_memory is None and plan.machine.sm:
        yield from _other_share(plan)
    elif engine.kv_cache_memory is not None and plan.kv:
        needed = (plan.kv.blocks_per_request + 1) * plan.kv.bytes_per_block
        room = min(rank.kv_bytes + rank.spare_bytes for rank in plan.ranks)
        mebibytes = -(-needed // 2**20) if needed > engine.kv_cache_memory else room // 2**20
        if mebibytes > 0:
            yield _change(f"engine.kvCacheMemory: {mebibytes}Mi", _with(plan, kv_cache_memory=mebibytes * 2**20))
    yield from _fewer_batched(plan)
    if engine.async_scheduling:
        yield _change("engine.asyncScheduling: false", _with(plan, async_scheduling=False))
    if engine.max_model_len > LEAST_CONTEXT and (longest := min(longest_context(plan), engine.max_model_len)):
        changed = _with(plan, max_model_len=longest)
        yield _change(f"engine.maxModelLen: {longest} instead of {engine.max_model_len}", changed)
    if engine.speculative_tokens:
        yield _change("engine.speculative.method: None", _with(plan, speculative_tokens=0))
    if engine.cuda_graphs and plan.machine.sm:
        eager = _with(plan, cuda_graphs=False)
        yield _change("engine.cudagraphMode: None, which costs two thirds of the speed", eager)


def _other_share(plan: MemoryPlan) -> Iterator[Change]:
    """Yield a greater share of the memory if the engine lacks room, else a smaller one, which leaves more beside it."""
    now, most = plan.engine.gpu_memory_utilization or plan.machine.utilization, plan.machine.utilization_max
    upwards = [round(now + step / 100, 3) for step in range(1, 100) if now + step / 100 <= most]
    downwards = [round(now - step / 100, 3) for step in range(1, 100) if now - step / 100 >= _LEAST_SHARE]
    for shares, enough in ((upwards, _room_in_budget), (downwards, _room_beside)):
        first = bisect_left(shares, True, key=lambda share: enough(_with(plan, gpu_memory_utilization=share)))
        if first < len(shares) and (changed := _with(plan, gpu_memory_utilization=shares[first])).fits:
            yield _change(f"engine.gpuMemoryUtilization: {shares[first]:.3g} instead of {now:.3g}", changed)
            return


def _room_in_budget(plan: MemoryPlan) -> bool:
    """Tell whether the budget has room, which grows with the share of the memory."""
    return plan.kv is not None and plan.kv.blocks > plan.kv.blocks_per_request


def _room_beside(plan: MemoryPlan) -> bool:
    """Tell whether there is room beside the budget, which shrinks with the share of the memory."""
    return all(rank.spare_bytes >= 0 for rank in plan.ranks)


def _fewer_batched(plan: MemoryPlan, before: str = "") -> Iterator[Change]:
    tokens = plan.engine.max_num_batched_tokens
    while (tokens := tokens // 2) >= _FEWEST_BATCHED:
        if (changed := _with(plan, max_num_batched_tokens=tokens)).fits:
            text = f"{before}engine.maxNumBatchedTokens: {tokens} instead of {plan.engine.max_num_batched_tokens}"
            yield _change(text, changed)
            return


def _settled_and_fewer(plan: MemoryPlan) -> Iterator[Change]:
    if plan.engine.async_scheduling:
        yield from _fewer_batched(_with(plan, async_scheduling=False), "engine.asyncScheduling: false, ")


def _together(plan: MemoryPlan) -> Iterator[Change]:
    """Yield one setting after the other, until it fits."""
    words, changed = [], plan
    most = plan.machine.utilization_max
    steps: list[tuple[str, dict[str, object]]] = []
    if plan.engine.kv_cache_memory is None and (plan.engine.gpu_memory_utilization or plan.machine.utilization) < most:
        steps.append((f"engine.gpuMemoryUtilization: {most:.3g}", {"gpu_memory_utilization": most}))
    if plan.engine.async_scheduling:
        steps.append(("engine.asyncScheduling: false", {"async_scheduling": False}))
    tokens = min(1024, plan.engine.max_num_batched_tokens)
    if tokens < plan.engine.max_num_batched_tokens:
        steps.append((f"engine.maxNumBatchedTokens: {tokens}", {"max_num_batched_tokens": tokens}))
    if plan.engine.speculative_tokens:
        steps.append(("engine.speculative.method: None", {"speculative_tokens": 0}))
    for text, values in steps:
        changed = _with(changed, **values)
        words.append(text)
        if changed.fits and len(words) > 1:
            yield _change(", ".join(words), changed)
            return
        if len(words) > 1 and (longest := longest_context(changed)):
            shorter = _with(changed, max_model_len=longest)
            yield _change(", ".join([*words, f"engine.maxModelLen: {longest}"]), shorter)
            return
    if (longest := longest_context(_with(changed, cuda_graphs=False))) and plan.machine.sm:
        longest = min(longest, plan.engine.max_model_len)
        words += ["engine.cudagraphMode: None", f"engine.maxModelLen: {longest}"]
        yield _change(", ".join(words), _with(changed, cuda_graphs=False, max_model_len=longest))


def _more_devices(plan: MemoryPlan, before: str = "") -> Change | None:
    """Return the fewest machines that would do, layers shared by more ranks before they are cut into stages."""
    per_node = plan.parallel.devices_per_node
    nodes = -(-plan.parallel.world_size // per_node)
    # On fewer than these the weights alone are more than all memory that the engines may take.
    whole = rank_weights(
        plan.model, replace(plan.parallel, tensor=1, pipeline=1), 0, drafts=plan.engine.speculative_tokens > 0
    )
    memory = plan.machine.memory_bytes * (1 if plan.machine.unified_memory else per_node)
    if plan.engine.kv_cache_memory is None:
        memory = int(memory * (plan.engine.gpu_memory_utilization or plan.machine.utilization))
    weights = sum(size for part, size in whole if plan.machine.unified_memory or part is not Part.ENGRAM)
    numbers = range(max(nodes + 1, weights // max(memory, 1)), min(_MOST_NODES, _MOST_RANKS // per_node) + 1)
    # Where no number of ranks divides both the devices and a layer (three machines), the layers are cut into stages.
    found = _fewest(plan, numbers, _divisions) or _fewest(plan, numbers, _in_stages)
    if found is None:
        return None
    parallel = found.parallel
    stages = f", pipelineParallelSize: {parallel.pipeline}" if parallel.pipeline > 1 else ""
    machines = f"topology.nodesPerGroup: {parallel.world_size // per_node}, tensorParallelSize: {parallel.tensor}"
    return _change(f"{before}{machines}{stages}", found)


_Divide = Callable[[MemoryPlan, int], Iterator[MemoryPlan]]
"""Plans for a number of machines, the division that is to be preferred first."""


def _fewest(plan: MemoryPlan, numbers: range, divide: _Divide) -> MemoryPlan | None:
    """Return the plan that fits on the fewest of these numbers of machines."""
    for more in reversed(numbers):
        possible = False
        for each in divide(plan, more):
            if each.fits:
                break
            possible = True
        else:
            if not possible:
                continue
            # Every rank has more to hold on fewer machines, so no number between would do.
            return None
        break
    upwards = (each for more in numbers for each in divide(plan, more))
    return next((each for each in upwards if each.fits), None)


def _divisions(plan: MemoryPlan, nodes: int) -> Iterator[MemoryPlan]:
    """Yield changes with at least as many ranks to a layer as now; none where the model allows none."""
    now, per_node = plan.parallel, plan.parallel.devices_per_node
    # Where a machine has several devices, sharing layers beyond it is slow; stages are better there.
    order = (now.tensor, 16, 8, 4, 2) if per_node > 1 else (16, 8, 4, 2, now.tensor)
    for tensor in order:
        if nodes * per_node % tensor == 0 and tensor >= now.tensor:
            yield from _divided(plan, tensor, nodes * per_node // tensor)


def _in_stages(plan: MemoryPlan, nodes: int) -> Iterator[MemoryPlan]:
    """Yield changes with fewer ranks to a layer than now, for numbers of machines that no others divide."""
    devices = nodes * plan.parallel.devices_per_node
    if devices % plan.parallel.tensor:
        for tensor in (4, 2, 1):
            if devices % tensor == 0 and tensor < plan.parallel.tensor:
                yield from _divided(plan, tensor, devices // tensor)


def _divided(plan: MemoryPlan, tensor: int, pipeline: int) -> Iterator[MemoryPlan]:
    parallel = replace(plan.parallel, tensor=tensor, pipeline=pipeline)
    with suppress(ValueError):
        yield memory_plan(plan.model, plan.machine, parallel, plan.engine, plan.measured)


def _with(plan: MemoryPlan, **values: object) -> MemoryPlan:
    engine = replace(plan.engine, **values)  # type: ignore[arg-type]
    return memory_plan(plan.model, plan.machine, plan.parallel, engine, plan.measured)


def _change(text: str, plan: MemoryPlan) -> Change:
    if plan.kv is None:
        return Change(text, plan)
    cache = gib(min(rank.kv_bytes for rank in plan.ranks))
    room = f"{plan.kv.concurrency:.2f} requests of {plan.engine.max_model_len:,} tokens at once"
    return Change(f"{text}: KV cache {cache}, {room}", plan)
