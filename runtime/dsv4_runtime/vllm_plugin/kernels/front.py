"""Steps before vLLM's DeepSeek-V4 attention by `dsv4_kernels.front`: norms, RoPE, the window's cache entry.

`norm` stands for the function that the attention's module imports, `insert` for the method that calls vLLM's fused
CUDA operator. Where the key is not stored as `fp8_ds_mla` stores it, vLLM's own run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.front.api import InsertPlan, NormPlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import codes
from dsv4_runtime.vllm_plugin.kernels.active import choice, most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce, announced_plan
from dsv4_runtime.vllm_plugin.kernels.views import aligned, pages


def announcing(original: Callable[..., None]) -> Callable[..., None]:
    """Return `__init__` of vLLM's attention, which also has the norms compiled beside the weights."""

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        rank, most = self.q_lora_rank, most_tokens(self.max_num_batched_tokens)
        if quantised := codes.wanted(rank):
            announce(NormPlan, quantised, rank, DEVICE, quantised=True)
        if quantised < most and choice().bundled(Op.FRONT):
            announce(NormPlan, most, rank, DEVICE)

    return make


def norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fused_q_kv_rmsnorm` with the bundled kernel where it is chosen, or a product takes FP8 codes."""

    @functools.wraps(original)
    def fused_q_kv_rmsnorm(
        qr: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> Any:
        (tokens, rank), most = qr.shape, codes.wanted(qr.shape[1])
        here = tokens <= most or choice().bundled(Op.FRONT)
        if not here or kv.shape[1] != 512 or {x.dtype for x in (qr, kv, q_weight, kv_weight)} != {torch.bfloat16}:
            return original(qr, kv, q_weight, kv_weight, eps)
        plan = _norm_plan(most, rank, qr.device, True) if tokens <= most else _norm_plan(tokens, rank, qr.device, False)
        normed, row = plan.run(qr=qr, kv=kv, q_weight=q_weight, kv_weight=kv_weight, eps=eps)
        return codes.give(normed, plan.codes(tokens)), row

    return fused_q_kv_rmsnorm


def _norm_plan(tokens: int, rank: int, device: torch.device, quantised: bool) -> NormPlan:
    most = tokens if quantised else most_tokens(tokens)
    plan: NormPlan = shared_plan(
        (Op.FRONT, "norm", most, rank, device, quantised), lambda: NormPlan(most, rank, device, quantised=quantised)
    )
    return plan


def insert(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_fused_qnorm_rope_kv_insert` of vLLM's attention with the bundled kernel."""

    @functools.wraps(original)
    def _fused_qnorm_rope_kv_insert(
        self: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, attn_metadata: Any
    ) -> Any:
        # Without metadata it is a step of vLLM's profile, which stores nothing.
        if not isinstance(attn_metadata, dict) or not _here(self):
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
    """Make the plan that the attention `layer` will ask for, once it has its KV cache."""
    if _here(layer):
        _insert_plan(layer)


def _here(layer: Any) -> bool:
    return choice().bundled(Op.FRONT) and layer.swa_cache_layer.kv_cache.dtype == torch.uint8


def _insert_plan(layer: Any) -> InsertPlan:
    cache = layer.swa_cache_layer.kv_cache
    size = (most_tokens(layer.max_num_batched_tokens), layer.n_local_heads, layer.padded_heads, cache.device)
    place = (cache.shape[1], cache.stride(0))
    plan: InsertPlan = announced_plan((Op.FRONT, "insert", *size, *place), InsertPlan, *size, *place, own_output=False)
    return plan
