"""The sum of vLLM's shared and routed experts, made by the last launch of `dsv4_kernels.moe`.

vLLM's MoE runner begins the shared experts, on a stream of their own while tokens are few, has the routed ones
computed and adds the two. Here the shared experts are taken from the runner, which then adds nothing. They begin where
they did, and what they give goes to the routed experts as an addend. The model holds the shared experts too, so their
parameters keep the names that weights are loaded by. Ranks of a tensor-parallel group each add their parts, as in vLLM,
which reduces the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from dsv4_runtime.vllm_plugin.kernels.active import LOGGER
from dsv4_runtime.vllm_plugin.kernels.moe import AddingMxfp4Experts, BundledMxfp4Experts


def take_shared_experts(runner: Any) -> None:
    """Have the bundled experts of `runner`, vLLM's MoE runner, which was just made, add its shared experts."""
    method = runner.routed_experts.quant_method
    if getattr(method, "experts_cls", None) is not BundledMxfp4Experts or runner.shared_experts is None:
        return
    reason = unsupported(runner)
    if reason is not None:
        _stays(reason)
        return
    shared, runner._shared_experts = runner._shared_experts, None
    # The operator that returns one tensor.
    runner._forward_entry = runner._select_forward()
    runner._forward_impl = functools.partial(forward, runner, shared, runner._forward_impl)
    method.experts_cls = AddingMxfp4Experts


@functools.cache
def _stays(reason: str) -> None:
    LOGGER.warning("dsv4 kernels: shared and routed experts are added by vLLM (%s)", reason)


def unsupported(runner: Any) -> str | None:
    """Return why the shared experts cannot be added by the routed ones of `runner`, None if they can."""
    moe = runner.moe_config
    for there, what in (
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
    ):
        if there:
            return what
    return None


def forward(
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
        shared(hidden_states, SharedExpertsOrder.NO_OVERLAP)
    # Asked for now: loading weights makes it, and makes it again.
    experts = runner.routed_experts.quant_method.moe_kernel.fused_experts
    experts.addend, experts.ready = shared.output, shared.wait if beside else None
    return original(hidden_states, router_logits, shared_experts_input, input_ids)
