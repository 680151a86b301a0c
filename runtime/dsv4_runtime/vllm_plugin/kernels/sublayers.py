"""Kernels between the products of a layer: hyper-connections, norms, RoPE and cache insertion, shared experts'
activation.

`norm` replaces the function imported by the attention's module, `insert` the method that calls vLLM's fused CUDA
operator. vLLM's own run if the key is not stored in the layout `fp8_ds_mla` (`dsv4_kernels.front`).

Hyper-connections (`dsv4_kernels.mhc`) have the names that vLLM's model imports. A step's residual, coefficients and
layer inputs are in the buffers of shared plans: the next seam reads those of the seam and overwrites them. `mhc_post`
has separate buffers, since a draft model may call it in between.

The activation of the shared experts and the quantization for their second product are one launch. The result is also
written in bf16, since a layer before the product may read it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from dsv4_kernels.fp8.api import SiluMulPlan, silu_places
from dsv4_kernels.front.api import InsertPlan, NormPlan
from dsv4_kernels.mhc.api import HeadPlan, MhcPlan, PostPlan, PrePlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import choice, most_tokens
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, HookMismatchError, load, parameters
from dsv4_runtime.vllm_plugin.kernels.plans import (
    DEVICE,
    aligned,
    announce,
    announced_plan,
    give_codes,
    pages,
    shared_plan,
    wanted_codes,
)


def announcing(original: Callable[..., None]) -> Callable[..., None]:
    """Return `__init__` of vLLM's attention, which also announces the norms."""

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        rank, most = self.q_lora_rank, most_tokens(self.max_num_batched_tokens)
        if quantised := wanted_codes(rank):
            announce(NormPlan, quantised, rank, DEVICE, quantised=True)
        if quantised < most and choice().bundled(Op.FRONT):
            announce(NormPlan, most, rank, DEVICE)

    return make


def norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fused_q_kv_rmsnorm` with the bundled kernel if chosen, or if a product uses FP8 codes."""

    @functools.wraps(original)
    def fused_q_kv_rmsnorm(
        qr: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> Any:
        (tokens, rank), most = qr.shape, wanted_codes(qr.shape[1])
        here = tokens <= most or choice().bundled(Op.FRONT)
        if not here or kv.shape[1] != 512 or {x.dtype for x in (qr, kv, q_weight, kv_weight)} != {torch.bfloat16}:
            return original(qr, kv, q_weight, kv_weight, eps)
        plan = _norm_plan(most, rank, qr.device, True) if tokens <= most else _norm_plan(tokens, rank, qr.device, False)
        normed, row = plan.run(qr=qr, kv=kv, q_weight=q_weight, kv_weight=kv_weight, eps=eps)
        return give_codes(normed, plan.codes(tokens)), row

    return fused_q_kv_rmsnorm


def _norm_plan(tokens: int, rank: int, device: torch.device, quantised: bool) -> NormPlan:
    most = tokens if quantised else most_tokens(tokens)
    return shared_plan(
        (Op.FRONT, "norm", most, rank, device, quantised), lambda: NormPlan(most, rank, device, quantised=quantised)
    )


def insert(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_fused_qnorm_rope_kv_insert` of vLLM's attention with the bundled kernel."""

    @functools.wraps(original)
    def _fused_qnorm_rope_kv_insert(
        self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, attn_metadata: Any
    ) -> Any:
        # A step of vLLM's profile has no metadata and stores nothing.
        if not isinstance(attn_metadata, dict) or not _inserts_here(self):
            return original(self, q, kv, positions, attn_metadata)
        metadata, tokens = attn_metadata[self.swa_cache_layer.prefix], q.shape[0]
        found, _ = _insert_plan(self).run(
            q=q,
            kv=kv.contiguous(),
            kv_cache=pages(self.swa_cache_layer.kv_cache),
            slot_mapping=aligned(metadata.slot_mapping[:tokens]),
            positions=aligned(positions[:tokens]),
            cos_sin_cache=self.rotary_emb.cos_sin_cache,
            padded_heads=self.padded_heads,
            eps=self.eps,
            page=metadata.block_size,
            out=torch.empty((tokens, self.padded_heads, 512), dtype=q.dtype, device=q.device),
        )
        return found

    return _fused_qnorm_rope_kv_insert


def plan_ahead_of_requests(layer: Any) -> None:
    """Make the insertion plan of the attention `layer`, once it has its KV cache."""
    if _inserts_here(layer):
        _insert_plan(layer)


def _inserts_here(layer: Any) -> bool:
    return choice().bundled(Op.FRONT) and layer.swa_cache_layer.kv_cache.dtype == torch.uint8


def _insert_plan(layer: Any) -> InsertPlan:
    cache = layer.swa_cache_layer.kv_cache
    size = (most_tokens(layer.max_num_batched_tokens), layer.n_local_heads, layer.padded_heads, cache.device)
    place = (cache.shape[1], cache.stride(0))
    return announced_plan((Op.FRONT, "insert", *size, *place), InsertPlan, *size, *place, own_output=False)


