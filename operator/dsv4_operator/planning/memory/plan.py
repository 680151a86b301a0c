"""Memory plan of every rank, changes that would make it fit, and the plan of a deployment."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dsv4_operator.api import (
    CudagraphMode,
    DSV4Deployment,
    Executor,
    KvCacheDtype,
    SpeculativeMethod,
    SpeculativeSpec,
    TablesPlace,
)
from dsv4_operator.planning.catalog.records import GIB, NANO, Build, Machine, Model, Part, Range
from dsv4_operator.planning.images import ImageProfile, profile_named
from dsv4_operator.planning.images.surface import read_arguments
from dsv4_operator.planning.memory.items import (
    beside_weights,
    check_parallel,
    load_format_item,
    loader_bytes,
    rank_weights,
    stages,
    weights_item,
)
from dsv4_operator.planning.memory.kv import Layout, layout
from dsv4_operator.planning.memory.records import (
    EngineSettings,
    FitVerdict,
    Item,
    KvPlan,
    Measured,
    MemoryPlan,
    MemoryPool,
    Parallel,
    RankPlan,
)
from dsv4_runtime.contract.kernels import OFF, Op, parse_kernel_choice


def memory_plan(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, measured: Measured | None = None
) -> MemoryPlan:
    """Return the memory plan of every rank. A plan that does not fit has a verdict and raises no error.

    Args:
        model: the checkpoint.
        machine: every machine of the group.
        parallel: parallelism of the group.
        engine: settings of the engine.
        measured: logged memory of a start with the same model, image and machine.

    Raises:
        ValueError: `parallel` does not divide the model (heads, output groups, layers), or the KV format is unknown.
    """
    check_parallel(model, parallel, engine.build.padded_tensor)
    drafts = model.speculative.layers if engine.speculative_tokens and model.speculative else 0
    cache, widths = _cache(model, engine, parallel.pipeline, drafts)
    kinds = [_kind(parallel, rank) for rank in range(parallel.world_size)]
    # The first rank of every kind represents the others.
    firsts = {
        kind: _rank(model, machine, parallel, engine, kinds.index(kind), measured) for kind in dict.fromkeys(kinds)
    }
    kv = _kv_plan(engine, parallel, cache, widths, tuple(firsts.values())) if cache else None
    if kv:
        firsts = {kind: replace(rank, kv_bytes=kv.blocks * widths[rank.stage]) for kind, rank in firsts.items()}
    missing = {rank.rank: _missing(rank, widths, kv) for rank in firsts.values()}
    tightest = max(firsts.values(), key=lambda rank: (max(missing[rank.rank]), -rank.rank))
    problem = _verdict(machine, engine, tightest, missing[tightest.rank], widths, kv)
    beside = MemoryPool.BESIDE
    worst = max(
        _missing(rank, widths, kv, rank.kv_available - rank.kv_least, rank.above(beside))[0] for rank in firsts.values()
    )
    best = max(max(_missing(rank, widths, kv, _better(rank), -rank.below(beside))) for rank in firsts.values())
    refused = bool(problem) and (kv is None or not machine.memory_bytes or best > 0)
    return MemoryPlan(
        model=model,
        machine=machine,
        parallel=parallel,
        engine=engine,
        measured=measured,
        ranks=tuple(
            replace(firsts[kind], rank=rank, node=rank // parallel.devices_per_node) for rank, kind in enumerate(kinds)
        ),
        kv=kv,
        fits=not problem,
        verdict=FitVerdict.NO if refused else FitVerdict.UNCERTAIN if problem else FitVerdict.FITS,
        uncertainty_bytes=max(rank.kv_available - rank.kv_least for rank in firsts.values()),
        lacks_at_most=worst,
        tightest=tightest.rank,
        problem=problem,
        short_bytes=max(0, *missing[tightest.rank]),
    )


def _cache(model: Model, engine: EngineSettings, pipeline: int, drafts: int) -> tuple[Layout | None, tuple[int, ...]]:
    """Return the layout of the KV cache and the bytes of a block on each stage."""
    if not model.kv_known:
        return None, (0,) * pipeline
    build = engine.build
    form = engine.kv_dtype or model.kv_format
    found = layout(model, form, drafts, engine.speculative_tokens, build.window_groups, build.state_pages)
    return found, _widths(found, len(model.layers), pipeline, drafts)


@lru_cache(maxsize=1024)
def _widths(cache: Layout, layers: int, pipeline: int, drafts: int) -> tuple[int, ...]:
    divided = list(stages(layers, pipeline))
    divided[-1] = range(divided[-1].start, divided[-1].stop + drafts)
    # Every stage has a cache, because every layer has a window.
    return tuple(cache.bytes_per_block(part) for part in divided)


def _kind(parallel: Parallel, rank: int) -> tuple[int, bool, int]:
    """Return the properties in which ranks differ: stage, head or worker, number of ranks on its machine."""
    before = rank - rank % parallel.devices_per_node
    return rank // parallel.tensor, rank == 0, min(parallel.devices_per_node, parallel.world_size - before)


def _rank(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, rank: int, measured: Measured | None
) -> RankPlan:
    stage, _, sharing = _kind(parallel, rank)
    rows = engine.build.expert_rows
    parts = rank_weights(model, parallel, stage, drafts=engine.speculative_tokens > 0, expert_rows=rows)
    if not machine.unified_memory or engine.tables_on_disk:
        parts = tuple((part, size) for part, size in parts if part is not Part.ENGRAM)
    total = sum(size for _, size in parts)
    items = [weights_item(model, parts, engine.build) if machine.sm else Item("weights", total, MemoryPool.BUDGET)]
    for item in beside_weights(model, machine, parallel, engine, head=rank == 0, last=stage == parallel.pipeline - 1):
        if not machine.sm and item.name == "worker and Ray processes":
            # The measurement of the processes of a CPU member includes their weights.
            item = Item(item.name, max(0, item.bytes - total), item.where, "")
        items.append(item)
    if measured is not None:
        items = [measured.applied(item) for item in items]
    memory = machine.memory_bytes // sharing if machine.unified_memory else machine.memory_bytes
    inside = [item for item in items if item.where is MemoryPool.BUDGET]
    planned = sum(item.bytes for item in inside)
    given = engine.kv_cache_memory is not None or not machine.sm
    if given:
        least = most = available = engine.kv_cache_memory or 0
        budget = planned + available
    else:
        budget = int(memory * (engine.gpu_memory_utilization or machine.utilization))
        available = budget - planned
        least, most = _interval(available, machine, engine, measured)
    return RankPlan(
        rank=rank,
        node=rank // parallel.devices_per_node,
        stage=stage,
        weights=parts,
        items=tuple(items),
        memory_bytes=memory,
        budget_bytes=budget,
        kv_available=available,
        kv_bytes=0,
        kv_least=least,
        kv_most=most,
        kv_given=given,
        loader_bytes=loader_bytes(machine, parallel, engine),
    )


_RESIDUAL, _RESIDUAL_UNIFIED = (0.45, 0.45), (1.2, 1.2)
_RESIDUAL_MEASURED = 0.02


def _interval(available: int, machine: Machine, engine: EngineSettings, measured: Measured | None) -> tuple[int, int]:
    """Return the interval of the memory for the KV cache that contains 90 % of comparable logged starts.

    After a measured start on the same machine: 2 % of the KV cache.
    """
    if measured is not None:
        change = int(_RESIDUAL_MEASURED * abs(available))
        return available - change, available + change
    below, above = engine.build.residual or (_RESIDUAL_UNIFIED if machine.unified_memory else _RESIDUAL)
    return available - int(below * GIB), available + int(above * GIB)


def _kv_plan(
    engine: EngineSettings, parallel: Parallel, cache: Layout, widths: Sequence[int], ranks: Sequence[RankPlan]
) -> KvPlan:
    step = engine.max_num_batched_tokens
    if engine.build.drafts_in_flight and engine.speculative_tokens:
        step += engine.speculative_tokens + 1
    in_flight = step * engine.concurrent_batches(parallel.pipeline)
    request = cache.blocks_per_request(engine.max_model_len, in_flight)
    blocks = max(0, min(rank.kv_available // widths[rank.stage] for rank in ranks))
    concurrency = blocks / request
    least, most = (
        max(0, min(bound // widths[rank.stage] for rank, bound in zip(ranks, bounds, strict=True))) / request
        for bounds in ([rank.kv_least for rank in ranks], [rank.kv_most for rank in ranks])
    )
    return KvPlan(
        bytes_per_block=max(widths),
        blocks=blocks,
        blocks_per_request=request,
        in_flight_tokens=in_flight,
        tokens=int(concurrency * engine.max_model_len),
        concurrency=concurrency,
        concurrency_least=least * cache.reserve.expected / cache.reserve.most,
        concurrency_most=most * cache.reserve.expected / cache.reserve.least,
        request_bytes=request * max(widths),
        request_least=int(request * max(widths) * cache.reserve.least / cache.reserve.expected),
        request_most=int(request * max(widths) * cache.reserve.most / cache.reserve.expected),
        in_flight_bytes=(request - cache.blocks_per_request(engine.max_model_len, 0)) * max(widths),
    )


def _needed(rank: RankPlan, widths: Sequence[int], kv: KvPlan | None) -> int:
    """Return the minimum KV cache of the rank in bytes: one request of the greatest length and vLLM's own block."""
    return (kv.blocks_per_request + 1) * widths[rank.stage] if kv else 0


