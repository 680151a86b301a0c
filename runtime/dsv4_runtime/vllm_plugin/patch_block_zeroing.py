"""Zeroes KV cache blocks on the CPU without Triton's interpreter."""

import ctypes
from typing import Any

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_MODULE = "vllm.v1.worker.utils"
_SYMBOL = "KVBlockZeroer.zero_block_ids"
_WORD = 4  # strides and sizes count int32
_FIELDS = ("addresses", "strides", "sizes", "chunks", "chunk size", "segments")


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform
    from vllm.v1.worker.utils import KVBlockZeroer

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    original = KVBlockZeroer.zero_block_ids
    expect_parameters(_SYMBOL, original, ["self", "block_ids"])
    names = original.__code__.co_names
    if "_meta" not in names:
        raise refuse(_SYMBOL, "it does not read self._meta, the table of the cache's segments")
    if "_zero_kv_blocks_kernel" not in names:
        return PatchOutcome.NOT_NEEDED

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        if not block_ids or self._meta is None:
            return
        if len(self._meta) != len(_FIELDS):
            raise refuse(_SYMBOL, f"self._meta has {len(self._meta)} fields, expected {len(_FIELDS)} {_FIELDS}")
        segments = [column.tolist() for column in self._meta[:3]]
        for address, stride, size in zip(*segments, strict=True):
            for block in block_ids:
                ctypes.memset(address + block * stride * _WORD, 0, size * _WORD)

    KVBlockZeroer.zero_block_ids = zero_block_ids
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "a Triton kernel clears new cache blocks; interpreted on a CPU it takes 20 ms per prompt token,"
        " three quarters of the prefill"
    ),
    upstream="none: vLLM means Triton's CPU compiler to be there",
    versions="vLLM 0.32.0",
    obsolete_when="the method no longer launches `_zero_kv_blocks_kernel` on a CPU",
    apply=_apply,
)
