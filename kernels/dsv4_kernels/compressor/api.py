"""Configurations, plans and registry rows of the compressor and its projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.compressor.kernel import compressor_save_kernel, compressor_store_kernel, projections_kernel
from dsv4_kernels.compressor.reference import (
    cache_stride,
    compressor_save,
    compressor_store,
    indexer_entries,
    mla_entries,
    projections,
    save_inputs,
    state_block,
    store_inputs,
    width_of,
)
from dsv4_kernels.numerics import seeded
from dsv4_kernels.plan import (
    BF16,
    F32,
    I32,
    I64,
    ROWS,
    SUPPORTED,
    U8,
    Input,
    Inputs,
    Launcher,
    Plan,
    Size,
    Support,
    counters,
)
from dsv4_kernels.registry import Operation, Tolerance, case


@dataclass(frozen=True)
class StoreConfig:
    """A program has `columns` columns of one token's entry; fewer than the head: the last one to arrive finishes it."""

    columns: int
    num_warps: int


def select(arch: Arch, tokens: int, head: int, ratio: int) -> StoreConfig:
    """The 128 rows of a ratio-128 window are half a megabyte: one program would read them for ten microseconds."""
    if ratio >= 32:
        return StoreConfig(32, 4) if tokens <= 512 else StoreConfig(64, 8)
    return StoreConfig(head, 4 if head == 512 else 1)


_compressor_save = Launcher(compressor_save_kernel)
_compressor_store = Launcher(compressor_store_kernel)


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
        shape = {"tokens": tokens, "head": head, "ratio": ratio, "page": page}
        super().__init__(operation, shape, device, arch, is_supported)
        self.tokens, self.head, self.ratio, self.page = tokens, head, ratio, page
        self.width, self.block = width_of(self.shape), state_block(ratio)
        self.state_stride = state_stride or self.block * 2 * self.width
        self.kv_stride = kv_stride or cache_stride(head, page)
        if self.state_stride % 4 or self.kv_stride % 16:
            raise ValueError(f"{operation}: blocks of states and pages must start at multiples of 16 bytes")

    def declare_all(self, **others: Input) -> Inputs:
        """Return the common tensors and `others`."""
        return self.declare(
            slot_mapping=Input(I64, (Size("tokens", most=self.tokens),)),
            positions=Input(I64, (Size(least="tokens"),)),
            state_cache=_states_input(self.block, self.width, self.state_stride),
            **others,
        )

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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        rows = Input(F32, (Size(least="tokens"), self.width), strides=ROWS)
        self.inputs = self.declare_all(kv=rows, score=rows, ape=Input(F32, (self.ratio, self.width)))

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
        self.inputs.check(
            slot_mapping=slot_mapping, positions=positions, state_cache=state_cache, kv=kv, score=score, ape=ape
        )
        tokens = int(slot_mapping.shape[0])
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
        entry = 584 if self.head == 512 else 132
        self.inputs = self.declare_all(
            kv_slot_mapping=Input(I64, ("tokens",)),
            token_to_req_indices=Input(I32, (None,)),
            cos_sin_cache=Input(F32, (None, 64)),
            rms_norm_weight=Input((BF16, F32), (self.head,)),
            block_table=Input(I32, (None, None), strides=ROWS, aligned=False),
            kv_cache=Input(U8, (None, self.page, entry), strides=(self.kv_stride, entry, 1)),
        )
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
        self.inputs.check(
            slot_mapping=slot_mapping, positions=positions, state_cache=state_cache, kv_slot_mapping=kv_slot_mapping,
            token_to_req_indices=token_to_req_indices, cos_sin_cache=cos_sin_cache, rms_norm_weight=rms_norm_weight,
            block_table=block_table, kv_cache=kv_cache,
        )  # fmt: skip
        tokens = int(slot_mapping.shape[0])
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


def _states_input(block: int, width: int, stride: int) -> Input:
    return Input(F32, (None, block, 2 * width), strides=(stride, 2 * width, 1))


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
        tolerance=tolerance,
        mutates=("kv_cache",),
        compared=compared,
    )


