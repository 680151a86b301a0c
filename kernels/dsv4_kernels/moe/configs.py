"""Configurations of the mixture of experts, and what the static gate compiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dsv4_kernels import tables
from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel

# Up to here every program finds the pairs of its expert by itself; above, one launch sorts them first.
DECODE_PAIRS = 64


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of both products. `m` is the pairs of a tile; `up_n` counts columns of h (2·up_n rows of w13), `down_n` of
    the output.

    `*_split` is the number of ranges of k inside a tile (decode only, else 1).
    """

    m: int
    up_n: int
    up_k: int
    up_warps: int
    up_stages: int
    up_split: int
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int
    down_split: int


@dataclass(frozen=True)
class ColumnsConfig:
    """Tiles of both products of the columns kernels.

    `up_early`: the up kernel's programs are placed while x is prepared. That hides a launch, but they then lie unevenly
    on the multiprocessors, which costs more where all of them run at once. `down_shares`: a token's experts are shared
    out to so many programs.
    """

    up_n: int
    up_k: int
    up_warps: int
    up_stages: int
    up_early: bool
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int
    down_shares: int


def _largest(wanted: int, length: int) -> int:
    """The largest power of two up to `wanted` that divides `length`."""
    while length % wanted:
        wanted //= 2
    return wanted


