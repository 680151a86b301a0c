"""vLLM's modular experts by `dsv4_kernels.moe` from the checkpoint's weights; their sum with the shared experts; the
router.

vLLM's MoE runner starts the shared experts, on a separate stream for few tokens, computes the routed ones and adds
both. Here the shared experts are removed from the runner, which then adds nothing. They start at the same point, and
their output is an addend of the routed experts' last launch. The model also references the shared experts, so that
their parameters keep the names for weight loading. Ranks of a tensor-parallel group each add their parts; vLLM reduces
the sum.

vLLM's MoE runner computes the logits with the gate, then calls the layer's router. A runner without a gate passes its
second argument on, which DeepSeek-V4 sets to the hidden states: the gate is removed from the runner, and the router
computes from the hidden states and the gate's weight (`dsv4_kernels.router`). The order of shared experts, the capture
of the selected experts and the type of their ids stay vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, detect
from dsv4_kernels.moe.api import LIMIT, MoePlan, is_supported
from dsv4_kernels.router.api import RouterPlan
from dsv4_kernels.router.api import is_supported as router_is_supported
from dsv4_runtime.contract.kernels import BUNDLED_W4A8, Op
from dsv4_runtime.vllm_plugin.kernels import vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import LOGGER, choice, first_reason, most_tokens, warn_once
from dsv4_runtime.vllm_plugin.kernels.hooks import check_overrides
from dsv4_runtime.vllm_plugin.kernels.plans import DEVICE, announce, shared_plan
from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
    MoEActivation,
    TopKWeightAndReduceNoOP,
    current_platform,
    get_current_vllm_config,
    kMxfp4Static,
)
from dsv4_runtime.vllm_plugin.kernels.vllm_api import modular_kernel as mk

OVERRIDDEN = (
    "activation_format",
    "_supports_current_device",
    "_supports_no_act_and_mul",
    "_supports_quant_scheme",
    "_supports_activation",
    "_supports_parallel_config",
    "finalize_weight_and_reduce_impl",
    "workspace_shapes",
    "apply",
    "process_weights_after_loading",
)
"""Replaced methods of vLLM's experts."""


