"""Child process of `test_projections.py`: the bundled projections inside the installed vLLM's own attention.

Prints one JSON object. The reference is `compressor_save` with torch's products.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
from __future__ import annotations

import importlib
import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.models.deepseek_v4 import attention
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from dsv4_kernels import interpreter
from dsv4_kernels.compressor.reference import compressor_save
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_plugin.kernels import compressor, hooks, plans, v033

HIDDEN, HEADS = 64, 8
os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
random = torch.Generator().manual_seed(0)
STEP: dict[str, Any] = {}
unknown = []
for hook in v033.HOOKS:
    if any(reference.startswith("compressor:") for reference in hook.wrap.values()):
        try:
            hooks.prepared(hook, importlib.import_module(hook.module))
        except hooks.HookMismatchError as error:
            unknown.append(str(error))
(PROJECTIONS,) = (one for one in v033.HOOKS if "compressor:at_once" in one.wrap.values())
hooks.apply(hooks.assignments(PROJECTIONS, attention))
for place in (attention, compressor):
    place.get_forward_context = lambda: SimpleNamespace(attn_metadata=STEP or None)


def matrix(rows: int) -> torch.Tensor:
    return (torch.randn((rows, HIDDEN), generator=random) / 8).bfloat16()


class Compressor(DeepseekCompressor):
    """vLLM's compressor with only the parts that the projections need; records its entries instead of storing them."""

    def __init__(self, name: str, head: int, ratio: int) -> None:
        torch.nn.Module.__init__(self)
        width = head * (2 if ratio == 4 else 1)
        block = 4 if ratio == 4 else 8
        self.head_dim, self.compress_ratio, self.dsv4_bundled = head, ratio, True
        self.ape = torch.nn.Parameter(torch.randn((ratio, width), generator=random), requires_grad=False)
        self.fused_wkv_wgate = torch.nn.Linear(HIDDEN, 2 * width, bias=False, dtype=torch.bfloat16)
        self.fused_wkv_wgate.weight = torch.nn.Parameter(matrix(2 * width), requires_grad=False)
        self.state_cache = SimpleNamespace(prefix=name, kv_cache=torch.zeros((24, block, 2 * width)))
        self.got: list[Any] = []

    def forward(self, kv_score: Any, positions: Any, rotary_emb: Any) -> None:
        self.got.append(kv_score)


