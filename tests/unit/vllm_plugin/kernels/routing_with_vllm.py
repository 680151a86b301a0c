"""Child process of `test_routing.py`: the bundled router and choice of keys inside the installed vLLM's own classes.

Prints one JSON object. The references are vLLM's routers for CPU and its choice in torch.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
from __future__ import annotations

import importlib
import json
import os
from collections import defaultdict
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dsv4_kernels import interpreter
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE, Op
from dsv4_runtime.vllm_plugin.kernels import choice, hooks, indexer, moe, v033

TOKENS, HIDDEN, EXPERTS, K = 5, 64, 256, 6
os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
choice._TOKENS[0] = TOKENS
moe.get_current_vllm_config = lambda: SimpleNamespace(lora_config=None)
random = torch.Generator().manual_seed(0)


class Experts:
    """Records the calls of vLLM's routed experts."""

    def __init__(self, **method: Any) -> None:
        kinds = {"is_monolithic": False, "topk_indices_dtype": torch.int32, "supports_internal_mk": True}
        self.quant_method = SimpleNamespace(**{**kinds, **method})
        self.asked: dict[str, Any] = {}

    def _ensure_moe_quant_config_init(self) -> None:
        pass

    def forward_modular(self, x: torch.Tensor, **asked: Any) -> torch.Tensor:
        self.asked = {name: asked[name].clone() for name in ("topk_weights", "topk_ids")}
        return x * 2


class Shared(torch.nn.Module):
    """Shared experts that run on the same stream."""

    def maybe_forward_async(self, x: torch.Tensor) -> bool:
        return False

    def forward(self, x: torch.Tensor, order: Any) -> None:
        self.output = x * 3


class Runner(MoERunner):
    """vLLM's runner, built from the given parts."""

    def __init__(self, chooses: Any, gate: Any, experts: Experts, **more: Any) -> None:
        torch.nn.Module.__init__(self)
        moe = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False, "hidden_dim": HIDDEN, "use_ep": False}
        moe |= more.pop("moe", {})
        parallel = SimpleNamespace(use_ep=moe.pop("use_ep"), use_all2all_kernels=False)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, **moe)
        self.router, self.gate, self.routed_experts, self._shared_experts = chooses, gate, experts, Shared()
        self.routed_input_transform = self.shared_expert_gate = None
        self.enable_dbo = self._fse_fuse_gate = False
        vars(self).update(more)

    def _sequence_parallel_context(self) -> Any:
        return nullcontext()


class Gate(torch.nn.Module):
    """A gate that must not be called."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        raise AssertionError("the gate computed its logits")


module = ModuleType("moe_runner")
module.MoERunner = Runner  # type: ignore[attr-defined]
HOOK_OF = {reference: hook for hook in v033.HOOKS for reference in (*hook.wrap.values(), *hook.each.values())}
hooks.apply(hooks.assignments(HOOK_OF["moe:attach_router"], module))
weight = (torch.randn((EXPERTS, HIDDEN), generator=random) / 4).bfloat16()
x = torch.randn((TOKENS, HIDDEN), generator=random).bfloat16()
bias = torch.nn.Parameter(torch.randn(EXPERTS, generator=random) / 4, requires_grad=False)
table = torch.rand((50, EXPERTS), generator=random).argsort(1)[:, :K].int().contiguous()
input_ids = torch.randint(0, 50, (TOKENS,), generator=random).int()
KINDS = {"learned": {"e_score_correction_bias": bias}, "hashed": {"hash_indices_table": table}}
COMMON = {"top_k": K, "global_num_experts": EXPERTS, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.long().sort(1)
    return weights.gather(1, order), ids


def routed(kind: dict[str, Any]) -> bool:
    """Return whether experts and shared experts get the same inputs as from vLLM's routing, also for int32 tokens."""
    chooses, experts = FusedTopKBiasRouter(**COMMON, **kind), Experts()
    captured: list[torch.Tensor] = []
    chooses.set_capture_fn(lambda ids: captured.append(ids.clone()))
    runner = Runner(chooses, Gate(weight), experts)
    shared, out = runner._forward_impl(x, x, x, input_ids)
    logits = x.float() @ weight.float().T
    wanted = CPURouter(**COMMON, **kind).select_experts(x, logits, torch.int32, input_ids=input_ids)
    got = by_expert(experts.asked["topk_weights"], experts.asked["topk_ids"])
    want = by_expert(*wanted)
    return (
        torch.equal(got[1], want[1])
        and torch.allclose(got[0], want[0], atol=1e-5)
        and experts.asked["topk_ids"].dtype == torch.int32
        and torch.equal(captured[0], experts.asked["topk_ids"])
        and torch.equal(out, x * 2)
        and torch.equal(shared, x * 3)
    )


