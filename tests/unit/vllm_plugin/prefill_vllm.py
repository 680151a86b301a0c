"""Child process of `test_prefill.py`: vLLM's own attention beside the bundled prefill and front, in the interpreter.

Prints one JSON object. FlashMLA's kernel requires a GPU; the bundled operation's reference replaces it. All code around
it (metadata, gathers, index lists, chunks) is vLLM's own.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json
import logging
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.models.deepseek_v4 import attention as stock_attention
from vllm.models.deepseek_v4.nvidia import flashinfer_sparse, flashmla
from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferSM120Attention
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

from dsv4_kernels import interpreter
from dsv4_kernels.mla_cache.api import mla_cache_write
from dsv4_kernels.mla_prefill.api import mla_prefill
from dsv4_kernels.numerics import ds_mla
from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import ALL_BUNDLED, BUNDLED, VARIABLE, KernelChoice, Op
from dsv4_runtime.vllm_plugin.kernels import attention, hooks, plans, v033
from dsv4_runtime.vllm_plugin.kernels import choice as kernels

os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
WINDOW, LENGTH, TOKENS, HEADS = 32, 640, 32, 8
NEW, SEEN = (1, 9, 5, 3), (21, 40, 600, 6)
"""New tokens of a step by request, the first of which decodes; and the context of each request afterwards."""
RANDOM = torch.Generator().manual_seed(3)


class Workspace:
    """Replacement for vLLM's workspace manager; records its largest size."""

    largest = 0

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        made = [torch.full(shape, 7, dtype=dtype) for shape, dtype in wanted]
        Workspace.largest = max(Workspace.largest, sum(one.nbytes for one in made))
        return made


