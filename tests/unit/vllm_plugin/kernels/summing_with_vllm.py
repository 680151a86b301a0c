"""Child process of `test_expert_sum.py`: vLLM's own MoE runner, whose shared experts the bundled ones add.

Prints one JSON object. The reference is the same runner without the hook.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
from __future__ import annotations

import importlib
import json
import os
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    mxfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.runner import shared_experts as stock
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dsv4_kernels import interpreter
from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_plugin.kernels import hooks, moe, v033
from dsv4_runtime.vllm_plugin.kernels.moe import AddingMxfp4Experts, BundledMxfp4Experts, gathered_tokens

TOKENS, HIDDEN, K = 5, 128, 6
os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
moe.get_current_vllm_config = lambda: SimpleNamespace(lora_config=None)
moe_runner.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)
moe_runner.is_forward_context_available = lambda: False
given = operation("moe_w4a16").make_inputs(
    {"tokens": TOKENS, "hidden": HIDDEN, "inter": 32, "experts": 8, "topk": K}, torch.device("cpu"), 3
)
x = given["x"]
told: list[str] = []


class Router:
    """A fixed choice of experts."""

    eplb_state = None

    def select_experts(self, **_: Any) -> Any:
        told.append("routed")
        return given["topk_weights"], given["topk_ids"]


class Method:
    """vLLM's method of MXFP4 experts, which makes their kernel after the weights are loaded."""

    is_monolithic, skip_forward_padding, has_unpadded_output, topk_indices_dtype = False, False, False, None
    supports_internal_mk = True
    experts_cls: type = BundledMxfp4Experts
    moe_kernel: Any = None

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        return bool(self.moe_kernel.can_overlap_shared_experts)

    def load(self, moe_config: Any) -> None:
        quant = mxfp4_w4a16_moe_quant_config(given["w13_scale"], given["w2_scale"])
        self.moe_kernel = mk.FusedMoEKernel(
            MoEPrepareAndFinalizeNoDPEPModular(), self.experts_cls(moe_config=moe_config, quant_config=quant)
        )


class Experts(torch.nn.Module):
    """vLLM's routed experts, with their modular kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Method()

    def _ensure_moe_quant_config_init(self) -> None:
        pass

    def forward_modular(self, x: torch.Tensor, topk_weights: Any, topk_ids: Any, **shared: Any) -> Any:
        kernel, weights = self.quant_method.moe_kernel, (given["w13"], given["w2"])
        return kernel.apply(
            x, *weights, topk_weights=topk_weights, topk_ids=topk_ids, activation=MoEActivation.SILU,
            global_num_experts=8, expert_map=None, apply_router_weight_on_input=False, **shared,
        )  # fmt: skip


class Event:
    """An event of a separate stream, which completes on a wait."""

    def __init__(self, name: str, layer: Layer) -> None:
        self.name, self.layer = name, layer

    def record(self, stream: Any) -> None:
        told.append(f"{self.name} recorded")

    def wait(self, stream: Any) -> None:
        told.append(f"{self.name} waited for")
        if self.name == "output":
            self.layer.finish()


class Layer(torch.nn.Module):
    """Shared experts. On a separate stream, the result is not available before its event."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(HIDDEN).bfloat16() * 3, requires_grad=False)
        self.late: tuple[torch.Tensor, torch.Tensor] | None = None
        self.aside = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        told.append("shared")
        out = x @ self.weight
        if self.aside:
            self.late = torch.full_like(out, torch.nan), out
            return self.late[0]
        return out

    def finish(self) -> None:
        assert self.late is not None
        self.late[0].copy_(self.late[1])


class Runner(MoERunner):
    """vLLM's runner, built from the given parts."""

    def __init__(self, moe: dict[str, Any] | None = None, router: Any = None, **more: Any) -> None:
        torch.nn.Module.__init__(self)
        parallel = FusedMoEParallelConfig.make_no_parallel()
        self.moe_config = FusedMoEConfig(
            num_experts=8, experts_per_token=K, hidden_dim=HIDDEN, intermediate_size=32, num_local_experts=8,
            num_logical_experts=8, activation=MoEActivation.SILU, device="cpu", max_num_tokens=TOKENS,
            routing_method=RoutingMethodType.DeepseekV4, moe_parallel_config=parallel, in_dtype=torch.bfloat16,
            swiglu_limit=10.0,
        )  # fmt: skip
        for name, value in (moe or {}).items():
            setattr(parallel if name in vars(parallel) else self.moe_config, name, value)
        self.router, self.gate, self.routed_experts = router or Router(), None, Experts()
        self.layer = more.pop("layer", Layer())
        self._shared_experts = stock.SharedExperts(self.layer, self.moe_config, False, lambda: False)
        self.routed_input_transform = self.routed_output_transform = self.shared_expert_gate = None
        self.enable_dbo = self._fse_fuse_gate = False
        self.routed_scaling_factor, self.layer_name = 1.0, "layer"
        vars(self).update(more)
        self._forward_entry = self._select_forward()


