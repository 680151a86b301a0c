"""Providers of an operation in this vLLM besides the bundled kernels: its own, and the packages that it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from dsv4_kernels.registry import Operation, Provider, operation, register_provider
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, Op
from dsv4_runtime.vllm_plugin.kernels import sm12x_kernels, vllm_kernels
from dsv4_runtime.vllm_plugin.kernels.vllm_kernels import Make

_VLLM: Mapping[Op, tuple[tuple[str, Callable[[], str | None], Make], ...]] = {
    Op.MOE: (("marlin", vllm_kernels.marlin_missing, vllm_kernels.marlin),),
    Op.FP8_LINEAR: (
        ("deepgemm", vllm_kernels.deep_gemm_missing, vllm_kernels.deep_gemm),
        ("cutlass", vllm_kernels.cutlass_missing, vllm_kernels.cutlass),
        ("triton", lambda: None, vllm_kernels.vllm_triton),
    ),
    Op.MLA_DECODE: (("flashmla", vllm_kernels.flash_mla_missing, vllm_kernels.flash_mla),),
    Op.MLA_PREFILL: (("flashmla", vllm_kernels.flash_mla_missing, vllm_kernels.flash_mla_prefill),),
    Op.FRONT: (("cuda", vllm_kernels.front_missing, vllm_kernels.front_insert),),
    Op.O_PROJ: (("deepgemm", vllm_kernels.deep_gemm_missing, vllm_kernels.deep_gemm_einsum),),
    Op.MHC: (("tilelang", vllm_kernels.tilelang_missing, vllm_kernels.tilelang),),
    Op.COMPRESSOR: (("cute", vllm_kernels.cute_missing, vllm_kernels.cute),),
    Op.INDEXER: (),
    Op.ROUTER: (("gate", lambda: None, vllm_kernels.gate),),
    Op.TOPK: (("cuda", lambda: None, vllm_kernels.indexer_topk),),
}


_SM12X: Mapping[Op, tuple[Provider, ...]] = {
    Op.MOE: (Provider("b12x", sm12x_kernels.b12x_moe_missing, sm12x_kernels.b12x_moe),),
    Op.FP8_LINEAR: (Provider("b12x", sm12x_kernels.b12x_linear_missing, sm12x_kernels.b12x_linear),),
    Op.MLA_DECODE: (
        Provider(
            "flashinfer", sm12x_kernels.flash_infer_missing, sm12x_kernels.flash_infer, sm12x_kernels.FP8_ATTENTION
        ),
    ),
    Op.MLA_PREFILL: (
        Provider(
            "flashinfer",
            sm12x_kernels.flash_infer_missing,
            sm12x_kernels.flash_infer_prefill,
            sm12x_kernels.FP8_ATTENTION,
        ),
    ),
}
"""Tried on compute capability 12.x alone: elsewhere no process is started for them."""

_OPERATIONS: Mapping[Op, str] = {
    Op.MOE: "moe_w4a16",
    Op.FP8_LINEAR: "fp8_gemm",
    Op.MLA_DECODE: "mla_decode",
    Op.MLA_PREFILL: "mla_prefill",
    Op.FRONT: "front_insert",
    Op.O_PROJ: "wo_a_einsum",
    Op.MHC: "mhc_post_pre",
    Op.COMPRESSOR: "compressor_store",
    Op.ROUTER: "router",
    Op.TOPK: "topk",
}


@functools.cache
def register() -> None:
    """Register vLLM's kernels as providers of the registry's operations."""
    for op in _OPERATIONS:
        for provider in of(op):
            register_provider(_OPERATIONS[op], provider)
    # Its second operation, which vLLM computes in Triton.
    register_provider("front_norm", Provider("cuda", vllm_kernels.front_missing, vllm_kernels.front_norm))


def of(op: Op) -> tuple[Provider, ...]:
    """Return vLLM's own kernels for `op`, with those that it has on this card alone."""
    return (*(Provider(*row) for row in _VLLM[op]), *(_SM12X.get(op, ()) if sm12x_kernels.here() else ()))


def names(op: Op) -> tuple[str, ...]:
    """Return the providers of `op` that are tried, the bundled ones first."""
    bundled = (BUNDLED, BUNDLED_W4A8) if op is Op.MOE else (BUNDLED,)
    return (*bundled, *(provider.name for provider in of(op)))


def find(operation_name: str, name: str) -> tuple[Operation, Provider]:
    """Return the provider called `name` of an operation of the registry, and the operation that judges it.

    Raises:
        KeyError: there is none of that name.
    """
    register()
    row = operation("moe_w4a8" if name == BUNDLED_W4A8 else operation_name)
    wanted = "dsv4" if name in (BUNDLED, BUNDLED_W4A8) else name
    for provider in row.providers():
        if provider.name == wanted:
            return row, provider
    raise KeyError(f"{operation_name} has no provider {name!r}")