def _missing(
    rank: RankPlan, widths: Sequence[int], kv: KvPlan | None, inside: int = 0, beside: int = 0
) -> tuple[int, int, int]:
    """Return the missing bytes of the rank: in the engine's budget, in its memory while it serves, while it loads.

    `inside` and `beside` are added to the expected sizes of the items in the budget and beside it.
    """
    loading = rank.total(MemoryPool.BESIDE) + beside + rank.items[0].bytes + rank.loader_bytes
    # Larger items of the budget reduce the KV cache, unless its size was given.
    budget, cache = (0, inside) if rank.kv_given else (inside, 0)
    return (
        _needed(rank, widths, kv) - rank.kv_available + budget,
        rank.used_bytes + cache + beside - rank.memory_bytes,
        loading - rank.memory_bytes,
    )


def _better(rank: RankPlan) -> int:
    """Return the change of the items in the budget in the best case, in bytes."""
    return -rank.below(MemoryPool.BUDGET) if rank.kv_given else rank.kv_available - rank.kv_most


def _verdict(
    machine: Machine,
    engine: EngineSettings,
    rank: RankPlan,
    missing: tuple[int, int, int],
    widths: Sequence[int],
    kv: KvPlan | None,
) -> str:
    """Return the reason why a plan does not fit, by its tightest rank; empty if it fits."""
    if not machine.memory_bytes:
        return "the memory size of the machine is not known"
    budget, serving, loading = missing
    weights, memory = rank.items[0].bytes, gib(rank.memory_bytes)
    if weights > rank.memory_bytes:
        return f"rank {rank.rank}: the weights need {gib(weights)}, and the machine has {memory}"
    if kv is None:
        return "the layout of the KV cache of this model is not known, and the plan covers the weights only"
    if budget > 0:
        return f"rank {rank.rank}: {_budget_problem(machine, engine, rank, _needed(rank, widths, kv))}"
    if serving > 0:
        return f"rank {rank.rank}: all components together need {gib(rank.used_bytes)}, and the machine has {memory}"
    if loading > 0:
        peak = gib(rank.memory_bytes + loading)
        return f"rank {rank.rank}: loading the weights temporarily needs {peak}, and the machine has {memory}"
    return ""


