"""vLLM 0.33, the newest known version: locations of symbols, hooks with their checks, and version-specific calls.

Only adapter modules name modules of vLLM, and they list every private attribute that other modules of the plugin use:
`SYMBOLS` maps names for `vllm_api` to locations; `HOOKS` lists the changed symbols of each module with their expected
signatures, and references to the replacing functions; `PRIVATE` lists the attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.hooks import Hook, Known

_MOE = "vllm.model_executor.layers.fused_moe"
_RUNNER_PACKAGE = "vllm.v1.worker.gpu"
_WARMUP = "vllm.model_executor.warmup"
_FP8 = "vllm.model_executor.kernels.linear"
_ATTENTION = "vllm.models.deepseek_v4.attention"
_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_CACHE_UTILS = "vllm.models.deepseek_v4.common.ops.cache_utils"
_MOE_RUNNER = f"{_MOE}.runner.moe_runner"
_WORKER = "vllm.v1.worker.gpu_worker"
_LOADER = "vllm.model_executor.model_loader.base_loader"

# Modules that `register`, `forking`, `loading` and `preload` change or import.
FLASHINFER_SPARSE = "vllm.models.deepseek_v4.nvidia.flashinfer_sparse"
FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla"
MODEL_REGISTRY = "vllm.model_executor.models.registry"
MODEL_LOADER = "vllm.model_executor.model_loader"
MODEL_RUNNER = "vllm.v1.worker.gpu.model_runner"
PARALLEL_STATE = "vllm.distributed.parallel_state"
RAY_EXECUTOR = "vllm.v1.executor.ray_executor_v2"
SERVE_COMMAND = "vllm.entrypoints.cli.serve"
SYSTEM_UTILS = "vllm.utils.system_utils"
SERVER_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.v1.engine.core",
)
"""Modules that the API server and EngineCore import until they serve, after the server's own."""
QUANTIZATION_MODULES = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.fp_quant",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.layers.quantization.quark.quark",
)
"""Modules that the API server imports for its configuration and a worker for the model."""
WORKER_MODULES = (
    _WORKER,
    MODEL_RUNNER,
    _MODEL,
    "vllm.models.deepseek_v41",
    f"{_WARMUP}.kernel_warmup",
    f"{_WARMUP}.minimax_m3_msa_warmup",
    "vllm.model_executor.models.qwen3_vl",
    "tilelang",
    "vllm.models.step5.nvidia.sparse_attention",
    # Of vllm.models.deepseek_v4.nvidia.ops.*_cutedsl, whose import initializes CUDA.
    "cutlass.cute",
    "cutlass.utils",
)
"""Modules that a worker imports until it serves DeepSeek-V4; suspects of initializing CUDA are last."""
COLLECTIVES = ("_all_reduce_out_place", "_all_gather_out_place", "_reduce_scatter_out_place", "gather", "broadcast")
"""Methods of `GroupCoordinator` that all ranks of a group call in the same order. Compiled graphs call the `_out_place`
methods too."""
LAYERS = ("vllm.model_executor", "vllm.models", "vllm.v1.attention")
"""Packages of the classes whose objects, beside modules, may have tensors of a model."""
PRIVATE: Mapping[str, tuple[str, ...]] = {
    "B12xExperts": ("_supports_current_device",),
    "DeepseekCompressor": ("_prepare_and_attn", "_prepare_and_attn_fn", "_static_forward_context"),
    "DeepseekV4Attention": (
        "_alloc_attn_out", "_forward_decode", "_forward_prefill", "_fused_wqa_wkv_gemm", "_o_proj", "_prepare_query",
        "_run_parallel_input_projections",
    ),
    "Fp8BlockScaledMMLinearKernel": ("_get_layer_params",),
    "FusedMoEExpertsModular": (
        "_supports_activation", "_supports_current_device", "_supports_no_act_and_mul", "_supports_parallel_config",
        "_supports_quant_scheme",
    ),
    "FusedTopKBiasRouter": ("_compute_routing", "_get_padding_mask", "_hash_indices_table"),
    "JitWarmupRegistry": ("_active", "_registrations"),
    "MoERunner": ("_forward_entry", "_forward_impl", "_select_forward", "_shared_experts"),
    "SamplingParams": ("_bad_words_token_ids",),
    "SparseIndexerTopk": ("_backend",),
    "VllmTritonJitKernel": ("_run_autotune",),
    "torch.ops": ("_moe_C",),
    "vllm.platforms": ("_current_platform",),
    _MODEL: ("_select_dsv4_attn_cls",),
    MODEL_REGISTRY: ("_run_in_subprocess",),
    SYSTEM_UTILS: ("_maybe_force_spawn",),
}  # fmt: skip
"""Private attributes that other modules of the plugin use, by class or module."""