class BundledMxfp4Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]  # vLLM has no types that mypy accepts
    """Experts of MXFP4 weights [E, 2I, H/2] and [E, H, I/2], bf16 in and out, SwiGLU clamped at ±10.

    Uses the weights in the checkpoint's layout, like vLLM's `B12X_MXFP4_BF16`, whose conversion is the identity. Sums
    the experts of a token. Expert ids of other ranks are skipped.
    """

    adds: ClassVar[bool] = False
    """Whether each run gets an `addend`, bf16 [M, K]; `ready`, if set, makes the stream wait for it."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config)
        self.addend: torch.Tensor | None = None
        self.ready: Callable[[], None] | None = None
        self._shape = _shape(moe_config)
        self._tokens = gathered_tokens(moe_config)
        self._a8 = choice().provider(Op.MOE) == BUNDLED_W4A8
        announce(MoePlan, tokens=self._tokens, **self._shape, a8=self._a8, device=DEVICE, adds=self.adds)

    @staticmethod
    def activation_format() -> Any:
        """Return the format with tokens in rows, not batched by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def unsupported(config: Any) -> str | None:
        """Return the reason why the layer with `config` (`FusedMoEConfig`) is not supported, or None."""
        support = is_supported(_shape(config), detect(torch.device("cuda")) or DEFAULT_ARCH)
        if not support:
            return support.reason
        if config.swiglu_limit != LIMIT:
            return f"swiglu_limit is {config.swiglu_limit}, the kernels clamp at {LIMIT}"
        if config.has_bias:
            return "the experts have biases"
        parallel = config.moe_parallel_config
        if parallel.use_batched_activation_format:
            return "tokens come batched by expert"
        if getattr(parallel, "use_passthrough_all2all", False) or (
            parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels
        ):
            return f"{parallel.all2all_backend} gives a rank any number of tokens; needs allgather_reducescatter"
        return None

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() and current_platform.has_device_capability(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return bool((weight_key, activation_key) == (kMxfp4Static, None))

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return the no-op: `apply` weights and adds."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,  # noqa: N803  (vLLM's names)
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        *_: Any,
        **__: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return empty workspaces (the plan has its own) and the output shape [M, K]."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum of the experts of every token, bf16 [M, K], into `output`."""
        ids = topk_ids
        if expert_map is not None:
            # Experts of other ranks have the local id −1; padding has it before, and as an index −1 is the last expert.
            ids = torch.where(ids < 0, -1, expert_map[ids.clamp_min(0).long()])
        addend, self.addend = self.addend, None
        self.plan(hidden_states.device).run(
            x=hidden_states,
            topk_ids=ids.to(torch.int32),
            topk_weights=topk_weights.to(torch.float32),
            w13=w1,
            w13_scale=self.w1_scale,
            w2=w2,
            w2_scale=self.w2_scale,
            out=output,
            addend=addend,
            ready=self.ready,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the plan, so that vLLM's profile includes its memory."""
        self.plan(layer.w13_weight.device)

    def plan(self, device: torch.device) -> MoePlan:
        """Return the shared plan of all layers of this shape."""
        return shared_plan(
            (Op.MOE, self._a8, self.adds, device, self._tokens, *self._shape.values()),
            lambda: MoePlan(tokens=self._tokens, **self._shape, a8=self._a8, device=device, adds=self.adds),
        )


class AddingMxfp4Experts(BundledMxfp4Experts):
    """The same experts, which add the output of the shared ones (`forward_with_sum`)."""

    adds = True


def select_experts(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return vLLM's `select_deepseek_v4_mxfp4_moe_backend` with the bundled experts."""
    check_overrides(BundledMxfp4Experts, mk.FusedMoEExpertsModular, OVERRIDDEN)
    backend = vllm_api.Mxfp4MoeBackend.B12X_MXFP4_BF16

    @functools.wraps(original)
    def select(config: Any) -> Any:
        if not choice().bundled(Op.MOE):
            return original(config)
        reason = BundledMxfp4Experts.unsupported(config)
        if reason is None:
            return backend, BundledMxfp4Experts
        LOGGER.warning("dsv4 kernels: moe stays with vLLM's own kernels (%s)", reason)
        return original(config)

    return select


def gathered_tokens(config: Any) -> int:
    """Return the maximum number of tokens of a rank's experts in a step, for the layer's `FusedMoEConfig`.

    With tokens distributed over ranks, vLLM gathers those of all data parallel ranks, each rounded up to the number of
    ranks that share a sequence.
    """
    parallel = config.moe_parallel_config
    sharing = max(1, getattr(parallel, "sp_size", 1))
    own = most_tokens(config.max_num_tokens)
    return int(-(-own // sharing) * sharing * parallel.dp_size * getattr(parallel, "pcp_size", 1))


def _shape(config: Any) -> dict[str, Any]:
    return {
        "hidden": config.hidden_dim,
        "inter": config.intermediate_size_per_partition,
        "experts": config.num_local_experts,
        "topk": config.experts_per_token,
    }


@functools.cache  # not with this module: it is imported while vLLM imports its package of experts
def _shared_experts_order() -> Any:
    return vllm_api.SharedExpertsOrder


@functools.cache  # as above
def _routers() -> Any:
    return vllm_api.fused_topk_bias_router


def take_shared_experts(runner: Any) -> None:
    """Let the bundled experts of `runner`, a new MoE runner of vLLM, add its shared experts."""
    method = runner.routed_experts.quant_method
    if getattr(method, "experts_cls", None) is not BundledMxfp4Experts or runner.shared_experts is None:
        return
    reason = sum_unsupported(runner)
    if reason is not None:
        warn_once("dsv4 kernels: shared and routed experts are added by vLLM (%s)", reason)
        return
    shared, runner._shared_experts = runner._shared_experts, None
    # Selects the operator that returns one tensor.
    runner._forward_entry = runner._select_forward()
    runner._forward_impl = functools.partial(forward_with_sum, runner, shared, runner._forward_impl)
    method.experts_cls = AddingMxfp4Experts


def sum_unsupported(runner: Any) -> str | None:
    """Return the reason why the routed experts of `runner` cannot add the shared ones, or None."""
    moe = runner.moe_config
    return first_reason(
        (moe.moe_parallel_config.use_ep or runner.router.eplb_state is not None, "the experts are spread over ranks"),
        (moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel, "tokens are spread over ranks"),
        (runner.shared_expert_gate is not None, "the shared experts have a gate"),
        (runner.routed_scaling_factor != 1.0, "the routed experts' result is scaled"),
        (
            runner.routed_input_transform is not None or runner.routed_output_transform is not None,
            "the routed experts' input or result is transformed",
        ),
        (moe.hidden_dim != moe.hidden_dim_unpadded, "the routed experts' input is padded"),
        (runner.enable_dbo, "a step is split into two that run at once"),
        (get_current_vllm_config().lora_config is not None, "an adapter may change the experts"),
    )


def forward_with_sum(
    runner: Any,
    shared: Any,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None = None,
) -> Any:
    """Return the experts' sum, bf16 [T, H]. Takes the place of `MoERunner._forward_impl`, which is `original`."""
    beside = shared.maybe_forward_async(hidden_states)
    if not beside:
        shared(hidden_states, _shared_experts_order().NO_OVERLAP)
    # Looked up per call: each load of weights makes a new one.
    experts = runner.routed_experts.quant_method.moe_kernel.fused_experts
    experts.addend, experts.ready = shared.output, shared.wait if beside else None
    return original(hidden_states, router_logits, shared_experts_input, input_ids)


def attach_router(runner: Any) -> None:
    """Replace the routing of `runner`, a new MoE runner of vLLM, if the bundled router is chosen."""
    router = runner.router
    # Runners of other models have no kernel choice.
    if getattr(router, "scoring_func", None) != "sqrtsoftplus" or not choice().bundled(Op.ROUTER):
        return
    reason = router_unsupported(runner)
    if reason is not None:
        warn_once("dsv4 kernels: router stays with vLLM's own kernels (%s)", reason)
        return
    gate, runner.gate = runner.gate, None
    gate.dsv4_replaced = True
    router._compute_routing = functools.partial(routing, router, gate)
    announce(RouterPlan, **_router_shape(router, gate), device=DEVICE)


def router_unsupported(runner: Any) -> str | None:
    """Return the reason why the bundled kernels cannot route for `runner`, or None."""
    router, gate, moe = runner.router, runner.gate, runner.moe_config
    if type(router) is not _routers().FusedTopKBiasRouter:
        return f"{type(router).__name__} chooses the experts"
    config, table = get_current_vllm_config(), router._hash_indices_table
    reason = first_reason(
        (gate is None, "the layer has no gate of its own"),
        (moe.moe_parallel_config.use_ep or router.eplb_state is not None, "the experts are spread over ranks"),
        (moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel, "tokens are spread over ranks"),
        (router.bias_vl is not None, "images have a bias of their own"),
        (runner.routed_experts.quant_method.is_monolithic, "the experts' kernel routes by itself"),
        (runner.routed_input_transform is not None, "the experts' input is transformed"),
        (runner.shared_expert_gate is not None or router.num_fused_shared_experts, "shared experts are routed too"),
        (runner.enable_dbo, "a step is split into two that run at once"),
        (config.lora_config is not None, "an adapter may change the gate"),
        (not router.renormalize, "weights are not normalised"),
        (table is not None and table.dtype != torch.int32, "hashed experts are no int32"),
    )
    if reason is not None:
        return reason
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or weight.shape[1] != moe.hidden_dim or getattr(gate, "bias", None) is not None:
        return f"the gate is {weight.dtype} {tuple(weight.shape)}, needs bfloat16 without bias, {moe.hidden_dim} wide"
    support = router_is_supported(_router_shape(router, gate), detect(weight.device) or DEFAULT_ARCH)
    return support.reason


def routing(
    router: Any,
    gate: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights float32 [T, k] and the experts int32 [T, k] of hidden states bf16 [T, H].

    Replaces `FusedTopKBiasRouter._compute_routing`. `router_logits` are the hidden states again. The caller converts
    the type of the ids.
    """
    x = hidden_states.contiguous()
    table = router._hash_indices_table
    chosen: dict[str, torch.Tensor | None] = (
        {"bias": router.e_score_correction_bias} if table is None else {"tid2eid": table, "input_ids": input_ids}
    )
    shape, device = _router_shape(router, gate), gate.weight.device
    plan = shared_plan((Op.ROUTER, *shape.values(), device), lambda: RouterPlan(**shape, device=device))
    weights, ids = plan.run(
        x=x, weight=gate.weight, scaling=router.routed_scaling_factor, k=router.top_k,
        padding=_routers()._get_padding_mask(x.shape[0]), **chosen,
    )  # fmt: skip
    return weights, ids


def _router_shape(router: Any, gate: Any) -> dict[str, Any]:
    experts, hidden = gate.weight.shape
    return {"tokens": most_tokens(1), "hidden": hidden, "experts": experts, "k": router.top_k}
