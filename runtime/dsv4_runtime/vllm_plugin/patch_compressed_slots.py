"""Computes the slots of compressed keys on the CPU in torch instead of in Triton's interpreter."""

from typing import Any

import torch
from torch import Tensor

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

_MODULE = "vllm.v1.attention.backends.mla.compressor_utils"
_SYMBOL = "CompressedSlotMappingKernel.__call__"
_PARAMETERS = [
    *("self", "compressed_slot_mapping", "slot_mapping", "query_start_loc", "seq_lens", "block_table", "block_size"),
    *("compress_ratio", "dcp_world_size", "cp_interleave"),
]


def compressed_slots(
    compressed_slot_mapping: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    compress_ratio: int,
) -> None:
    """Write, for each token that ends a group of `compress_ratio`, the slot of the group's key; -1 for the others.

    The same numbers as vLLM's kernel without context parallelism.

    Args:
        compressed_slot_mapping: output, int64 `[tokens]`.
        slot_mapping: int64 `[tokens]`, the tokens' own slots; a token without one has no compressed one either.
        query_start_loc: int32 `[requests + 1]`, first token of each request.
        seq_lens: int32 `[requests]`, each request's length after this step, in tokens.
        block_table: int32 `[requests, blocks]`.
        block_size: compressed keys per cache block.
    """
    requests = len(block_table)
    starts, counts = query_start_loc[:requests].long(), query_start_loc[: requests + 1].long().diff()
    request = torch.arange(requests).repeat_interleave(counts)
    token = torch.arange(len(request)) + starts[0]
    position = seq_lens[request].long() - counts[request] + token - starts[request]
    ends = ((position + 1) % compress_ratio == 0) & (slot_mapping[token] != -1)
    group = torch.where(ends, position // compress_ratio, 0)
    block = block_table[request, group // block_size].long()
    compressed_slot_mapping[token] = torch.where(ends, block * block_size + group % block_size, -1)


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import compressor_utils

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    kernel: Any = getattr(compressor_utils, "CompressedSlotMappingKernel", None)
    expect_parameters(_SYMBOL, kernel and kernel.__call__, _PARAMETERS)
    original = kernel.__call__

    def call(self: Any, *args: Any) -> Any:
        *own, dcp_world_size, _ = args
        return compressed_slots(*own) if dcp_world_size == 1 else original(self, *args)

    kernel.__call__ = call
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why="interpreted on a CPU the kernel takes a sixth of a step of the nano model",
    upstream="none: vLLM means Triton's CPU compiler to be there",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM's CPU metadata builders no longer launch the kernel",
    apply=_apply,
)
