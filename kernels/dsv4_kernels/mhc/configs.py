"""Configurations of the hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel


@dataclass(frozen=True)
class MixConfig:
    """One program of the mix kernel takes `block_t` tokens and `span` columns of each stream, `block_c` at a time.

    `apart`: the terms of fn are made first, by a kernel of its own, instead of in every block of tokens. A program of
    the apply kernel for post and comb takes `coefficients` tokens, 0 as many as fit its registers with all splits at
    once.
    """

    block_t: int
    block_c: int
    span: int
    num_warps: int
    num_stages: int
    apart: bool = False
    apply_warps: int = 8
    coefficients: int = 0


MAX_SPLITS = 128
# Values of fn that one program takes apart.
PLANES_BLOCK = 1024
# Up to here programs are few and short, and the products are those of the least tile.
FEW_TOKENS = 256


def select(arch: Arch, tokens: int, hidden: int, multiprocessors: int) -> MixConfig:
    """Columns of few tokens are cut until every multiprocessor has a program.

    Of more, small tiles hide most of the time to memory: of 20 candidates for 1,024 to 8,192 tokens and both hidden
    sizes sm_90's was the fastest each time (H100, 2026-11-24). On SM12x, where none was timed, Triton 3.9 would keep
    two of its registers in local memory; nothing of these tiles is there.
    """
    if tokens <= FEW_TOKENS:
        return MixConfig(16, 32, _span(32, -(-tokens // 16), hidden, multiprocessors), 4, 2)
    if arch is Arch.SM_90:
        return MixConfig(32, 32, 512, 4, 2, apart=True, coefficients=32)
    return MixConfig(64, 32, 512, 8, 2, apart=True, coefficients=32)


def _span(block_c: int, blocks: int, hidden: int, programs: int) -> int:
    """Columns of one program: spans that halve from the whole row down make few different kernels, all warmed up."""
    wanted = max(1, min(-(-programs // blocks), MAX_SPLITS))
    span = block_c
    while -(-hidden // span) > wanted:
        span *= 2
    return span


def post_config(tokens: int) -> MixConfig:
    """`mhc_post` has no products, so its tiles are free: enough columns in flight, one token."""
    return MixConfig(1, 1024, 1024, 4, 1)


def padded(splits: int) -> int:
    """The next power of two: how many partial results the apply kernel loads at once."""
    return 1 << (splits - 1).bit_length()


def coefficient_tile(config: MixConfig, splits: int) -> tuple[int, int]:
    """Return the splits and tokens that a program for post and comb loads at once, a tile that registers hold."""
    if config.coefficients:
        return 1, config.coefficients
    return padded(splits), max(1, min(16, 32 // padded(splits)))


MIX_SIGNATURE = {
    "x_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "post_ptr": "*fp32",
    "comb_ptr": "*fp32",
    "fn_ptr": "*fp32",
    "out_ptr": "*bf16",
    "part_ptr": "*fp32",
    "tokens": "i32",
}
APPLY_SIGNATURE = {
    "part_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "base_ptr": "*fp32",
    "residual_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "stream_ptr": "*bf16",
    "post_ptr": "*fp32",
    "comb_ptr": "*fp32",
    "y_ptr": "*bf16",
    "code_ptr": "*fp8e4nv",
    "code_scale_ptr": "*u8",
    "tokens": "i32",
    "splits": "i32",
    "rms_eps": "fp32",
    "pre_eps": "fp32",
    "sinkhorn_eps": "fp32",
    "post_mult": "fp32",
    "norm_eps": "fp32",
    "repeat": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Few and many tokens at both hidden sizes, for every form: pre, broadcast, seam, post, head."""
    records = []
    for arch in Arch:
        for tokens, hidden in ((1, 4096), (128, 4096), (4096, 4096), (1, 7168), (4096, 7168)):
            config = select(arch, tokens, hidden, arch.spec.multiprocessors)
            records += [_mix(arch, config, hidden, streams, rows, post) for streams, rows, post in _FORMS]
            records += [_apply(arch, config, hidden, 4, True, False, quant) for quant in (False, True)]
            if tokens == 1:
                records += [_apply(arch, config, hidden, 1, True, False, quant) for quant in (False, True)]
                records.append(_apply(arch, config, hidden, 4, False, True))
        records += [_mix(arch, post_config(1), hidden, 4, 0, True) for hidden in (4096, 7168)]
        records += [_planes(arch, rows * hidden) for hidden in (4096, 7168) for rows in (96, 24, 16)]
    return tuple({record.key: record for record in records}.values())


_FORMS = ((4, 24, False), (1, 24, False), (4, 24, True), (4, 4, False))


def _mix(arch: Arch, config: MixConfig, hidden: int, streams: int, rows: int, post: bool) -> StaticKernel:
    form = {(4, 24): "pre", (1, 24): "broadcast", (4, 4): "head", (4, 0): "post"}[streams, rows]
    wgmma = arch is Arch.SM_90 and config.block_t >= 64
    apart = config.apart and rows > 0
    mma = ("none",) if not rows else ("wgmma-bf16",) if wgmma else ("bf16",)
    return StaticKernel(
        operation="mhc",
        kernel="dsv4_kernels.mhc.kernel:mhc_mix_kernel",
        label=f"t{config.block_t}-c{config.span}-h{hidden}-{'seam' if post and rows else form}",
        arch=arch,
        signature={**MIX_SIGNATURE, "fn_ptr": "*bf16" if apart or not rows else "*fp32"},
        constexprs={
            "H": hidden,
            "STREAMS": streams,
            "ROWS": rows,
            "POST": post,
            "SPAN": config.span,
            "BT": config.block_t,
            "BC": config.block_c,
            "STAGES": config.num_stages,
            "APART": apart,
            "EARLY": rows > 0,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # On sm_90 Triton 3.9 keeps two registers of many tokens in local memory, of 168 at most; 3.6 and 3.8 none.
        expect=Expect(mma=mma, spill=8 if apart and arch is Arch.SM_90 else 0),
    )


def _apply(
    arch: Arch, config: MixConfig, hidden: int, streams: int, norm: bool, head: bool, quant: bool = False
) -> StaticKernel:
    form = "head" if head else "pre" if streams == 4 else "broadcast"
    splits = -(-hidden // config.span)
    block_s = padded(splits)
    coefficient_s, coefficient_t = coefficient_tile(config, splits)
    return StaticKernel(
        operation="mhc",
        kernel="dsv4_kernels.mhc.kernel:mhc_apply_kernel",
        label=f"s{block_s}-h{hidden}-{form}{'-o8' if quant else ''}",
        arch=arch,
        signature=APPLY_SIGNATURE,
        constexprs={
            "H": hidden,
            "STREAMS": streams,
            "NORM": norm,
            "HEAD": head,
            "BS": block_s,
            "CS": coefficient_s,
            "CT": coefficient_t,
            "BH": padded(hidden),
            "QUANT": quant,
            "EARLY": True,
        },
        num_warps=config.apply_warps,
        num_stages=1,
    )


def _planes(arch: Arch, values: int) -> StaticKernel:
    return StaticKernel(
        operation="mhc",
        kernel="dsv4_kernels.mhc.kernel:mhc_planes_kernel",
        label=f"n{values}",
        arch=arch,
        signature={"fn_ptr": "*fp32", "out_ptr": "*bf16"},
        constexprs={"N": values, "BLOCK": PLANES_BLOCK},
        num_warps=4,
        num_stages=1,
    )
