"""Gives vLLM's CPU build the operators of DeepSeek-V4 on processors for which they were not compiled."""

import functools
from typing import Any

import torch

from dsv4_runtime.vllm_plugin import cpu_operators
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, refuse

_MODULE = "vllm.models.deepseek_v4.cpu.cpu_sparse"
_SYMBOL = "torch.ops._C"
# What vLLM's model asks of them, in PyTorch's language for signatures.
_CACHE = "Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, int kv_cache_block_size, int compress_ratio) -> ()"
_STATE = "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, Tensor rms_norm_weight,"
_HC = "Tensor hc_fn, Tensor hc_scale, Tensor hc_base"
SIGNATURES = {
    "convert_weight_packed": "(Tensor(a) weight) -> Tensor(a)",
    "bmm_cpu": "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "hc_pre_fused_cpu": (
        f"(Tensor x, {_HC}, int hc_mult, int sinkhorn_iters, float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
    ),
    "hc_post_fused_cpu": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "hc_head_fused_cpu": f"(Tensor x, {_HC}, float hc_eps, float norm_eps) -> Tensor",
    "fused_qnorm_rope_kv_insert_cpu": (
        "(Tensor q, Tensor kv, Tensor positions, Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, Tensor cos_sin_cache,"
        " int q_head_padded, float eps, int cache_block_size) -> Tensor"
    ),
    "inverse_gptj_rope_o_proj_cpu": "(Tensor o, Tensor positions, Tensor cos_sin_cache, int rope_dim) -> Tensor",
    "flash_mla_with_kvcache_cpu": (
        "(Tensor(a!) out, Tensor q, Tensor window_cache_2d, Tensor window_slots, int window_block_size,"
        " Tensor compressed_cache_2d, Tensor compressed_slots, int compressed_block_size, Tensor attn_sink,"
        " float scale) -> ()"
    ),
    "save_partial_states_cpu": (
        "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, Tensor slot_mapping) -> ()"
    ),
    "compress_norm_rope_store_cpu": f"{_STATE} float rms_norm_eps, {_CACHE}",
    "compress_norm_rope_store_indexer_cpu": f"{_STATE} float rms_norm_eps, {_CACHE}",
    "fused_indexer_q_rope_quant_cpu": (
        "(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, Tensor(a!) index_q_fp8, Tensor index_weights,"
        " float index_weights_softmax_scale, float index_weights_head_scale, Tensor(b!) index_weights_out) -> ()"
    ),
    "fp8_paged_mqa_logits_cpu": (
        "(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, Tensor page_table, int block_size,"
        " int max_seq_len) -> Tensor"
    ),
    "topk_transform_512_cpu": (
        "(Tensor scores, Tensor seq_lens, Tensor page_tables, Tensor(a!) out_page_indices, int page_size,"
        " Tensor(b!)? out_raw_indices) -> ()"
    ),
    "biased_topk_cpu": (
        "(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, bool renormalize,"
        " str scoring_func, int num_fused_shared_experts, float? routed_scaling_factor,"
        " bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)"
    ),
    "hash_topk_cpu": (
        "(Tensor gating_output, Tensor tid2eid, int topk, str scoring_func, int num_fused_shared_experts,"
        " int num_experts, float routed_scaling_factor) -> (Tensor, Tensor)"
    ),
}


@functools.cache
def _library() -> Any:
    # Operators live as long as their library.
    return torch.library.Library("_C", "FRAGMENT")


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform

    missing = [name for name in SIGNATURES if not hasattr(torch.ops._C, name)]
    if not current_platform.is_cpu() or not missing:
        return PatchOutcome.NOT_WANTED
    if len(missing) != len(SIGNATURES):
        raise refuse(_SYMBOL, f"it lacks {missing} and has the others, expected all or none of them")
    for name, signature in SIGNATURES.items():
        _library().define(name + signature)
        _library().impl(name, getattr(cpu_operators, name), "CPU")
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "the operators of DeepSeek-V4 are compiled for AVX-512 with BF16 only; on other x86-64 processors loading"
        " ends with `'_OpNamespace' '_C' object has no attribute 'convert_weight_packed'`"
    ),
    upstream="none: `VLLM_EXT_SRC_SGL` in `cmake/cpu_extension.cmake` belongs to the AVX-512 library",
    versions="vLLM 0.32.0",
    obsolete_when="`vllm._C_AVX2` has the operators",
    apply=_apply,
)
