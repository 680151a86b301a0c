"""Multiplies by bfloat16 weights in float32 on processors that have no products of bfloat16."""

from typing import Any

import torch

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

_MODULE = "vllm.model_executor.layers.utils"
_SYMBOL = "dispatch_cpu_unquantized_gemm"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, rounded to the type of `x` once, at the end.

    Args:
        x: bfloat16 `[..., K]`.
        weight: float32 `[N, K]`.
        bias: `[N]`.
    """
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, wide).to(x.dtype)


def _apply() -> PatchOutcome:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or torch.cpu._is_avx512_bf16_supported():
        return PatchOutcome.NOT_WANTED
    original = utils.dispatch_cpu_unquantized_gemm
    expect_parameters(_SYMBOL, original, ["layer", "remove_weight"])

    def dispatch(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight)
        # Where oneDNN took the weight, it is gone or of another type.
        if layer.weight.numel() and layer.weight.dtype == torch.bfloat16:
            wide = layer.weight.float()
            layer.cpu_linear = lambda x, weight, bias: linear(x, wide, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "without AVX-512 oneDNN refuses bfloat16, and what vLLM falls back to takes ten times as long for 512 tokens as"
        " float32 does"
    ),
    upstream="none known",
    versions="vLLM 0.32.0",
    obsolete_when="oneDNN, or vLLM without it, multiplies bfloat16 on AVX2 with sums of float32",
    apply=_apply,
)