def padding() -> list[list[int]]:
    """Return the experts of a step whose last tokens are padding."""
    context = SimpleNamespace(is_padding=torch.arange(8) >= 3)
    moe._routers().is_forward_context_available, moe._routers().get_forward_context = lambda: True, lambda: context
    experts = Experts()
    Runner(FusedTopKBiasRouter(**COMMON, **KINDS["learned"]), Gate(weight), experts)._forward_impl(x, x, x, input_ids)
    return [experts.asked["topk_ids"][3:].tolist(), experts.asked["topk_weights"][3:].tolist()]


def refused() -> dict[str, str | None]:
    """Return the reasons for which vLLM keeps the router, and thus its gate."""
    reasons: list[str] = []
    moe.warn_once = lambda message, reason: reasons.append(reason)

    def runner(router_more: dict[str, Any] | None = None, gate: Any = None, **more: Any) -> Runner:
        kind = {**COMMON, **KINDS["learned"], **(router_more or {})}
        return Runner(FusedTopKBiasRouter(**kind), gate or Gate(weight), Experts(), **more)

    found = {}
    for name, make in {
        "expert parallel": lambda: runner(moe={"use_ep": True}),
        "data parallel": lambda: runner(moe={"dp_size": 2}),
        "vision": lambda: runner({"bias_vl": bias, "image_sentinel_lo": 7}),
        "half": lambda: runner(gate=Gate(weight.half())),
        "padded": lambda: runner(moe={"hidden_dim": 128}),
        "two at once": lambda: runner(enable_dbo=True),
        "monolithic": lambda: Runner(
            FusedTopKBiasRouter(**COMMON, **KINDS["learned"]), Gate(weight), Experts(is_monolithic=True)
        ),
        "on a CPU": lambda: Runner(CPURouter(**COMMON, **KINDS["learned"]), Gate(weight), Experts()),
        "another model": lambda: runner({"scoring_func": "sigmoid"}),
    }.items():
        reasons.clear()
        kept = make().gate is not None
        found[name] = "; ".join(reasons) if kept else "taken"
    return found


def chosen_keys() -> dict[str, object]:
    """Rows without keys, with few, and with more than are chosen; then cases without a plan, which vLLM computes."""
    hooks.apply(hooks.assignments(HOOK_OF["indexer:topk_decode"], indexer_topk))
    asked: list[str] = []
    indexer_topk.SparseIndexerTopk._per_row = staticmethod(lambda *_: asked.append("decode"))
    prompts = SimpleNamespace(top_k_per_row_prefill=lambda *_: asked.append("prompt"), other=lambda: "other")
    sparse = SimpleNamespace(ops=prompts)
    hooks.apply([(sparse, "ops", indexer.PromptOps(sparse.ops))])
    width, k = 300, 16
    buffer = torch.full((8, 20), 7, dtype=torch.int32)
    logits = torch.randn((6, width), generator=random)
    lengths = torch.tensor([[0, 1], [15, 16], [17, 300]], dtype=torch.int32)
    own, theirs = (indexer_topk.SparseIndexerTopk(name) for name in ("auto", "torch"))
    want = torch.empty((6, k), dtype=torch.int32)
    theirs(logits, lengths, 2, want, k, width)
    want = torch.where(want < 0, width, want).sort(1).values
    args = (lengths.new_zeros(6), lengths.flatten(), buffer[:6, :k], 6, width, 1, k)
    own(logits, lengths, 2, buffer[:6, :k], k, width)
    sparse.ops.top_k_per_row_prefill(logits, *args)
    unplanned = asked.copy()
    layer = SimpleNamespace(topk_tokens=k, max_model_len=width, topk_indices_buffer=buffer)
    vars(layer).update(topk_backend="auto", compress_ratio=4)
    indexer.plan_topk(layer, 1 << 20)
    agree = []
    for run in (
        lambda: own(logits, lengths, 2, buffer[:6, :k], k, width),
        lambda: sparse.ops.top_k_per_row_prefill(logits, *args),
    ):
        buffer.fill_(7)
        run()
        found = torch.where(buffer[:6, :k] < 0, width, buffer[:6, :k]).sort(1).values
        agree.append(torch.equal(found, want) and bool((buffer[6:] == 7).all()) and bool((buffer[:, k:] == 7).all()))
    asked.clear()
    own(logits, lengths[:, 1:].contiguous(), 2, buffer[:6, :k], k, width)  # one length for a request's two rows
    own(torch.zeros((1, 301)), lengths[:1, :1], 1, buffer[:1, :k], k, 301)
    return {"unplanned": unplanned, "agree": agree, "others": asked.copy(), "rest": sparse.ops.other()}


