"""The bundled kernels' hooks in vLLM, each applied right after vLLM imported its module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, choice, possible
from dsv4_runtime.vllm_plugin.kernels.hooks import (
    ATTACHED,
    Assignment,
    Hook,
    HookMismatchError,
    Known,
    check_overrides,
    parameters,
)
from dsv4_runtime.vllm_plugin.kernels.topk_hooks import TOPK_HOOKS
from dsv4_runtime.vllm_plugin.kernels.warmup_hooks import WARM_UP_HOOKS

_TILELANG = "vllm.model_executor.kernels.mhc.tilelang_kernels"
_CUTE = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"


def install() -> None:
    """Arrange for every hook whose operations may be bundled to be attached when vLLM imports its module.

    What a hook puts in place asks for the choice when a layer is made: only then the shapes are known.
    """
    anything = any(map(possible, Op))
    for hook in HOOKS:
        if any(map(possible, hook.ops)) if hook.ops else anything or not hook.bundled:
            ATTACHED.install(hook)


def _with_each_new(kind: type, then: Callable[[Any], None]) -> Assignment:
    """Return the assignment that has `then` called with every object of `kind` that is made."""
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    return kind, "__init__", make


def _moe(module: ModuleType) -> list[Assignment]:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    from dsv4_runtime.vllm_plugin.kernels.moe import OVERRIDDEN, BundledMxfp4Experts

    check_overrides(BundledMxfp4Experts, modular_kernel.FusedMoEExpertsModular, OVERRIDDEN)
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

    return [(module, "select_deepseek_v4_mxfp4_moe_backend", select)]


def _fp8_linear(module: ModuleType) -> list[Assignment]:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import PlatformEnum

    from dsv4_runtime.vllm_plugin.kernels.linear import OVERRIDDEN, BundledFp8BlockScaledMMKernel

    check_overrides(BundledFp8BlockScaledMMKernel, Fp8BlockScaledMMLinearKernel, OVERRIDDEN)
    kernels = module._POSSIBLE_FP8_BLOCK_KERNELS
    return [(kernels, PlatformEnum.CUDA, [BundledFp8BlockScaledMMKernel, *kernels[PlatformEnum.CUDA]])]


def _known_mlp(self: Any, x: Any) -> Any:
    gate_up, _ = self.gate_up_proj(x)
    x = self.act_fn(gate_up)
    x, _ = self.down_proj(x)
    return x


def _shared_experts(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import shared_experts

    kind = module.DeepseekV4MLP

    @functools.wraps(kind.forward)
    def with_codes(self: Any, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(shared_experts.activation(self, gate_up))
        return x

    return [_with_each_new(kind, shared_experts.prepare), (kind, "forward", with_codes)]


def _attention(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import prefill
    from dsv4_runtime.vllm_plugin.kernels.attention import OVERRIDDEN, BundledAttention, attention_class

    original = module._select_dsv4_attn_cls
    known = (module.DeepseekV4FlashMLAAttention, module.DeepseekV4FlashInferSM120Attention)
    taken = set(parameters(prefill.forward)) - {"layer"}
    for kind in known:
        check_overrides(BundledAttention, kind, OVERRIDDEN)
        # FlashMLA's class gives positions as well, which are dropped.
        if (given := set(parameters(kind._forward_prefill)) - {"self", "positions"}) != taken:
            raise HookMismatchError(f"{kind.__name__}._forward_prefill gets {sorted(given)}, expected {sorted(taken)}")

    @functools.wraps(original)
    def select(vllm_config: Any) -> Any:
        stock = original(vllm_config)
        if stock in known:
            return attention_class(stock, module, vllm_config.model_config.hf_config)
        _attention_stays(stock.__name__)
        return stock

    return [(module, "_select_dsv4_attn_cls", select)]


@functools.cache
def _attention_stays(kind: str) -> None:
    wanted = [op for op in (Op.MLA_DECODE, Op.MLA_PREFILL, Op.O_PROJ) if choice().bundled(op)]
    if wanted:
        LOGGER.warning(
            "dsv4 kernels: %s stays with vLLM's own kernels (attention is of %s, which is not known here)",
            ", ".join(wanted), kind,
        )  # fmt: skip


def _front_norm(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import front

    kind = module.DeepseekV4Attention
    return [
        (module, "fused_q_kv_rmsnorm", front.norm(module.fused_q_kv_rmsnorm)),
        (kind, "__init__", front.announcing(kind.__init__)),
    ]


def _front_insert(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import front

    kind, name = module.DeepseekV4Attention, "_fused_qnorm_rope_kv_insert"
    return [(kind, name, front.insert(kind._fused_qnorm_rope_kv_insert))]


def _wo_a_scale(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels.linear import keep_wo_a_scale

    method = module.Fp8LinearMethod
    original = method.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        # No other layer gets anything beside its parameters: models are shared between processes by their names.
        if getattr(layer, "is_bmm", False) and choice().bundled(Op.O_PROJ):
            keep_wo_a_scale(layer)
        original(self, layer)

    return [(method, "process_weights_after_loading", process_weights_after_loading)]


def _mhc(module: ModuleType) -> list[Assignment]:
    """Swap the functions that the model calls when its first layer is made, and those of the draft models with them."""
    from dsv4_runtime.vllm_plugin.kernels import hyper

    for name in _HYPER_CONNECTIONS:
        if (found := parameters(getattr(module, name))) != (expected := parameters(hyper.FUNCTIONS[name])):
            raise HookMismatchError(f"parameters of {name} are {found}, expected {expected}")
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

    return [(layer, "__init__", make)]


def _compressor(module: ModuleType) -> list[Assignment]:
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

    return [(kind, "__init__", make), (kind, "forward", chosen)]


def _projections(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import projections

    kind, name = module.DeepseekV4Attention, "_run_parallel_input_projections"
    return [
        (kind, name, projections.at_once(kind._run_parallel_input_projections)),
        (kind, "forward", projections.noting_positions(kind.forward)),
    ]


def _indexer_scores(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    return [
        (module, "has_deep_gemm", indexer.scores_are_there(module.has_deep_gemm)),
        (module, "fp8_fp4_mqa_logits", indexer.logits(module.fp8_fp4_mqa_logits)),
        (module, "fp8_fp4_paged_mqa_logits", indexer.paged_logits(module.fp8_fp4_paged_mqa_logits)),
    ]


def _indexer_schedule(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    name = "get_paged_mqa_logits_metadata"
    return [(module, name, indexer.no_schedule(module.get_paged_mqa_logits_metadata))]


def _indexer_query(module: ModuleType) -> list[Assignment]:
    from dsv4_runtime.vllm_plugin.kernels import indexer

    return [(module, "fused_indexer_q_rope_quant", indexer.query(module.fused_indexer_q_rope_quant))]


def _router(module: ModuleType) -> list[Assignment]:
    def attach(runner: Any) -> None:
        # Not before: this module is imported while vLLM's package of experts is.
        from dsv4_runtime.vllm_plugin.kernels import router

        router.attach(runner)

    return [_with_each_new(module.MoERunner, attach)]


def _expert_sum(module: ModuleType) -> list[Assignment]:
    def take(runner: Any) -> None:
        # As above.
        from dsv4_runtime.vllm_plugin.kernels.expert_sum import take_shared_experts

        take_shared_experts(runner)

    return [_with_each_new(module.MoERunner, take)]


def _nothing(module: ModuleType) -> list[Assignment]:
    """Only the symbols count."""
    return []


_ATTENTION = "vllm.models.deepseek_v4.attention"
_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_RUNNER_FORWARD = ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids")
_RUNNER_PARTS = Known(
    names=frozenset(
        {"router", "gate", "moe_config", "routed_experts", "_shared_experts", "shared_expert_gate", "enable_dbo"}
    )
)
_QUERY = (
    "positions",
    "index_q",
    "index_q_cos_sin_cache",
    "index_weights",
    "index_weights_softmax_scale",
    "index_weights_head_scale",
    "use_fp4",
    "weights_out_dtype",
)
_PAGED = ("q", "kv_cache", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len", "indices")
_HYPER_CONNECTIONS = (
    "mhc_pre_tilelang",
    "mhc_pre_broadcast_tilelang",
    "mhc_fused_post_pre_tilelang",
    "mhc_post_tilelang",
    "hc_head_fused_kernel_tilelang",
)
_SELECT_LINEAR = ("config", "possible_kernels", "compute_capability", "force_kernel", "quantization")

HOOKS = (
    Hook(
        (Op.MOE,),
        "vllm.model_executor.layers.quantization.mxfp4",
        {"select_deepseek_v4_mxfp4_moe_backend": ("config",)},
        _moe,
    ),
    Hook(
        (Op.MOE,),
        _RUNNER,
        {
            "MoERunner.__init__": _RUNNER_PARTS,
            "MoERunner._forward_impl": _RUNNER_FORWARD,
            "MoERunner._select_forward": ("self",),
            "SharedExperts.maybe_forward_async": ("self", "shared_experts_input"),
            "SharedExperts.forward": ("self", "shared_experts_input", "order"),
            "SharedExperts.wait": ("self",),
            "SharedExperts.output": None,
        },
        _expert_sum,
    ),
    Hook(
        (Op.FP8_LINEAR,),
        "vllm.model_executor.kernels.linear",
        {"_POSSIBLE_FP8_BLOCK_KERNELS": None, "choose_scaled_mm_linear_kernel": _SELECT_LINEAR},
        _fp8_linear,
    ),
    Hook(
        (Op.FP8_LINEAR,),
        _MODEL,
        {"DeepseekV4MLP.__init__": None, "DeepseekV4MLP.forward": Known(body=_known_mlp)},
        _shared_experts,
    ),
    Hook(
        (Op.MLA_DECODE, Op.MLA_PREFILL, Op.O_PROJ),
        _MODEL,
        {
            "_select_dsv4_attn_cls": ("vllm_config",),
            "DeepseekV4FlashMLAAttention": None,
            "DeepseekV4FlashInferSM120Attention": None,
        },
        _attention,
    ),
    Hook(
        (Op.FP8_LINEAR, Op.FRONT),
        _ATTENTION,
        {
            "fused_q_kv_rmsnorm": ("qr", "kv", "q_weight", "kv_weight", "eps"),
            "DeepseekV4Attention.__init__": Known(names=frozenset({"q_lora_rank", "max_num_batched_tokens"})),
        },
        _front_norm,
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
        _front_insert,
    ),
    Hook(
        (Op.O_PROJ,),
        "vllm.model_executor.layers.quantization.fp8",
        {"Fp8LinearMethod.process_weights_after_loading": ("self", "layer")},
        _wo_a_scale,
    ),
    Hook(
        (Op.MHC,),
        _MODEL,
        {
            "DeepseekV4DecoderLayer.__init__": Known(names=frozenset({"hidden_size"})),
            **dict.fromkeys(_HYPER_CONNECTIONS),
        },
        _mhc,
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
        _compressor,
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
            # Without the positions the projections stay vLLM's.
            "DeepseekV4Attention.forward": ("self", "positions", "hidden_states", "llama_4_scaling"),
        },
        _projections,
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.model_executor.layers.sparse_attn_indexer",
        {
            "has_deep_gemm": (),
            "fp8_fp4_mqa_logits": ("q", "kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "max_seqlen_k"),
            "fp8_fp4_paged_mqa_logits": _PAGED,
        },
        _indexer_scores,
    ),
    Hook(
        (Op.INDEXER,),
        "vllm.v1.attention.backends.mla.indexer",
        {"get_paged_mqa_logits_metadata": ("context_lens", "block_size", "num_sms", "indices")},
        _indexer_schedule,
    ),
    Hook((Op.INDEXER,), _ATTENTION, {"fused_indexer_q_rope_quant": _QUERY}, _indexer_query),
    Hook(
        (Op.ROUTER,),
        _RUNNER,
        {"MoERunner.__init__": _RUNNER_PARTS, "MoERunner._forward_impl": _RUNNER_FORWARD},
        _router,
    ),
    Hook(
        (Op.ROUTER,),
        "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router",
        {
            "FusedTopKBiasRouter._compute_routing": (
                "self",
                "hidden_states",
                "router_logits",
                "indices_type",
                "input_ids",
            ),
            "_get_padding_mask": ("num_tokens",),
        },
        _nothing,
    ),
    *TOPK_HOOKS,
    *WARM_UP_HOOKS,
)
