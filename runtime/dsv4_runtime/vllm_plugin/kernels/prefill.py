"""Prefill of vLLM's DeepSeek-V4 attention by `dsv4_kernels.mla_prefill`, for either of vLLM's CUDA classes.

vLLM's metadata, chunks of requests, workspace and gathers stay. The index lists and the attention over the gathered
rows are bundled: what vLLM has of FlashMLA or, on SM12x, of FlashInfer is not asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache
from vllm.v1.worker.workspace import current_workspace_manager

from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan
from dsv4_kernels.mla_prefill.reference import list_width
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce
from dsv4_runtime.vllm_plugin.kernels.views import whole_rows
from dsv4_runtime.vllm_plugin.reserve import width as c128_width


def make_plans(layer: Any) -> tuple[PrefillPlan, ListsPlan]:
    """Return the plans of `layer`, made by the first layer of its kind, and have them compiled beside the weights.

    They need no cache, so that they can be made with the layer.
    """
    tokens, device = layer.max_num_batched_tokens, layer.attn_sink.device
    attention = (tokens, layer.padded_heads, list_width(_chosen_width(layer), layer.window_size))
    lists = (tokens, _chosen_width(layer), layer.compress_ratio)
    announce(PrefillPlan, *attention, DEVICE, own_output=False)
    announce(ListsPlan, *lists, DEVICE, window=layer.window_size, own_output=False)
    return (
        shared_plan((Op.MLA_PREFILL, *attention, device), lambda: PrefillPlan(*attention, device, own_output=False)),
        shared_plan(
            (Op.MLA_PREFILL, "lists", *lists, layer.window_size, device),
            lambda: ListsPlan(*lists, device, layer.window_size, own_output=False),
        ),
    )


def reserve(layer: Any) -> None:
    """Take the largest workspace once, in vLLM's dummy step: it must not grow once vLLM has locked it."""
    compressed = -(-layer.max_model_len // layer.compress_ratio) if layer.compress_ratio > 1 else 0
    _workspace(layer, layer.PREFILL_CHUNK_SIZE, compressed + layer.window_size + layer.max_num_batched_tokens)


def forward(
    layer: Any,
    *,
    q: torch.Tensor,
    compressed_k_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    output: torch.Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    """Fill `output` for the prefill tokens of `q` [T, padded heads, 512], chunk by chunk of requests.

    `layer.prefill_plans` are those of `make_plans`.
    """
    attention, lists = layer.prefill_plans
    decodes, starts = swa_metadata.num_decodes, swa_metadata.query_start_loc_cpu
    topk, ratio, window = lists.topk, layer.compress_ratio, layer.window_size
    chosen = _chosen(layer, attn_metadata, swa_metadata)
    for first, last, entries, rows in swa_metadata.get_prefill_chunk_plan(
        compress_ratio=ratio, prefill_chunk_size=layer.PREFILL_CHUNK_SIZE
    ):
        kv, indices, lengths = _workspace(layer, last - first, rows)
        requests, seq_lens = slice(first, last), swa_metadata.prefill_seq_lens[first:last]
        gathered = swa_metadata.prefill_gather_lens[requests]
        if topk:
            dequantize_and_gather_k_cache(
                kv, compressed_k_cache, seq_lens=seq_lens // ratio, gather_lens=None,
                block_table=attn_metadata.block_table[decodes:][requests],
                block_size=attn_metadata.block_size // ratio, offset=0,
            )  # fmt: skip
        dequantize_and_gather_k_cache(
            kv, swa_k_cache, seq_lens=seq_lens, gather_lens=gathered,
            block_table=swa_metadata.block_table[decodes:][requests], block_size=swa_metadata.block_size,
            offset=entries,
        )  # fmt: skip
        begin, end = (int(starts[decodes + edge] - starts[decodes]) for edge in (first, last))
        tokens = slice(begin, end)
        found = lists.run(
            chosen=chosen[tokens], seq_lens=seq_lens, gather_lens=gathered, topk=topk, ratio=ratio, window=window,
            query_start_loc=swa_metadata.query_start_loc[decodes + first : decodes + last + 1], rows=rows,
            first=entries, out=(indices[: end - begin], lengths[: end - begin]),
        )  # fmt: skip
        attention.run(
            q=q[tokens], kv=kv.view(-1, kv.shape[-1]), indices=found[0], lengths=found[1], sink=layer.attn_sink,
            out=output[tokens],
        )  # fmt: skip


def _chosen_width(layer: Any) -> int:
    """Return the most compressed entries that a token of `layer` sees."""
    if layer.compress_ratio <= 1:
        return 0
    return int(layer.topk_indices_buffer.shape[-1] if layer.compress_ratio == 4 else c128_width(layer.max_model_len))


def _chosen(layer: Any, attn_metadata: Any, swa_metadata: Any) -> torch.Tensor:
    """Return the compressed entries of each prefill token, int32 [T, at least the plan's topk]."""
    tokens = swa_metadata.num_prefill_tokens
    if layer.compress_ratio > 4:
        return whole_rows(attn_metadata.c128a_prefill_topk_indices, tokens)
    # Of a layer without compressed entries nothing is read.
    begin = swa_metadata.num_decode_tokens
    found: torch.Tensor = layer.topk_indices_buffer[begin : begin + tokens]
    return found


def _workspace(layer: Any, requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return vLLM's workspace as rows bf16 [requests, rows, 512] and the lists of all tokens of a step."""
    tokens = layer.max_num_batched_tokens
    kv, indices, lengths = current_workspace_manager().get_simultaneous(
        ((requests, rows, layer.head_dim), torch.bfloat16),
        ((tokens, list_width(_chosen_width(layer), layer.window_size)), torch.int32),
        ((tokens,), torch.int32),
    )
    return kv, indices, lengths