def _budget_problem(machine: Machine, engine: EngineSettings, rank: RankPlan, needed: int) -> str:
    request = f"one request of {engine.max_model_len:,} tokens needs {gib(needed)} of KV cache"
    if engine.kv_cache_memory is not None:
        return f"kvCacheMemory is {gib(engine.kv_cache_memory)}, and {request}"
    share = engine.gpu_memory_utilization or machine.utilization
    weights = rank.items[0].bytes
    others, left = rank.total(MemoryPool.BUDGET) - weights, rank.kv_available
    outcome = f"leave {gib(left)}" if left >= 0 else f"exceed it by {gib(-left)}"
    return (
        f"the engine may use {gib(rank.budget_bytes)} ({share:.3g} of {gib(rank.memory_bytes)}), of which "
        f"{gib(weights)} of weights and {gib(others)} of other components {outcome}, and {request}"
    )


def gib(count: float) -> str:
    """Return bytes as text in GiB."""
    return f"{count / GIB:.2f} GiB"


LEAST_CONTEXT = 1024
"""The shortest suggested `maxModelLen`, and its step."""
_FEWEST_BATCHED = 512
_LEAST_SHARE = 0.1
_MOST_NODES = 16
_MOST_RANKS = 64
_NO_SETTINGS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the specification that would make it fit."""

    settings: Mapping[str, object]
    """Values by their paths below `spec`; None: remove the field."""
    plan: MemoryPlan
    """Plan with the change."""
    before: object = None
    """Value of a single setting in the original plan."""

    @property
    def text(self) -> str:
        """Return fields, values and effect, for display."""
        parts = [
            f"{'remove ' if value is None else ''}{field}{'' if value is None else f': {_written(value)}'}"
            for field, value in self.settings.items()
        ]
        before = "" if self.before is None else f" instead of {_written(self.before)}"
        kv = self.plan.kv
        if kv is None:
            return ", ".join(parts) + before
        cache = gib(min(rank.kv_bytes for rank in self.plan.ranks))
        room = f"{kv.concurrency:.2f} concurrent requests of {self.plan.engine.max_model_len:,} tokens"
        return f"{', '.join(parts)}{before}: KV cache {cache}, {room}"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def advice(plan: MemoryPlan) -> Iterator[Change]:
    """Yield the smallest changes that would make `plan` fit, those with the least effect first.

    If no single change is sufficient: all together. Changes are computed lazily. Yields none for a plan that fits, or
    if no change helps.
    """
    if not plan.fits and plan.kv is not None:
        yield from _other_settings(plan)
        found = _more_devices(plan)
        engine = plan.engine
        if found is None and (engine.kv_cache_memory is not None or engine.gpu_memory_utilization is not None):
            # If no number of machines is sufficient, the given share of their memory may be wrong.
            field = "gpuMemoryUtilization" if engine.kv_cache_memory is None else "kvCacheMemory"
            found = _more_devices(
                _with(plan, kv_cache_memory=None, gpu_memory_utilization=None), {f"engine.{field}": None}
            )
        if found is not None:
            yield found


def longest_context(plan: MemoryPlan, requests: int = 1) -> int:
    """Return the greatest `max_model_len`, a multiple of 1024 tokens, with which `plan` would fit; 0 if none.

    `requests` is the number of requests of that length that must fit at once.
    """

    def fits(tokens: int) -> bool:
        changed = _with(plan, max_model_len=tokens)
        return changed.fits and changed.kv is not None and changed.kv.concurrency >= requests

    if not fits(LEAST_CONTEXT):
        return 0
    low, high = 1, plan.model.max_positions // LEAST_CONTEXT
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * LEAST_CONTEXT):
            low = middle
        else:
            high = middle - 1
    return low * LEAST_CONTEXT


def load_formats(plan: MemoryPlan, formats: Sequence[str]) -> Iterator[tuple[str, Item | None]]:
    """Yield each load format with its memory that reduces the KV cache on unified memory; None without any."""
    for name in dict.fromkeys((plan.engine.load_format, *formats)):
        yield name, load_format_item(plan.parallel, replace(plan.engine, load_format=name))


def largest_uncertainty(plan: MemoryPlan) -> tuple[Item, str] | None:
    """Return the item in the engine's budget with the widest range, and a measurement of it; None without ranges."""
    items = [item for item in plan.ranks[plan.tightest].items if item.where is MemoryPool.BUDGET]
    widest = max(items, key=lambda item: item.most - item.least)
    if widest.most == widest.least:
        return None
    return widest, _MEASUREMENTS.get(widest.name, "read the memory lines of vLLM's log with --from-log")