def fit(config: MoeConfig, hidden: int, inter: int, decode: bool) -> MoeConfig:
    """Shrink tiles that do not divide the model's sizes; every loop then runs without masks."""
    up_split, down_split = _split(config.up_split, hidden), _split(config.down_split, inter)
    up_k, down_k = _largest(config.up_k, hidden // up_split), _largest(config.down_k, inter // down_split)
    # Triton 3.6 gives NaN for some wgmma loops of three and more stages over blocks of 64 (H200, 7 of 40 tiles tried;
    # none of 60 with blocks of 128 or of two stages). Only tensor-parallel shards that 128 does not divide come here.
    return replace(
        config,
        up_n=_largest(config.up_n, inter),
        up_k=up_k,
        up_stages=config.up_stages if decode or up_k >= 128 else 1,
        up_split=up_split,
        down_n=_largest(config.down_n, hidden),
        down_k=down_k,
        down_stages=config.down_stages if decode or down_k >= 128 else 1,
        down_split=down_split,
    )


def _split(wanted: int, length: int) -> int:
    # Ranges shorter than 128 make the rows that are read too short for memory.
    while wanted > 1 and length % (wanted * 128):
        wanted //= 2
    return wanted


def is_decode(tokens: int, topk: int) -> bool:
    """Tell whether the batch runs without a sort."""
    return tokens * topk <= DECODE_PAIRS


def average_rows(tokens: int, topk: int, experts: int) -> int:
    """Pairs per expert if the router spreads evenly, rounded up: what the sorted tables are indexed by."""
    return -(-tokens * topk // experts)


def select(arch: Arch, mma: str, tokens: int, topk: int, experts: int, hidden: int, inter: int) -> MoeConfig:
    """The table's row for the batch, fitted to the sizes."""
    decode = is_decode(tokens, topk)
    table = _table(arch, mma, decode)
    row = table.select(tokens=tokens, inter=inter) if decode else table.select(rows=average_rows(tokens, topk, experts))
    return fit(row, hidden, inter, decode)


def select_columns(arch: Arch, tokens: int, topk: int, hidden: int, inter: int) -> ColumnsConfig | None:
    """The columns kernels' row for a W4A16 batch, fitted to the sizes; None where another body runs it.

    They need FP8 products that take one side from registers (sm_90), and 128 values of k to a row. Not for W4A8, where
    h is rounded to E4M3: that instruction's short sums tip the rounding often enough to be seen.
    """
    if arch is not Arch.SM_90 or hidden % 128 or inter % 128 or not is_decode(tokens, topk):
        return None
    for row in _columns_table().rows:
        if row.holds({"tokens": tokens, "inter": inter}):
            return _fit_columns(row.config, hidden, inter)
    return None


def _fit_columns(config: ColumnsConfig, hidden: int, inter: int) -> ColumnsConfig:
    return replace(
        config,
        up_n=_largest(config.up_n, inter),
        up_k=_largest(config.up_k, hidden),
        down_n=_largest(config.down_n, hidden),
        down_k=_largest(config.down_k, inter),
    )


def _columns_table() -> tables.Table[ColumnsConfig]:
    return tables.load(Path(__file__).parent, Arch.SM_90, "decode_columns", ColumnsConfig)


def reachable(arch: Arch, mma: str, tokens: int, topk: int, experts: int) -> list[int]:
    """One batch size for every table row that batches of 1..tokens can select."""
    last_decode = min(tokens, DECODE_PAIRS // topk)
    rows = [row.when for row in _table(arch, mma, True).rows]
    if arch is Arch.SM_90:
        rows += [row.when for row in _columns_table().rows]
    # 1 and 2 as well: a single token has a kernel of its own.
    found = {t for t in (1, 2, *(when["tokens"][0] for when in rows)) if 1 <= t <= last_decode}
    first_sorted = last_decode + 1
    for row in _table(arch, mma, False).rows:
        low = max((row.when["rows"][0] - 1) * experts // topk + 1, first_sorted)
        if low <= tokens:
            found.add(low)
    if tokens >= first_sorted:
        found.add(tokens)
    return sorted(found)


def _table(arch: Arch, mma: str, decode: bool) -> tables.Table[MoeConfig]:
    return tables.load(Path(__file__).parent, arch, f"{'decode' if decode else 'sorted'}_{mma}", MoeConfig)


def static_kernels() -> tuple[StaticKernel, ...]:
    """Every table row at the shape that the project runs on the architecture: whole Flash on sm_90, its half (two GPUs)
    on sm_120, its eighth (eight GPUs) on sm_121; and one row at the sizes of Pro."""
    records: list[StaticKernel] = []
    shards = {Arch.SM_90: 2048, Arch.SM_120: 1024, Arch.SM_121: 256}
    for arch in Arch:
        for mma in ("dot",) if arch is Arch.SM_90 else ("mx", "dot"):
            for decode in (True, False):
                table = _table(arch, mma, decode)
                for i, row in enumerate(table.rows):
                    low, high = row.when.get("inter", (0, None))
                    inter = max(min(shards[arch], high or shards[arch]), 1024 if low > 512 else 0)
                    records += _records(arch, mma, decode, row.label, row.config, 4096, inter, 256)
                    if decode and mma == "dot" and arch is not Arch.SM_120:
                        # W4A8 without block-scaled MMA: only the decode kernels differ, which round x themselves.
                        before = (3, 8) if arch is Arch.SM_121 else None
                        made = _records(arch, mma, decode, row.label, row.config, 4096, inter, 256, a8=True)
                        records.append(replace(made[0], before=before))
                    if i == 0 and arch is Arch.SM_120 and mma == "mx":
                        records += _records(arch, mma, decode, f"pro-{row.label}", row.config, 7168, 384, 384)
    for columns_row in _columns_table().rows:
        records += _columns_records(columns_row)
    return tuple(records)


def _with_and_without_addend(record: StaticKernel) -> list[StaticKernel]:
    """Return both forms of a kernel that writes the result."""
    return [
        replace(record, constexprs={**record.constexprs, "addend_ptr": None}),
        replace(record, label=f"{record.label}-adds", signature={**record.signature, "addend_ptr": "*bf16"}),
    ]


def _columns_records(row: tables.Row[ColumnsConfig]) -> list[StaticKernel]:
    """The columns kernels of one row at whole Flash or, where the row ends below, at its end."""
    hidden, inter = 4096, min(2048, row.when.get("inter", (0, None))[1] or 2048)
    c = _fit_columns(row.config, hidden, inter)
    shared: dict[str, object] = {"EXPERTS": 256, "TOPK": 6, "HIDDEN": hidden, "INTER": inter, "PTX": True}
    up = {**shared, "LIMIT": 10.0, "BLOCK_N": c.up_n, "BLOCK_K": c.up_k, "STAGES": c.up_stages}
    down = {**shared, "BLOCK_N": c.down_n, "BLOCK_K": c.down_k, "STAGES": c.down_stages, "SHARES": c.down_shares}
    x = {"x_ptr": "*fp8e4nv", "x_factor_ptr": "*fp32", "ids_ptr": "*i32", "weight_ptr": "*fp32"}
    h = {"h_ptr": "*fp8e4nv", "h_factor_ptr": "*fp32"}
    weights = {"w_ptr": "*u8", "w_scale_ptr": "*u8"}
    outputs = {"ids_ptr": "*i32", "out_ptr": "*bf16", "part_ptr": "*fp32", "count_ptr": "*i32"}
    up_record, down_record = (
        StaticKernel(
            operation="moe_w4a16",
            kernel=f"dsv4_kernels.moe.columns:moe_columns_{name}_kernel",
            label=f"columns-{row.label}",
            arch=Arch.SM_90,
            signature=signature,
            constexprs=constants,
            num_warps=warps,
            num_stages=stages,
            expect=Expect(mma=("wgmma-fp8",), cp_async=8),
        )
        for name, signature, constants, warps, stages in (
            ("up", {**x, **weights, **h, "copies": "i32"}, up, c.up_warps, c.up_stages),
            ("down", {**h, **weights, **outputs}, down, c.down_warps, c.down_stages),
        )
    )
    return [up_record, *_with_and_without_addend(down_record)]


def _records(
    arch: Arch,
    mma: str,
    decode: bool,
    label: str,
    config: MoeConfig,
    hidden: int,
    inter: int,
    experts: int,
    a8: bool = False,
) -> list[StaticKernel]:
    c = fit(config, hidden, inter, decode)
    a8 = a8 or mma == "mx"
    act = "*fp8e4nv" if mma == "mx" else "*bf16"
    weights = {"w_ptr": "*u8", "w_scale_ptr": "*u8"}
    shared: dict[str, object] = {"HIDDEN": hidden, "INTER": inter, "MMA": mma, "PTX": True}
    up: dict[str, object] = {**shared, "TOPK": 6, "LIMIT": 10.0, "A8": a8, "BLOCK_M": c.m}
    up |= {"BLOCK_N": c.up_n, "BLOCK_K": c.up_k, "STAGES": c.up_stages}
    down: dict[str, object] = {**shared, "BLOCK_N": c.down_n, "BLOCK_K": c.down_k, "STAGES": c.down_stages}
    h = {"h_ptr": act, "h_scale_ptr": "*u8"}
    if decode:
        up |= {"EXPERTS": experts, "PAIRS": 0 if config.m == 1 else DECODE_PAIRS, "SPLIT": c.up_split}
        down |= {"EXPERTS": experts, "TOPK": 6, "SPLIT": c.down_split}
        up_types = {"x_ptr": "*bf16", "ids_ptr": "*i32", "weight_ptr": "*fp32", **weights, **h, "pairs": "i32"}
        down_types = {**h, "ids_ptr": "*i32", **weights, "out_ptr": "*bf16"}
    else:
        down |= {"BLOCK_M": c.m}
        plan = {"rows_ptr": "*i32", "tile_ptr": "*i32"}
        up_types = {"x_ptr": act, "x_scale_ptr": "*u8", "weight_ptr": "*fp32", **plan, **weights, **h}
        down_types = {**h, **plan, **weights, "y_ptr": "*bf16"}
    expected = ("mx",) if mma == "mx" else ("bf16", "wgmma-bf16") if arch is Arch.SM_90 else ("bf16",)
    late = arch is Arch.SM_121 and mma == "mx"
    kind = "decode" if decode else "sorted"
    made: list[StaticKernel] = []
    up_steps = hidden // c.up_split // c.up_k
    down_steps = inter // c.down_split // c.down_k * (6 if decode else 1)
    for name, types, constants, warps, stages, steps in (
        ("up", up_types, up, c.up_warps, c.up_stages, up_steps),
        ("down", down_types, down, c.down_warps, c.down_stages, down_steps),
    ):
        # On sm_90 Triton 3.8 keeps four registers of this tile in local memory and 3.9 fifty; 3.6 keeps none.
        crowded = arch is Arch.SM_90 and name == "up" and (c.m, c.up_n) == (64, 64)
        record = StaticKernel(
            operation="moe_w4a8" if a8 else "moe_w4a16",
            kernel=f"dsv4_kernels.moe.kernel:moe_{kind}_{name}_kernel",
            label=f"{mma}-{label}",
            arch=arch,
            signature=types,
            constexprs=constants,
            num_warps=warps,
            num_stages=stages,
            # A shard whose loop has one or two steps is fetched before the loop, or unrolled.
            expect=Expect(mma=expected, cp_async=8 if steps > 2 else 0, spill=200 if crowded else 0),
            since=(3, 8) if late else (3, 6),
        )
        made += _with_and_without_addend(record) if decode and name == "down" else [record]
    return made
