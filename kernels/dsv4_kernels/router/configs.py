"""Configurations of the router."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel


@dataclass(frozen=True)
class RouterConfig:
    """One program: `block_t` tokens × `block_e` experts over `span` columns, `block_k` at a time."""

    block_t: int
    block_e: int
    block_k: int
    span: int
    num_warps: int
    num_stages: int


MAX_SPLITS = 16


def select(arch: Arch, tokens: int, experts: int, hidden: int, multiprocessors: int) -> RouterConfig:
    """Few tokens are spread over the columns until every multiprocessor has a program."""
    block_t, block_e, block_k = (16, 32, 128) if tokens <= 64 else (64, 64, 64)
    tiles = -(-tokens // block_t) * -(-experts // block_e)
    wanted = max(1, min(multiprocessors // tiles, MAX_SPLITS))
    # Spans that double from one block on: few different kernels.
    span = block_k
    while -(-hidden // span) > wanted:
        span *= 2
    return RouterConfig(block_t, block_e, block_k, span, 4, 4)


def padded(experts: int) -> int:
    """The next power of two."""
    return 1 << (experts - 1).bit_length()


PRODUCT_SIGNATURE = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "part_ptr": "*fp32", "tokens": "i32"}
SELECT_SIGNATURE = {
    "part_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "table_ptr": "*i32",
    "input_ptr": "*i32",
    "padding_ptr": "*i1",
    "out_weight_ptr": "*fp32",
    "out_id_ptr": "*i32",
    "tokens": "i32",
    "splits": "i32",
    "scaling": "fp32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Both models' routers, few and many tokens, learned and hashed."""
    records: dict[str, StaticKernel] = {}
    for arch in Arch:
        for experts, hidden in ((256, 4096), (384, 7168)):
            for tokens in (1, 4096):
                c = select(arch, tokens, experts, hidden, arch.spec.multiprocessors)
                wgmma = arch is Arch.SM_90 and c.block_t >= 64
                record = StaticKernel(
                    operation="router",
                    kernel="dsv4_kernels.router.kernel:router_product_kernel",
                    label=f"t{c.block_t}-e{experts}-h{hidden}-c{c.span}",
                    arch=arch,
                    signature=PRODUCT_SIGNATURE,
                    constexprs={
                        "E": experts, "H": hidden, "SPAN": c.span, "BT": c.block_t, "BE": c.block_e, "BK": c.block_k,
                        "EARLY": True,
                    },
                    num_warps=c.num_warps,
                    num_stages=c.num_stages,
                    expect=Expect(mma=("wgmma-bf16" if wgmma else "bf16",), cp_async=8),
                )  # fmt: skip
                records[record.key] = record
            for hashed in (False, True):
                record = StaticKernel(
                    operation="router",
                    kernel="dsv4_kernels.router.kernel:router_select_kernel",
                    label=f"e{experts}-{'hash' if hashed else 'learned'}",
                    arch=arch,
                    signature=SELECT_SIGNATURE,
                    constexprs={
                        "E": experts,
                        "EP": padded(experts),
                        "K": 6,
                        "HASH": hashed,
                        "PADDED": True,
                        "EARLY": True,
                    },
                    num_warps=1,
                    num_stages=1,
                )
                records[record.key] = record
    return tuple(records.values())