_SPARSE = "vllm.v1.attention.backends.mla"
LAYER_KERNELS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    f"{_SPARSE}.sparse_swa:_COMPUTE_PREFILL_METADATA_KERNEL": ({},),
    f"{_SPARSE}.sparse_swa:_COMPUTE_SWA_INDICES_AND_LENS_KERNEL": (
        {"window_size": "sliding_window", "block_size": 64, "max_image_tokens": 0},
    ),
    f"{_SPARSE}.compressor_utils:_COMPRESSED_SLOT_MAPPING_KERNEL": ({},),
    f"{_SPARSE}.indexer:_PREPARE_UNIFORM_DECODE_KERNEL": ({},),
    f"{_SPARSE}.indexer:_BUILD_PREFILL_CHUNK_METADATA_KERNEL": ({},),
    f"{_CACHE_UTILS}:_COMBINE_TOPK_SWA_INDICES_KERNEL": ({},),
    f"{_CACHE_UTILS}:_COMPUTE_GLOBAL_TOPK_INDICES_AND_LENS_KERNEL": ({},),
    f"{_ATTENTION}:_FUSED_Q_KV_RMSNORM_KERNEL": ({},),
    "vllm.models.deepseek_v4.sparse_mla:_BUILD_C128A_TOPK_METADATA_KERNEL": ({},),
    "vllm.v1.attention.ops.common:_UNPACK_SEQ_TRITON_KERNEL": ({},),
}
"""Triton kernels that vLLM's layers of DeepSeek-V4 register for the JIT warm-up, with the arguments; a text names a
field of the model's configuration. Without those whose keys need a KV cache."""
SYMBOLS: Mapping[str, str] = {
    # configuration and context
    "current_platform": "vllm.platforms:current_platform",
    "envs": "vllm.envs",
    "get_current_vllm_config": "vllm.config:get_current_vllm_config",
    "get_current_vllm_config_or_none": "vllm.config:get_current_vllm_config_or_none",
    "get_forward_context": "vllm.forward_context:get_forward_context",
    "DeviceCapability": "vllm.platforms.interface:DeviceCapability",
    "Platform": "vllm.platforms.interface:Platform",
    "PlatformEnum": "vllm.platforms:PlatformEnum",
    "platforms": "vllm.platforms",
    "pynvml": "vllm.third_party:pynvml",
    # attention
    "compute_global_topk_indices_and_lens": "vllm.models.deepseek_v4.common.ops:compute_global_topk_indices_and_lens",
    "current_workspace_manager": "vllm.v1.worker.workspace:current_workspace_manager",
    "dequantize_and_gather_k_cache": "vllm.models.deepseek_v4.common.ops:dequantize_and_gather_k_cache",
    "execute_in_parallel": "vllm.utils.multi_stream_utils:execute_in_parallel",
    "flashmla": "vllm.v1.attention.ops.flashmla",
    "get_dspark_swa_index_width": "vllm.v1.attention.backends.mla.compressor_utils:get_dspark_swa_index_width",
    "ReplicatedLinear": "vllm.model_executor.layers.linear:ReplicatedLinear",
    # experts
    "B12xExperts": f"{_MOE}.b12x:B12xExperts",
    "fused_marlin_moe": f"{_MOE}.experts.marlin_moe:fused_marlin_moe",
    "fused_topk_bias_router": f"{_MOE}.router.fused_topk_bias_router",
    "FusedMoEConfig": f"{_MOE}.config:FusedMoEConfig",
    "FusedMoEParallelConfig": f"{_MOE}.config:FusedMoEParallelConfig",
    "GateLinear": f"{_MOE}.router.gate_linear:GateLinear",
    "get_b12x_fused_moe": "vllm.utils.b12x:get_b12x_fused_moe",
    "kMxfp4Static": "vllm.model_executor.layers.quantization.utils.quant_utils:kMxfp4Static",
    "ll_bf16": f"{_FP8}.cute_dsl.ll_bf16",
    "modular_kernel": f"{_MOE}.modular_kernel",
    "MoEActivation": f"{_MOE}.activation:MoEActivation",
    "mxfp4_w4a16_moe_quant_config": f"{_MOE}.config:mxfp4_w4a16_moe_quant_config",
    "Mxfp4MoeBackend": f"{_MOE}.oracle.mxfp4:Mxfp4MoeBackend",
    "prepare_moe_mxfp4_layer_for_marlin": (
        "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4:prepare_moe_mxfp4_layer_for_marlin"
    ),
    "RoutingMethodType": f"{_MOE}.config:RoutingMethodType",
    "scalar_types": "vllm.scalar_type:scalar_types",
    "SharedExpertsOrder": f"{_MOE}.runner.shared_experts:SharedExpertsOrder",
    "silu_and_mul_with_clamp": f"{_MOE}.activation:silu_and_mul_with_clamp",
    "TopKWeightAndReduceNoOP": f"{_MOE}.topk_weight_and_reduce:TopKWeightAndReduceNoOP",
    # FP8 products
    "B12xFp8BlockScaledMMKernel": f"{_FP8}.scaled_mm.b12x:B12xFp8BlockScaledMMKernel",
    "custom_ops": "vllm._custom_ops",
    "deep_gemm": "vllm.utils.deep_gemm",
    "Fp8BlockScaledMMLinearKernel": f"{_FP8}.scaled_mm.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel",
    "get_b12x_blockscaled": "vllm.utils.b12x:get_b12x_blockscaled",
    "linear_kernels": _FP8,
    "replace_parameter": "vllm.model_executor.utils:replace_parameter",
    "w8a8_triton_block_scaled_mm": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm"
    ),
    # other operations
    "flashinfer": "vllm.utils.flashinfer",
    "fused_q_kv_rmsnorm": "vllm.models.common.ops.fused_qk_rmsnorm:fused_q_kv_rmsnorm",
    "has_cutedsl": "vllm.utils.import_utils:has_cutedsl",
    "indexer_topk": "vllm.model_executor.layers.indexer_topk",
    "mhc_fused_post_pre_tilelang": "vllm.model_executor.kernels.mhc.tilelang:mhc_fused_post_pre_tilelang",
    "SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL": (
        "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl:_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"
    ),
    # model runner and sampler
    "BlockTables": f"{_RUNNER_PACKAGE}.block_table:BlockTables",
    "buffer_utils": f"{_RUNNER_PACKAGE}.buffer_utils",
    "compute_token_to_req_indices": "vllm.v1.attention.ops.metadata:compute_token_to_req_indices",
    "get_prompt_logprobs_token_ids": f"{_RUNNER_PACKAGE}.sample.prompt_logprob:get_prompt_logprobs_token_ids",
    "input_batch": f"{_RUNNER_PACKAGE}.input_batch",
    "InputBatch": f"{_RUNNER_PACKAGE}.input_batch:InputBatch",
    "InputBuffers": f"{_RUNNER_PACKAGE}.input_batch:InputBuffers",
    "post_update": f"{_RUNNER_PACKAGE}.input_batch:post_update",
    "register_top_k_top_p_warmups": "vllm.v1.sample.ops.topk_topp_sampler:register_top_k_top_p_warmups",
    "RequestState": f"{_RUNNER_PACKAGE}.states:RequestState",
    "sampler": f"{_RUNNER_PACKAGE}.sample.sampler",
    "Sampler": f"{_RUNNER_PACKAGE}.sample.sampler:Sampler",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "StructuredOutputsParams": "vllm.sampling_params:StructuredOutputsParams",
    "StructuredOutputsWorker": f"{_RUNNER_PACKAGE}.structured_outputs:StructuredOutputsWorker",
    # warm-up and KV cache planning
    "allocate_kv_cache": "vllm.v1.worker.utils:allocate_kv_cache",
    "get_num_ubatches": "vllm.v1.worker.ubatch_utils:get_num_ubatches",
    "get_world_group": f"{PARALLEL_STATE}:get_world_group",
    "GroupCoordinator": f"{PARALLEL_STATE}:GroupCoordinator",
    "get_kv_cache_spec": f"{_RUNNER_PACKAGE}.attn_utils:get_kv_cache_spec",
    "init_minimal_kv_cache_for_profiling": (f"{_RUNNER_PACKAGE}.cudagraph_utils:_init_minimal_kv_cache_for_profiling"),
    "system_utils": SYSTEM_UTILS,
    "JitWarmupRegistry": f"{_WARMUP}.jit_warmup:JitWarmupRegistry",
    "ModelRegistry": "vllm.model_executor.models:ModelRegistry",
    "resolve_kv_cache_layout": "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
    "VllmTritonJitKernel": f"{_WARMUP}.jit_warmup_triton_helper:VllmTritonJitKernel",
    "WorkerBase": "vllm.v1.worker.worker_base:WorkerBase",
}

