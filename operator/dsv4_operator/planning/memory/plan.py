"""The memory plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from dsv4_operator.planning.catalog.constants import GIB
from dsv4_operator.planning.catalog.records import Machine, Model, Part
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
from dsv4_operator.planning.memory.terms import beside_weights, loader_bytes
from dsv4_operator.planning.memory.weights import check_parallel, rank_weights, stages, weights_item


def memory_plan(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, measured: Measured | None = None
) -> MemoryPlan:
    """Return where the memory of every rank goes. Never raises for a plan that does not fit; the verdict says so.

    Args:
        model: the checkpoint.
        machine: every machine of the group.
        parallel: how the group is divided.
        engine: the engine's settings.
        measured: what a start of the same model, image and machine logged.

    Raises:
        ValueError: `parallel` does not divide the model (heads, output groups, layers), or the KV format is unknown.
    """
    check_parallel(model, parallel)
    drafts = model.speculative.layers if engine.speculative_tokens and model.speculative else 0
    cache, widths = _cache(model, engine, parallel.pipeline, drafts)
    firsts = _firsts(model, machine, parallel, engine, measured)
    kv = _kv_plan(engine, parallel, cache, widths, tuple(firsts.values())) if cache else None
    if kv:
        firsts = {kind: replace(rank, kv_bytes=kv.blocks * widths[rank.stage]) for kind, rank in firsts.items()}
    missing = {rank.rank: _missing(rank, widths, kv) for rank in firsts.values()}
    tightest = max(firsts.values(), key=lambda rank: (max(missing[rank.rank]), -rank.rank))
    problem = _verdict(machine, engine, tightest, missing[tightest.rank], widths, kv)
    worst = max(max(_missing(rank, widths, kv, _worst(rank))) for rank in firsts.values())
    best = max(max(_missing(rank, widths, kv, _best(rank))) for rank in firsts.values())
    refused = bool(problem) and (kv is None or not machine.memory_bytes or best > 0)
    return MemoryPlan(
        model=model,
        machine=machine,
        parallel=parallel,
        engine=engine,
        measured=measured,
        ranks=tuple(
            replace(firsts[_kind(parallel, rank)], rank=rank, node=rank // parallel.devices_per_node)
            for rank in range(parallel.world_size)
        ),
        kv=kv,
        fits=not problem,
        verdict=FitVerdict.NO if refused else FitVerdict.NARROW if problem or worst > 0 else FitVerdict.FITS,
        uncertainty_bytes=max(0, worst - max(missing[tightest.rank])),
        lacks_at_most=worst,
        tightest=tightest.rank,
        problem=problem,
        short_bytes=max(0, *missing[tightest.rank]),
    )


def _cache(model: Model, engine: EngineSettings, pipeline: int, drafts: int) -> tuple[Layout | None, tuple[int, ...]]:
    """Return the layout of the KV cache, and the bytes of a block on each stage."""
    if not model.kv_known:
        return None, (0,) * pipeline
    found = layout(model, engine.kv_dtype or model.kv_format, drafts, engine.speculative_tokens)
    return found, _widths(found, len(model.layers), pipeline, drafts)


@lru_cache(maxsize=1024)
def _widths(cache: Layout, layers: int, pipeline: int, drafts: int) -> tuple[int, ...]:
    divided = list(stages(layers, pipeline))
    divided[-1] = range(divided[-1].start, divided[-1].stop + drafts)
    # A stage without any cache of its own cannot be: every layer has a window.
    return tuple(cache.bytes_per_block(part) for part in divided)


def _kind(parallel: Parallel, rank: int) -> tuple[int, bool, int]:
    """Return what tells ranks apart: stage, whether it is the head, how many ranks its machine has."""
    before = rank - rank % parallel.devices_per_node
    return rank // parallel.tensor, rank == 0, min(parallel.devices_per_node, parallel.world_size - before)


def _firsts(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, measured: Measured | None
) -> dict[tuple[int, bool, int], RankPlan]:
    """Return the first rank of every kind, before the KV cache is shared out."""
    found: dict[tuple[int, bool, int], RankPlan] = {}
    for rank in range(parallel.world_size):
        if (kind := _kind(parallel, rank)) not in found:
            found[kind] = _rank(model, machine, parallel, engine, rank, measured)
    return found


def _rank(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, rank: int, measured: Measured | None
) -> RankPlan:
    stage, _, sharing = _kind(parallel, rank)
    rows = engine.build.expert_rows
    parts = rank_weights(model, parallel, stage, drafts=engine.speculative_tokens > 0, expert_rows=rows)
    if not machine.unified_memory or engine.tables_on_disk:
        parts = tuple((part, size) for part, size in parts if part is not Part.ENGRAM)
    items = [weights_item(parts, engine.build) if machine.sm else Item("weights", _sum(parts), MemoryPool.BUDGET)]
    for item in beside_weights(model, machine, parallel, engine, head=rank == 0, last=stage == parallel.pipeline - 1):
        # The processes of a CPU member were measured with their weights.
        items.append(item if machine.sm or item.name != "worker and Ray processes" else _less(item, items[0].bytes))
    if measured is not None:
        items = [measured.applied(item) for item in items]
    memory = machine.memory_bytes // sharing if machine.unified_memory else machine.memory_bytes
    inside = sum(item.bytes for item in items if item.where is MemoryPool.BUDGET)
    if engine.kv_cache_memory is not None or not machine.sm:
        available = engine.kv_cache_memory or 0
        budget = inside + available
    else:
        budget = int(memory * (engine.gpu_memory_utilization or machine.utilization))
        available = budget - inside
    given = engine.kv_cache_memory is not None or not machine.sm
    above, below = (0, 0) if given else _spread(items)
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
        kv_least=available - above,
        kv_most=available + below,
        kv_given=given,
        loader_bytes=loader_bytes(machine),
    )


def _spread(items: Sequence[Item]) -> tuple[int, int]:
    """Return the bytes that the items of the budget may take more and less than is expected."""
    inside = [item for item in items if item.where is MemoryPool.BUDGET]
    return sum(item.most - item.bytes for item in inside), sum(item.bytes - item.least for item in inside)


def _sum(parts: Sequence[tuple[Part, int]]) -> int:
    return sum(size for _, size in parts)


def _less(item: Item, taken: int) -> Item:
    return Item(item.name, max(0, item.bytes - taken), item.where, "")


def _kv_plan(
    engine: EngineSettings, parallel: Parallel, cache: Layout, widths: Sequence[int], ranks: Sequence[RankPlan]
) -> KvPlan:
    in_flight = engine.max_num_batched_tokens * engine.concurrent_batches(parallel.pipeline)
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
        in_flight_bytes=(request - cache.blocks_per_request(engine.max_model_len, 0)) * max(widths),
    )


def _needed(rank: RankPlan, widths: Sequence[int], kv: KvPlan | None) -> int:
    """Return the bytes of KV cache that the rank must have: one request of the greatest length, and the block that vLLM
    keeps to itself.
    """
    return (kv.blocks_per_request + 1) * widths[rank.stage] if kv else 0


_Difference = tuple[int, int]
"""Bytes by which the items in the budget and those beside it differ from what is expected."""


def _worst(rank: RankPlan) -> _Difference:
    return rank.above(MemoryPool.BUDGET), rank.above(MemoryPool.BESIDE)


def _best(rank: RankPlan) -> _Difference:
    return -rank.below(MemoryPool.BUDGET), -rank.below(MemoryPool.BESIDE)


def _missing(
    rank: RankPlan, widths: Sequence[int], kv: KvPlan | None, change: _Difference = (0, 0)
) -> tuple[int, int, int]:
    """Return what the rank lacks: in the engine's budget, of its memory while it serves, and while it loads."""
    inside, beside = change
    loading = rank.total(MemoryPool.BESIDE) + beside + rank.items[0].bytes + rank.loader_bytes
    # What the budget's items take more comes off the KV cache, unless its size was given.
    budget, cache = (0, inside) if rank.kv_given else (inside, 0)
    return (
        _needed(rank, widths, kv) - rank.kv_available + budget,
        rank.used_bytes + cache + beside - rank.memory_bytes,
        loading - rank.memory_bytes,
    )