class Attention(attention.DeepseekV4Attention):
    """vLLM's attention up to the call of the compressors, built from the given parts."""

    backend_cls = forward_mqa = get_padded_num_q_heads = None

    def __init__(self, ratio: int) -> None:
        torch.nn.Module.__init__(self)
        self.hidden_size, self.aux_stream_list, self.ln_events = HIDDEN, None, [None] * 4
        self.n_local_heads, self.head_dim, self.compress_ratio = 1, 512, ratio
        self.rotary_emb = self.indexer_rotary_emb = None
        self._prepare_and_attn_fn = self._prepare_and_attn
        self.compressor, self.indexer = None, None
        if ratio > 1:
            self.compressor = Compressor("main", 512, ratio)
        if ratio == 4:
            head = ReplicatedLinear.__new__(ReplicatedLinear)
            torch.nn.Module.__init__(head)
            head.weight, head.bias = torch.nn.Parameter(matrix(HEADS), requires_grad=False), None
            self.indexer = Indexer(Compressor("index", 128, ratio), head)
        self.asked: list[str] = []

    def _alloc_attn_out(self, num_tokens: int, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, None, :]

    def _split_qkv_and_norm(self, qr_kv: torch.Tensor) -> Any:
        return qr_kv, None, qr_kv

    def _fused_wqa_wkv_gemm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * 2

    def _wq_b_proj(self, qr: torch.Tensor, qr_scale: Any = None) -> torch.Tensor:
        return qr.new_zeros((qr.shape[0], 512))

    def _fused_qnorm_rope_kv_insert(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q

    def _sparse_indexer_and_attn(self, *_: Any) -> None:
        pass

    def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return o[:, 0]


class Indexer(torch.nn.Module):
    """The indexer's parts; records the weights of the heads."""

    def __init__(self, compressor: Compressor, head: torch.nn.Module) -> None:
        super().__init__()
        self.compressor, self.weights_proj, self.n_head = compressor, head, HEADS
        self.weights = torch.zeros(0)

    def forward(
        self, hidden_states: Any, qr: Any, kv_score: Any, weights: torch.Tensor, positions: Any, *_: Any
    ) -> Any:
        self.compressor(kv_score, positions, None)
        self.weights = weights.clone()
        return None, None, None


def step(layer: Attention, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `layer` for `tokens` tokens, the second of which is padding; return x and positions."""
    x = torch.randn((tokens, HIDDEN), generator=random).bfloat16()
    positions = torch.randint(0, 90, (tokens,), generator=random)
    STEP.clear()
    for one in compressor._compressors(layer):
        slots = torch.randperm(24 * one.state_cache.kv_cache.shape[1], generator=random)[:tokens]
        slots[1] = -1
        STEP[one.state_cache.prefix] = SimpleNamespace(slot_mapping=slots)
    layer(positions, x)
    return x, positions


def saved(ratio: int) -> bool:
    """Few tokens: states and weights equal those of the single products, and the compressors have nothing to save."""
    layer = Attention(ratio)
    before = {one: one.state_cache.kv_cache.clone() for one in compressor._compressors(layer)}
    compressor.plan_projections(layer)
    made = len(plans._PLANS)
    x, positions = step(layer, 3)
    found = [len(plans._PLANS) == made, layer.dsv4_positions is None]
    for one, cache in before.items():
        kv, score = (x.float() @ one.fused_wkv_wgate.weight.float().T).chunk(2, 1)
        slots = STEP[one.state_cache.prefix].slot_mapping
        compressor_save(kv, score, one.ape, positions, cache, slots)
        found += [torch.allclose(one.state_cache.kv_cache, cache, atol=1e-5), one.got == [None]]
    if layer.indexer is not None:
        want = x.float() @ layer.indexer.weights_proj.weight.float().T
        found.append(torch.allclose(layer.indexer.weights.float(), want, rtol=2.0**-7, atol=1e-5))
    return all(found)


def original(self: Any, hidden_states: torch.Tensor) -> Any:
    self.asked.append(hidden_states.shape[0])
    return hidden_states, *[torch.zeros((len(hidden_states), 2))] * 3


def kept() -> dict[str, bool]:
    """Return the cases in which vLLM computes the products."""
    theirs = compressor.at_once(original)
    found = {}

    def asked(name: str, layer: Attention, tokens: int = 3) -> None:
        layer._run_parallel_input_projections = lambda x: theirs(layer, x)
        step(layer, tokens)
        found[name] = layer.asked == [tokens]

    asked("many tokens", Attention(4), 33)
    asked("no compressor", Attention(1))
    wide = Attention(4)
    wide._prepare_and_attn_fn = lambda *args: wide._prepare_and_attn(*args)
    asked("prepared outside of graphs", wide)
    half = Attention(4)
    half.indexer.compressor.dsv4_bundled = False
    asked("one is not bundled", half)
    adapted = Attention(4)
    adapted.indexer.weights_proj = torch.nn.Linear(HIDDEN, HEADS)
    asked("an adapter", adapted)
    odd = Attention(128)
    odd.hidden_size = 60
    asked("an odd size", odd)
    profiled = Attention(128)
    profiled._run_parallel_input_projections = lambda x: theirs(profiled, x)
    STEP.clear()
    profiled(torch.arange(3), torch.zeros((3, HIDDEN), dtype=torch.bfloat16))
    found["no metadata"] = profiled.asked == [3]
    return found


def stored() -> list[int]:
    """Return the numbers of saves and stores of the bundled compressor, called with products and without."""
    counts = [0, 0]

    def count(place: int) -> Any:
        def run(**_: Any) -> None:
            counts[place] += 1

        return SimpleNamespace(run=run)

    compressor._compressor_plans = lambda *_: (count(0), count(1))
    keys = torch.zeros((1, 64, 584), dtype=torch.uint8)
    layer: Any = Compressor("main", 512, 4)
    layer.k_cache_prefix, layer._static_forward_context = "keys", {"keys": SimpleNamespace(kv_cache=keys)}
    layer.norm, layer.rms_norm_eps = SimpleNamespace(weight=None), 1e-6
    slots = torch.zeros(2, dtype=torch.int64)
    STEP["main"] = SimpleNamespace(slot_mapping=slots, token_to_req_indices=None, block_table=None)
    STEP["keys"] = SimpleNamespace(slot_mapping=slots)
    for kv_score in (torch.zeros((2, 2048)), None):
        compressor.forward(layer, kv_score, torch.zeros(2), SimpleNamespace(cos_sin_cache=None))
    return counts


print(
    json.dumps(
        {
            "unknown": unknown,
            "saved": {ratio: saved(ratio) for ratio in (4, 128)},
            "kept": kept(),
            "stored": stored(),
        }
    )
)