_MEASUREMENTS = {
    "weights": "read `Model loading took … GiB` in vLLM's log",
    "CUDA graphs": "read `Estimated CUDA graph memory` in vLLM's log",
    "load format": "compare `Available KV cache memory` with a start with --load-format=safetensors",
    "images in the profile": "compare `Available KV cache memory` with a start with --language-model-only",
    "NCCL in the profile": "compare `Available KV cache memory` with a start with NCCL_BUFFSIZE=1048576",
}


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
            yield Change({"engine.kvCacheMemory": f"{mebibytes}Mi"}, _with(plan, kv_cache_memory=mebibytes * 2**20))
    yield from _fewer_batched(plan)
    if engine.async_scheduling:
        yield Change({"engine.asyncScheduling": False}, _with(plan, async_scheduling=False))
    if engine.max_model_len > LEAST_CONTEXT and (longest := min(longest_context(plan), engine.max_model_len)):
        changed = _with(plan, max_model_len=longest)
        yield Change({"engine.maxModelLen": longest}, changed, engine.max_model_len)
    if engine.speculative_tokens:
        yield Change({"engine.speculative.method": "None"}, _with(plan, speculative_tokens=0))
    if engine.cuda_graphs and plan.machine.sm:
        yield Change({"engine.cudagraphMode": "None"}, _with(plan, cuda_graphs=False))


