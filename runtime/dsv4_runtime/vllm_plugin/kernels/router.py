"""vLLM's router of DeepSeek-V4's experts, its product and its choice computed by `dsv4_kernels.router`.

vLLM's MoE runner has the gate compute the logits, then asks the layer's router for the experts. A runner without a gate
passes on what it was called with, which DeepSeek-V4 makes the hidden states: so the gate is taken from the runner, and
the router computes from the hidden states and the gate's weight. The runner's order of shared experts, the capture of
the chosen experts and the type of their numbers stay vLLM's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router as stock

from dsv4_kernels.arch import DEFAULT_ARCH, detect
from dsv4_kernels.router.api import RouterPlan, is_supported
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, choice, most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce


def attach(runner: Any) -> None:
    """Have the bundled kernels route for `runner`, vLLM's MoE runner, which was just made, where they are chosen."""
    router = runner.router
    # Other models have runners too, and no choice is made for them.
    if getattr(router, "scoring_func", None) != "sqrtsoftplus" or not choice().bundled(Op.ROUTER):
        return
    reason = unsupported(runner)
    if reason is not None:
        _stays(reason)
        return
    gate, runner.gate = runner.gate, None
    router._compute_routing = functools.partial(routing, router, gate)
    announce(RouterPlan, **_shape(router, gate), device=DEVICE)


@functools.cache
def _stays(reason: str) -> None:
    LOGGER.warning("dsv4 kernels: router stays with vLLM's own kernels (%s)", reason)


def unsupported(runner: Any) -> str | None:
    """Return why the bundled kernels cannot route for `runner`, None if they can."""
    router, gate, moe = runner.router, runner.gate, runner.moe_config
    if type(router) is not stock.FusedTopKBiasRouter:
        return f"{type(router).__name__} chooses the experts"
    config, table = get_current_vllm_config(), router._hash_indices_table
    for there, what in (
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
    ):
        if there:
            return what
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or weight.shape[1] != moe.hidden_dim or getattr(gate, "bias", None) is not None:
        return f"the gate is {weight.dtype} {tuple(weight.shape)}, needs bfloat16 without bias, {moe.hidden_dim} wide"
    support = is_supported(_shape(router, gate), detect(weight.device) or DEFAULT_ARCH)
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

    Takes the place of `FusedTopKBiasRouter._compute_routing`. `router_logits` are the hidden states again. Experts of
    another type are converted by the caller.
    """
    x = hidden_states.contiguous()
    table = router._hash_indices_table
    chosen: dict[str, torch.Tensor | None] = (
        {"bias": router.e_score_correction_bias} if table is None else {"tid2eid": table, "input_ids": input_ids}
    )
    weights, ids = _plan(router, gate).run(
        x=x, weight=gate.weight, scaling=router.routed_scaling_factor, k=router.top_k,
        padding=stock._get_padding_mask(x.shape[0]), **chosen,
    )  # fmt: skip
    return weights, ids


def _plan(router: Any, gate: Any) -> RouterPlan:
    s, device = _shape(router, gate), gate.weight.device
    plan: RouterPlan = shared_plan(
        (Op.ROUTER, *s.values(), device),
        lambda: RouterPlan(s["tokens"], s["hidden"], s["experts"], s["k"], device),
    )
    return plan


def _shape(router: Any, gate: Any) -> dict[str, int]:
    experts, hidden = gate.weight.shape
    return {"tokens": most_tokens(1), "hidden": hidden, "experts": experts, "k": router.top_k}
