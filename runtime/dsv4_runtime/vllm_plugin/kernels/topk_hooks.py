"""The hooks of the choice of the indexer's best keys: its plans, decode, prompts, and what vLLM fills before."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.hooks import Hook


def _plans(module: ModuleType) -> None:
    from vllm import envs

    from dsv4_runtime.vllm_plugin.kernels.topk import plan_ahead

    indexer = module.SparseAttnIndexer
    original = indexer.__init__

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plan_ahead(self, (envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20) // 4)

    indexer.__init__ = make


def _fill(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.topk import unfilled

    module.SparseAttnIndexer.forward_cuda = unfilled(module.SparseAttnIndexer.forward_cuda)


def _prompts(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.topk import PromptOps

    module.ops = PromptOps(module.ops)  # type: ignore[attr-defined]


def _decode(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.topk import decode

    module.SparseIndexerTopk.forward = decode(module.SparseIndexerTopk.forward)


TOPK_HOOKS = (
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.indexer_topk",
        "SparseIndexerTopk.forward",
        ("self", "logits", "seq_lens", "next_n", "topk_indices", "topk_tokens", "max_seq_len"),
        _decode,
    ),
    Hook((Op.TOPK,), "vllm.model_executor.layers.sparse_attn_indexer", "SparseAttnIndexer", None, _plans),
    # What brings the scores of prompts to float32: since vLLM 0.33 rows begin at their first column.
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        "as_fp32_logits",
        ("logits", "row_ends"),
        _prompts,
    ),
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        "SparseAttnIndexer.forward_cuda",
        ("self", "hidden_states", "q_quant", "k", "weights"),
        _fill,
    ),
)
