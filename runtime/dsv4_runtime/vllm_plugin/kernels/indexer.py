"""The indexer of vLLM's sparse attention: queries and scores by `dsv4_kernels.indexer`, selection by
`dsv4_kernels.indexer`.

The scores replace functions that vLLM's modules import by name, with equal arguments. The bundled kernel needs no
schedule for paged scores, and none is made. Therefore all replacements are in force or none: the choice contains the
operation only if all of its hooks are attached (`hooks`).

vLLM's indexer writes the columns of each row's highest scores into its buffer, and −1 for missing ones. For decode it
calls a class that selects one of vLLM's kernels, for prompts a function of `vllm._custom_ops`. Both are replaced for
layers with a plan; inputs that the plan does not support go to vLLM's kernels. vLLM fills the rows with −1 before,
since its kernels leave elements unwritten. The bundled kernels write complete rows: for a layer with a plan the fill is
omitted, and done here for vLLM's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.indexer.api import FEW_ROWS, LARGEST, LogitsPlan, PagedLogitsPlan, QueryPlan, TopkPlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import choice, most_rows, most_tokens
from dsv4_runtime.vllm_plugin.kernels.plans import DEVICE, aligned, announce, announced_plan, shared_plan


def in_force() -> bool:
    """Return whether bundled kernels compute the indexer in this process."""
    return choice().bundled(Op.INDEXER)


def scores_are_there(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return `has_deep_gemm` of vLLM's indexer, which requires it; the bundled scores satisfy the requirement."""

    def has_deep_gemm() -> bool:
        return in_force() or original()

    return has_deep_gemm


def _logits_plan(heads: int, device: torch.device) -> LogitsPlan:
    return announced_plan((Op.INDEXER, "logits", heads, device), LogitsPlan, heads, device)


class _PagedPlans:
    """Plans of the paged scores for 1 to `most` rows per request.

    The longest draft determines the tokens per request of a step. Graphs are captured with full drafts before vLLM
    serves; shorter drafts occur only while it serves and require compiled kernels.
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
        """Compile at the first call outside of a capture: vLLM runs a step before each capture."""
        if not self._compiled and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.warmup()
        return self


def _paged_plans(rows: int, keys: int, heads: int, device: torch.device, *, page: int, stride: int) -> _PagedPlans:
    most = most_rows(rows)

    def make(rows: int) -> PagedLogitsPlan:
        announce(PagedLogitsPlan, rows, keys, heads, DEVICE, page=page, stride=stride)
        return PagedLogitsPlan(rows, keys, heads, device, page=page, stride=stride)

    return shared_plan(
        (Op.INDEXER, "paged", most, keys, heads, page, stride, device),
        lambda: _PagedPlans(most, make),
    )


def plan_ahead_of_requests(layer: Any) -> None:
    """Make the plans of `layer`, vLLM's indexer, once it has its cache of keys."""
    if not in_force() or layer.indexer_op.use_fp4_cache:
        return
    heads, keys, cache = layer.n_head, layer.indexer_op.max_model_len, layer.indexer_op.k_cache.kv_cache
    page, stride, device = cache.shape[1], cache.view(torch.uint8).stride(0), cache.device
    _query_plan(1, heads, device)
    _paged_plans(1, keys, heads, device, page=page, stride=stride)


def _query_plan(tokens: int, heads: int, device: torch.device) -> QueryPlan:
    # vLLM computes scores only for contexts longer than the selection: not before it serves.
    _logits_plan(heads, device)
    return announced_plan((Op.INDEXER, "query", heads, device), QueryPlan, most_tokens(tokens), heads, device)


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
    """Return vLLM's `get_paged_mqa_logits_metadata` with an empty result for the bundled scores."""

    def get_paged_mqa_logits_metadata(
        context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None
    ) -> Any:
        if indices is not None or not in_force():
            return original(context_lens, block_size, num_sms, indices=indices)
        return torch.empty((0, 2), dtype=torch.int32, device=context_lens.device)

    return get_paged_mqa_logits_metadata


_TOPK_PLANS: dict[tuple[int, torch.device], TopkPlan] = {}
_TOPK_REPLACED: set[str] = set()
"""Replaced ones of "decode" and "prompts"; vLLM 0.32's prompts are not."""


def planning_topk(original: Callable[..., None]) -> Callable[..., None]:
    """Return `SparseAttnIndexer.__init__` of vLLM, which also plans the selection of keys."""
    most_scores = (vllm_api.envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20) // 4

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plan_topk(self, most_scores)

    return make


def plan_topk(layer: Any, most_scores: int) -> None:
    """Make the plan for `layer`, vLLM's new sparse indexer, before the allocation of the KV cache.

    A chunk of a prompt has at most `most_scores` scores. An explicit selection of vLLM's kernel is respected. Models
    with uncompressed keys also have this indexer, without a kernel choice.
    """
    if layer.topk_backend != "auto" or layer.compress_ratio == 1 or not choice().bundled(Op.TOPK):
        return
    k, width, device = layer.topk_tokens, layer.max_model_len, layer.topk_indices_buffer.device
    held = _TOPK_PLANS.get((k, device))
    if held is not None and held.width >= width:
        return
    rows = planned_rows(most_tokens(1), width, most_scores)
    _TOPK_PLANS[k, device] = shared_plan((Op.TOPK, rows, width, k, device), lambda: TopkPlan(rows, width, k, device))
    announce(TopkPlan, rows, width, k, DEVICE)


