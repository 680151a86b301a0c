"""A memory plan as text for people, and as a document: pure, no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_operator.cli.output import render_table
from dsv4_operator.planning.catalog import GIB
from dsv4_operator.planning.memory import FitVerdict, MemoryPlan, MemoryPool, RankPlan, gib
from dsv4_operator.planning.memory.plan import Change

_WIDTH = 60
FILLS = (
    ("weights", "█"),
    ("activations and buffers", "▓"),
    ("KV cache", "▒"),
    ("beside the engine", "░"),
    ("free", "·"),
)
"""Characters of a bar, in order: so that it can be read without colours."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """Ranks that need the same memory, shown as one."""

    label: str
    plan: RankPlan


def alike(ranks: Sequence[RankPlan]) -> list[RankRange]:
    """Return `ranks` in runs of equal memory."""
    runs: list[list[RankPlan]] = []
    for rank in ranks:
        if runs and _figures(runs[-1][0]) == _figures(rank):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [
        RankRange(f"rank {run[0].rank}" if len(run) == 1 else f"ranks {run[0].rank}-{run[-1].rank}", run[0])
        for run in runs
    ]


def _figures(rank: RankPlan) -> tuple[object, ...]:
    return rank.items, rank.weights, rank.memory_bytes, rank.kv_bytes, rank.kv_available


def text(plan: MemoryPlan, changes: Sequence[Change], title: str, *, refused: bool = False) -> str:
    """Return everything about `plan`: its table, bars, KV cache, verdict, and `changes` that would make it fit.

    Args:
        plan: the memory of one group.
        changes: the advice, if it does not fit.
        title: the deployment's name.
        refused: whether it is refused for another reason than its memory.
    """
    shown = alike(plan.ranks)
    parts = [f"{title}: {subject(plan)}", table(plan, shown), bars(shown), *_cache(plan), *_doubts(plan)]
    parts.append(verdict(plan, refused=refused))
    if changes:
        head = "Any one of these would make it fit:" if len(changes) > 1 else "This would make it fit:"
        parts.append("\n".join([head, *(f"  - {change.text}" for change in changes)]))
    elif plan.verdict is FitVerdict.NO and plan.kv is not None and plan.machine.memory_bytes:
        parts.append("No setting and no number of machines of this kind that dsv4 knows of would make it fit.")
    return "\n\n".join(parts)


def subject(plan: MemoryPlan) -> str:
    """Return `V4-Flash on 2 × DGX Spark, 128 GB (GB10), tensor parallel 2`."""
    parallel = plan.parallel
    devices = f"{parallel.world_size} × {plan.machine.title}"
    if parallel.devices_per_node > 1 and parallel.world_size > parallel.devices_per_node:
        devices += f" in {-(-parallel.world_size // parallel.devices_per_node)} machines"
    how = [f"tensor parallel {parallel.tensor}"] if parallel.world_size > 1 else []
    if parallel.pipeline > 1:
        how.append(f"{parallel.pipeline} stages")
    return ", ".join([f"{plan.model.name} on {devices}", *how])


def table(plan: MemoryPlan, shown: Sequence[RankRange]) -> str:
    """Return the components by rank, in GiB as expected, and at most on the tightest rank."""
    rows = list(_rows(plan, shown))
    figures = [[*(f"{value / GIB:.2f}" for value in values), most] for _, values, most, _ in rows]
    widths = [max(len(line[column]) for line in figures) for column in range(len(shown) + 1)]
    cells = [
        [name, *(figure.rjust(widths[column]) for column, figure in enumerate(line)), note]
        for (name, _, _, note), line in zip(rows, figures, strict=True)
    ]
    headers = ["GiB", *(each.label for each in shown), "at most", " "]
    lines = render_table(headers, [[cell or " " for cell in row] for row in cells])
    return "\n".join(line.rstrip() for line in lines.splitlines())


_MemoryRow = tuple[str, list[int], str, str]
"""Name, bytes of each kind of rank, what the tightest rank has at most, a note."""


def _rows(plan: MemoryPlan, shown: Sequence[RankRange]) -> Iterator[_MemoryRow]:
    tightest = plan.ranks[plan.tightest]

    def each(place: MemoryPool) -> Iterator[_MemoryRow]:
        notes: dict[str, str] = {}
        for item in (item for one in shown for item in one.plan.items if item.where is place):
            notes.setdefault(item.name, item.note)
        for name, note in notes.items():
            sizes = [sum(item.bytes for item in one.plan.items if item.name == name) for one in shown]
            yield name, sizes, _at_most(tightest, name), note

    for row in each(MemoryPool.BUDGET):
        yield row
        if row[0] == "weights" and max(row[1]) >= GIB:
            for part in dict.fromkeys(part for one in shown for part, _ in one.plan.weights):
                yield f"  {part}", [dict(one.plan.weights).get(part, 0) for one in shown], "", ""
    if plan.kv is not None:
        yield "KV cache", [one.plan.kv_bytes for one in shown], "", _cache_note(plan)
    yield from each(MemoryPool.BESIDE)
    yield "together", [one.plan.used_bytes for one in shown], "", ""
    yield "memory", [one.plan.memory_bytes for one in shown], "", ""


def _at_most(rank: RankPlan, name: str) -> str:
    """Return what `name` may take on `rank`, where that is more than is expected."""
    items = [item for item in rank.items if item.name == name]
    most = sum(item.most for item in items)
    return f"{most / GIB:.2f}" if most > sum(item.bytes for item in items) else ""


def _cache_note(plan: MemoryPlan) -> str:
    if plan.engine.kv_cache_memory is not None or not plan.machine.sm:
        return "kvCacheMemory, in whole blocks"
    share = plan.engine.gpu_memory_utilization or plan.machine.utilization
    return f"what is left of {share:g} of the memory on the tightest rank"


def bars(shown: Sequence[RankRange]) -> str:
    """Return one bar for each kind of rank, and what its fills mean."""
    width = max(len(each.label) for each in shown)
    lines = [f"{each.label.ljust(width)}  {bar(each.plan)}" for each in shown]
    legend = "   ".join(f"{fill} {name}" for name, fill in FILLS)
    return "\n".join([*lines, f"{'':{width}}  {legend}"])


def bar(rank: RankPlan) -> str:
    """Return one rank's memory as a bar; what exceeds it is drawn beyond the closing line."""
    if not rank.memory_bytes:
        return "memory not known"
    scale = _WIDTH / rank.memory_bytes
    sizes = [
        rank.items[0].bytes if rank.items[0].where is MemoryPool.BUDGET else 0,
        rank.total(MemoryPool.BUDGET) - rank.items[0].bytes,
        rank.kv_bytes,
        rank.total(MemoryPool.BESIDE),
    ]
    drawn, filled = "", 0
    for size, (_, fill) in zip(sizes, FILLS, strict=False):
        filled += size
        drawn += fill * (round(filled * scale) - len(drawn))
    drawn = drawn.ljust(_WIDTH, FILLS[-1][1])
    beyond = drawn[_WIDTH : 2 * _WIDTH]
    return f"│{drawn[:_WIDTH]}│{beyond} {gib(rank.used_bytes)} of {gib(rank.memory_bytes)}"