def filled_rows() -> dict[str, object]:
    """Return the number of rows that vLLM's operator fills, and whether rows are filled for vLLM's kernels instead."""
    asked: list[int] = []

    def operator(hidden_states: torch.Tensor, *_: Any, **__: Any) -> None:
        asked.append(hidden_states.shape[0])

    sparse_attn_indexer.torch = SimpleNamespace(  # type: ignore[attr-defined]
        ops=SimpleNamespace(vllm=SimpleNamespace(sparse_attn_indexer=operator)), Tensor=torch.Tensor
    )
    kind = sparse_attn_indexer.SparseAttnIndexer
    hooks.apply([(kind, "forward_cuda", indexer.unfilled(kind.forward_cuda))])

    def rows(answered: bool = True, width: int = 16, **more: Any) -> int:
        indexer._TOPK_REPLACED.clear()
        indexer._TOPK_REPLACED.update({"decode", "prompts"} if answered else {"decode"})
        layer = defaultdict(lambda: None)
        layer |= {"topk_tokens": 16, "topk_backend": "auto", "compress_ratio": 4, **more}
        layer["topk_indices_buffer"] = torch.zeros((8, width), dtype=torch.int32)
        layer["k_cache"] = SimpleNamespace(prefix="", kv_cache=None)
        layer["dense_mha_metadata_layer_name"] = ""
        layer["_parallel_config"] = SimpleNamespace(cp_kv_cache_interleave_size=1)
        made = type("Layer", (), {"__getattr__": lambda _, name: layer[name]})()
        sparse_attn_indexer.SparseAttnIndexer.forward_cuda(made, x, x, None, x)
        return asked.pop()

    found = {
        "planned": rows(),
        "prompts are vLLM's": rows(answered=False),
        "another by name": rows(topk_backend="persistent"),
        "another count": rows(topk_tokens=20, width=20),
        "wider buffer": rows(width=20),
    }
    # No plan supports rows of this width.
    buffer = torch.full((2, 16), 7, dtype=torch.int32)
    indexer_topk.SparseIndexerTopk("auto")(
        torch.zeros((1, 301)), torch.tensor([[3]], dtype=torch.int32), 1, buffer[:1], 16, 301
    )
    return {"rows": found, "filled": [bool((buffer[0] == -1).all()), bool((buffer[1] == 7).all())]}


def hooks_that_do_not_fit() -> list[str]:
    """Return the symbols of this vLLM that the two operations' hooks do not know."""
    found = []
    for hook in v033.HOOKS:
        if hook.ops in ((Op.ROUTER,), (Op.TOPK,)):
            try:
                hooks.prepared(hook, importlib.import_module(hook.module))
            except hooks.HookMismatchError as error:
                found.append(str(error))
    return found


print(
    json.dumps(
        {
            # Before they are changed.
            "unknown": hooks_that_do_not_fit(),
            "learned": routed(KINDS["learned"]),
            "hashed": routed(KINDS["hashed"]),
            "padding": padding(),
            "refused": refused(),
            "keys": chosen_keys(),
            "filled": filled_rows(),
        }
    )
)
