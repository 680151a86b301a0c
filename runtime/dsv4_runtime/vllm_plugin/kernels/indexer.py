"""The indexer of vLLM's sparse attention, its queries and scores computed by `dsv4_kernels.indexer`.

These take the place of functions that vLLM's modules import by name, with the same arguments. The choice of the best
keys stays vLLM's. No schedule is made for the paged scores: the bundled kernel needs none. So all of them are in force
or none: the choice has the operation only if all of its hooks are attached (`hooks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.indexer.api import LogitsPlan, PagedLogitsPlan, QueryPlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import choice, most_rows, most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce, announced_plan
from dsv4_runtime.vllm_plugin.kernels.views import aligned


def in_force() -> bool:
    """Tell whether the bundled kernels compute the indexer in this process."""
    return choice().bundled(Op.INDEXER)


def scores_are_there(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return `has_deep_gemm` of vLLM's indexer, which is not made without it: the bundled scores will do too."""

    def has_deep_gemm() -> bool:
        return in_force() or original()

    return has_deep_gemm


def _logits_plan(heads: int, device: torch.device) -> LogitsPlan:
    plan: LogitsPlan = announced_plan((Op.INDEXER, "logits", heads, device), LogitsPlan, heads, device)
    return plan


class _PagedPlans:
    """Plans of the paged scores for 1 to `most` rows a request.

    A step verifies as many tokens a request as its longest draft has. Graphs are recorded with full drafts before vLLM
    serves; shorter ones come only while it does, and must find their kernel compiled.
    """

    def __init__(self, most: int, make: Callable[[int], PagedLogitsPlan]) -> None:
        self.plans = {rows: make(rows) for rows in range(1, most + 1)}
        self._compiled = False

    def warmup(self) -> None:
        """Compile all of them."""
        for plan in self.plans.values():
            plan.warmup()
        self._compiled = True

    def compiled(self) -> _PagedPlans:
        """Compile what is not, at the first call outside of a recording: vLLM runs a step before it records one."""
        if not self._compiled and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.warmup()
        return self


def _paged_plans(rows: int, keys: int, heads: int, device: torch.device, *, page: int, stride: int) -> _PagedPlans:
    most = most_rows(rows)

    def make(rows: int) -> PagedLogitsPlan:
        announce(PagedLogitsPlan, rows, keys, heads, DEVICE, page=page, stride=stride)
        return PagedLogitsPlan(rows, keys, heads, device, page=page, stride=stride)

    plans: _PagedPlans = shared_plan(
        (Op.INDEXER, "paged", most, keys, heads, page, stride, device),
        lambda: _PagedPlans(most, make),
    )
    return plans


def plan_ahead_of_requests(layer: Any) -> None:
    """Make the plans that `layer`, vLLM's indexer, will ask for, once it has its cache of keys."""
    if not in_force() or layer.indexer_op.use_fp4_cache:
        return
    heads, keys, cache = layer.n_head, layer.indexer_op.max_model_len, layer.indexer_op.k_cache.kv_cache
    page, stride, device = cache.shape[1], cache.view(torch.uint8).stride(0), cache.device
    _query_plan(1, heads, device)
    _paged_plans(1, keys, heads, device, page=page, stride=stride)


def _query_plan(tokens: int, heads: int, device: torch.device) -> QueryPlan:
    # vLLM asks for scores only once a context is longer than what is chosen from it: not before it serves.
    _logits_plan(heads, device)
    plan: QueryPlan = announced_plan(
        (Op.INDEXER, "query", heads, device), QueryPlan, most_tokens(tokens), heads, device
    )
    return plan


def query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fused_indexer_q_rope_quant` with the bundled kernel for FP8 queries."""

    def fused_indexer_q_rope_quant(
        positions: torch.Tensor,
        index_q: torch.Tensor,
        index_q_cos_sin_cache: torch.Tensor,
        index_weights: torch.Tensor,
        index_weights_softmax_scale: float,
        index_weights_head_scale: float,
        use_fp4: bool = False,
        weights_out_dtype: torch.dtype = torch.float32,
    ) -> Any:
        if use_fp4 or weights_out_dtype != torch.float32 or not in_force():
            return original(
                positions, index_q, index_q_cos_sin_cache, index_weights, index_weights_softmax_scale,
                index_weights_head_scale, use_fp4, weights_out_dtype,
            )  # fmt: skip
        tokens, heads = index_q.shape[:2]
        codes, weights = _query_plan(tokens, heads, index_q.device).run(
            positions=positions,
            index_q=index_q.contiguous(),
            index_q_cos_sin_cache=index_q_cos_sin_cache,
            index_weights=index_weights.contiguous(),
            index_weights_softmax_scale=index_weights_softmax_scale,
            index_weights_head_scale=index_weights_head_scale,
        )
        return codes.view(torch.float8_e4m3fn), weights

    return fused_indexer_q_rope_quant


def logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fp8_fp4_mqa_logits` with the bundled kernel for FP8 queries."""

    def fp8_fp4_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        max_seqlen_k: int,
    ) -> Any:
        if q[1] is not None or not in_force():
            return original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
        rows, heads = q[0].shape[:2]
        plan = _logits_plan(heads, q[0].device)
        out = torch.empty((rows, max_seqlen_k), dtype=torch.float32, device=weights.device)
        return plan.run(
            q=aligned(q[0].view(torch.uint8)),
            k=aligned(kv[0].view(torch.uint8)),
            k_scale=aligned(kv[1].view(torch.float32)),
            weights=aligned(weights),
            cu_seqlen_ks=aligned(cu_seqlen_ks),
            cu_seqlen_ke=aligned(cu_seqlen_ke),
            out=out,
        )

    return fp8_fp4_mqa_logits


def paged_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fp8_fp4_paged_mqa_logits` with the bundled kernel for FP8 queries."""

    def fp8_fp4_paged_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule_metadata: torch.Tensor,
        max_model_len: int,
        indices: torch.Tensor | None = None,
    ) -> Any:
        if q[1] is not None or indices is not None or not in_force():
            return original(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices)
        batch, next_n, heads = q[0].shape[:3]
        pages = kv_cache.view(torch.uint8).squeeze(2) if kv_cache.dim() == 4 else kv_cache.view(torch.uint8)
        device = weights.device
        plans = _paged_plans(next_n, max_model_len, heads, device, page=pages.shape[1], stride=pages.stride(0))
        plan = plans.compiled().plans[next_n]
        return plan.run(
            q=aligned(q[0].view(torch.uint8)),
            kv_cache=pages,
            weights=aligned(weights),
            context_lens=aligned(context_lens.view(batch, next_n)),
            block_tables=block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous(),
            out=torch.empty((batch * next_n, max_model_len), dtype=torch.float32, device=device),
        )

    return fp8_fp4_paged_mqa_logits


def no_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `get_paged_mqa_logits_metadata` that makes nothing where the bundled kernel scores."""

    def get_paged_mqa_logits_metadata(
        context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None
    ) -> Any:
        if indices is not None or not in_force():
            return original(context_lens, block_size, num_sms, indices=indices)
        return torch.empty((0, 2), dtype=torch.int32, device=context_lens.device)

    return get_paged_mqa_logits_metadata
