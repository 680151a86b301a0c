"""vLLM's modular experts, computed by `dsv4_kernels.moe` from the weights as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.platforms import current_platform

from dsv4_kernels.arch import DEFAULT_ARCH, detect
from dsv4_kernels.moe.api import MoePlan, is_supported
from dsv4_kernels.moe.reference import LIMIT
from dsv4_runtime.contract.kernels import BUNDLED_W4A8, Op
from dsv4_runtime.vllm_plugin.kernels.active import choice, most_tokens, shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce

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
"""Methods of vLLM's experts that are replaced here."""


class BundledMxfp4Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]  # vLLM has no types that mypy accepts
    """Experts of MXFP4 weights [E, 2I, H/2] and [E, H, I/2], bf16 in and out, SwiGLU clamped at ±10.

    Takes the weights in the checkpoint's own layout, as vLLM's `B12X_MXFP4_BF16` does, whose conversion is the
    identity. Sums the experts of a token itself. An expert id that is not on this rank is skipped.
    """

    adds: ClassVar[bool] = False
    """Whether every run gets an `addend`, bf16 [M, K], for which `ready` has the stream wait if it has to."""

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
        """Return tokens in rows, not batched by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def unsupported(config: Any) -> str | None:
        """Return why the layer that `config` (`FusedMoEConfig`) describes cannot be computed here, None if it can."""
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
        """Return that nothing is left to weight or to add."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,  # noqa: N803  (vLLM's names)
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        *_: Any,
        **__: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return no workspaces (the plan has its own) and the output, [M, K]."""
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
        ids = topk_ids if expert_map is None else local_ids(expert_map, topk_ids)
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
        """Make the plan now, so that its memory is there when vLLM profiles."""
        self.plan(layer.w13_weight.device)

    def plan(self, device: torch.device) -> MoePlan:
        """Return the plan that all layers of this shape share."""
        key = (Op.MOE, self._a8, self.adds, device, self._tokens, *self._shape.values())
        s = self._shape

        def make() -> MoePlan:
            sizes = (s["hidden"], s["inter"], s["experts"], s["topk"])
            return MoePlan(self._tokens, *sizes, a8=self._a8, device=device, adds=self.adds)

        plan: MoePlan = shared_plan(key, make)
        return plan


class AddingMxfp4Experts(BundledMxfp4Experts):
    """The same experts, which add what the shared ones gave: `expert_sum` hands it to each run."""

    adds = True


def local_ids(expert_map: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return which expert of this rank each of `ids` [T, k] is, −1 where it is another rank's or no expert.

    Padding has the id −1, which as an index would be the last expert.
    """
    return torch.where(ids < 0, -1, expert_map[ids.clamp_min(0).long()])


def gathered_tokens(config: Any) -> int:
    """Return the most tokens that the experts of a rank get in a step, by the layer's `FusedMoEConfig`.

    Where tokens are spread over ranks, vLLM gathers those of all data parallel ranks, each rounded up to the ranks that
    share a sequence.
    """
    parallel = config.moe_parallel_config
    sharing = max(1, getattr(parallel, "sp_size", 1))
    own = most_tokens(config.max_num_tokens)
    return int(-(-own // sharing) * sharing * parallel.dp_size * getattr(parallel, "pcp_size", 1))


def _shape(config: Any) -> dict[str, int]:
    return {
        "hidden": config.hidden_dim,
        "inter": config.intermediate_size_per_partition,
        "experts": config.num_local_experts,
        "topk": config.experts_per_token,
    }
