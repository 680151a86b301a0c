"""Child process of `test_decoding.py`: the bundled decode with the entries that vLLM's indexer chose, interpreted.

Prints one JSON object. The reference is vLLM's kernel that computes slots from the entries.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch

from dsv4_kernels import interpreter
from dsv4_kernels.mla_cache.api import mla_cache_write
from dsv4_kernels.mla_decode.api import DecodePlan
from dsv4_kernels.numerics import ds_mla
from dsv4_runtime.contract.kernels import ALL_BUNDLED, VARIABLE
from dsv4_runtime.vllm_plugin.kernels import attention, plans

WINDOW, TOPK, HEADS, PAGE = 32, 32, 8, 64
TOKENS, DECODES = 5, 3
"""Three requests, two of which have two tokens each; the last token is padding."""
os.environ[VARIABLE] = str(ALL_BUNDLED)
interpreter.install()
random = torch.Generator().manual_seed(3)


def cache(count: int, page: int) -> torch.Tensor:
    """Return a packed cache [count, page, 584] of random entries."""
    raw = torch.zeros((count, ds_mla(page).page_bytes), dtype=torch.uint8)
    rows = torch.randn((count * page, 512), generator=random).bfloat16()
    mla_cache_write(rows, torch.arange(count * page), raw, page)
    return raw.as_strided((count, page, 584), (raw.stride(0), 584, 1))


def chosen() -> torch.Tensor:
    """Return entries of each token's request, int32 [5, 32]: all entries, few, none, and remains in the padding."""
    rows = torch.full((TOKENS, TOPK), -1, dtype=torch.int32)
    for token, count in enumerate((TOPK, 5, 0, TOPK, 7)):
        rows[token, :count] = torch.randperm(3 * PAGE, generator=random)[:count].sort().values.int()
    return rows


def metadata() -> tuple[Any, Any]:
    """Return vLLM's metadata of the window's cache and of the compressed one, whose table is longer than the step's."""
    window = SimpleNamespace(
        num_decodes=DECODES, num_decode_tokens=TOKENS, block_size=64,
        decode_swa_indices=torch.randint(0, 128, (TOKENS, 1, WINDOW), generator=random, dtype=torch.int32),
        decode_swa_lens=torch.tensor([WINDOW, 9, 1, WINDOW, 0], dtype=torch.int32),
        token_to_req_indices=torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32),
        is_valid_token=torch.tensor([True, True, True, True, False]),
    )  # fmt: skip
    table = torch.randperm(4 * 6, generator=random).int().view(4, 6)
    return window, SimpleNamespace(block_size=4 * PAGE, block_table=table)


def layer() -> Any:
    made = attention.BundledAttention.__new__(attention.BundledAttention)
    vars(made).update(
        n_local_heads=HEADS, padded_heads=HEADS, window_size=WINDOW, compress_ratio=4, topk_indices_buffer=chosen(),
        swa_cache_layer=SimpleNamespace(kv_cache=cache(2, 64)), _decode_here=True, _most_decodes=TOKENS, _target=None,
        attn_sink=torch.randn(HEADS, generator=random),
    )  # fmt: skip
    return made


def decoded(made: Any, lookup: bool, steps: tuple[Any, Any], compressed: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the decoded output of a layer; without `lookup`, vLLM's kernel computes the slots."""
    plans._PLANS.clear()
    looks_up = DecodePlan.looks_up
    if not lookup:
        DecodePlan.looks_up = lambda *_: False  # type: ignore[method-assign]
    output = torch.empty_like(q)
    try:
        made._forward_decode(q, compressed, *steps, swa_only=False, output=output)
    finally:
        DecodePlan.looks_up = looks_up  # type: ignore[method-assign]
    return output


asked: list[int] = []
stock = attention.compute_global_topk_indices_and_lens


def noted(chosen: torch.Tensor, *args: Any) -> Any:
    asked.append(chosen.shape[0])
    return stock(chosen, *args)


attention.compute_global_topk_indices_and_lens = noted
made, steps, compressed = layer(), metadata(), cache(4 * 6, PAGE)
q = torch.randn((TOKENS, HEADS, 512), generator=random).bfloat16()
ours = decoded(made, True, steps, compressed, q)
before = asked.copy()
theirs = decoded(made, False, steps, compressed, q)
print(
    json.dumps(
        {
            "same": torch.equal(ours, theirs),
            "launches of vLLM's": [before, asked],
            "nothing": bool((ours[4] == 0).all() and (ours[:4] != 0).any(-1).all()),
        }
    )
)
