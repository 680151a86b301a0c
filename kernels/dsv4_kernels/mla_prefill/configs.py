"""Configurations of sparse MLA prefill."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel


@dataclass(frozen=True)
class PrefillConfig:
    """One program: `block_h` heads of one token, tiles of `block_n` entries."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def select(arch: Arch, heads: int) -> PrefillConfig:
    """As many heads as share a gathered tile: half of the registers of sm_90 hold the sums of 64 heads."""
    if arch is Arch.SM_90:
        return PrefillConfig(64, 64, 8, 2) if heads > 32 else PrefillConfig(16, 64, 4, 2)
    return PrefillConfig(32, 32, 8, 2) if heads > 16 else PrefillConfig(16, 32, 4, 2)


# 64 heads × 512 columns of float32 are 128 of a thread's 255 registers on sm_90. What does not fit beside them is
# spilled once per tile: 40 B with Triton 3.6, 32 with 3.8, 504 with 3.9. On SM12x nothing is spilled.
SM_90_SPILL = 512

SIGNATURE = {
    "q_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "index_ptr": "*i32",
    "length_ptr": "*i32",
    "sink_ptr": "*fp32",
    "o_ptr": "*bf16",
    "lse_ptr": "*fp32",
}


WORKERS = 256
BLOCK = 256
LIST_SIGNATURE = {
    **dict.fromkeys(("chosen_ptr", "begin_ptr", "seq_ptr", "gather_ptr", "out_ptr", "length_ptr"), "*i32"),
    **dict.fromkeys(("chosen_stride", "out_stride", "rows", "first"), "i32"),
}


def list_width(topk: int, window: int) -> int:
    """Columns of a list: a multiple of 128, as FlashMLA wants them."""
    return -(-(topk + window) // 128) * 128


def _lists(arch: Arch, topk: int, ratio: int) -> StaticKernel:
    return StaticKernel(
        operation="mla_prefill_lists",
        kernel="dsv4_kernels.mla_prefill.kernel:mla_prefill_lists_kernel",
        label=f"k{topk}-r{ratio}",
        arch=arch,
        signature=LIST_SIGNATURE,
        constexprs={"TOPK": topk, "RATIO": ratio, "WINDOW": 128, "WIDTH": list_width(topk, 128), "BLOCK": BLOCK},
        num_warps=4,
        num_stages=1,
    )


def static_kernels() -> tuple[StaticKernel, ...]:
    """Both configurations of every architecture, with Flash's list; and the lists of its three kinds of layers."""
    records = []
    for arch in Arch:
        records += [_lists(arch, topk, ratio) for topk, ratio in ((0, 1), (512, 4), (8192, 128))]
        for heads in (16, 64):
            c = select(arch, heads)
            wgmma = arch is Arch.SM_90 and c.block_h >= 64
            records.append(
                StaticKernel(
                    operation="mla_prefill",
                    kernel="dsv4_kernels.mla_prefill.kernel:mla_prefill_kernel",
                    label=f"h{c.block_h}-n{c.block_n}-w{c.num_warps}-s{c.num_stages}",
                    arch=arch,
                    signature=SIGNATURE,
                    constexprs={"H": heads, "K": 640, "BH": c.block_h, "BN": c.block_n},
                    num_warps=c.num_warps,
                    num_stages=c.num_stages,
                    expect=Expect(
                        mma=("wgmma-bf16" if wgmma else "bf16",),
                        cp_async=16,
                        shared=arch.spec.shared_bytes,
                        spill=SM_90_SPILL if wgmma else 0,
                    ),
                )
            )
    return tuple(records)