def cache(entries: int, page: int) -> torch.Tensor:
    """Return a packed cache [pages, page, 584] of random entries, with pages further apart than their length."""
    count = -(-entries // page)
    raw = torch.zeros((count, ds_mla(page).page_bytes + 576), dtype=torch.uint8)
    rows = torch.randn((count * page, 512), generator=RANDOM).bfloat16()
    mla_cache_write(rows, torch.arange(count * page), raw, page)
    return raw.as_strided((count, page, 584), (raw.stride(0), 584, 1))


def layer(ratio: int) -> Any:
    made = attention.bundled_class(DeepseekV4FlashMLAAttention, True).__new__(
        attention.bundled_class(DeepseekV4FlashMLAAttention, True)
    )
    torch.nn.Module.__init__(made)
    vars(made).update(
        compress_ratio=ratio, window_size=WINDOW, max_model_len=LENGTH, max_num_batched_tokens=TOKENS, head_dim=512,
        padded_heads=HEADS, n_local_heads=HEADS, max_image_tokens=0, scale=512**-0.5, prefix="layer", eps=1e-6,
        attn_sink=torch.randn(HEADS, generator=RANDOM), swa_cache_layer=SimpleNamespace(prefix="window"),
        topk_indices_buffer=chosen(24 if ratio <= 4 else 8, 4)[0],
    )  # fmt: skip
    made.prefill_plans = attention.make_prefill_plans(made)
    return made


def chosen(width: int, ratio: int, all_of_them: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entries of each token of the step, int32 [T, width], and their numbers."""
    rows, counts = torch.full((sum(NEW), width), -1, dtype=torch.int32), []
    for new, seen in zip(NEW, SEEN, strict=True):
        for position in range(seen - new, seen):
            there = (position + 1) // ratio
            picked = torch.arange(there) if all_of_them else torch.randperm(there, generator=RANDOM)
            counts.append(min(there, width))
            rows[len(counts) - 1, : counts[-1]] = picked[:width].int()
    return rows, torch.tensor(counts)


def metadata(ratio: int) -> tuple[Any, Any]:
    """Return vLLM's metadata of the window's cache and of the compressed one: a decode, then three prefills."""
    starts = torch.tensor((0, *NEW)).cumsum(0).int()
    seq_lens = torch.tensor(SEEN, dtype=torch.int32)
    gather = [new + min(seen - new, WINDOW - 1) for new, seen in zip(NEW, SEEN, strict=True)]
    entries = [0 if ratio == 1 else seen // ratio for seen in SEEN]

    def chunks(compress_ratio: int, prefill_chunk_size: int) -> list[tuple[int, int, int, int]]:
        spans = ((0, 2), (2, 3))
        sizes = [(max(entries[1 + a : 1 + b]), max(gather[1 + a : 1 + b])) for a, b in spans]
        return [(*span, size[0], sum(size)) for span, size in zip(spans, sizes, strict=True)]

    def table(page: int) -> torch.Tensor:
        return torch.randperm(4 * -(-LENGTH // page), generator=RANDOM).int().view(4, -1)

    window = SimpleNamespace(
        num_decodes=1, num_prefills=3, num_decode_tokens=1, num_prefill_tokens=sum(NEW[1:]),
        prefill_seq_lens=seq_lens[1:], prefill_gather_lens=torch.tensor(gather[1:], dtype=torch.int32),
        query_start_loc=starts, query_start_loc_cpu=starts, block_table=table(64), block_size=64,
        get_prefill_chunk_plan=chunks, prefill_left_visible=None, prefill_right_visible=None,
    )  # fmt: skip
    if ratio == 1:
        return window, None
    buffer = torch.full((TOKENS, 128), -1, dtype=torch.int32)
    buffer[: sum(NEW[1:]), :5] = chosen(5, 128, all_of_them=True)[0][1:]
    # With short contexts, vLLM's rows are narrower than those of its buffer.
    narrow = buffer[: sum(NEW[1:]), :64]
    return window, SimpleNamespace(block_table=table(256), block_size=256, c128a_prefill_topk_indices=narrow)


def prefill_agrees(ratio: int) -> dict[str, object]:
    """Compare one step's prefill tokens with vLLM's class; report also whether the workspace was reserved for them."""
    made, (window, compressed) = layer(ratio), metadata(ratio)
    if compressed is not None and ratio == 4:
        made.topk_indices_buffer = chosen(24, 4)[0]
    workspace = Workspace()
    attention.current_workspace_manager = flashmla.current_workspace_manager = lambda: workspace
    Workspace.largest = 0
    attention.reserve_prefill(made)
    reserved = Workspace.largest
    q = torch.randn((sum(NEW), HEADS, 512), generator=RANDOM).bfloat16()
    given = {
        "q": q[1:], "positions": torch.zeros(sum(NEW[1:]), dtype=torch.int64),
        "compressed_k_cache": None if ratio == 1 else cache(4 * LENGTH // ratio + 256, 256 // ratio),
        "swa_k_cache": cache(4 * LENGTH, 64), "attn_metadata": compressed, "swa_metadata": window,
    }  # fmt: skip
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    made._forward_prefill(**given, output=found[1:])
    taken = Workspace.largest
    DeepseekV4FlashMLAAttention._forward_prefill(made, **given, output=wanted[1:])
    torch.testing.assert_close(found[1:].float(), wanted[1:].float(), atol=2e-3, rtol=2.0**-6)
    return {"differing": float((found[1:] - wanted[1:]).abs().max()), "reserved": taken == reserved}


def reference(
    *, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, attn_sink: torch.Tensor,
    topk_length: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Replacement for FlashMLA's sparse prefill."""
    out.copy_(mla_prefill(q, kv[:, 0], indices[:, 0], topk_length, attn_sink)[0])


def classes() -> dict[str, str]:
    """Name the class that replaces vLLM's choice on SM12x, by the bundled operations."""
    model = SimpleNamespace(**vars(flashinfer_sparse) | vars(flashmla))
    images = SimpleNamespace(vision_n_layers=2, vision_max_n_token=64)
    found = {}
    for name, ops, config in (
        ("both", (Op.MLA_DECODE, Op.MLA_PREFILL), None),
        ("prefill", (Op.MLA_PREFILL,), None),
        ("decode", (Op.MLA_DECODE,), None),
        ("none", (Op.MOE,), None),
        ("images", (Op.MLA_DECODE, Op.MLA_PREFILL), images),
    ):
        attention.choice = lambda ops=ops: KernelChoice(dict.fromkeys(ops, BUNDLED))
        kind = attention.attention_class(DeepseekV4FlashInferSM120Attention, model, config)
        padded = [kind.get_padded_num_q_heads(heads) for heads in (8, 24, 64)]
        found[name] = f"{kind.__name__} {padded}"
    attention.choice = lambda: KernelChoice(dict.fromkeys((Op.MLA_DECODE,), BUNDLED))
    padded = attention.attention_class(DeepseekV4FlashMLAAttention, model, None).get_padded_num_q_heads(8)
    attention.choice = kernels.choice
    return {**found, "FlashMLA, decode alone": str(padded)}


def front_agrees() -> dict[str, object]:
    """Attach the front's hooks to vLLM's module; compare the norms with its Triton kernel and the insertion."""
    original, warnings = stock_attention.fused_q_kv_rmsnorm, []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    hooks.LOGGER.addHandler(handler)
    for hook in v033.HOOKS:
        if hook.ops == (Op.FRONT,):
            hooks.ATTACHED.run(hook)
    row = operation("front_norm")
    given = row.make_inputs({"tokens": 5, "rank": 72}, torch.device("cpu"), 1)
    own, theirs = stock_attention.fused_q_kv_rmsnorm(**given), original(**given)
    planned = len(plans._PLANS)
    norms = all(torch.allclose(a.float(), b.float(), rtol=2**-7, atol=0) for a, b in zip(own, theirs, strict=True))
    made, store = layer(1), cache(128, 64)
    made.padded_heads, made.n_local_heads = 16, HEADS
    made.rotary_emb = SimpleNamespace(cos_sin_cache=torch.randn((64, 64), generator=RANDOM))
    made.swa_cache_layer.kv_cache = store
    q, kv = (torch.randn(shape, generator=RANDOM).bfloat16() for shape in ((4, HEADS, 512), (4, 512)))
    # The first token has no slot, and the last one is padding of a CUDA graph.
    slots, positions = torch.tensor([-1, 70, 3]), torch.tensor([9, 8, 7, 6])
    copied = plans.pages(store).clone()
    expected, entries = operation("front_insert").reference(
        q=q, kv=kv, kv_cache=copied, slot_mapping=slots, positions=positions,
        cos_sin_cache=made.rotary_emb.cos_sin_cache, padded_heads=16, eps=1e-6, page=64,
    )  # fmt: skip
    step = {"window": SimpleNamespace(slot_mapping=slots, block_size=64)}
    queries = made._fused_qnorm_rope_kv_insert(q, kv, positions, step)
    dummy = made._fused_qnorm_rope_kv_insert(q, kv, positions, None)
    return {
        "warnings": warnings,
        "norms": norms and planned > 0,
        "queries": torch.allclose(queries.float(), expected.float(), rtol=2**-7, atol=1e-6),
        "entries": torch.equal(plans.pages(store), entries),
        "dummy step": list(dummy.shape) == [4, 16, 512],
    }


flashmla.flash_mla_sparse_fwd = reference
print(
    json.dumps(
        {
            "prefill": {str(ratio): prefill_agrees(ratio) for ratio in (1, 4, 128)},
            "classes": classes(),
            "front": front_agrees(),
        }
    )
)