def _other_share(plan: MemoryPlan) -> Iterator[Change]:
    """Yield a greater share of the memory if the budget is too small, else a smaller one."""
    now, most = plan.engine.gpu_memory_utilization or plan.machine.utilization, plan.machine.utilization_max
    upwards = [round(now + step / 100, 3) for step in range(1, 100) if now + step / 100 <= most]
    downwards = [round(now - step / 100, 3) for step in range(1, 100) if now - step / 100 >= _LEAST_SHARE]
    for shares, enough in ((upwards, _budget_fits), (downwards, _rest_fits)):
        first = bisect_left(shares, True, key=lambda share: enough(_with(plan, gpu_memory_utilization=share)))
        if first < len(shares) and (changed := _with(plan, gpu_memory_utilization=shares[first])).fits:
            yield Change({"engine.gpuMemoryUtilization": shares[first]}, changed, now)
            return


def _budget_fits(plan: MemoryPlan) -> bool:
    """Return whether the KV cache fits into the budget, which grows with the share of the memory."""
    return plan.kv is not None and plan.kv.blocks > plan.kv.blocks_per_request


def _rest_fits(plan: MemoryPlan) -> bool:
    """Return whether the other items fit beside the budget, which shrinks with a greater share of the memory."""
    return all(rank.spare_bytes >= 0 for rank in plan.ranks)


