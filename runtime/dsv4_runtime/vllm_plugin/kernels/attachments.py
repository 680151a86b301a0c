"""The bundled kernels' hooks in vLLM, each applied right after vLLM imported its module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.after_import import after_import
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, choice, possible
from dsv4_runtime.vllm_plugin.kernels.hooks import Hook, HookMismatchError, run
from dsv4_runtime.vllm_plugin.kernels.topk_hooks import TOPK_HOOKS
from dsv4_runtime.vllm_plugin.kernels.warmup_hooks import WARM_UP_HOOKS

_TILELANG = "vllm.model_executor.kernels.mhc.tilelang_kernels"
_CUTE = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"


def install() -> None:
    """Arrange for every hook whose operations may be bundled to run when vLLM imports its module.

    What a hook puts in place asks for the choice when a layer is made: only then the shapes are known.
    """
    for hook in HOOKS:
        if not hook.ops or any(possible(op) for op in hook.ops):
            after_import(hook.module, functools.partial(run, hook))


def _moe(module: ModuleType) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    from dsv4_runtime.vllm_plugin.kernels.moe import BundledMxfp4Experts

    backend = Mxfp4MoeBackend.B12X_MXFP4_BF16
    original = module.select_deepseek_v4_mxfp4_moe_backend

    @functools.wraps(original)
    def select(config: Any) -> Any:
        if not choice().bundled(Op.MOE):
            return original(config)
        reason = BundledMxfp4Experts.unsupported(config)
        if reason is None:
            return backend, BundledMxfp4Experts
        LOGGER.warning("dsv4 kernels: moe stays with vLLM's own kernels (%s)", reason)
        return original(config)

    module.select_deepseek_v4_mxfp4_moe_backend = select  # type: ignore[attr-defined]


def _fp8_linear(module: ModuleType) -> None:
    from vllm.platforms import PlatformEnum

    from dsv4_runtime.vllm_plugin.kernels.linear import BundledFp8BlockScaledMMKernel

    module._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA].insert(0, BundledFp8BlockScaledMMKernel)


def _shared_experts(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import shared_experts

    kind = module.DeepseekV4MLP
    original, forward = kind.__init__, kind.forward

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        shared_experts.prepare(self)

    @functools.wraps(forward)
    def with_codes(self: Any, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(shared_experts.activation(self, gate_up))
        return x

    kind.__init__, kind.forward = make, with_codes


def _attention(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.attention import attention_class

    original = module._select_dsv4_attn_cls

    @functools.wraps(original)
    def select(vllm_config: Any) -> Any:
        return attention_class(original(vllm_config), module, vllm_config.model_config.hf_config)

    module._select_dsv4_attn_cls = select  # type: ignore[attr-defined]


def _front_norm(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import front

    module.fused_q_kv_rmsnorm = front.norm(module.fused_q_kv_rmsnorm)  # type: ignore[attr-defined]
    kind = module.DeepseekV4Attention
    kind.__init__ = front.announcing(kind.__init__)


def _front_insert(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import front

    kind = module.DeepseekV4Attention
    kind._fused_qnorm_rope_kv_insert = front.insert(kind._fused_qnorm_rope_kv_insert)


def _wo_a_scale(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels.linear import keep_wo_a_scale

    method = module.Fp8LinearMethod
    original = method.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        keep_wo_a_scale(layer)
        original(self, layer)

    method.process_weights_after_loading = process_weights_after_loading


def _mhc(module: ModuleType) -> None:
    """Swap the functions that the model calls when its first layer is made, and those of the draft models with them."""
    from dsv4_runtime.vllm_plugin.kernels import hyper

    layer = module.DeepseekV4DecoderLayer
    original = layer.__init__

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if choice().bundled(Op.MHC):
            sys.modules.setdefault(_TILELANG, hyper.UnusedKernels(_TILELANG))
            # Asked for now: vLLM imports the module of the MTP after this one.
            consumers = [module, *(sys.modules.get(f"{module.__package__}.{name}") for name in ("mtp", "dspark"))]
            for consumer in filter(None, consumers):
                for name in hyper.FUNCTIONS.keys() & vars(consumer).keys():
                    setattr(consumer, name, hyper.FUNCTIONS[name])
        original(self, *args, **kwargs)
        if choice().bundled(Op.MHC):
            hyper.announce_plans(self.hidden_size)

    layer.__init__ = make


def _compressor(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import compressor, hyper

    kind = module.DeepseekCompressor
    original, forward = kind.__init__, kind.forward

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if choice().bundled(Op.COMPRESSOR):
            sys.modules.setdefault(_CUTE, hyper.UnusedKernels(_CUTE))
        original(self, *args, **kwargs)
        self.dsv4_bundled = choice().bundled(Op.COMPRESSOR) and compressor.supported(self)

    @functools.wraps(forward)
    def chosen(self: Any, kv_score: Any, positions: Any, rotary_emb: Any) -> None:
        (compressor.forward if self.dsv4_bundled else forward)(self, kv_score, positions, rotary_emb)

    kind.__init__, kind.forward = make, chosen


def _projections(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import projections

    kind = module.DeepseekV4Attention
    kind._run_parallel_input_projections = projections.at_once(kind._run_parallel_input_projections)


def _positions(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import projections

    kind = module.DeepseekV4Attention
    kind.forward = projections.noting_positions(kind.forward)


def _indexer_scores(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    indexer.attach()
    module.has_deep_gemm = indexer.scores_are_there(module.has_deep_gemm)  # type: ignore[attr-defined]
    module.fp8_fp4_mqa_logits = indexer.logits(module.fp8_fp4_mqa_logits)  # type: ignore[attr-defined]
    module.fp8_fp4_paged_mqa_logits = indexer.paged_logits(module.fp8_fp4_paged_mqa_logits)  # type: ignore[attr-defined]


def _indexer_schedule(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    module.get_paged_mqa_logits_metadata = indexer.no_schedule(module.get_paged_mqa_logits_metadata)  # type: ignore[attr-defined]


def _indexer_query(module: ModuleType) -> None:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    module.fused_indexer_q_rope_quant = indexer.query(module.fused_indexer_q_rope_quant)  # type: ignore[attr-defined]


def _with_each_new(kind: type, then: Callable[[Any], None]) -> None:
    """Have `then` called with every object of `kind` that is made."""
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    kind.__init__ = make  # type: ignore[misc]


def _router(module: ModuleType) -> None:
    def attach(runner: Any) -> None:
        # Not before: this module is imported while vLLM's package of experts is.
        from dsv4_runtime.vllm_plugin.kernels import router

        router.attach(runner)

    _with_each_new(module.MoERunner, attach)


def _expert_sum(module: ModuleType) -> None:
    for name in ("wait", "output", "forward"):
        if not hasattr(module.SharedExperts, name):
            raise HookMismatchError(f"SharedExperts.{name} is gone")

    def take(runner: Any) -> None:
        # As above.
        from dsv4_runtime.vllm_plugin.kernels.expert_sum import take_shared_experts

        take_shared_experts(runner)

    _with_each_new(module.MoERunner, take)


HOOKS = (
    Hook(
        (Op.MOE,),
        "vllm.model_executor.layers.quantization.mxfp4",
        "select_deepseek_v4_mxfp4_moe_backend",
        ("config",),
        _moe,
    ),
    Hook((Op.FP8_LINEAR,), "vllm.model_executor.kernels.linear", "_POSSIBLE_FP8_BLOCK_KERNELS", None, _fp8_linear),
    Hook(
        (Op.FP8_LINEAR,),
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4MLP.forward",
        ("self", "x"),
        _shared_experts,
    ),
    Hook(
        (Op.MLA_DECODE, Op.MLA_PREFILL, Op.O_PROJ),
        "vllm.models.deepseek_v4.nvidia.model",
        "_select_dsv4_attn_cls",
        ("vllm_config",),
        _attention,
    ),
    Hook(
        (Op.FP8_LINEAR, Op.FRONT),
        "vllm.models.deepseek_v4.attention",
        "fused_q_kv_rmsnorm",
        ("qr", "kv", "q_weight", "kv_weight", "eps"),
        _front_norm,
    ),
    Hook(
        (Op.FRONT,),
        "vllm.models.deepseek_v4.attention",
        "DeepseekV4Attention._fused_qnorm_rope_kv_insert",
        ("self", "q", "kv", "positions", "attn_metadata"),
        _front_insert,
    ),
    Hook(
        (Op.O_PROJ,),
        "vllm.model_executor.layers.quantization.fp8",
        "Fp8LinearMethod.process_weights_after_loading",
        ("self", "layer"),
        _wo_a_scale,
    ),
    Hook(
        (Op.MHC,),
        "vllm.models.deepseek_v4.nvidia.model",
        "mhc_fused_post_pre_tilelang",
        (
            "x",
            "residual",
            "post_layer_mix",
            "comb_res_mix",
            "fn",
            "hc_scale",
            "hc_base",
            "rms_eps",
            "hc_pre_eps",
            "hc_sinkhorn_eps",
            "hc_post_mult_value",
            "sinkhorn_repeat",
            "n_splits",
            "tile_n",
            "norm_weight",
            "norm_eps",
        ),
        _mhc,
    ),
    Hook(
        (Op.COMPRESSOR,),
        "vllm.models.deepseek_v4.compressor",
        "DeepseekCompressor.forward",
        ("self", "kv_score", "positions", "rotary_emb"),
        _compressor,
    ),
    Hook(
        (Op.COMPRESSOR,),
        "vllm.models.deepseek_v4.attention",
        "DeepseekV4Attention._run_parallel_input_projections",
        ("self", "hidden_states"),
        _projections,
    ),
    # Without it the projections stay vLLM's too: they have no positions.
    Hook(
        (Op.COMPRESSOR,),
        "vllm.models.deepseek_v4.attention",
        "DeepseekV4Attention.forward",
        ("self", "positions", "hidden_states", "llama_4_scaling"),
        _positions,
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        "fp8_fp4_paged_mqa_logits",
        (
            "q",
            "kv_cache",
            "weights",
            "context_lens",
            "block_tables",
            "schedule_metadata",
            "max_model_len",
            "indices",
        ),
        _indexer_scores,
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.v1.attention.backends.mla.indexer",
        "get_paged_mqa_logits_metadata",
        ("context_lens", "block_size", "num_sms", "indices"),
        _indexer_schedule,
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.models.deepseek_v4.attention",
        "fused_indexer_q_rope_quant",
        (
            "positions",
            "index_q",
            "index_q_cos_sin_cache",
            "index_weights",
            "index_weights_softmax_scale",
            "index_weights_head_scale",
            "use_fp4",
            "weights_out_dtype",
        ),
        _indexer_query,
    ),
    Hook(
        (Op.ROUTER,),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "MoERunner._forward_impl",
        ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        _router,
    ),
    Hook(
        (Op.MOE,),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "MoERunner._forward_impl",
        ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        _expert_sum,
    ),
    *TOPK_HOOKS,
    *WARM_UP_HOOKS,
)