def aside(runner: Any, shared: Any) -> None:
    """Let `shared` run on a separate stream, as on CUDA."""
    runner.layer.aside = True
    shared._determine_shared_experts_order = lambda x: stock.SharedExpertsOrder.MULTI_STREAM_OVERLAPPED
    shared._stream, shared._input_ready_event = "aux", [Event("input", runner.layer)]
    shared._output_ready_event = [Event("output", runner.layer)]


def run(runner: Any) -> torch.Tensor:
    moe_runner.get_layer_from_name = lambda name: runner
    runner.routed_experts.quant_method.load(runner.moe_config)
    told.clear()
    out = runner.forward(x, x)
    return out.clone()


stock.torch = SimpleNamespace(cuda=SimpleNamespace(stream=lambda stream: nullcontext()))  # type: ignore[attr-defined]
stock.current_stream = lambda: "main"
module = ModuleType("moe_runner")
module.MoERunner = type("Hooked", (Runner,), {})  # type: ignore[attr-defined]
module.SharedExperts = stock.SharedExperts  # type: ignore[attr-defined]
(SUM,) = (one for one in v033.HOOKS if one.each == {"MoERunner": "moe:take_shared_experts"})
hooks.apply(hooks.assignments(SUM, module))
Hooked: Any = module.MoERunner


def summed(**options: Any) -> dict[str, object]:
    """Return, for one stream and for two, whether three steps give vLLM's sum, and the order of events."""
    found: dict[str, object] = {}
    wanted = run(Runner(**options))
    for name in ("one stream", "two streams"):
        runner = Hooked(**options)
        shared = runner._forward_impl.args[1]
        if name == "two streams":
            aside(runner, shared)
        same = [torch.equal(run(runner), wanted) for _ in range(3)]
        experts = runner.routed_experts.quant_method.moe_kernel.fused_experts
        found[name] = [*same, type(experts) is AddingMxfp4Experts, experts.addend is None, told.copy()]
    return found


def reduced() -> list[object]:
    """Return whether two ranks give vLLM's sum, the number of reductions, and whether both are of equal tensors."""
    asked: list[torch.Tensor] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.clone())
        return x * 2

    moe_runner.tensor_model_parallel_all_reduce = all_reduce
    wanted, got = run(Runner({"tp_size": 2})), run(Hooked({"tp_size": 2}))
    return [torch.equal(wanted, got), len(asked), torch.equal(*asked)]