def planned_rows(tokens: int, width: int, most_scores: int) -> int:
    """Return the rows of `width` scores for which a plan needs buffers in a step of up to `tokens` rows.

    Rows of one chunk need no buffer, longer rows one per chunk; narrow rows have up to twice as many chunks as their
    scores fill.
    """
    enough = 0 if width <= LARGEST else min(tokens, -(-2 * most_scores // width))
    # The warm-up also compiles the kernels for many rows.
    return max(enough, FEW_ROWS + 1)


def _chosen(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, k: int) -> bool:
    """Write the columns of the `k` highest scores of each row into `out`; return False without a suitable plan."""
    plan = _TOPK_PLANS.get((k, logits.device))
    rows, width = logits.shape
    if (
        plan is None
        or not plan.holds(rows, width)
        or logits.dtype != torch.float32
        or logits.stride(1) != 1
        or logits.data_ptr() % 16
        or lengths.dtype != torch.int32
        or lengths.numel() != rows
        or not lengths.is_contiguous()
    ):
        return False
    plan.run(logits=logits, lengths=lengths, k=k, out=out)
    return True


def unfilled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `SparseAttnIndexer.forward_cuda`, without the fill for a layer with a plan."""

    @functools.wraps(original)
    def forward_cuda(self: Any, hidden_states: torch.Tensor, q_quant: Any, k: Any, weights: torch.Tensor) -> Any:
        buffer = self.topk_indices_buffer
        whole = self.topk_backend == "auto" and self.compress_ratio != 1 and buffer.shape[1] == self.topk_tokens
        if whole and len(_TOPK_REPLACED) == 2 and (self.topk_tokens, buffer.device) in _TOPK_PLANS:
            # vLLM uses only their number of rows, for the fill.
            hidden_states = hidden_states[:0]
        return original(self, hidden_states, q_quant, k, weights)

    return forward_cuda


def _fill(out: torch.Tensor, k: int) -> None:
    """Fill `out` with −1 where `unfilled` may have omitted it."""
    if (k, out.device) in _TOPK_PLANS:
        out.fill_(-1)


class Padded:
    """Preserves rows of prompts that a padded decode overwrites.

    If requests decode different numbers of tokens, vLLM pads them to the longest and writes the selection of the padded
    rows over the first rows of its buffer. The rows after those of decode tokens contain the finished selection of
    prompts, and vLLM restores only the rows of decode tokens (review of vLLM's pull request 32175; as of 0.33). The
    surrounding functions are wrapped to save and restore the following rows.
    """

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return vLLM's `pack_seq_triton`, which pads the queries of decode tokens, x [tokens, ...]."""

        @functools.wraps(original)
        def pack_seq_triton(x: torch.Tensor, lengths: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._tokens = x.shape[0]
            return original(x, lengths, *args, **kwargs)

        return pack_seq_triton

    def keep(self, rows: torch.Tensor) -> None:
        """Save the part of `rows`, the target of a decode's selection, that does not belong to decode tokens."""
        tokens, self._tokens, self._kept = self._tokens, None, None
        if tokens is not None and tokens < rows.shape[0]:
            behind = rows[tokens:]
            self._kept = (behind, behind.clone())

    def unpack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return vLLM's `unpack_seq_triton`, which copies the decode tokens' rows out of the padded ones."""

        @functools.wraps(original)
        def unpack_seq_triton(packed_tensor: torch.Tensor, lengths: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            unpacked = original(packed_tensor, lengths, *args, **kwargs)
            kept, self._kept = self._kept, None
            if kept is not None:
                kept[0].copy_(kept[1])
            return unpacked

        return unpack_seq_triton


PADDED = Padded()


def topk_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `SparseIndexerTopk.forward` with the bundled kernels."""
    _TOPK_REPLACED.add("decode")

    @functools.wraps(original)
    def forward(
        self: Any,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        PADDED.keep(topk_indices)
        # Only vLLM's kernels derive row lengths from lengths of requests.
        if self._backend != "auto" or not _chosen(logits, seq_lens, topk_indices, topk_tokens):
            _fill(topk_indices, topk_tokens)
            original(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)

    return forward


class PromptOps:
    """vLLM's operators in its indexer, with the bundled selection for prompts. All rows begin at column 0."""

    def __init__(self, ops: Any) -> None:
        _TOPK_REPLACED.add("prompts")
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def top_k_per_row_prefill(
        self,
        logits: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        raw_topk_indices: torch.Tensor,
        num_rows: int,
        stride0: int,
        stride1: int,
        topk_tokens: int,
    ) -> None:
        """Write the columns of each row's highest scores into `raw_topk_indices`."""
        if not _chosen(logits, cu_seqlen_ke, raw_topk_indices, topk_tokens):
            _fill(raw_topk_indices, topk_tokens)
            self._ops.top_k_per_row_prefill(
                logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens
            )