def _verdict(
    machine: Machine,
    engine: EngineSettings,
    rank: RankPlan,
    missing: tuple[int, int, int],
    widths: Sequence[int],
    kv: KvPlan | None,
) -> str:
    """Return why a plan does not fit, by its tightest rank; empty if it does."""
    if not machine.memory_bytes:
        return "how much memory the machine has is not known"
    budget, serving, loading = missing
    weights, memory = rank.items[0].bytes, gib(rank.memory_bytes)
    if weights > rank.memory_bytes:
        return f"rank {rank.rank}: the weights take {gib(weights)}, and the memory has {memory}"
    if kv is None:
        return "the layout of this model's KV cache is not known; only its weights are planned"
    if budget > 0:
        return f"rank {rank.rank}: {_budget_problem(machine, engine, rank, _needed(rank, widths, kv))}"
    if serving > 0:
        return f"rank {rank.rank}: everything together takes {gib(rank.used_bytes)}, and the memory has {memory}"
    if loading > 0:
        peak = gib(rank.memory_bytes + loading)
        return f"rank {rank.rank}: loading the weights takes {peak} for a while, and the memory has {memory}"
    return ""


def _budget_problem(machine: Machine, engine: EngineSettings, rank: RankPlan, needed: int) -> str:
    request = f"one request of {engine.max_model_len:,} tokens needs {gib(needed)} of KV cache"
    if engine.kv_cache_memory is not None:
        return f"kvCacheMemory is {gib(engine.kv_cache_memory)}, and {request}"
    share = engine.gpu_memory_utilization or machine.utilization
    weights = rank.items[0].bytes
    others, left = rank.total(MemoryPool.BUDGET) - weights, rank.kv_available
    outcome = f"leave {gib(left)}" if left >= 0 else f"exceed that by {gib(-left)}"
    return (
        f"the engine may take {gib(rank.budget_bytes)} ({share:.3g} of {gib(rank.memory_bytes)}); {gib(weights)} of "
        f"weights and {gib(others)} of other things {outcome}, and {request}"
    )


def gib(count: float) -> str:
    """Return bytes as people write them."""
    return f"{count / GIB:.2f} GiB"
