"""The compressor as operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.compressor.configs import cache_stride, select, state_block
from dsv4_kernels.compressor.inputs import save_inputs, store_inputs, width_of
from dsv4_kernels.compressor.kernel import compressor_save_kernel, compressor_store_kernel
from dsv4_kernels.compressor.reference import compressor_save, compressor_store, indexer_entries, mla_entries
from dsv4_kernels.launch import Launcher
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, counters, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case

_compressor_save = Launcher(compressor_save_kernel)
_compressor_store = Launcher(compressor_store_kernel)

_I64 = torch.int64


class CompressorPlan(Plan):
    """Common part of plans to save and to store: sizes, and the state cache with blocks `state_stride` floats apart."""

    def __init__(
        self,
        operation: str,
        tokens: int,
        head: int,
        ratio: int,
        device: torch.device,
        page: int = 64,
        state_stride: int | None = None,
        kv_stride: int | None = None,
        arch: Arch | None = None,
    ) -> None:
        require_thawed(operation)
        self.operation, self.device = operation, device
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"tokens": tokens, "head": head, "ratio": ratio, "page": page}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.tokens, self.head, self.ratio, self.page = tokens, head, ratio, page
        self.width, self.block = width_of(self.shape), state_block(ratio)
        self.state_stride = state_stride or self.block * 2 * self.width
        self.kv_stride = kv_stride or cache_stride(head, page)
        if self.state_stride % 4 or self.kv_stride % 16:
            raise ValueError(f"{operation}: blocks of states and pages must start at multiples of 16 bytes")

    def _check(self, state_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor) -> int:
        shape = (self.block, 2 * self.width)
        if state_cache.dtype != torch.float32 or tuple(state_cache.shape[1:]) != shape:
            raise ValueError(f"state_cache must be float32 [blocks, {shape[0]}, {shape[1]}]")
        _check_stride("state_cache", state_cache, self.state_stride)
        check_tensor("slot_mapping", slot_mapping, _I64, (None,))
        check_tensor("positions", positions, _I64, (None,))
        tokens = int(slot_mapping.shape[0])
        if tokens > self.tokens or positions.shape[0] < tokens:
            raise ValueError(f"{tokens} slots of {positions.shape[0]} positions, the plan holds {self.tokens}")
        return tokens

    def warmup(self) -> None:
        """Every configuration and type of weight; padded tokens only, so that nothing is written."""
        for tokens in {min(self.tokens, 1), self.tokens}:
            params = {**self.shape, "tokens": tokens}
            make = save_inputs if self.operation == "compressor_save" else store_inputs
            # The strides of the plan, with one block and one page.
            inputs = make({**params, "state_stride": self.state_stride, "cache_stride": self.kv_stride}, self.device, 0)
            inputs["slot_mapping"].fill_(-1)
            if "rms_norm_weight" not in inputs:
                self.run(**inputs)
                continue
            for dtype in (torch.bfloat16, torch.float32):
                self.run(**{**inputs, "rms_norm_weight": inputs["rms_norm_weight"].to(dtype)})


class SavePlan(CompressorPlan):
    """`compressor_save`."""

    def run(
        self,
        *,
        kv: torch.Tensor,
        score: torch.Tensor,
        ape: torch.Tensor,
        positions: torch.Tensor,
        state_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Write into state_cache and return it."""
        tokens = self._check(state_cache, slot_mapping, positions)
        for name, rows in (("kv", kv), ("score", score)):
            if rows.dtype != torch.float32 or rows.shape[1:] != (self.width,) or rows.stride(1) != 1:
                raise ValueError(f"{name} must be float32 [tokens, {self.width}] with contiguous rows")
            if rows.shape[0] < tokens or rows.data_ptr() % 16:
                raise ValueError(f"{name} needs {tokens} rows and a start at a multiple of 16 bytes")
        check_tensor("ape", ape, torch.float32, (self.ratio, self.width))
        if tokens:
            _compressor_save[(tokens,)](
                kv_ptr=kv, score_ptr=score, ape_ptr=ape, position_ptr=positions, slot_ptr=slot_mapping,
                state_ptr=state_cache, kv_stride=kv.stride(0), score_stride=score.stride(0), W=self.width,
                RATIO=self.ratio, BLOCK=self.block, STATE_STRIDE=self.state_stride,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        return state_cache


class StorePlan(CompressorPlan):
    """`compressor_store` and `compressor_store_indexer`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        split = select(self.arch, self.tokens, self.head, self.ratio).columns < self.head
        shape = (self.tokens if split else 0, self.head)
        self.part = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.count = counters(shape[0], self.device)

    def run(
        self,
        *,
        state_cache: torch.Tensor,
        token_to_req_indices: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        rms_norm_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_slot_mapping: torch.Tensor,
        compress_ratio: int,
    ) -> torch.Tensor:
        """Write into kv_cache and return it."""
        tokens = self._check(state_cache, slot_mapping, positions)
        check_tensor("kv_slot_mapping", kv_slot_mapping, _I64, (tokens,))
        check_tensor("token_to_req_indices", token_to_req_indices, torch.int32, (None,))
        check_tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, 64))
        if rms_norm_weight.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"rms_norm_weight has dtype {rms_norm_weight.dtype}, needs bf16 or float32")
        check_tensor("rms_norm_weight", rms_norm_weight, rms_norm_weight.dtype, (self.head,))
        if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.stride(1) != 1:
            raise ValueError("block_table must be int32 [requests, blocks] with contiguous rows")
        shape = (self.page, 584 if self.head == 512 else 132)
        if kv_cache.dtype != torch.uint8 or tuple(kv_cache.shape[1:]) != shape:
            raise ValueError(f"kv_cache must be uint8 [pages, {shape[0]}, {shape[1]}]")
        _check_stride("kv_cache", kv_cache, self.kv_stride)
        if compress_ratio != self.ratio:
            raise ValueError(f"compress_ratio is {compress_ratio}, the plan was made for {self.ratio}")
        if not tokens:
            return kv_cache
        config = select(self.arch, tokens, self.head, self.ratio)
        _compressor_store[(tokens, self.head // config.columns)](
            state_ptr=state_cache, request_ptr=token_to_req_indices, position_ptr=positions, slot_ptr=slot_mapping,
            table_ptr=block_table, weight_ptr=rms_norm_weight, cos_sin_ptr=cos_sin_cache, cache_ptr=kv_cache,
            cache_slot_ptr=kv_slot_mapping, part_ptr=self.part, count_ptr=self.count,
            mapped=token_to_req_indices.shape[0], table_stride=block_table.stride(0), eps=rms_norm_eps, D=self.head,
            W=self.width, RATIO=self.ratio, BLOCK=self.block, STATE_STRIDE=self.state_stride, PAGE=self.page,
            CACHE_STRIDE=self.kv_stride, N=config.columns,
            num_warps=config.num_warps, num_stages=1,
        )  # fmt: skip
        return kv_cache


def _check_stride(name: str, tensor: torch.Tensor, stride: int) -> None:
    """Rows within a block or page are contiguous, blocks or pages `stride` elements apart."""
    rows_apart = tensor.stride()[1:] != (tensor.shape[2], 1)
    if rows_apart or (tensor.shape[0] > 1 and tensor.stride(0) != stride) or tensor.data_ptr() % 16:
        raise ValueError(f"{name} has strides {tensor.stride()}, needs ({stride}, {tensor.shape[2]}, 1) and 16 bytes")


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any count and page; the heads and ratios that DeepSeek-V4 has."""
    if params["head"] not in (128, 512):
        return Support(f"compressor: head is {params['head']}, needs 128 or 512")
    if params["ratio"] not in (4, 128):
        return Support(f"compressor: ratio is {params['ratio']}, needs 4 or 128")
    if params["head"] == 128 and params["page"] % 4:
        return Support(f"compressor: pages of {params['page']} entries, the indexer's need a multiple of 4")
    return SUPPORTED


def _cases(head: int) -> Any:
    both = (
        case("empty", "cpu gpu", tokens=0, head=head, ratio=4, page=64),
        case("chunks4", "cpu gpu", tokens=41, head=head, ratio=4, page=64),
        case("apart4", "cpu gpu", tokens=13, head=head, ratio=4, page=8, state_stride=32768, cache_stride=40960),
        case("r4-t1", "gpu bench", tokens=1, head=head, ratio=4, page=64, dense=True),
        case("r4-t32", "gpu bench", tokens=32, head=head, ratio=4, page=64, dense=True),
        case("r4-t4096", "gpu bench", tokens=4096, head=head, ratio=4, page=64, dense=True),
    )
    if head == 128:
        return both
    return (
        *both,
        case("page61", "cpu gpu", tokens=9, head=512, ratio=4, page=61),
        case("chunks128", "cpu gpu", tokens=133, head=512, ratio=128, page=2),
        case("many128", "gpu", tokens=1000, head=512, ratio=128, page=2),
        case("r128-t1", "gpu bench", tokens=1, head=512, ratio=128, page=2, dense=True),
        case("r128-t32", "gpu bench", tokens=32, head=512, ratio=128, page=2, dense=True),
        case("r128-t4096", "gpu bench", tokens=4096, head=512, ratio=128, page=2, dense=True),
    )


def _window_bytes(params: Mapping[str, Any]) -> int:
    """Each state that an entry needs read once, each entry written once."""
    tokens, ratio, head = int(params["tokens"]), int(params["ratio"]), int(params["head"])
    prefill = tokens > 64
    entries = tokens // ratio if prefill else tokens
    read = tokens * 2 * width_of(params) * 4 if prefill else tokens * (2 if ratio == 4 else 1) * ratio * head * 8
    return read + entries * (584 if head == 512 else 132)


# A float32 value next to a rounding boundary may fall on the other side of the float64 one's: one step, seldom.
_CODES = Tolerance(rms=5e-3, relative=2.0**-3, absolute=2e-3, mismatch=1e-3)
_BF16 = Tolerance(relative=2.0**-7, absolute=1e-5)


def _plan(plan: type[CompressorPlan], name: str) -> Any:
    def make(params: Mapping[str, Any], device: torch.device, arch: Arch | None) -> Plan:
        return plan(
            name,
            params["tokens"],
            params["head"],
            params["ratio"],
            device,
            page=params["page"],
            state_stride=params.get("state_stride"),
            kv_stride=params.get("cache_stride"),
            arch=arch,
        )

    return make


def _store_row(name: str, head: int, summary: str, outputs: tuple[str, ...], compared: Any) -> Operation:
    tolerance = (_CODES, _BF16, Tolerance(bitwise=True)) if head == 512 else (_CODES,)
    return Operation(
        name=name,
        summary=summary,
        folder="compressor",
        outputs=outputs,
        cases=_cases(head),
        make_inputs=store_inputs,
        reference=compressor_store,
        plan=_plan(StorePlan, name),
        is_supported=is_supported,
        nbytes=_window_bytes,
        flops=lambda p: 0,
        tolerance=tolerance,
        mutates=("kv_cache",),
        compared=compared,
    )


OPERATIONS = (
    Operation(
        name="compressor_save",
        summary="save projections into the compressor's state cache",
        folder="compressor",
        outputs=("state",),
        cases=_cases(512),
        make_inputs=save_inputs,
        reference=compressor_save,
        plan=_plan(SavePlan, "compressor_save"),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (16 * width_of(p) + 16) + 4 * p["ratio"] * width_of(p),
        flops=lambda p: 0,
        tolerance=(Tolerance(bitwise=True),),
        mutates=("state_cache",),
        compared=lambda outputs: (outputs[0].nan_to_num(0.0),),
    ),
    _store_row(
        "compressor_store",
        512,
        "compress windows, norm, RoPE, quantise and insert",
        ("nope", "rope", "pad"),
        mla_entries,
    ),
    _store_row("compressor_store_indexer", 128, "the same for the indexer's keys", ("value",), indexer_entries),
)