def _cache(plan: MemoryPlan) -> Iterator[str]:
    kv = plan.kv
    if kv is None or not kv.blocks:
        return
    length = plan.engine.max_model_len
    yield "\n".join(
        [
            f"KV cache      {kv.blocks:,} blocks of {kv.bytes_per_block:,} bytes on every rank{_cache_range(plan)}",
            f"one request   {kv.blocks_per_request:,} blocks ({gib(kv.request_bytes)}) for {length:,} tokens, of which "
            f"{gib(kv.in_flight_bytes)} are for {kv.in_flight_tokens:,} tokens in flight",
            f"vLLM's log    KV cache size: {kv.tokens:,} tokens, Maximum concurrency for {length:,} tokens per "
            f"request: {kv.concurrency:.2f}x",
        ]
    )


def _cache_range(plan: MemoryPlan) -> str:
    least, most = (min(bounds) for bounds in zip(*((one.kv_least, one.kv_most) for one in plan.ranks), strict=True))
    return f", {max(0, least) / GIB:.2f} to {most / GIB:.2f} GiB" if most > least else ""


def _doubts(plan: MemoryPlan) -> Iterator[str]:
    """Return the figures that the verdict rests on and that nobody has confirmed."""
    found = [
        f"{what} is not confirmed: {source.text}."
        for what, source in (
            (f"The memory of {plan.machine.title}", plan.machine.source("memory_bytes")),
            (f"The size of {plan.model.name}", plan.model.source("checkpoint_bytes")),
        )
        if source is not None and not source.verified
    ]
    if found:
        yield "\n".join(found)