class Model(torch.nn.Module):
    """The layer of the model, which contains the shared experts as well."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.shared_experts = Layer()
        self.experts = kind(layer=self.shared_experts)
        del self.experts.layer


def refused() -> dict[str, str]:
    """Return the reasons for which vLLM adds, by case; "taken" if it has no shared experts left."""
    reasons: list[str] = []
    moe.warn_once = lambda message, reason: reasons.append(reason)
    found = {}
    for name, options in {
        "taken": {},
        "expert parallel": {"moe": {"use_ep": True}},
        "data parallel": {"moe": {"dp_size": 2}},
        "sequence parallel": {"moe": {"sp_size": 2}},
        "balanced": {"router": SimpleNamespace(eplb_state=object())},
        "gated": {"shared_expert_gate": object()},
        "scaled": {"routed_scaling_factor": 2.5},
        "latent": {"routed_output_transform": object()},
        "padded": {"moe": {"hidden_dim_unpadded": 100}},
        "two at once": {"enable_dbo": True},
    }.items():
        reasons.clear()
        runner = Hooked(**options)
        kept = runner._shared_experts is not None
        kept &= runner.routed_experts.quant_method.experts_cls is BundledMxfp4Experts
        found[name] = "; ".join(reasons) if kept else "taken"
    moe.get_current_vllm_config = lambda: SimpleNamespace(lora_config=object())
    reasons.clear()
    Hooked()
    found["adapters"] = "; ".join(reasons)
    # No message: other experts, or no shared ones.
    Method.experts_cls = mk.FusedMoEExpertsModular
    reasons.clear()
    Hooked()
    return {**found, "other experts": "; ".join(reasons)}


class Gathering:
    """The communication of two data parallel ranks with equal tokens."""

    def dispatch(self, *given: torch.Tensor, is_sequence_parallel: bool, extra_tensors: Any = None) -> Any:
        return tuple(torch.cat([one, one]) for one in given)

    def combine_into_output(self, x: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool) -> None:
        output.copy_(x[TOKENS:])

    def allocate_combine_input(self, *_: Any, **__: Any) -> None:
        return None


def gathered() -> dict[str, object]:
    """Return whether the experts accept the tokens of two data parallel ranks, and why other methods are refused."""
    naive_dp_ep.get_ep_group = Gathering
    quant = mxfp4_w4a16_moe_quant_config(given["w13_scale"], given["w2_scale"])

    def experts_of(dispatch: Any, **parallel: Any) -> Any:
        config = Runner(parallel).moe_config
        return mk.FusedMoEKernel(dispatch, BundledMxfp4Experts(config, quant)).apply(
            x, given["w13"], given["w2"], topk_weights=given["topk_weights"], topk_ids=given["topk_ids"],
            activation=MoEActivation.SILU, global_num_experts=8, expert_map=None, apply_router_weight_on_input=False,
        )  # fmt: skip

    alone = experts_of(MoEPrepareAndFinalizeNoDPEPModular()).clone()
    of_two = experts_of(naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=2), dp_size=2)
    moe.detect = lambda device: None  # type: ignore[assignment]  # There is no card to ask.
    reasons = {}
    for backend in ("allgather_reducescatter", "deepep_high_throughput", "mori_low_latency", "nixl_ep", "passthrough"):
        config = Runner({"dp_size": 2, "use_ep": True, "all2all_backend": backend}).moe_config
        reasons[backend] = BundledMxfp4Experts.unsupported(config) or ""
    sizes = {
        f"{parallel}": gathered_tokens(Runner(parallel).moe_config)
        for parallel in ({}, {"dp_size": 2}, {"dp_size": 2, "sp_size": 4}, {"pcp_size": 2})
    }
    return {"same": torch.equal(alone, of_two), "reasons": reasons, "sizes": list(sizes.values())}


def hooks_that_do_not_fit() -> list[str]:
    """Return the mismatches of the hook and the runner of this vLLM."""
    try:
        hooks.prepared(SUM, importlib.import_module(SUM.module))
    except hooks.HookMismatchError as error:
        return [str(error)]
    return []


def gone() -> str:
    """Return the hook's error for a vLLM with other shared experts; empty if there is none."""
    other = ModuleType("moe_runner")
    other.MoERunner, other.SharedExperts = Runner, type("SharedExperts", (), {})  # type: ignore[attr-defined]
    try:
        hooks.prepared(SUM, other)
    except hooks.HookMismatchError as error:
        return str(error)
    return ""


def ids_of_ranks() -> list[list[list[int]]]:
    """Return the ids that the experts of four ranks get: a token with experts of all ranks, and a padding token."""
    ids, found = torch.tensor([[0, 5, 2, 7, 3, 6], [-1] * 6], dtype=torch.int32), []
    for rank in range(4):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        experts = BundledMxfp4Experts.__new__(BundledMxfp4Experts)
        asked: dict[str, Any] = {}
        plan = SimpleNamespace(run=asked.update)
        quant = SimpleNamespace(w1_scale=None, w2_scale=None)
        vars(experts).update(addend=None, ready=None, plan=lambda device, plan=plan: plan, quant_config=quant)
        experts.apply(
            x[:2],
            x[:2],
            x,
            x,
            torch.ones((2, 6)),
            ids,
            MoEActivation.SILU,
            8,
            expert_map,
            None,
            None,
            x,
            x,
            None,
            False,
        )
        assert asked["topk_ids"].dtype == torch.int32
        found.append(asked["topk_ids"].tolist())
    return found


print(
    json.dumps(
        {
            "unknown": hooks_that_do_not_fit(),
            "gone": gone(),
            "sum": summed(),
            "gathered": gathered(),
            "ids": ids_of_ranks(),
            "reduced": reduced(),
            "names": [sorted(name for name, _ in Model(kind).named_parameters()) for kind in (Runner, Hooked)],
            "refused": refused(),
        }
    )
)
