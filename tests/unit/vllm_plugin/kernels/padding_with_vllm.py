"""Child process of `test_padding.py`: vLLM's own sparse indexer over a step of ragged decodes and a prompt's chunk.

Prints one JSON object. The scores are generated here, by token; everything else is vLLM's, with the bundled choice of
keys.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
from vllm.v1.attention.backends.mla import indexer as backend

from dsv4_kernels import interpreter
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_plugin.kernels import choice, hooks, indexer

os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
K, WIDTH, ROWS, HEAD = 8, 64, 32, 128
CONTEXT = 40
"""Keys that every request has before the step."""
choice._TOKENS[0] = ROWS
SCORES = torch.rand((64, WIDTH), generator=torch.Generator().manual_seed(0))
"""Scores of up to 64 tokens, each identified by its number, for all keys."""


def scores(q: torch.Tensor) -> torch.Tensor:
    """Return the scores of queries [..., 1, HEAD], whose values are the token's number."""
    numbers = q.float()[..., 0, 0].reshape(-1)
    return SCORES[torch.where(torch.isfinite(numbers), numbers, 63.0).long()]


def prompt_scores(q: tuple[torch.Tensor, Any], *_: Any, **__: Any) -> torch.Tensor:
    return scores(q[0]).clone()


class Workspace:
    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in specs]


def step(decodes: list[int], prompt: int, first: int) -> torch.Tensor:
    """Return the chosen keys for the tokens of decoding requests, then of a continued prompt of `prompt` tokens.

    Tokens are numbered so that the first of the prompt has the number `first`.
    """
    tokens = sum(decodes)
    numbers = torch.arange(first - tokens, first + prompt)
    q = numbers.bfloat16()[:, None, None].expand(-1, 1, HEAD).contiguous()
    lengths = torch.tensor(decodes, dtype=torch.int32)
    width = max(decodes, default=1)
    decode = None
    if decodes:
        fields = {
            "block_table": torch.zeros((len(decodes), 1), dtype=torch.int32),
            "seq_lens": torch.full((len(decodes), width), CONTEXT, dtype=torch.int32),
            "decode_lens": lengths,
            "requires_padding": len(set(decodes)) > 1,
            "schedule_metadata": torch.zeros((1, 2), dtype=torch.int32),
        }
        decode = backend.DeepSeekV32IndexerDecodeMetadata(**fields)
    chunks = []
    if prompt:
        ends = CONTEXT + 1 + torch.arange(prompt, dtype=torch.int32)
        bounds = torch.tensor([0, CONTEXT + prompt], dtype=torch.int32)
        chunks = [
            backend.DeepseekV32IndexerPrefillChunkMetadata(
                block_table=torch.zeros((1, 1), dtype=torch.int32), cu_seqlen_ks=torch.zeros_like(ends),
                cu_seqlen_ke=ends, cu_seq_lens=bounds, token_to_seq=torch.zeros_like(ends),
                total_seq_lens=CONTEXT + prompt, token_start=tokens, token_end=tokens + prompt, num_reqs=1,
                skip_kv_gather=True, local_cu_seq_lens=bounds, local_total_seq_lens=CONTEXT + prompt,
                max_local_total_seq_lens=CONTEXT + prompt,
            )
        ]  # fmt: skip
    metadata = backend.DeepseekV32IndexerMetadata(
        seq_lens=lengths, max_seq_len=WIDTH, slot_mapping=torch.arange(tokens + prompt), num_decodes=len(decodes),
        num_decode_tokens=tokens, num_prefills=len(chunks), num_prefill_tokens=prompt, decode=decode,
        prefill=backend.DeepseekV32IndexerPrefillMetadata(chunks=chunks) if chunks else None,
    )  # fmt: skip
    context = SimpleNamespace(attn_metadata={"layer": metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    sparse_attn_indexer.get_forward_context = lambda: context
    buffer = torch.full((ROWS, K), -7, dtype=torch.int32)
    cache = torch.zeros((1, 64, HEAD + 4), dtype=torch.uint8)
    sparse_attn_indexer.sparse_attn_indexer(
        torch.zeros((tokens + prompt, 8)), "layer", cache, q, None, None, torch.ones((tokens + prompt, 1)), 128,
        "ue8m0", K, HEAD, WIDTH, WIDTH, buffer, True, False, False, "",
    )  # fmt: skip
    return buffer[: tokens + prompt].sort(1).values


sparse_attn_indexer.current_workspace_manager = Workspace
sparse_attn_indexer._resolve_layer_name = lambda name: name
sparse_attn_indexer.kv_cache_as_quant_view = lambda cache, *_: cache
sparse_attn_indexer.fp8_fp4_mqa_logits = prompt_scores
sparse_attn_indexer.fp8_fp4_paged_mqa_logits = prompt_scores
sparse_attn_indexer.ops = SimpleNamespace()
sparse = sparse_attn_indexer
hooks.apply(
    [
        (sparse, "ops", indexer.PromptOps(sparse.ops)),
        (sparse, "pack_seq_triton", indexer.PADDED.pack(sparse.pack_seq_triton)),
        (sparse, "unpack_seq_triton", indexer.PADDED.unpack(sparse.unpack_seq_triton)),
    ]
)
decoding = indexer_topk.SparseIndexerTopk
hooks.apply([(decoding, "forward", indexer.topk_decode(decoding.forward))])
layer = SimpleNamespace(topk_tokens=K, max_model_len=WIDTH, topk_indices_buffer=torch.zeros((1, K), dtype=torch.int32))
vars(layer).update(topk_backend="auto", compress_ratio=4)
indexer.plan_topk(layer, 1 << 20)
BATCHES = ([2, 1], [1, 2], [3, 1, 1], [1, 1, 4], [2, 2], [1])
found = {}
for decodes in BATCHES:
    tokens = sum(decodes)
    together = step(decodes, 6, 20)
    alone, decoded = step([], 6, 20), step(decodes, 0, 20)
    found[str(decodes)] = [
        torch.equal(together[tokens:], alone), torch.equal(together[:tokens], decoded), bool((alone >= 0).all())
    ]  # fmt: skip
print(json.dumps(found))
