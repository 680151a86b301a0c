"""Child process of `test_with_vllm.py`: importing vLLM takes seconds and brings warnings of its own.

Prints one JSON object: what each patch did, and whether the replaced functions give vLLM's own results.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.worker import utils

from dsv4_runtime.vllm_plugin import patch_window_indices

WINDOW, BLOCK = 8, 4


def window_indices_agree() -> bool:
    """Three requests: one decodes, two prefill, the last token is padding."""
    query_start = torch.tensor([0, 1, 6, 30, 30], dtype=torch.int32)
    lengths = torch.tensor([21, 9, 24, 0], dtype=torch.int32)
    request = torch.tensor([0] + [1] * 5 + [2] * 24 + [0], dtype=torch.int32)
    valid = torch.arange(31) < 30
    table = torch.randperm(32, generator=torch.Generator().manual_seed(0)).to(torch.int32).reshape(4, 8)
    replay = torch.tensor([15, 0, 3, 0], dtype=torch.int32)
    results = []
    for own in (True, False):
        indices, lens = torch.full((31, 1, WINDOW), 7, dtype=torch.int32), torch.full((31,), 7, dtype=torch.int32)
        common = (query_start, lengths, request, valid, table)
        for offset, count in ((0, 1), (1, 30)):
            rows = (indices[offset:], lens[offset:])
            if own:
                patch_window_indices.window_indices(
                    *rows, WINDOW, WINDOW, *common, BLOCK, replay, num_tokens=count, token_offset=offset
                )
            else:
                sparse_swa._compute_swa_indices_and_lens_kernel[(count,)](
                    rows[0], rows[0].stride(0), rows[1], WINDOW, WINDOW, rows[1], rows[1],
                    *common, table.stride(0), BLOCK, replay, offset, HAS_IMAGE=False, TRITON_BLOCK_SIZE=16,
                )  # fmt: skip
        results.append((indices, lens))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def zeroed_words() -> list[int]:
    """Two segments share blocks of 8 words: words 0-2 and 4-5 of a block. Blocks 1 and 3 of four are zeroed."""
    cache = torch.ones(32, dtype=torch.int32)
    zeroer = utils.KVBlockZeroer.__new__(utils.KVBlockZeroer)
    base = cache.data_ptr()
    columns = (torch.tensor([base, base + 16], dtype=torch.uint64), torch.tensor([8, 8]), torch.tensor([3, 2]))
    zeroer._meta = (*columns, 1, 4, 2)
    zeroer.zero_block_ids([1, 3])
    return (cache == 0).nonzero().flatten().tolist()


print(
    json.dumps(
        {
            "platform": type(current_platform).__name__,
            "ray device": current_platform.ray_device_key,
            "layer types": sorted(DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(None, 0)),
            "window indices": window_indices_agree(),
            "zeroed words": zeroed_words(),
            "queue pauses": repr(shm_broadcast.sched_yield),
        }
    )
)