_COMPRESSOR = (
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


MOST_TOKENS = 32
"""Beyond, the weights are a smaller part of the reads, and every program reads all of x."""


@dataclass(frozen=True)
class ProjectionConfig:
    """One program: `block_t` tokens × `block_n` columns, `block_k` values of the input at a time."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def select_projection(arch: Arch, tokens: int) -> ProjectionConfig:
    """Return narrow programs for few tokens, so that every multiprocessor reads weights."""
    return ProjectionConfig(16, 16, 256, 4, 4) if tokens <= 16 else ProjectionConfig(32, 32, 128, 4, 4)


_projections = Launcher(projections_kernel)


class ProjectionPlan(Plan):
    """Projections of up to `tokens` tokens; `width` is W, `index_width` that of the indexer's compressor, 0 without.

    Blocks of the state caches lie `state_stride` and `index_stride` floats apart.
    """

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        hidden: int,
        ratio: int,
        width: int,
        index_width: int = 0,
        heads: int = 0,
        state_stride: int | None = None,
        index_stride: int | None = None,
        arch: Arch | None = None,
    ) -> None:
        shape = {
            "tokens": tokens, "hidden": hidden, "ratio": ratio, "width": width, "index_width": index_width,
            "heads": heads,
        }  # fmt: skip
        super().__init__("projections", shape, device, arch, projections_supported)
        self.tokens, self.hidden, self.ratio = tokens, hidden, ratio
        self.width, self.index_width, self.n_heads, self.block = width, index_width, heads, state_block(ratio)
        self.state_stride = state_stride or self.block * 2 * width
        self.index_stride = index_stride or self.block * 2 * index_width
        if self.state_stride % 4 or self.index_stride % 4:
            raise ValueError("projections: blocks of states must start at multiples of 16 bytes")
        index = self._compressor("index_", index_width, self.index_stride) if index_width else {}
        if index:
            index["head_weight"] = Input(BF16, (heads, hidden))
        self._index = tuple(index)
        self.inputs = self.declare(
            x=Input(BF16, (Size("tokens", most=tokens), hidden)),
            slot_mapping=Input(I64, (Size("saved", most="tokens"),), aligned=False),
            positions=Input(I64, (Size(least="saved"),), aligned=False),
            **self._compressor("", width, self.state_stride),
            **index,
        )
        self.heads = torch.empty((tokens, heads), dtype=torch.bfloat16, device=device)

    def run(
        self,
        *,
        x: torch.Tensor,
        positions: torch.Tensor,
        weight: torch.Tensor,
        ape: torch.Tensor,
        state_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        index_weight: torch.Tensor | None = None,
        index_ape: torch.Tensor | None = None,
        index_state_cache: torch.Tensor | None = None,
        index_slot_mapping: torch.Tensor | None = None,
        head_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Write into the state caches; return (state_cache,) or (state_cache, index_state_cache, heads)."""
        tokens, saved = int(x.shape[0]), int(slot_mapping.shape[0])
        index = (index_weight, index_ape, index_state_cache, index_slot_mapping)
        named = dict(zip(self._index, (*index, head_weight), strict=False))
        self.inputs.check(
            x=x, slot_mapping=slot_mapping, positions=positions, weight=weight, ape=ape, state_cache=state_cache,
            **named,
        )  # fmt: skip
        if not self.index_width:
            # Never read: no program has columns of them.
            index, head_weight = (weight, ape, state_cache, slot_mapping), weight
        heads = self.heads[:tokens]
        if tokens:
            c = select_projection(self.arch, tokens)
            columns = 2 * (self.width + self.index_width) + self.n_heads
            _projections[(-(-columns // c.block_n),)](
                x_ptr=x, position_ptr=positions, weight_ptr=weight, ape_ptr=ape, state_ptr=state_cache,
                slot_ptr=slot_mapping, index_weight_ptr=index[0], index_ape_ptr=index[1], index_state_ptr=index[2],
                index_slot_ptr=index[3], head_weight_ptr=head_weight, head_ptr=heads, tokens=tokens, saved=saved,
                H=self.hidden, W=self.width, INDEX_W=self.index_width, HEADS=self.n_heads, RATIO=self.ratio,
                BLOCK=self.block, STATE_STRIDE=self.state_stride, INDEX_STRIDE=self.index_stride,
                BT=c.block_t, BN=c.block_n, BK=c.block_k,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return (state_cache, index_state_cache, heads) if index_state_cache is not None else (state_cache,)

    def _compressor(self, which: str, width: int, stride: int) -> dict[str, Input]:
        """Return the inputs of a compressor, with the prefix `which`."""
        slots = {f"{which}slot_mapping": Input(I64, (Size(least="saved"),), aligned=False)} if which else {}
        return {
            f"{which}weight": Input(BF16, (2 * width, self.hidden)),
            f"{which}ape": Input(F32, (self.ratio, width)),
            f"{which}state_cache": _states_input(self.block, width, stride),
            **slots,
        }

    def warmup(self) -> None:
        """Run every configuration that a token count up to the planned one selects; no slot is written."""
        strides = {"state_stride": self.state_stride, "index_stride": self.index_stride}
        for tokens in self.first_of_each(self.tokens, lambda t: select_projection(self.arch, t)):
            inputs = _inputs({**self.shape, **strides, "tokens": tokens}, self.device, 0)
            for name in inputs.keys() & {"slot_mapping", "index_slot_mapping"}:
                inputs[name].fill_(-1)
            self.run(**inputs)


def projections_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Accept few tokens, rows that start at multiples of 16 bytes, and widths that programs of 32 columns divide."""
    if params["tokens"] > MOST_TOKENS:
        return Support(f"projections: {params['tokens']} tokens, needs {MOST_TOKENS} or fewer")
    if params["ratio"] not in (4, 128):
        return Support(f"projections: ratio is {params['ratio']}, needs 4 or 128")
    if params["hidden"] % 8:
        return Support(f"projections: hidden is {params['hidden']}, needs a multiple of 8")
    index, heads = params.get("index_width", 0), params.get("heads", 0)
    if not params["width"] or params["width"] % 32 or index % 32 or bool(index) != bool(heads):
        return Support(
            f"projections: widths are {params['width']} and {index} with {heads} heads, need multiples of 32, and "
            "heads with the second alone"
        )
    return SUPPORTED


def _states(params: Mapping[str, Any], width: int, stride: int | None, device: torch.device, seed: int) -> torch.Tensor:
    block = state_block(params["ratio"])
    blocks, size = 2 * params["tokens"] + 1, block * 2 * width
    flat = torch.randn((blocks, stride or size), generator=seeded(device, seed), device=device)
    return flat[:, :size].unflatten(1, (block, 2 * width))


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Draw tokens anywhere in their windows; of more than two, one is padding and the last has no slot."""
    draw = seeded(device, seed)
    tokens, hidden, ratio = params["tokens"], params["hidden"], params["ratio"]
    saved = tokens - 1 if tokens > 2 else tokens

    def matrix(rows: int) -> torch.Tensor:
        return (torch.randn((rows, hidden), generator=draw, device=device) * hidden**-0.5).bfloat16()

    def compressor(name: str, width: int, stride: int | None, seed: int) -> dict[str, torch.Tensor]:
        state = _states(params, width, stride, device, seed)
        slots = torch.randperm(state.shape[0] * state.shape[1], generator=torch.Generator().manual_seed(seed))[:saved]
        if tokens > 2:
            slots[1] = -1
        return {
            f"{name}weight": matrix(2 * width),
            f"{name}ape": torch.randn((ratio, width), generator=draw, device=device),
            f"{name}state_cache": state,
            f"{name}slot_mapping": slots.to(device),
        }

    inputs = {
        "x": torch.randn((tokens, hidden), generator=draw, device=device).bfloat16(),
        "positions": torch.randint(0, 3 * ratio, (tokens,), generator=draw, device=device),
        **compressor("", params["width"], params.get("state_stride"), seed + 1),
    }
    if index := params.get("index_width", 0):
        inputs |= compressor("index_", index, params.get("index_stride"), seed + 2)
        inputs["head_weight"] = matrix(params["heads"])
    return inputs


def _nbytes(params: Mapping[str, Any]) -> int:
    widths = 2 * (int(params["width"]) + int(params.get("index_width", 0)))
    heads, tokens, hidden = int(params.get("heads", 0)), int(params["tokens"]), int(params["hidden"])
    return 2 * hidden * (tokens + widths + heads) + tokens * (4 * widths + 2 * widths + 2 * heads)


def _three(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return three outputs, empty ones in the place of those that are not there."""
    nothing = outputs[0].new_empty((0,))
    return (*outputs, nothing, nothing)[:3]


# A sum in another order; near zero the terms' rounding is more than the sum's.
_SUM = Tolerance(absolute=1e-4, relative=1e-4, rms=1e-5)
_C4 = {"ratio": 4, "width": 1024, "index_width": 256, "heads": 64}
_C128 = {"ratio": 128, "width": 512}
_SMALL = {"hidden": 200, "ratio": 4, "width": 64, "index_width": 32, "heads": 24}
OPERATIONS = (
    *_COMPRESSOR,
    Operation(
        name="projections",
        summary="projections of few tokens for compressors and indexer, saved as states",
        folder="compressor",
        outputs=("state", "index_state", "heads"),
        cases=(
            case("empty", "cpu gpu", tokens=0, **_SMALL),
            case("t1", "cpu gpu", tokens=1, **_SMALL),
            case("small", "cpu gpu", tokens=5, **_SMALL),
            case("most", "cpu gpu", tokens=32, **_SMALL),
            case("apart", "cpu gpu", tokens=19, **{**_SMALL, "state_stride": 4096, "index_stride": 2052}),
            case("plain", "cpu gpu", tokens=3, hidden=136, ratio=128, width=96),
            case("c4-t1", "gpu bench", tokens=1, hidden=4096, **_C4),
            case("c4-t32", "gpu bench", tokens=32, hidden=4096, **_C4),
            case("c128-t1", "gpu bench", tokens=1, hidden=4096, **_C128),
            case("c128-t32", "gpu bench", tokens=32, hidden=4096, **_C128),
            case("pro-c4-t1", "gpu bench", tokens=1, hidden=7168, **_C4),
        ),
        make_inputs=_inputs,
        reference=projections,
        plan=lambda p, device, arch: ProjectionPlan(device, **p, arch=arch),
        is_supported=projections_supported,
        nbytes=_nbytes,
        flops=lambda p: (
            2 * p["tokens"] * p["hidden"] * (2 * (p["width"] + p.get("index_width", 0)) + p.get("heads", 0))
        ),
        tolerance=(_SUM, _SUM, Tolerance(absolute=1e-4, relative=2.0**-8)),
        mutates=("state_cache", "index_state_cache"),
        compared=_three,
    ),
)
