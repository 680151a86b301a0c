"""Configurations of the indexer's queries and scores."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel


@dataclass(frozen=True)
class LogitsConfig:
    """A tile is `block_n` keys. Prefill: `block_m` rows per program; decode: `waves` programs per multiprocessor."""

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 1
    waves: int = 1


QUERY_HEADS = 16


PREFILL = tuple(LogitsConfig(128, 4, 3, block_m=rows) for rows in (4, 16, 64))


def select_prefill(arch: Arch, rows: int, keys: int, multiprocessors: int) -> LogitsConfig:
    """Return the tile of a prefill's scores: keys stay while rows pass by, the more rows the more there are of both.

    About eight programs per multiprocessor were the fastest on an H200 for 512 to 8,192 rows and 128 to 32,768 keys
    (2026-11-24).
    """
    wanted = rows * -(-keys // PREFILL[0].block_n) // (8 * multiprocessors)
    return next((config for config in PREFILL if wanted < 2 * config.block_m), PREFILL[-1])


MANY_REQUESTS = 32


def select_paged(arch: Arch, batch: int, rows_at_once: int) -> LogitsConfig:
    """Return the tile of paged scores: rows stay while pages pass by, several tiles in flight.

    On sm_90 the fastest of 21 candidates with 1 and 8 requests, and with 64 (H200, 2026-11-24).
    """
    if arch is not Arch.SM_90:
        return LogitsConfig(64, 4, 4, waves=2)
    waves = 6 if batch >= MANY_REQUESTS else 4
    if rows_at_once > 1:
        return LogitsConfig(64, 4, 6, waves=waves)
    return LogitsConfig(64 if batch >= MANY_REQUESTS else 128, 4, 3, waves=waves)


def padded_heads(heads: int) -> int:
    """Columns of the product for one row."""
    return max(16, 1 << (heads - 1).bit_length())


def rows_at_once(next_n: int, heads: int) -> int:
    """Return how many rows of a request are in one product, a power of two: all of up to 128 columns, else 1.

    Beside queries that do not stay, two rows would not fit the registers of SM12x.
    """
    together = 1 << (next_n - 1).bit_length()
    return together if together * padded_heads(heads) <= 128 else 1


QUERY_SIGNATURE = {
    "q_ptr": "*bf16",
    "position_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "out_ptr": "*fp8e4nv",
    "out_weight_ptr": "*fp32",
    "softmax_scale": "fp32",
    "head_scale": "fp32",
}
LOGITS_SIGNATURE = {
    "q_ptr": "*fp8e4nv",
    "k_ptr": "*fp8e4nv",
    "k_scale_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "start_ptr": "*i32",
    "end_ptr": "*i32",
    "out_ptr": "*fp32",
    "rows": "i32",
    "keys": "i32",
    "out_stride": "i32",
}
PAGED_SIGNATURE = {
    "q_ptr": "*fp8e4nv",
    "cache_ptr": "*fp8e4nv",
    "weight_ptr": "*fp32",
    "length_ptr": "*i32",
    "table_ptr": "*i32",
    "out_ptr": "*fp32",
    "table_stride": "i32",
    "out_stride": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """64 heads: queries, prefill, and decode of one, two and four tokens, with the body that each Triton takes."""
    records = []
    for arch in Arch:
        records.append(
            StaticKernel(
                operation="indexer",
                kernel="dsv4_kernels.indexer.kernel:indexer_query_kernel",
                label=f"h64-b{QUERY_HEADS}",
                arch=arch,
                signature=QUERY_SIGNATURE,
                constexprs={"H": 64, "BH": QUERY_HEADS},
                num_warps=4,
                num_stages=1,
            )
        )
        bodies: list[tuple[bool, tuple[int, int], tuple[int, int] | None]] = [(False, (3, 6), None)]
        if arch.spec.mx_since is not None:
            bodies = [(True, arch.spec.mx_since, None)]
            if arch.spec.mx_since > (3, 6):
                bodies.append((False, (3, 6), arch.spec.mx_since))
        for mx, since, before in bodies:
            records += [_prefill(arch, config, mx, since, before) for config in PREFILL]
            for batch, next_n in itertools.product((1, MANY_REQUESTS), (1, 2, 4)):
                records.append(_paged(arch, batch, next_n, mx, since, before))
    return tuple({record.key: record for record in records}.values())


def _mma(arch: Arch, mx: bool) -> tuple[str, ...]:
    return ("mx",) if mx else ("wgmma-fp8",) if arch is Arch.SM_90 else ("f16", "fp8")


def _prefill(
    arch: Arch, c: LogitsConfig, mx: bool, since: tuple[int, int], before: tuple[int, int] | None
) -> StaticKernel:
    return StaticKernel(
        operation="indexer",
        kernel="dsv4_kernels.indexer.kernel:indexer_logits_kernel",
        label=f"n{c.block_n}-m{c.block_m}-{'mx' if mx else 'dot'}",
        arch=arch,
        signature=LOGITS_SIGNATURE,
        constexprs={"H": 64, "HP": 64, "BM": c.block_m, "BN": c.block_n, "MX": mx},
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        expect=Expect(mma=_mma(arch, mx), cp_async=4),
        since=since,
        before=before,
    )


def _paged(
    arch: Arch, batch: int, next_n: int, mx: bool, since: tuple[int, int], before: tuple[int, int] | None
) -> StaticKernel:
    at_once = rows_at_once(next_n, 64)
    c = select_paged(arch, batch, at_once)
    return StaticKernel(
        operation="indexer",
        kernel="dsv4_kernels.indexer.kernel:indexer_paged_logits_kernel",
        label=f"n{c.block_n}-next{next_n}-{'mx' if mx else 'dot'}",
        arch=arch,
        signature=PAGED_SIGNATURE,
        constexprs={
            "NEXT_N": next_n,
            "H": 64,
            "HP": 64,
            "LP": at_once,
            "PAGE": 64,
            "CACHE_STRIDE": 64 * 132,
            "BN": c.block_n,
            "MX": mx,
        },
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        expect=Expect(mma=_mma(arch, mx), cp_async=4),
        since=since,
        before=before,
    )