def _fewer_batched(plan: MemoryPlan, others: Mapping[str, object] = _NO_SETTINGS) -> Iterator[Change]:
    tokens = plan.engine.max_num_batched_tokens
    while (tokens := tokens // 2) >= _FEWEST_BATCHED:
        if (changed := _with(plan, max_num_batched_tokens=tokens)).fits:
            settings = {**others, "engine.maxNumBatchedTokens": tokens}
            yield Change(settings, changed, None if others else plan.engine.max_num_batched_tokens)
            return


def _settled_and_fewer(plan: MemoryPlan) -> Iterator[Change]:
    if plan.engine.async_scheduling:
        yield from _fewer_batched(_with(plan, async_scheduling=False), {"engine.asyncScheduling": False})


def _together(plan: MemoryPlan) -> Iterator[Change]:
    """Yield a combination of settings, added one after the other until the plan fits."""
    settings: dict[str, object] = {}
    changed = plan
    most = plan.machine.utilization_max
    steps: list[tuple[str, object, dict[str, object]]] = []
    if plan.engine.kv_cache_memory is None and (plan.engine.gpu_memory_utilization or plan.machine.utilization) < most:
        steps.append(("engine.gpuMemoryUtilization", most, {"gpu_memory_utilization": most}))
    if plan.engine.async_scheduling:
        steps.append(("engine.asyncScheduling", False, {"async_scheduling": False}))
    tokens = min(1024, plan.engine.max_num_batched_tokens)
    if tokens < plan.engine.max_num_batched_tokens:
        steps.append(("engine.maxNumBatchedTokens", tokens, {"max_num_batched_tokens": tokens}))
    if plan.engine.speculative_tokens:
        steps.append(("engine.speculative.method", "None", {"speculative_tokens": 0}))
    for field, value, values in steps:
        changed = _with(changed, **values)
        settings[field] = value
        if changed.fits and len(settings) > 1:
            yield Change(settings, changed)
            return
        if len(settings) > 1 and (longest := longest_context(changed)):
            yield Change({**settings, "engine.maxModelLen": longest}, _with(changed, max_model_len=longest))
            return
    if (longest := longest_context(_with(changed, cuda_graphs=False))) and plan.machine.sm:
        longest = min(longest, plan.engine.max_model_len)
        settings |= {"engine.cudagraphMode": "None", "engine.maxModelLen": longest}
        yield Change(settings, _with(changed, cuda_graphs=False, max_model_len=longest))


def _more_devices(plan: MemoryPlan, others: Mapping[str, object] = _NO_SETTINGS) -> Change | None:
    """Return the plan with the fewest machines that fits; more ranks per layer are preferred to stages."""
    per_node = plan.parallel.devices_per_node
    nodes = -(-plan.parallel.world_size // per_node)
    # With fewer machines the weights alone exceed the memory of all engines.
    whole = rank_weights(
        plan.model, replace(plan.parallel, tensor=1, pipeline=1), 0, drafts=plan.engine.speculative_tokens > 0
    )
    memory = plan.machine.memory_bytes * (1 if plan.machine.unified_memory else per_node)
    if plan.engine.kv_cache_memory is None:
        memory = int(memory * (plan.engine.gpu_memory_utilization or plan.machine.utilization))
    weights = sum(size for part, size in whole if plan.machine.unified_memory or part is not Part.ENGRAM)
    numbers = range(max(nodes + 1, weights // max(memory, 1)), min(_MOST_NODES, _MOST_RANKS // per_node) + 1)
    # If no number of ranks divides both the devices and a layer (three machines), use stages.
    found = _fewest(plan, numbers, _divisions) or _fewest(plan, numbers, _in_stages)
    if found is None:
        return None
    parallel = found.parallel
    settings = {
        "topology.nodesPerGroup": parallel.world_size // per_node,
        "topology.tensorParallelSize": parallel.tensor,
        **({"topology.pipelineParallelSize": parallel.pipeline} if parallel.pipeline > 1 else {}),
    }
    return Change({**others, **settings}, found)


_Divide = Callable[[MemoryPlan, int], Iterator[MemoryPlan]]
"""Plans for a number of machines, the preferred division first."""


def _fewest(plan: MemoryPlan, numbers: range, divide: _Divide) -> MemoryPlan | None:
    """Return the plan that fits with the fewest machines in `numbers`."""
    for more in reversed(numbers):
        possible = False
        for each in divide(plan, more):
            if each.fits:
                break
            possible = True
        else:
            if not possible:
                continue
            # With fewer machines every rank holds more, so no smaller number fits.
            return None
        break
    upwards = (each for more in numbers for each in divide(plan, more))
    return next((each for each in upwards if each.fits), None)


def _divisions(plan: MemoryPlan, nodes: int) -> Iterator[MemoryPlan]:
    """Yield plans with at least as many ranks per layer as now; none if the model does not allow any."""
    now, per_node = plan.parallel, plan.parallel.devices_per_node
    # With several devices per machine, layers shared between machines are slow; stages are better.
    order = (now.tensor, 16, 8, 4, 2) if per_node > 1 else (16, 8, 4, 2, now.tensor)
    for tensor in order:
        if nodes * per_node % tensor == 0 and tensor >= now.tensor:
            yield from _divided(plan, tensor, nodes * per_node // tensor)


def _in_stages(plan: MemoryPlan, nodes: int) -> Iterator[MemoryPlan]:
    """Yield plans with fewer ranks per layer than now, for numbers of machines without another division."""
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


_TABLES_ON_DISK = "spark-dsv41"
_LEAST_LOADER = "safetensors"
_OTHER_PROCESS = "ipc_cache"
_ATTENTION = "VLLM_MEMORY_PROFILE_INCLUDE_ATTN"
_CHUNK = 8 * 2**20
_NCCL_BUFFER, _NCCL_CHANNELS = 4 * 2**20, 16
"""NCCL's default buffer of a channel, and its maximum number of channels between machines."""


def deployment_plan(
    deployment: DSV4Deployment, model: Model, machine: Machine, profile: ImageProfile, measured: Measured | None = None
) -> MemoryPlan:
    """Return the memory plan of one group. Without `maxModelLen`: with the longest context that fits.

    Args:
        deployment: the specification.
        model: its checkpoint, from the catalog or from the files.
        machine: every machine of the group; on CPU with its actual memory.
        profile: profile of the image.
        measured: logged memory of a start with the same model, image and machine.

    Raises:
        ValueError: see `memory_plan`.
    """
    topology = deployment.spec.topology
    parallel = Parallel(
        topology.tensor_parallel, topology.pipeline_parallel_size, topology.devices_per_node, topology.expert_parallel
    )
    engine = engine_of(deployment, model, machine, profile)
    plan = memory_plan(model, machine, parallel, engine, measured)
    if deployment.spec.engine.max_model_len is None and machine.sm:
        longest = longest_context(plan) or LEAST_CONTEXT
        return memory_plan(model, machine, parallel, replace(plan.engine, max_model_len=longest), measured)
    fastest = profile.load_formats[0] if profile.load_formats else engine.load_format
    if machine.unified_memory and fastest != engine.load_format and _required_load_format(deployment, profile) is None:
        faster = memory_plan(model, machine, parallel, replace(engine, load_format=fastest), measured)
        if faster.kv and faster.fits and faster.kv.concurrency_least >= engine.max_num_seqs:
            return faster
    return plan


def engine_of(deployment: DSV4Deployment, model: Model, machine: Machine, profile: ImageProfile) -> EngineSettings:
    """Return the settings that affect memory; the default context is the shortest one."""
    engine = deployment.spec.engine
    on_cpu = not machine.sm
    on_disk = deployment.spec.model.tables is TablesPlace.DISK
    build = profile.build
    if on_disk and not profile.tables_on_disk and machine.unified_memory:
        # The only known engines that do so are patched builds, with pages and workspaces of their own.
        build = profile_named(_TABLES_ON_DISK).build
    env = {**profile.env, **{given.name: given.value for given in engine.env}}
    load_format = _required_load_format(deployment, profile) or _load_format(machine, profile)
    kernels = _kernels(engine.kernels, machine, profile, load_format)
    return EngineSettings(
        max_model_len=engine.max_model_len or (NANO.max_model_len if on_cpu else LEAST_CONTEXT),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        # vLLM 0.32, config/vllm.py: "`ray` does not support async scheduling yet" of the compiled graphs.
        async_scheduling=engine.async_scheduling and engine.executor is not Executor.RAY_LEGACY,
        speculative_tokens=_speculative_tokens(engine.speculative, model),
        kv_dtype=_KV_FORMATS.get(engine.kv_cache_dtype),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_memory=engine.kv_cache_memory or (NANO.kv_cache_bytes if on_cpu else None),
        cuda_graphs=engine.cudagraph_mode is not CudagraphMode.NONE,
        capture_size=max(_sizes(engine.extra_args, "--max-cudagraph-capture-size"), default=None),
        capture_sizes=_sizes(engine.extra_args, "--cudagraph-capture-sizes"),
        ray=engine.executor is not Executor.MP,
        ray_legacy=engine.executor is Executor.RAY_LEGACY,
        build=_with_bundled(build, kernels, machine, model),
        kernels=kernels,
        tables_on_disk=on_disk,
        load_format=load_format,
        loader_ring=_number(env, "INSTANTTENSOR_BUFFER_SIZE", 0),
        loader_windows=_number(env, "INSTANTTENSOR_IO_DEPTH", 0) * _number(env, "INSTANTTENSOR_CHUNK_SIZE", _CHUNK),
        attention_profiled=_ATTENTION in profile.extra_env and env.get(_ATTENTION) == "1",
        images=not any(one.name == "--language-model-only" for one in read_arguments(engine.extra_args)),
        nccl_share=_nccl_share(env),
    )


def _kernels(given: str | None, machine: Machine, profile: ImageProfile, load_format: str) -> str:
    """Return `spec.engine.kernels`, or its default."""
    if given is not None:
        return given
    # The weights of another process are laid out for vLLM's own kernels.
    return "auto" if machine.is_sm12x and profile.bundled_kernels and load_format != _OTHER_PROCESS else "off"


def _with_bundled(build: Build, kernels: str, machine: Machine, model: Model) -> Build:
    """Return `build` with the workspace of the bundled attention of prompts on SM12x, where vLLM's own needs none."""
    possible = parse_kernel_choice(kernels).bundled(Op.MLA_PREFILL)
    if not possible or not machine.is_sm12x or model.kv_sources or build.workspace.most:
        return build
    certain = parse_kernel_choice(kernels, OFF).bundled(Op.MLA_PREFILL)
    return replace(build, workspace=Range(1.0 if certain else 0.0, 1.0, 1.0))


def _required_load_format(deployment: DSV4Deployment, profile: ImageProfile) -> str | None:
    """Return the load format of the user's arguments, else that of the image; None if neither sets one."""
    arguments = read_arguments(deployment.spec.engine.extra_args)
    given = [value for one in arguments if one.name == "--load-format" for value in one.values]
    return given[-1] if given else profile.args.get("--load-format")


def _load_format(machine: Machine, profile: ImageProfile) -> str:
    """Return the load format with the least memory on unified memory, else the fastest."""
    if machine.unified_memory and _LEAST_LOADER in profile.load_formats:
        return _LEAST_LOADER
    return profile.load_formats[0] if profile.load_formats else _LEAST_LOADER


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "")
    return int(value) if value.isdecimal() else default


def _sizes(args: Sequence[str], flag: str) -> tuple[int, ...]:
    """Return the numbers that the user gives to `flag`; none if one of them is invalid."""
    given = [value for argument in read_arguments(args) if argument.name == flag for value in argument.values]
    given = given or _compiled(args, _COMPILED[flag])
    return tuple(map(int, given)) if all(value.isdecimal() for value in given) else ()


_COMPILED = {
    "--cudagraph-capture-sizes": "cudagraph_capture_sizes",
    "--max-cudagraph-capture-size": "max_cudagraph_capture_size",
}
"""Keys of `--compilation-config` for flags of captured sizes."""


def _compiled(args: Sequence[str], key: str) -> list[str]:
    """Return the numbers of `key` in the `--compilation-config` of the user, as text."""
    found: Any = []
    given = (one for one in read_arguments(args) if one.name in ("--compilation-config", "-cc"))
    for argument, text in ((one, text) for one in given for text in one.values):
        # The rule `UnknownArgument` reports other text.
        with suppress(ValueError):
            value = json.loads(text)
            if argument.key == key:
                found = value
            elif not argument.key and isinstance(value, dict):
                found = value.get(key, found)
    return [str(each) for each in (found if isinstance(found, list) else [found])]


def _nccl_share(env: Mapping[str, str]) -> float:
    """Return the bytes of NCCL's buffers relative to its defaults."""
    size, channels = (env.get(name, "") for name in ("NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS"))
    share = int(size) / _NCCL_BUFFER if size.isdecimal() else 1.0
    return share * (min(int(channels), _NCCL_CHANNELS) / _NCCL_CHANNELS if channels.isdecimal() else 1.0)


_KV_FORMATS = {KvCacheDtype.FP8_DS_MLA: "fp8_ds_mla", KvCacheDtype.NVFP4_DS_MLA: "nvfp4_ds_mla"}
"""vLLM replaces other formats by that of the model."""


def _speculative_tokens(spec: SpeculativeSpec, model: Model) -> int:
    if spec.method is SpeculativeMethod.NONE:
        return 0
    return spec.tokens or (model.speculative.tokens if model.speculative else 1)
