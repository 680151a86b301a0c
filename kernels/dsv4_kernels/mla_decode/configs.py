"""Configurations of sparse MLA decode, how its work is split, and what the static gate compiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dsv4_kernels.arch import Arch
from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.static import Expect, StaticKernel
from dsv4_kernels.tables import Row, Table, load


@dataclass(frozen=True)
class DecodeConfig:
    """One program: `block_h` heads, tiles of `block_n` entries. `waves`: programs per multiprocessor that splitting
    aims at.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"h{self.block_h}-n{self.block_n}-w{self.num_warps}-s{self.num_stages}"


def table(arch: Arch) -> Table[DecodeConfig]:
    """The rows of `arch`, by heads and tokens."""
    return load(Path(__file__).parent, arch, "mla_decode", DecodeConfig)


def select(arch: Arch, heads: int, tokens: int) -> DecodeConfig:
    """The configuration for `heads` local heads and `tokens` query tokens."""
    return table(arch).select(heads=heads, tokens=tokens)


# Up to this many entries per token the shares are cut from the widths; above, where a context of usual length fills a
# small part of the width, from the lengths on the device.
FIXED_WIDTH = 2048


def tile_count(config: DecodeConfig, window: int, topk: int) -> int:
    """Tiles of one token's two lists; a tile never spans both."""
    return -(-window // config.block_n) + -(-topk // config.block_n)


def split_count(config: DecodeConfig, tokens: int, heads: int, tiles: int, multiprocessors: int) -> int:
    """In how many shares a token's list of at most `tiles` tiles is worked on; depends on nothing that lives on the
    device.

    Shares are whole tiles and equal: as many as fill the machine `waves` times, then no more than that length needs.
    """
    programs = max(1, tokens) * -(-heads // config.block_h)
    wanted = max(1, min(tiles, config.waves * multiprocessors // programs))
    return -(-tiles // -(-tiles // wanted))


# Of a run that looks pages up, in place of cmp_len_ptr.
TABLE = {"table_ptr": "*i32", "request_ptr": "*i32", "counts_ptr": "*i1", "table_stride": "i32"}
SIGNATURE = {
    "q_ptr": "*bf16",
    "swa_ptr": "*u8",
    "swa_idx_ptr": "*i32",
    "swa_len_ptr": "*i32",
    "cmp_ptr": "*u8",
    "cmp_idx_ptr": "*i32",
    "cmp_len_ptr": "*i32",
    "sink_ptr": "*fp32",
    "position_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
    "o_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "scale_ptr": "*u8",
    "tokens": "i32",
    "splits": "i32",
}


# On sm_90 64 heads × 512 columns of float32 are half the register file; what does not fit beside them is spilled once
# per tile: 96 B with Triton 3.6, which was measured, and more with later ones. The limit keeps it from growing unseen.
# On SM12x nothing is spilled.
SM_90_SPILL = 704


def _heads_of(row: Row[DecodeConfig]) -> int:
    """A head count that selects the row."""
    low, high = row.when.get("heads", (1, None))
    return high if high is not None else max(64, low)


def static_kernels() -> tuple[StaticKernel, ...]:
    """Every configuration of every table in the forms that its rows can take: split, whole, whole with the fused
    epilogue, one tile per share."""
    records: dict[str, StaticKernel] = {}
    for arch in Arch:
        for row in table(arch).rows:
            forms = [(512, True, False, False), (512, False, False, False), (512, False, True, False)]
            forms += [(0, False, True, False), (512, True, False, True)]
            for k, split, o8, one in forms:
                record = _record(arch, row, k, split, o8, one)
                records.setdefault(record.key, record)
                if one:
                    looking = _looking_up(record)
                    records.setdefault(looking.key, looking)
    return tuple(records.values())


def _record(arch: Arch, row: Row[DecodeConfig], k: int, split: bool, o8: bool, one: bool) -> StaticKernel:
    c = row.config
    wgmma = arch is Arch.SM_90 and c.block_h >= 64
    return StaticKernel(
        operation="mla_decode",
        kernel="dsv4_kernels.mla_decode.kernel:mla_decode_kernel",
        label=f"{c.label}-k{k}{'-split' if split else ''}{'-one' if one else ''}{'-o8' if o8 else ''}",
        arch=arch,
        signature={**SIGNATURE, "o_ptr": "*fp8e4nv" if o8 else "*bf16"},
        constexprs={
            "H": _heads_of(row),
            "QH": _heads_of(row),
            "W": 128,
            "K": k,
            "SWA_PAGE": 64,
            "SWA_STRIDE": ds_mla(64).page_bytes,
            "CMP_PAGE": 64,
            "CMP_STRIDE": ds_mla(64).page_bytes,
            "SWA_SHIFT": 6,
            "CMP_SHIFT": 6,
            "BH": c.block_h,
            "BN": c.block_n,
            "SPLIT": split,
            "ONE": one,
            "FIXED": True,
            "O8": o8,
            "PIN": True,
            **dict.fromkeys(TABLE),
        },
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        expect=Expect(
            mma=("wgmma-bf16" if wgmma else "bf16",),
            # One tile, or one stage, is loaded straight into registers.
            cp_async=0 if one or c.num_stages == 1 else 8,
            shared=arch.spec.shared_bytes,
            spill=SM_90_SPILL if arch is Arch.SM_90 and not one else 0,
        ),
    )


def _looking_up(record: StaticKernel) -> StaticKernel:
    """Return the record of the same launch with a table of pages."""
    signature = {name: kind for name, kind in record.signature.items() if name != "cmp_len_ptr"}
    constexprs = {name: value for name, value in record.constexprs.items() if name not in TABLE}
    return replace(
        record,
        label=f"{record.label}-lookup",
        signature={**signature, **TABLE},
        constexprs={**constexprs, "cmp_len_ptr": None},
    )
