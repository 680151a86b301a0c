"""Computes the cache slots of a step on the CPU in torch instead of in Triton's interpreter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

_MODULE = "vllm.v1.worker.gpu.block_table"
_SYMBOL = "BlockTables.compute_slot_mappings"
_PARAMETERS = {
    "compute_slot_mappings": ["self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"],
    "gather_block_tables": ["self", "idx_mapping", "num_reqs_padded", "out", "out_ptrs"],
}
_PAD = -1


def slot_mappings(
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    enabled: Sequence[bool],
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
) -> None:
    """Write the slot of each token in each group of layers; -1 beyond the tokens and where there is none.

    The same numbers as vLLM's kernel `_compute_slot_mappings_kernel` without context parallelism.

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
    """Copy the rows of the step's requests, as far as they are filled, and clear those of the padding.

    The same numbers as vLLM's kernel `_gather_block_tables_kernel`.

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


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.block_table import BlockTables

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    for name, expected in _PARAMETERS.items():
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


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "interpreted on a CPU this kernel and that of `BlockTables.gather_block_tables` take a third of a step of the"
        " nano model"
    ),
    upstream="none: vLLM means Triton's CPU compiler to be there",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM's model runner computes them on the CPU without Triton",
    apply=_apply,
)