# The model always includes the following norm.
_NORMS = (True,)
_KINDS: Mapping[str, type[MhcPlan]] = {
    "mhc_pre": PrePlan,
    "mhc_pre_broadcast": PrePlan,
    "mhc_post_pre": PrePlan,
    "mhc_post": PostPlan,
    "mhc_head": HeadPlan,
}


def announce_plans(hidden: int) -> None:
    """Announce the plans of a model with `hidden` values per stream."""
    for name, kind in _KINDS.items():
        announce(kind, name, most_tokens(1), hidden, DEVICE, **_hyper_options(kind, hidden))


def _hyper_options(kind: type[MhcPlan], hidden: int) -> dict[str, Any]:
    """Return the options of a plan of `kind`: the input of a sublayer is quantized for its products."""
    quantised = {"quantised": wanted_codes(hidden)} if kind is PrePlan else {}
    return {"norms": _NORMS, **quantised}


def _hyper_plan(name: str, tensor: torch.Tensor) -> Any:
    def make() -> MhcPlan:
        kind, hidden = _KINDS[name], tensor.shape[-1]
        return kind(name, most_tokens(tensor.shape[0]), hidden, tensor.device, **_hyper_options(kind, hidden))

    return shared_plan((Op.MHC, name, tensor.shape[-1], tensor.device), make)


def _before_sublayer(name: str, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Run the plan `name`; its last result y carries FP8 codes if a product uses them."""
    plan = _hyper_plan(name, inputs["residual"])
    results: tuple[torch.Tensor, ...] = plan.run(**inputs)
    give_codes(results[-1], plan.codes(results[-1].shape[0]))
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
    plan = _hyper_plan("mhc_post", residual)
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
    result: torch.Tensor = _hyper_plan("mhc_head", hs_flat).run(
        hs_flat=hs_flat, fn=fn, hc_scale=hc_scale, hc_base=hc_base, rms_eps=rms_eps, hc_eps=hc_eps
    )
    return result


def hyper_connections(module: ModuleType) -> list[Assignment]:
    """Return the assignment that replaces the functions of the model, and of the draft models, with its first layer."""
    functions = {name: load(reference) for name, reference in vllm_api.adapter().HYPER_CONNECTIONS.items()}
    for name, own in functions.items():
        if (found := parameters(getattr(module, name))) != (expected := parameters(own)):
            raise HookMismatchError(f"parameters of {name} are {found}, expected {expected}")
    layer = module.DeepseekV4DecoderLayer
    original, unused = layer.__init__, vllm_api.adapter().TILELANG_HYPER_CONNECTIONS

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if choice().bundled(Op.MHC):
            sys.modules.setdefault(unused, UnusedKernels(unused))
            # Looked up here: vLLM imports the module of the MTP after this one.
            consumers = [module, *(sys.modules.get(f"{module.__package__}.{name}") for name in ("mtp", "dspark"))]
            for consumer in filter(None, consumers):
                for name in functions.keys() & vars(consumer).keys():
                    setattr(consumer, name, functions[name])
        original(self, *args, **kwargs)
        if choice().bundled(Op.MHC):
            announce_plans(self.hidden_size)

    return [(layer, "__init__", make)]


class _Unused:
    """Placeholder of an unused kernel; its registration for the warm-up has no effect."""

    def register_warmup(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class UnusedKernels(ModuleType):
    """A module with unused kernels only, so that TileLang or CuTe are not required and compile nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused()


def prepare_activation(mlp: Any) -> None:
    """Store the clamp of the activation on `mlp`, a `DeepseekV4MLP`, unless the activation is unknown."""
    act = mlp.act_fn
    # Exactly these: vLLM's class with a clamp has further parameters, which other models set.
    plain = getattr(act, "alpha", 1.0) == 1.0 and getattr(act, "beta", 0.0) == 0.0
    if type(act).__name__ in ("SiluAndMul", "SiluAndMulWithClamp") and plain:
        mlp.dsv4_limit = float(getattr(act, "swiglu_limit", "inf"))
    width = int(mlp.down_proj.input_size_per_partition)
    if wanted_codes(width):
        announce(SiluMulPlan, wanted_codes(width), width, DEVICE)


def activation(mlp: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the input bf16 [T, K] of the second product of `mlp` from gate_up [T, 2K]."""
    tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
    limit = getattr(mlp, "dsv4_limit", None)
    if limit is None or gate_up.dim() != 2 or tokens > wanted_codes(width) or gate_up.dtype != torch.bfloat16:
        found: torch.Tensor = mlp.act_fn(gate_up)
        return found
    most, device = wanted_codes(width), gate_up.device
    plan = shared_plan((Op.FP8_LINEAR, "silu", width, most, device), lambda: SiluMulPlan(most, width, device))
    y, code, scale = plan.run(x=gate_up, limit=limit, out=silu_places(tokens, width, device))
    return give_codes(y, (code, scale))


def shared_experts(module: ModuleType) -> list[Assignment]:
    """Return the assignments for `DeepseekV4MLP` of vLLM's model: the activation with quantization."""
    kind = module.DeepseekV4MLP
    original = kind.__init__

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        prepare_activation(self)

    @functools.wraps(kind.forward)
    def with_codes(self: Any, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(activation(self, gate_up))
        return x

    return [(kind, "__init__", make), (kind, "forward", with_codes)]
