"""What would make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4_operator.planning.memory.plan import gib, memory_plan
from dsv4_operator.planning.memory.records import MemoryPlan

LEAST_CONTEXT = 1024
"""The shortest `maxModelLen` that is advised, and its step."""
_FEWEST_BATCHED = 512
_LEAST_SHARE = 0.1
_MOST_NODES = 16


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the specification that would make it fit."""

    text: str
    """For people: field, value and effect."""
    plan: MemoryPlan
    """With the change made."""


def advice(plan: MemoryPlan) -> tuple[Change, ...]:
    """The smallest changes that would make `plan` fit, least painful first; where none is enough alone, all together.

    Empty for a plan that fits, and where nothing helps.
    """
    if plan.fits or plan.kv is None:
        return ()
    single = [change for change in _settings(plan) if change.plan.fits]
    if not single and plan.engine.async_scheduling:
        single = list(_fewer_batched(_with(plan, async_scheduling=False), "engine.asyncScheduling: false, "))
    if not single:
        single = [change for change in _together(plan) if change.plan.fits]
    return (*single, *(change for change in _more_devices(plan) if change.plan.fits))


def longest_context(plan: MemoryPlan) -> int:
    """The greatest `max_model_len`, in whole 1024 tokens, with which `plan` would fit; 0 if none."""
    most = plan.model.max_positions // LEAST_CONTEXT
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _with(plan, max_model_len=middle * LEAST_CONTEXT).fits:
            low = middle
        else:
            high = middle - 1
    return low * LEAST_CONTEXT


def _settings(plan: MemoryPlan) -> Iterator[Change]:
    engine = plan.engine
    if engine.kv_cache_memory is None and plan.machine.sm:
        now, most = engine.gpu_memory_utilization or plan.machine.utilization, plan.machine.utilization_max
        upwards = [round(now + step / 100, 3) for step in range(1, 100) if now + step / 100 <= most]
        # Too great a share leaves too little beside the engine.
        downwards = [round(now - step / 100, 3) for step in range(1, 100) if now - step / 100 >= _LEAST_SHARE]
        for share in (*upwards, *downwards):
            if (changed := _with(plan, gpu_memory_utilization=share)).fits:
                yield _change(f"engine.gpuMemoryUtilization: {share:.3g} instead of {now:.3g}", changed)
                break
    elif engine.kv_cache_memory is not None and plan.kv:
        needed = (plan.kv.blocks_per_request + 1) * plan.kv.bytes_per_block
        mebibytes = -(-needed // 2**20)
        if needed > engine.kv_cache_memory:
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


def _fewer_batched(plan: MemoryPlan, before: str = "") -> Iterator[Change]:
    tokens = plan.engine.max_num_batched_tokens
    while (tokens := tokens // 2) >= _FEWEST_BATCHED:
        if (changed := _with(plan, max_num_batched_tokens=tokens)).fits:
            text = f"{before}engine.maxNumBatchedTokens: {tokens} instead of {plan.engine.max_num_batched_tokens}"
            yield _change(text, changed)
            return


def _together(plan: MemoryPlan) -> Iterator[Change]:
    """One setting after the other, until it fits."""
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


def _more_devices(plan: MemoryPlan) -> Iterator[Change]:
    """The fewest machines that would do, layers shared by more ranks before they are cut into stages."""
    now, per_node = plan.parallel, plan.parallel.devices_per_node
    nodes = -(-now.world_size // per_node)
    # Where a machine has several devices, sharing layers beyond it is slow; stages are better there.
    order = (now.tensor, 16, 8, 4, 2) if per_node > 1 else (16, 8, 4, 2, now.tensor)
    for more in range(nodes + 1, _MOST_NODES + 1):
        world = more * per_node
        for tensor in order:
            if world % tensor or tensor < now.tensor:
                continue
            parallel = replace(now, tensor=tensor, pipeline=world // tensor)
            try:
                changed = memory_plan(plan.model, plan.machine, parallel, plan.engine)
            except ValueError:
                continue
            if changed.fits:
                stages = f", pipelineParallelSize: {parallel.pipeline}" if parallel.pipeline > 1 else ""
                yield _change(f"topology.nodesPerGroup: {more}, tensorParallelSize: {tensor}{stages}", changed)
                return


def _with(plan: MemoryPlan, **values: object) -> MemoryPlan:
    return memory_plan(plan.model, plan.machine, plan.parallel, replace(plan.engine, **values))  # type: ignore[arg-type]


def _change(text: str, plan: MemoryPlan) -> Change:
    if plan.kv is None:
        return Change(text, plan)
    cache = gib(min(rank.kv_bytes for rank in plan.ranks))
    return Change(f"{text}: KV cache {cache}, {plan.kv.concurrency:.2f}x {plan.engine.max_model_len} tokens", plan)