def verdict(plan: MemoryPlan, *, refused: bool = False) -> str:
    """Return whether it fits, and by how much or why not."""
    rank = plan.ranks[plan.tightest]
    if plan.verdict is not FitVerdict.NO:
        return _fitting(plan, rank, refused=refused)
    too_heavy = rank.items[0].bytes > rank.memory_bytes
    if plan.kv is None:
        return f"{'It does not fit' if too_heavy else 'Whether it fits is not known'}: {plan.problem}."
    short = f"; {gib(plan.short_bytes)} are missing" if plan.short_bytes else ""
    # Of the weights alone it would be less, and the reader can count.
    counted = ", with everything else and the KV cache of one request" if short and too_heavy else ""
    return f"It does not fit: {plan.problem}{short}{counted}."


def _fitting(plan: MemoryPlan, rank: RankPlan, *, refused: bool) -> str:
    if plan.verdict is FitVerdict.FITS:
        found = "The memory is enough" if refused else "It fits"
        line = f"{found}; rank {rank.rank} is the tightest and keeps {gib(rank.spare_bytes)} free beyond its reserve."
    elif plan.fits:
        line = (
            f"It fits by less than its uncertainty ({gib(plan.uncertainty_bytes)}): as expected it does, "
            f"and with every figure at most it would lack {gib(plan.lacks_at_most)}."
        )
    else:
        line = (
            f"It fits by less than its uncertainty ({gib(plan.uncertainty_bytes)}): as expected it lacks "
            f"{gib(plan.short_bytes)}, which the range of the figures covers ({plan.problem})."
        )
    kv, seqs = plan.kv, plan.engine.max_num_seqs
    if kv is not None and 0 < kv.concurrency < seqs:
        line += (
            f" There is room for {kv.concurrency:.2f} requests of {plan.engine.max_model_len:,} tokens at once, "
            f"and maxNumSeqs is {seqs}: when more are that long, some wait."
        )
    return line


def document(plan: MemoryPlan, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the same for programs; sizes in bytes."""
    found: dict[str, Any] = {
        "model": plan.model.name,
        "machine": plan.machine.id,
        "fits": plan.verdict is not FitVerdict.NO,
        "verdict": str(plan.verdict),
        "uncertaintyBytes": plan.uncertainty_bytes,
        "tightestRank": plan.tightest,
        "shortBytes": plan.short_bytes,
        "maxModelLen": plan.engine.max_model_len,
        "ranks": [_rank_document(rank) for rank in plan.ranks],
    }
    if plan.problem:
        found["problem"] = plan.problem
    if plan.kv is not None:
        found["kv"] = {
            "blocks": plan.kv.blocks,
            "bytesPerBlock": plan.kv.bytes_per_block,
            "blocksPerRequest": plan.kv.blocks_per_request,
            "inFlightTokens": plan.kv.in_flight_tokens,
            "tokens": plan.kv.tokens,
            "concurrency": round(plan.kv.concurrency, 4),
        }
    if changes:
        found["advice"] = [change.text for change in changes]
    return found


def _rank_document(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        "stage": rank.stage,
        "memoryBytes": rank.memory_bytes,
        "usedBytes": rank.used_bytes,
        "budgetBytes": rank.budget_bytes,
        "kvBytes": rank.kv_bytes,
        "weights": {str(part): size for part, size in rank.weights},
        "items": [
            {
                "name": item.name,
                "bytes": item.bytes,
                "leastBytes": item.least,
                "mostBytes": item.most,
                "where": str(item.where),
            }
            for item in rank.items
        ],
    }