TILELANG_HYPER_CONNECTIONS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
CUTE_COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
HYPER_CONNECTIONS: Mapping[str, str] = {
    "mhc_pre_tilelang": "sublayers:mhc_pre",
    "mhc_pre_broadcast_tilelang": "sublayers:mhc_pre_broadcast",
    "mhc_fused_post_pre_tilelang": "sublayers:mhc_fused_post_pre",
    "mhc_post_tilelang": "sublayers:mhc_post",
    "hc_head_fused_kernel_tilelang": "sublayers:hc_head",
}
"""Functions of hyper-connections in vLLM's model modules, with their replacements."""


def compile_together(compile_all: Callable[[], None], count: int) -> None:
    """Call `compile_all`, which compiles `count` kernels, under vLLM's parallel compilation."""
    from importlib import import_module

    import_module(f"{_WARMUP}.jit_warmup_triton_helper").compile_triton_warmup(compile_all, count)


def grammar_masks(rows: int, drafts: int) -> int:
    """Return the number of masks of a step of `rows` requests: one per possible draft and one per request."""
    return rows * (drafts + 1)


def _known_mlp(self: Any, x: Any) -> Any:
    gate_up, _ = self.gate_up_proj(x)
    x = self.act_fn(gate_up)
    x, _ = self.down_proj(x)
    return x


