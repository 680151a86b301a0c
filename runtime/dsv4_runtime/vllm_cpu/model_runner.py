"""Kernels of vLLM's model runner and attention metadata on the CPU in torch instead of Triton's interpreter.

Interpreted on a CPU, these small Triton kernels dominate a step of the nano model. Each replacement computes the values
of vLLM's kernel and applies where vLLM's current platform is the CPU.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_UPSTREAM = "none: vLLM expects Triton's CPU compiler"
_VERSIONS = "vLLM 0.32.0"
_BLOCK_TABLES = "BlockTables.compute_slot_mappings"
_BLOCK_TABLE_PARAMETERS = {
    "compute_slot_mappings": ["self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"],
    "gather_block_tables": ["self", "idx_mapping", "num_reqs_padded", "out", "out_ptrs"],
}
_PAD = -1
_WINDOW = "ComputeSWAIndicesAndLensKernel.__call__"
_WINDOW_PARAMETERS = [
    *("self", "swa_indices", "swa_lens", "window_size", "index_width", "left_visible", "right_visible"),
    *("query_start_loc", "seq_lens", "token_to_req_indices", "is_valid_token", "block_table", "block_size"),
    *("replay_start", "num_tokens", "token_offset", "has_image"),
]
_SLOTS = "CompressedSlotMappingKernel.__call__"
_SLOTS_PARAMETERS = [
    *("self", "compressed_slot_mapping", "slot_mapping", "query_start_loc", "seq_lens", "block_table", "block_size"),
    *("compress_ratio", "dcp_world_size", "cp_interleave"),
]
_ZEROING = "KVBlockZeroer.zero_block_ids"
_WORD_BYTES = 4  # strides and sizes count int32
_FIELDS = ("addresses", "strides", "sizes", "chunks", "chunk size", "segments")


def slot_mappings(
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    enabled: Sequence[bool],
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
) -> None:
    """Write the cache slot of each token in each group of layers; -1 for padding and for tokens without a slot.

    Source: vLLM's kernel `_compute_slot_mappings_kernel` without context parallelism.

    Args:
        tables: int32 `[rows, blocks]` of each group.
        idx_mapping: int32 `[requests]`, rows of the tables; -1 is a request without blocks.
        query_start_loc: int32 `[>= requests + 1]`, first token of each request.
        positions: int64 `[>= tokens]`.
        out: int64 `[groups, >= tokens]`, changed.
    """
    starts = query_start_loc[: len(idx_mapping) + 1].long()
    row = idx_mapping.long().repeat_interleave(starts.diff())
    tokens, real = slice(int(starts[0]), int(starts[-1])), row >= 0
    position = positions[tokens].long()
    for group, (table, size, wanted) in enumerate(zip(tables, block_sizes, enabled, strict=True)):
        if wanted:
            block = table[row.clamp_min(0), torch.where(real, position // size, 0)].long()
            out[group, tokens] = torch.where(real, block * size + position % size, _PAD)
        else:
            out[group, tokens] = _PAD
    out[:, tokens.stop :] = _PAD


def gather_block_tables(
    tables: Sequence[Tensor], num_blocks: Tensor, idx_mapping: Tensor, num_reqs_padded: int, out: Sequence[Tensor]
) -> None:
    """Copy the filled part of the rows of the step's requests, and clear the padding rows.

    Source: vLLM's kernel `_gather_block_tables_kernel`.

    Args:
        tables: int32 `[rows, blocks]` of each group.
        num_blocks: int32 `[groups, rows]`.
        idx_mapping: int32 `[requests]`, rows of the tables.
        out: int32 `[>= num_reqs_padded, blocks]` of each group, changed.
    """
    row, count = idx_mapping.long(), len(idx_mapping)
    for group, (table, target) in enumerate(zip(tables, out, strict=True)):
        filled = torch.arange(table.shape[1]) < num_blocks[group, row][:, None]
        target[:count] = torch.where(filled, table[row], target[:count])
        target[count:num_reqs_padded] = 0


def window_indices(
    swa_indices: Tensor,
    swa_lens: Tensor,
    window_size: int,
    index_width: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req_indices: Tensor,
    is_valid_token: Tensor,
    block_table: Tensor,
    block_size: int,
    replay_start: Tensor,
    *,
    num_tokens: int,
    token_offset: int,
) -> None:
    """Write, for each token, the cache slots of the positions in its window, oldest first, and their number.

    Source: vLLM's kernel `_compute_swa_indices_and_lens_kernel` without images.

    Args:
        swa_indices: output, int32 `[>= num_tokens, (1,) >= index_width]`; -1 fills a row's end.
        swa_lens: output, int32 `[>= num_tokens]`.
        window_size: visible positions of a token, including its own.
        index_width: columns written.
        query_start_loc: int32 `[requests + 1]`, first token of each request in the batch.
        seq_lens: int32 `[requests]`, length of each request after this step, in tokens.
        token_to_req_indices: int32 `[tokens]`.
        is_valid_token: bool `[tokens]`; a padding token gets length 0 and a row of -1.
        block_table: int32 `[requests, blocks]`.
        block_size: tokens per cache block.
        replay_start: `[requests]`, first position with window entries.
        num_tokens: rows written.
        token_offset: the first row's token in the batch.
    """
    tokens = torch.arange(token_offset, token_offset + num_tokens)
    request = token_to_req_indices[tokens].long()
    start = query_start_loc[request].long()
    position = seq_lens[request].long() - (query_start_loc[request + 1].long() - start) + tokens - start
    first = torch.maximum((position - (window_size - 1)).clamp_min(0), replay_start[request].long())
    valid = is_valid_token[tokens]
    length = torch.where(valid, position + 1 - first, 0)
    column = torch.arange(index_width)
    inside = column < length[:, None]
    wanted = torch.where(inside, first[:, None] + column, 0)
    block = block_table[request[:, None], wanted // block_size].long()
    slots = torch.where(inside, block * block_size + wanted % block_size, -1)
    swa_lens[:num_tokens] = length.to(swa_lens.dtype)
    rows = swa_indices[:num_tokens]
    rows.view(num_tokens, -1)[:, :index_width] = slots.to(swa_indices.dtype)


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

    Source: vLLM's kernel `CompressedSlotMappingKernel` without context parallelism.

    Args:
        compressed_slot_mapping: output, int64 `[tokens]`.
        slot_mapping: int64 `[tokens]`, slots of the tokens; a token without one has no compressed slot either.
        query_start_loc: int32 `[requests + 1]`, first token of each request.
        seq_lens: int32 `[requests]`, length of each request after this step, in tokens.
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


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _patch_block_tables() -> PatchOutcome:
    from vllm.v1.worker.gpu.block_table import BlockTables

    if not _is_cpu():
        return PatchOutcome.NOT_WANTED
    for name, expected in _BLOCK_TABLE_PARAMETERS.items():
        expect_parameters(f"BlockTables.{name}", getattr(BlockTables, name, None), expected)
    computed, gathered = BlockTables.compute_slot_mappings, BlockTables.gather_block_tables

    def compute(
        self: Any, idx_mapping: Tensor, query_start_loc: Tensor, positions: Tensor, num_tokens_padded: int,
        out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if self.num_kv_cache_groups == 0 or self.cp_size != 1:
            return computed(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out)
        found = self.slot_mappings if out is None else out
        slot_mappings(
            [table.gpu for table in self.block_tables], self.block_sizes, self._slot_mapping_enabled,
            idx_mapping, query_start_loc, positions, found,
        )  # fmt: skip
        return found[:, :num_tokens_padded]

    def gather(self: Any, idx_mapping: Tensor, num_reqs_padded: int, out: Any = None, out_ptrs: Any = None) -> Any:
        if self.num_kv_cache_groups == 0:
            return gathered(self, idx_mapping, num_reqs_padded, out, out_ptrs)
        targets = tuple(self.input_block_tables) if out is None else out
        tables = [table.gpu for table in self.block_tables]
        gather_block_tables(tables, self.num_blocks.gpu, idx_mapping, num_reqs_padded, targets)
        return tuple(table[:num_reqs_padded] for table in targets)

    BlockTables.compute_slot_mappings, BlockTables.gather_block_tables = compute, gather
    return PatchOutcome.APPLIED


def _patch_window_indices() -> PatchOutcome:
    from vllm.v1.attention.backends.mla import sparse_swa

    if not _is_cpu():
        return PatchOutcome.NOT_WANTED
    kernel: Any = getattr(sparse_swa, "ComputeSWAIndicesAndLensKernel", None)
    expect_parameters(_WINDOW, kernel and kernel.__call__, _WINDOW_PARAMETERS)
    original = kernel.__call__

    def call(self: Any, *args: Any, has_image: bool = False, **kwargs: Any) -> Any:
        if has_image:  # vision models only, which this build does not run
            return original(self, *args, has_image=has_image, **kwargs)
        # Arguments 4 and 5 are the visibility of images.
        return window_indices(*args[:4], *args[6:], **kwargs)

    kernel.__call__ = call
    return PatchOutcome.APPLIED


def _patch_compressed_slots() -> PatchOutcome:
    from vllm.v1.attention.backends.mla import compressor_utils

    if not _is_cpu():
        return PatchOutcome.NOT_WANTED
    kernel: Any = getattr(compressor_utils, "CompressedSlotMappingKernel", None)
    expect_parameters(_SLOTS, kernel and kernel.__call__, _SLOTS_PARAMETERS)
    original = kernel.__call__

    def call(self: Any, *args: Any) -> Any:
        *own, dcp_world_size, _ = args
        return compressed_slots(*own) if dcp_world_size == 1 else original(self, *args)

    kernel.__call__ = call
    return PatchOutcome.APPLIED


def _patch_block_zeroing() -> PatchOutcome:
    from vllm.v1.worker.utils import KVBlockZeroer

    if not _is_cpu():
        return PatchOutcome.NOT_WANTED
    original = KVBlockZeroer.zero_block_ids
    expect_parameters(_ZEROING, original, ["self", "block_ids"])
    names = original.__code__.co_names
    if "_meta" not in names:
        raise refuse(_ZEROING, "it does not read self._meta, the table of the cache's segments")
    if "_zero_kv_blocks_kernel" not in names:
        return PatchOutcome.NOT_NEEDED

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        if not block_ids or self._meta is None:
            return
        if len(self._meta) != len(_FIELDS):
            raise refuse(_ZEROING, f"self._meta has {len(self._meta)} fields, expected {len(_FIELDS)} {_FIELDS}")
        segments = [column.tolist() for column in self._meta[:3]]
        for address, stride, size in zip(*segments, strict=True):
            for block in block_ids:
                ctypes.memset(address + block * stride * _WORD_BYTES, 0, size * _WORD_BYTES)

    KVBlockZeroer.zero_block_ids = zero_block_ids
    return PatchOutcome.APPLIED


PATCHES = (
    Patch(
        module="vllm.v1.worker.utils",
        symbol=_ZEROING,
        why=(
            "a Triton kernel clears new cache blocks; interpreted on a CPU it takes 20 ms per prompt token,"
            " three quarters of the prefill"
        ),
        upstream=_UPSTREAM,
        versions=_VERSIONS,
        obsolete_when="the method no longer launches `_zero_kv_blocks_kernel` on a CPU",
        apply=_patch_block_zeroing,
    ),
    Patch(
        module="vllm.v1.attention.backends.mla.sparse_swa",
        symbol=_WINDOW,
        why="interpreted on a CPU the kernel takes 6 ms per prompt token, and vLLM's CPU attention ignores the result",
        upstream=_UPSTREAM,
        versions=_VERSIONS,
        obsolete_when="vLLM's CPU metadata builder no longer launches the kernel",
        apply=_patch_window_indices,
    ),
    Patch(
        module="vllm.v1.worker.gpu.block_table",
        symbol=_BLOCK_TABLES,
        why=(
            "interpreted on a CPU this kernel and that of `BlockTables.gather_block_tables` take a third of a step of"
            " the nano model"
        ),
        upstream=_UPSTREAM,
        versions=_VERSIONS,
        obsolete_when="vLLM's model runner computes them on the CPU without Triton",
        apply=_patch_block_tables,
    ),
    Patch(
        module="vllm.v1.attention.backends.mla.compressor_utils",
        symbol=_SLOTS,
        why="interpreted on a CPU the kernel takes a sixth of a step of the nano model",
        upstream=_UPSTREAM,
        versions=_VERSIONS,
        obsolete_when="vLLM's CPU metadata builders no longer launch the kernel",
        apply=_patch_compressed_slots,
    ),
)
