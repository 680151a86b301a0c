"""The hooks of the choice of the indexer's best keys: its plans, decode, prompts, and what vLLM fills before."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, Hook, Known


def _plans(module: ModuleType) -> list[Assignment]:
    from vllm import envs

    from dsv4_runtime.vllm_plugin.kernels.topk import plan_ahead

    indexer = module.SparseAttnIndexer
    original, most_scores = indexer.__init__, (envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20) // 4

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plan_ahead(self, most_scores)

    return [(indexer, "__init__", make)]


def _fill(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.topk import unfilled

    kind = module.SparseAttnIndexer
    return [(kind, "forward_cuda", unfilled(kind.forward_cuda))]


def _prompts(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.topk import PromptOps

    return [(module, "ops", PromptOps(module.ops))]


def _padded(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.topk import PADDED

    return [
        (module, "pack_seq_triton", PADDED.pack(module.pack_seq_triton)),
        (module, "unpack_seq_triton", PADDED.unpack(module.unpack_seq_triton)),
    ]


def _decode(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.topk import decode

    kind = module.SparseIndexerTopk
    return [(kind, "forward", decode(kind.forward))]


def _indexer(module: ModuleType) -> list[Assignment]:
    return [*_plans(module), *_fill(module), *_prompts(module), *_padded(module)]


TOPK_HOOKS = (
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.indexer_topk",
        {
            "SparseIndexerTopk.__init__": Known(names=frozenset({"_backend"})),
            "SparseIndexerTopk.forward": (
                "self",
                "logits",
                "seq_lens",
                "next_n",
                "topk_indices",
                "topk_tokens",
                "max_seq_len",
            ),
        },
        _decode,
    ),
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        {
            "SparseAttnIndexer.__init__": Known(
                names=frozenset(
                    {"topk_backend", "compress_ratio", "topk_tokens", "max_model_len", "topk_indices_buffer"}
                )
            ),
            "SparseAttnIndexer.forward_cuda": ("self", "hidden_states", "q_quant", "k", "weights"),
            "pack_seq_triton": ("x", "lengths", "pad_value", "block_t", "block_d"),
            "unpack_seq_triton": ("packed_tensor", "lengths", "block_t", "block_d"),
            # What brings the scores of prompts to float32: since vLLM 0.33 rows begin at their first column.
            "as_fp32_logits": ("logits", "row_ends"),
            "ops.top_k_per_row_prefill": (
                "logits",
                "cu_seqlen_ks",
                "cu_seqlen_ke",
                "raw_topk_indices",
                "num_rows",
                "stride0",
                "stride1",
                "topk_tokens",
            ),
        },
        _indexer,
    ),
)