_RUNNER_FORWARD = ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids")
_RUNNER_PARTS = Known(
    names=frozenset(
        {"router", "gate", "moe_config", "routed_experts", "_shared_experts", "shared_expert_gate", "enable_dbo"}
    )
)
_QUERY = (
    "positions", "index_q", "index_q_cos_sin_cache", "index_weights", "index_weights_softmax_scale",
    "index_weights_head_scale", "use_fp4", "weights_out_dtype",
)  # fmt: skip
_PAGED = ("q", "kv_cache", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len", "indices")
_SELECT_LINEAR = ("config", "possible_kernels", "compute_capability", "force_kernel", "quantization")

_INITIALIZE = ("vllm_config", "prefix", "model_class", "model_config")
_DRAFTS = frozenset({"input_batch", "block_table", "num_query_per_req"})

_KERNEL_WARMUP = ("worker", "process_local_only")


def _warm_up(
    module: str, symbol: str, expected: tuple[str, ...] | Known, reference: str, *, bundled: bool = False
) -> Hook:
    return Hook((), module, {symbol: expected}, wrap={symbol: reference}, bundled=bundled)


HOOKS = (
    Hook(
        (Op.MOE,),
        "vllm.model_executor.layers.quantization.mxfp4",
        {"select_deepseek_v4_mxfp4_moe_backend": ("config",)},
        wrap={"select_deepseek_v4_mxfp4_moe_backend": "moe:select_experts"},
    ),
    Hook(
        (Op.MOE,),
        _MOE_RUNNER,
        {
            "MoERunner.__init__": _RUNNER_PARTS,
            "MoERunner._forward_impl": _RUNNER_FORWARD,
            "MoERunner._select_forward": ("self",),
            "SharedExperts.maybe_forward_async": ("self", "shared_experts_input"),
            "SharedExperts.forward": ("self", "shared_experts_input", "order"),
            "SharedExperts.wait": ("self",),
            "SharedExperts.output": None,
        },
        each={"MoERunner": "moe:take_shared_experts"},
    ),
    Hook(
        (Op.FP8_LINEAR,),
        "vllm.model_executor.kernels.linear",
        {"_POSSIBLE_FP8_BLOCK_KERNELS": None, "choose_scaled_mm_linear_kernel": _SELECT_LINEAR},
        "linear:preferred",
    ),
    Hook(
        (Op.FP8_LINEAR,),
        _MODEL,
        {"DeepseekV4MLP.__init__": None, "DeepseekV4MLP.forward": Known(body=_known_mlp)},
        "sublayers:shared_experts",
    ),
    Hook(
        (Op.MLA_DECODE, Op.MLA_PREFILL, Op.O_PROJ),
        _MODEL,
        {
            "_select_dsv4_attn_cls": ("vllm_config",),
            "DeepseekV4FlashMLAAttention": None,
            "DeepseekV4FlashInferSM120Attention": None,
        },
        "attention:selection",
    ),
    Hook(
        (Op.FP8_LINEAR, Op.FRONT),
        _ATTENTION,
        {
            "fused_q_kv_rmsnorm": ("qr", "kv", "q_weight", "kv_weight", "eps"),
            "DeepseekV4Attention.__init__": Known(names=frozenset({"q_lora_rank", "max_num_batched_tokens"})),
        },
        wrap={"fused_q_kv_rmsnorm": "sublayers:norm", "DeepseekV4Attention.__init__": "sublayers:announcing"},
    ),
    Hook(
        (Op.FRONT,),
        _ATTENTION,
        {
            "DeepseekV4Attention._fused_qnorm_rope_kv_insert": Known(
                ("self", "q", "kv", "positions", "attn_metadata"),
                names=frozenset(
                    {"swa_cache_layer", "kv_cache", "slot_mapping", "rotary_emb", "padded_heads", "eps", "block_size"}
                ),
            )
        },
        wrap={"DeepseekV4Attention._fused_qnorm_rope_kv_insert": "sublayers:insert"},
    ),
    Hook(
        (Op.O_PROJ,),
        "vllm.model_executor.layers.quantization.fp8",
        {"Fp8LinearMethod.process_weights_after_loading": ("self", "layer")},
        wrap={"Fp8LinearMethod.process_weights_after_loading": "linear:keeping_wo_a_scale"},
    ),
    Hook(
        (Op.MHC,),
        _MODEL,
        {
            "DeepseekV4DecoderLayer.__init__": Known(names=frozenset({"hidden_size"})),
            **dict.fromkeys(HYPER_CONNECTIONS),
        },
        "sublayers:hyper_connections",
    ),
    Hook(
        (Op.COMPRESSOR,),
        "vllm.models.deepseek_v4.compressor",
        {
            "DeepseekCompressor.__init__": Known(names=frozenset({"head_dim", "compress_ratio", "use_fp4_cache"})),
            "DeepseekCompressor.forward": Known(
                ("self", "kv_score", "positions", "rotary_emb"),
                names=frozenset({"state_cache", "kv_cache", "slot_mapping", "ape", "compress_ratio", "c128_boundary"}),
            ),
        },
        wrap={"DeepseekCompressor.__init__": "compressor:choosing", "DeepseekCompressor.forward": "compressor:chosen"},
    ),
    Hook(
        (Op.COMPRESSOR,),
        _ATTENTION,
        {
            "DeepseekV4Attention._run_parallel_input_projections": Known(
                ("self", "hidden_states"),
                names=frozenset(
                    {"_fused_wqa_wkv_gemm", "aux_stream_list", "ln_events", "compressor", "indexer", "weights_proj"}
                ),
            ),
            # Provides the positions of the projections.
            "DeepseekV4Attention.forward": ("self", "positions", "hidden_states", "llama_4_scaling"),
        },
        wrap={
            "DeepseekV4Attention._run_parallel_input_projections": "compressor:at_once",
            "DeepseekV4Attention.forward": "compressor:noting_positions",
        },
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        {
            "has_deep_gemm": (),
            "fp8_fp4_mqa_logits": ("q", "kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "max_seqlen_k"),
            "fp8_fp4_paged_mqa_logits": _PAGED,
        },
        wrap={
            "has_deep_gemm": "indexer:scores_are_there",
            "fp8_fp4_mqa_logits": "indexer:logits",
            "fp8_fp4_paged_mqa_logits": "indexer:paged_logits",
        },
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.v1.attention.backends.mla.indexer",
        {"get_paged_mqa_logits_metadata": ("context_lens", "block_size", "num_sms", "indices")},
        wrap={"get_paged_mqa_logits_metadata": "indexer:no_schedule"},
    ),
    Hook(
        (Op.INDEXER,),
        _ATTENTION,
        {"fused_indexer_q_rope_quant": _QUERY},
        wrap={"fused_indexer_q_rope_quant": "indexer:query"},
    ),
    Hook(
        (Op.ROUTER,),
        _MOE_RUNNER,
        {"MoERunner.__init__": _RUNNER_PARTS, "MoERunner._forward_impl": _RUNNER_FORWARD},
        each={"MoERunner": "moe:attach_router"},
    ),
    Hook(
        (Op.ROUTER,),
        "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router",
        {
            "FusedTopKBiasRouter._compute_routing": (
                "self", "hidden_states", "router_logits", "indices_type", "input_ids",
            ),
            "_get_padding_mask": ("num_tokens",),
        },
    ),
    Hook(
        (Op.TOPK,),
        "vllm.model_executor.layers.indexer_topk",
        {
            "SparseIndexerTopk.__init__": Known(names=frozenset({"_backend"})),
            "SparseIndexerTopk.forward": (
                "self", "logits", "seq_lens", "next_n", "topk_indices", "topk_tokens", "max_seq_len",
            ),
        },
        wrap={"SparseIndexerTopk.forward": "indexer:topk_decode"},
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
            # Converts the scores of prompts to float32: since vLLM 0.33 rows begin at their first column.
            "as_fp32_logits": ("logits", "row_ends"),
            "ops.top_k_per_row_prefill": (
                "logits", "cu_seqlen_ks", "cu_seqlen_ke", "raw_topk_indices", "num_rows", "stride0", "stride1",
                "topk_tokens",
            ),
        },
        wrap={
            "SparseAttnIndexer.__init__": "indexer:planning_topk",
            "SparseAttnIndexer.forward_cuda": "indexer:unfilled",
            "ops": "indexer:PromptOps",
            "pack_seq_triton": "indexer:PADDED.pack",
            "unpack_seq_triton": "indexer:PADDED.unpack",
        },
    ),
    _warm_up(_WORKER, "Worker.determine_available_memory", ("self",), "warmup:after_precompile", bundled=True),
    _warm_up(
        MODEL_RUNNER, "GPUModelRunner.capture_model",
        Known(("self", "profile_only"), names=frozenset({"cudagraph_manager", "capture"})),
        "warmup:before_profiled_capture", bundled=True,
    ),
    _warm_up(
        MODEL_RUNNER, "GPUModelRunner.profile_cudagraph_memory", ("self",), "warmup:reusing_graph_estimate"
    ),
    # Before the next hook, whose processes compile while this one waits for its own.
    _warm_up(_WORKER, "kernel_warmup", _KERNEL_WARMUP, "compile_ahead:before_jit_warmup"),
    _warm_up(_WORKER, "kernel_warmup", _KERNEL_WARMUP, "warmup:around_kernel_warmup", bundled=True),
    _warm_up(
        f"{_WARMUP}.kernel_warmup", "deepseek_v4_sparse_mla_attention_warmup", ("worker",), "warmup:before_attention",
        bundled=True,
    ),
    _warm_up(
        f"{_WARMUP}.kernel_warmup", "_ll_bf16_router_shapes_from_model",
        Known(("model",), names=frozenset({"modules"})), "warmup:of_called_gates", bundled=True,
    ),
    _warm_up(
        "vllm.v1.sample.ops.topk_topp_sampler", "flashinfer_sampler_supported", (), "compile_ahead:without_flashinfer"
    ),
    _warm_up(_WORKER, "Worker.determine_available_memory", ("self",), "compile_ahead:before_profile"),
    _warm_up(_WORKER, "Worker.init_device", ("self",), "compile_ahead:before_device"),
    _warm_up(_LOADER, "initialize_model", _INITIALIZE, "compile_ahead:after_model"),
    _warm_up(_LOADER, "initialize_model", _INITIALIZE, "warmup:announcing_attention", bundled=True),
    _warm_up(
        _CACHE_UTILS, "CombineTopkSwaIndicesKernel.get_warmup_keys", ("self", "vllm_config"), "warmup:every_alignment"
    ),
    Hook(
        (),
        _CACHE_UTILS,
        {
            "DequantizeAndGatherKCacheKernel.CompileKey": None,
            "DequantizeAndGatherKCacheKernel.get_warmup_keys": ("self", "vllm_config"),
            "DequantizeAndGatherKCacheKernel.warmup_inputs": ("self", "compile_key"),
        },
        "warmup:every_gather",
    ),
    # Also for DSpark. vLLM 0.33 has one parameter more than 0.32.
    _warm_up(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator", "prepare_dflash_inputs", Known(among=_DRAFTS),
        "warmup:every_block",
    ),
)  # fmt: skip
