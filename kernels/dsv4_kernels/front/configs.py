"""Configurations of the norms, RoPE and the cache entry."""

from __future__ import annotations

import itertools

from dsv4_kernels.arch import Arch
from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.static import StaticKernel

# Four heads are 64 bytes per thread of four warps.
BLOCK_HEADS = 4

NORM_SIGNATURE = {
    "qr_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "q_weight_ptr": "*bf16",
    "kv_weight_ptr": "*bf16",
    "qr_out_ptr": "*bf16",
    "kv_out_ptr": "*bf16",
    "code_ptr": "*fp8e4nv",
    "scale_ptr": "*u8",
    "qr_stride": "i32",
    "kv_stride": "i32",
    "eps": "fp32",
}
INSERT_SIGNATURE = {
    "q_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "cache_ptr": "*u8",
    "slot_ptr": "*i64",
    "position_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
    "out_ptr": "*bf16",
    "count": "i32",
    "eps": "fp32",
}


def block(columns: int) -> int:
    """The next power of two."""
    return 1 << (columns - 1).bit_length()


def static_kernels() -> tuple[StaticKernel, ...]:
    """Both models' low ranks; 64 heads, and 8 padded to 16."""
    records = []
    for arch in Arch:
        for rank, quant in itertools.product((1024, 1536), (False, True)):
            records.append(
                StaticKernel(
                    operation="front",
                    kernel="dsv4_kernels.front.kernel:front_norm_kernel",
                    label=f"q{rank}{'-o8' if quant else ''}",
                    arch=arch,
                    signature=NORM_SIGNATURE,
                    constexprs={"Q": rank, "BLOCK": block(rank), "QUANT": quant},
                    num_warps=4,
                    num_stages=1,
                )
            )
        for heads, padded in ((64, 64), (8, 16)):
            records.append(
                StaticKernel(
                    operation="front",
                    kernel="dsv4_kernels.front.kernel:front_insert_kernel",
                    label=f"h{heads}-p{padded}",
                    arch=arch,
                    signature=INSERT_SIGNATURE,
                    constexprs={
                        "H": heads,
                        "P": padded,
                        "PAGE": 64,
                        "STRIDE": ds_mla(64).page_bytes,
                        "BH": BLOCK_HEADS,
                    },
                    num_warps=4,
                    num_stages=1,
                )
            )
    return tuple(records)
