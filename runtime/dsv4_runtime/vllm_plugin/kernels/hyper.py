"""vLLM's hyper-connections of DeepSeek-V4, computed by `dsv4_kernels.mhc`, under the names that its model imports.

A step's residual, coefficients and layer inputs live in the buffers of shared plans: the seam's are read by the next
seam, which overwrites them. `mhc_post` has buffers of its own, since a draft model may ask for it in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from dsv4_kernels.mhc.api import HeadPlan, MhcPlan, PostPlan, PrePlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import codes
from dsv4_runtime.vllm_plugin.kernels.active import most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce

# The model always has the norm that follows computed along.
_NORMS = (True,)
_KINDS: Mapping[str, type[MhcPlan]] = {
    "mhc_pre": PrePlan,
    "mhc_pre_broadcast": PrePlan,
    "mhc_post_pre": PrePlan,
    "mhc_post": PostPlan,
    "mhc_head": HeadPlan,
}


def announce_plans(hidden: int) -> None:
    """Have the plans of a model with `hidden` values a stream compiled."""
    for name, kind in _KINDS.items():
        announce(kind, name, most_tokens(1), hidden, DEVICE, **_options(kind, hidden))


def _options(kind: type[MhcPlan], hidden: int) -> dict[str, Any]:
    """Return the options of a plan of `kind`: what comes before a sublayer is quantised for the sublayer's products."""
    quantised = {"quantised": codes.wanted(hidden)} if kind is PrePlan else {}
    return {"norms": _NORMS, **quantised}


def _plan(name: str, tensor: torch.Tensor) -> Any:
    def make() -> MhcPlan:
        kind, hidden = _KINDS[name], tensor.shape[-1]
        return kind(name, most_tokens(tensor.shape[0]), hidden, tensor.device, **_options(kind, hidden))

    return shared_plan((Op.MHC, name, tensor.shape[-1], tensor.device), make)


def _before_sublayer(name: str, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Run the plan called `name`; y, the last of its results, comes with FP8 codes where a product takes them."""
    plan = _plan(name, inputs["residual"])
    results: tuple[torch.Tensor, ...] = plan.run(**inputs)
    codes.give(results[-1], plan.codes(results[-1].shape[0]))
    return results


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """Return (post, comb, y) of residual bf16 [T, 4, H]; see `dsv4_kernels.mhc`."""
    return _before_sublayer(
        "mhc_pre", residual=residual, fn=fn, hc_scale=hc_scale, hc_base=hc_base, rms_eps=rms_eps, hc_pre_eps=hc_pre_eps,
        hc_sinkhorn_eps=hc_sinkhorn_eps, hc_post_mult_value=hc_post_mult_value, sinkhorn_repeat=sinkhorn_repeat,
        norm_weight=norm_weight, norm_eps=norm_eps,
    )  # fmt: skip


def mhc_pre_broadcast(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    fn_broadcast: torch.Tensor | None = None,
) -> Any:
    """Return (residual, post, comb, y) of the embeddings bf16 [T, H]."""
    return _before_sublayer(
        "mhc_pre_broadcast", residual=residual, fn_broadcast=fn_broadcast, hc_scale=hc_scale, hc_base=hc_base,
        rms_eps=rms_eps, hc_pre_eps=hc_pre_eps, hc_sinkhorn_eps=hc_sinkhorn_eps, hc_post_mult_value=hc_post_mult_value,
        sinkhorn_repeat=sinkhorn_repeat, norm_weight=norm_weight, norm_eps=norm_eps,
    )  # fmt: skip


def mhc_fused_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """Return (residual, post, comb, y) after the sublayer that made x bf16 [T, H]."""
    return _before_sublayer(
        "mhc_post_pre", x=x, residual=residual, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix, fn=fn,
        hc_scale=hc_scale, hc_base=hc_base, rms_eps=rms_eps, hc_pre_eps=hc_pre_eps, hc_sinkhorn_eps=hc_sinkhorn_eps,
        hc_post_mult_value=hc_post_mult_value, sinkhorn_repeat=sinkhorn_repeat, norm_weight=norm_weight,
        norm_eps=norm_eps,
    )  # fmt: skip


def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """Return the new residual bf16 [T, 4, H]."""
    plan = _plan("mhc_post", residual)
    result: torch.Tensor = plan.run(x=x, residual=residual, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix)
    return result


def hc_head(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Return the streams of hs_flat bf16 [T, 4, H] collapsed to bf16 [T, H]."""
    result: torch.Tensor = _plan("mhc_head", hs_flat).run(
        hs_flat=hs_flat, fn=fn, hc_scale=hc_scale, hc_base=hc_base, rms_eps=rms_eps, hc_eps=hc_eps
    )
    return result


FUNCTIONS = {
    "mhc_pre_tilelang": mhc_pre,
    "mhc_pre_broadcast_tilelang": mhc_pre_broadcast,
    "mhc_fused_post_pre_tilelang": mhc_fused_post_pre,
    "mhc_post_tilelang": mhc_post,
    "hc_head_fused_kernel_tilelang": hc_head,
}


class _Unused:
    """Stands for a kernel of TileLang's that nothing calls: asking for its compilation does nothing."""

    def register_warmup(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class UnusedKernels(ModuleType):
    """A module all of whose kernels are unused, so that TileLang or CuTe need not be there and compile nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused()
