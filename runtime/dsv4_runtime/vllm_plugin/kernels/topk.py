"""The choice of the best keys in vLLM's sparse attention, computed by `dsv4_kernels.indexer`.

vLLM's indexer writes the columns of each row's best scores into its buffer, and −1 where a row has fewer scores. For
decode it asks the class that picks one of vLLM's kernels, for prompts a function of `vllm._custom_ops`. Both are
answered here once a layer has planned it; what the plan does not hold goes to vLLM's kernels.

vLLM fills the rows with −1 before, since its kernels leave places unwritten. The bundled ones write whole rows: where a
layer is planned the fill is left out, and done here for what goes to vLLM's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.indexer.api import FEW_ROWS, LARGEST, TopkPlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import choice, most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce

_PLANS: dict[tuple[int, torch.device], TopkPlan] = {}
_ANSWERED: set[str] = set()
"""Of "decode" and "prompts" what is answered here: vLLM 0.32's prompts are not."""


def plan_ahead(layer: Any, most_scores: int) -> None:
    """Make the plan for `layer`, vLLM's sparse indexer that was just made: its memory counts before the KV cache.

    A chunk of a prompt has at most `most_scores` scores. An explicit choice among vLLM's kernels is left alone. Models
    whose keys are not compressed have this indexer too, and no choice is made for them.
    """
    if layer.topk_backend != "auto" or layer.compress_ratio == 1 or not choice().bundled(Op.TOPK):
        return
    k, width, device = layer.topk_tokens, layer.max_model_len, layer.topk_indices_buffer.device
    held = _PLANS.get((k, device))
    if held is not None and held.width >= width:
        return
    rows = planned_rows(most_tokens(1), width, most_scores)
    _PLANS[k, device] = shared_plan((Op.TOPK, rows, width, k, device), lambda: TopkPlan(rows, width, k, device))
    announce(TopkPlan, rows, width, k, DEVICE)


def planned_rows(tokens: int, width: int, most_scores: int) -> int:
    """Return for how many rows of `width` scores a plan has room for all that a step of up to `tokens` rows asks for.

    Rows of one chunk need no room. Rows of more need it for each of their chunks, and of narrow ones there are more:
    up to twice as many chunks as scores fill.
    """
    enough = 0 if width <= LARGEST else min(tokens, -(-2 * most_scores // width))
    # The warm-up compiles what more rows than a few take.
    return max(enough, FEW_ROWS + 1)


def _chosen(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, k: int) -> bool:
    """Write the columns of the `k` best scores of each row into `out`; return false if no plan holds them."""
    plan = _PLANS.get((k, logits.device))
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
    """Return vLLM's `SparseAttnIndexer.forward_cuda`, in which nothing is filled for a layer that is planned."""

    @functools.wraps(original)
    def forward_cuda(self: Any, hidden_states: torch.Tensor, q_quant: Any, k: Any, weights: torch.Tensor) -> Any:
        buffer = self.topk_indices_buffer
        whole = self.topk_backend == "auto" and self.compress_ratio != 1 and buffer.shape[1] == self.topk_tokens
        if whole and len(_ANSWERED) == 2 and (self.topk_tokens, buffer.device) in _PLANS:
            # All that vLLM takes of them is how many rows it fills.
            hidden_states = hidden_states[:0]
        return original(self, hidden_states, q_quant, k, weights)

    return forward_cuda


def _fill(out: torch.Tensor, k: int) -> None:
    """Fill `out` with −1 where `unfilled` may have left that out."""
    if (k, out.device) in _PLANS:
        out.fill_(-1)


class Padded:
    """The rows of prompts that a padded decode overwrites.

    Where requests decode different numbers of tokens, vLLM pads them to the longest, and has the choice for the padded
    rows written over the first rows of its buffer. Behind the decode tokens' rows there are those of prompts, which
    are chosen already, and vLLM puts back the decode tokens' rows alone (vLLM's pull request 32175, in which a review
    says so; as of 0.33). The functions between which that happens are wrapped here: the rows behind are kept, and put
    back.
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
        """Keep those of `rows`, which are about to be chosen for a decode, that are not decode tokens'."""
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


def decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `SparseIndexerTopk.forward` with the bundled kernels."""
    _ANSWERED.add("decode")

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
        # Lengths of whole requests, instead of each row's, are vLLM's kernels' own to count down.
        if self._backend != "auto" or not _chosen(logits, seq_lens, topk_indices, topk_tokens):
            _fill(topk_indices, topk_tokens)
            original(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)

    return forward


class PromptOps:
    """vLLM's operators, as its indexer has them, with the choice for prompts bundled. All rows begin at column 0."""

    def __init__(self, ops: Any) -> None:
        _ANSWERED.add("prompts")
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
        """Write each row's best columns into `raw_topk_indices`."""
        if not _chosen(logits, cu_seqlen_ke, raw_topk_indices, topk_tokens):
            _fill(raw_topk_indices, topk_tokens)
            self._ops.top_k_per_row_prefill(
                logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens
            )
