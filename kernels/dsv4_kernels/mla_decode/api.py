"""Configurations, plans and registry rows of sparse MLA decode and of the merge of its parts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_kernels.arch import Arch, Table, load_table, multiprocessors
from dsv4_kernels.interpreter import interpreting
from dsv4_kernels.mla_cache.api import cache_input
from dsv4_kernels.mla_decode.kernel import mla_decode_kernel, mla_merge_kernel
from dsv4_kernels.mla_decode.reference import (
    decode_inputs,
    merge_inputs,
    merge_o8_inputs,
    merge_two_inputs,
    mla_decode,
    mla_decode_o8,
    mla_merge,
    mla_merge_o8,
    mla_merge_two,
    o8_inputs,
)
from dsv4_kernels.numerics import as_numbers, ds_mla
from dsv4_kernels.plan import BF16, F32, I32, I64, ROWS, SUPPORTED, U8, Input, Inputs, Launcher, Plan, Size, Support
from dsv4_kernels.registry import Operation, Tolerance, case


@dataclass(frozen=True)
class MergeConfig:
    """`block_parts` parts are loaded at a time, of `rows` heads of a token."""

    block_parts: int
    num_warps: int
    rows: int = 1


# A block is loaded at once, whether its parts are there or not. 5, 10 and 20 are the tiles of 128 + 512 entries; 20
# parts of 512 are 80 values per thread of four warps.
BLOCKS = (1, 2, 4, 5, 8, 10, 16, 20)
# From here on multiprocessors are full with programs of any size (of 14 candidates on an H100, 2026-11-24).
MANY_TOKENS = 128


def merge_config(arch: Arch, parts: int, tokens: int, heads: int) -> MergeConfig:
    """The least block that holds all parts, else the largest; of many tokens with one part, two heads at once."""
    block = next((size for size in BLOCKS if size >= parts), BLOCKS[-1])
    if tokens >= MANY_TOKENS and block == 1 and heads % 2 == 0:
        return MergeConfig(block, 1, 2)
    return MergeConfig(block, 4 if block > 4 else 2)


_mla_merge = Launcher(mla_merge_kernel)


class MergePlan(Plan):
    """Merge of up to `parts` parts of up to `tokens` tokens."""

    def __init__(
        self, operation: str, parts: int, tokens: int, heads: int, device: torch.device, arch: Arch | None = None
    ) -> None:
        shape = {"parts": parts, "tokens": tokens, "heads": heads}
        super().__init__(operation, shape, device, arch, merge_supported)
        self.o8, two = operation.endswith("o8"), operation == "mla_merge_two"
        count = Size("tokens", most=tokens)
        lead = (count,) if two else (Size("parts", most=parts), count)
        o, lse = Input(BF16, (*lead, heads, 512)), Input(F32, (*lead, heads))
        of_part = {"o0": o, "lse0": lse, "o1": o, "lse1": lse} if two else {"o": o, "lse": lse}
        rotation = {"positions": Input(I64, ("tokens",)), "cos_sin": Input(F32, (None, 64))} if self.o8 else {}
        self.inputs = self.declare(
            **of_part, sink=Input(F32, (heads,)), **rotation, **_result_inputs(heads, self.o8, aligned=False)
        )
        *self._given, _, self._second = self.inputs.declared
        # A kernel takes both; it writes one.
        self._no_lse = torch.empty((1, 1), dtype=torch.float32, device=device)
        self._no_scale = torch.empty((1, 1, 4), dtype=torch.uint8, device=device)

    @functools.cached_property
    def out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of the runs that name no place for them; made by the first of them."""
        tokens, heads = self.shape["tokens"], self.shape["heads"]
        empty = functools.partial(torch.empty, device=self.device)
        if self.o8:
            return empty((tokens, heads, 512), dtype=torch.uint8), empty((tokens, heads, 4), dtype=torch.uint8)
        return empty((tokens, heads, 512), dtype=torch.bfloat16), empty((tokens, heads), dtype=torch.float32)

    def run(
        self, *, out: tuple[torch.Tensor, torch.Tensor] | None = None, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Same keywords as the reference of the operation.

        Writes `out`, (o, lse) or (code, scale); without it buffers of the plan that its next run overwrites.
        """
        two = self.operation == "mla_merge_two"
        o, lse = (tensors["o0"], tensors["lse0"]) if two else (tensors["o"], tensors["lse"])
        parts, tokens = (2, o.shape[0]) if two else (o.shape[0], o.shape[1])
        results = (self.out[0][:tokens], self.out[1][:tokens]) if out is None else out
        given = {name: tensors.get(name) for name in self._given}
        self.inputs.check(**given, out=results[0], **{self._second: results[1]})
        positions = tensors.get("positions", lse)
        if tokens:
            launch_merge(
                self.arch, o, lse, tensors.get("o1", o), tensors.get("lse1", lse), tensors["sink"], positions,
                tensors.get("cos_sin", lse), results[0], self._no_lse if self.o8 else results[1],
                results[1] if self.o8 else self._no_scale, tokens, parts, two, self.o8,
            )  # fmt: skip
        return results

    def warmup(self) -> None:
        """Every block of parts up to the planned count, of few tokens and of many."""
        heads = self.shape["heads"]
        sizes = {min(block, self.shape["parts"]) for block in BLOCKS}
        for parts in {2} if self.operation == "mla_merge_two" else sizes:
            for tokens in sorted({min(1, self.shape["tokens"]), min(MANY_TOKENS, self.shape["tokens"])}):
                params = {"parts": parts, "tokens": tokens, "heads": heads}
                self.run(**_INPUTS[self.operation](params, self.device, 0))


def _result_inputs(heads: int, o8: bool, aligned: bool = True) -> dict[str, Input]:
    """Return the requirements of a plan for its results: o and lse, or the codes and scales of o."""
    if o8:
        return {"out": Input(U8, ("tokens", heads, 512)), "out_scale": Input(U8, ("tokens", heads, 4), aligned=aligned)}
    return {"out": Input(BF16, ("tokens", heads, 512)), "out_lse": Input(F32, ("tokens", heads), aligned=aligned)}


def launch_merge(
    arch: Arch,
    o: torch.Tensor,
    lse: torch.Tensor,
    o1: torch.Tensor,
    lse1: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
    out_scale: torch.Tensor,
    tokens: int,
    parts: int,
    two: bool,
    o8: bool,
    early: bool = False,
) -> None:
    """Launch the merge over checked tensors; mla_decode uses it for its splits.

    early: programmatic dependent launch, the merge's programs are placed while the kernel before it still runs and wait
    for it.
    """
    heads = out.shape[1]
    config = merge_config(arch, parts, tokens, heads)
    _mla_merge[(tokens * heads // config.rows,)](
        part_ptr=o, part_lse_ptr=lse, second_ptr=o1, second_lse_ptr=lse1, sink_ptr=sink, position_ptr=positions,
        cos_sin_ptr=cos_sin, o_ptr=out.view(torch.float8_e4m3fn) if o8 else out, lse_ptr=out_lse, scale_ptr=out_scale,
        tokens=tokens, parts=parts, H=heads, BS=config.block_parts, ROWS=config.rows, TWO=two, O8=o8, EARLY=early,
        num_warps=config.num_warps, num_stages=1, launch_pdl=early,
    )  # fmt: skip


def merge_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any parts, tokens and heads."""
    if params["parts"] < 1:
        return Support(f"mla_merge: {params['parts']} parts, needs at least 1")
    return SUPPORTED


_INPUTS = {"mla_merge": merge_inputs, "mla_merge_two": merge_two_inputs, "mla_merge_o8": merge_o8_inputs}
_CLOSE = Tolerance(absolute=1e-5, relative=2.0**-8)
_MERGED_LSE = Tolerance(absolute=1e-5, relative=1e-6)


def _row(
    name: str, summary: str, reference: Any, outputs: tuple[str, ...], tolerance: tuple[Tolerance, ...]
) -> Operation:
    parts = (2, 2, 2) if name == "mla_merge_two" else (1, 5, 20)
    return Operation(
        name=name,
        summary=summary,
        folder="mla_decode",
        outputs=outputs,
        cases=(
            case("empty", "cpu gpu", parts=2, tokens=0, heads=8),
            case("few", "cpu gpu", parts=parts[0], tokens=3, heads=8),
            case("some", "cpu gpu", parts=parts[1], tokens=2, heads=5),
            case("many", "cpu gpu", parts=parts[2], tokens=1, heads=16),
            case("heads-together", "cpu gpu", parts=min(parts[0], 2), tokens=128, heads=4),
            case("decode", "gpu bench", parts=min(parts[1] * 2, 10), tokens=8, heads=64),
            case("prefill", "gpu bench", parts=2, tokens=1024, heads=64),
        ),
        make_inputs=_INPUTS[name],
        reference=reference,
        plan=lambda p, device, arch: MergePlan(name, p["parts"], p["tokens"], p["heads"], device, arch),
        is_supported=merge_supported,
        nbytes=lambda p: p["tokens"] * p["heads"] * (p["parts"] * 1028 + 1028),
        flops=lambda p: p["tokens"] * p["heads"] * p["parts"] * 1024,
        tolerance=tolerance,
        compared=as_numbers if name == "mla_merge_o8" else tuple,
    )


# A float32 value next to a rounding boundary may fall on the other side of the float64 one's: one step of E4M3, seldom.
_MERGED_QUANTISED = Tolerance(rms=5e-3, relative=2.0**-3, absolute=1e-9, mismatch=1e-4)

_MLA_MERGE = (
    _row("mla_merge", "merge of split attention with the sink", mla_merge, ("o", "lse"), (_CLOSE, _MERGED_LSE)),
    _row(
        "mla_merge_two",
        "merge of two attention subsets with the sink",
        mla_merge_two,
        ("o", "lse"),
        (_CLOSE, _MERGED_LSE),
    ),
    _row("mla_merge_o8", "merge, inverse RoPE and FP8 quantisation", mla_merge_o8, ("value",), (_MERGED_QUANTISED,)),
)


@dataclass(frozen=True)
class DecodeConfig:
    """One program: `block_h` heads, tiles of `block_n` entries. `waves`: programs per multiprocessor that splitting
    aims at.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"h{self.block_h}-n{self.block_n}-w{self.num_warps}-s{self.num_stages}"


def table(arch: Arch) -> Table[DecodeConfig]:
    """The rows of `arch`, by heads and tokens."""
    return load_table(Path(__file__).parent, arch, "mla_decode", DecodeConfig)


def select(arch: Arch, heads: int, tokens: int) -> DecodeConfig:
    """The configuration for `heads` local heads and `tokens` query tokens."""
    return table(arch).select(heads=heads, tokens=tokens)


# Up to this many entries per token the shares are cut from the widths; above, where a context of usual length fills a
# small part of the width, from the lengths on the device.
FIXED_WIDTH = 2048


def tile_count(config: DecodeConfig, window: int, topk: int) -> int:
    """Tiles of one token's two lists; a tile never spans both."""
    return -(-window // config.block_n) + -(-topk // config.block_n)


def split_count(config: DecodeConfig, tokens: int, heads: int, tiles: int, multiprocessors: int) -> int:
    """In how many shares a token's list of at most `tiles` tiles is worked on; depends on nothing that lives on the
    device.

    Shares are whole tiles and equal: as many as fill the machine `waves` times, then no more than that length needs.
    """
    programs = max(1, tokens) * -(-heads // config.block_h)
    wanted = max(1, min(tiles, config.waves * multiprocessors // programs))
    return -(-tiles // -(-tiles // wanted))


_mla_decode = Launcher(mla_decode_kernel)

MAX_HEADS = 128


class DecodePlan(Plan):
    """Decode of up to `tokens` query tokens with `heads` local heads.

    A row of q may hold more heads, `q_heads`, of which the first `heads` count (engines pad them).
    `window` and `topk` are the widths of the two index rows (topk 0: no compressed cache), `pages` the page sizes in
    tokens, `strides` the bytes between pages. With `lookup` runs of few tokens take a table of pages (`looks_up`).
    Results are views of the plan's buffers, valid until its next run.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        window: int,
        topk: int,
        device: torch.device,
        pages: tuple[int, int] = (64, 64),
        strides: tuple[int, int] | None = None,
        o8: bool = False,
        q_heads: int | None = None,
        arch: Arch | None = None,
        lookup: bool = False,
    ) -> None:
        strides = strides or (ds_mla(pages[0]).page_bytes, ds_mla(pages[1]).page_bytes)
        shape = {
            "tokens": tokens, "heads": heads, "window": window, "topk": topk, "pages": pages, "strides": strides
        }  # fmt: skip
        super().__init__("mla_decode_o8" if o8 else "mla_decode", shape, device, arch, is_supported)
        self.lookup, self.o8, self.q_heads = lookup, o8, q_heads or heads
        # Without and with a table; a run may have either.
        self.inputs, self.looked_up = self._declare(False), self._declare(True)
        self.multiprocessors = multiprocessors(device, self.arch)
        self.o = torch.empty((tokens, heads, 512), dtype=torch.uint8 if o8 else torch.bfloat16, device=device)
        self.scale = torch.empty((tokens, heads, 4), dtype=torch.uint8, device=device)
        self.lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
        rows = max((t * s for t in range(1, tokens + 1) if (s := self.splits(t)) > 1), default=0)
        self.part_o = torch.empty((rows * heads * 512,), dtype=torch.bfloat16, device=device)
        self.part_lse = torch.empty((rows * heads,), dtype=torch.float32, device=device)

    def _declare(self, lookup: bool) -> Inputs:
        s = self.shape
        heads, topk, (pages, cmp_pages), (stride, cmp_stride) = s["heads"], s["topk"], s["pages"], s["strides"]
        lengths = {"cmp_len": Input(I32, ("tokens",))}
        if lookup:
            lengths = {
                "table": Input(I32, (None, None), strides=ROWS, aligned=False),
                "request": Input(I32, ("tokens",), aligned=False),
                "counts": Input(torch.bool, ("tokens",), aligned=False),
            }
        # Of a layer without compressed entries nothing is read.
        cache = {"cmp_cache": cache_input(cmp_pages, cmp_stride)} if topk else {}
        rotation = {"positions": Input(I64, ("tokens",)), "cos_sin": Input(F32, (None, 64))} if self.o8 else {}
        return self.declare(
            q=Input(BF16, (Size("tokens", most=s["tokens"]), heads, 512), strides=(self.q_heads * 512, 512, 1)),
            swa_cache=cache_input(pages, stride),
            swa_idx=Input(I32, ("tokens", s["window"])),
            swa_len=Input(I32, ("tokens",)),
            cmp_idx=Input(I32, ("tokens", topk)),
            sink=Input(F32, (heads,)),
            **lengths, **cache, **rotation, **_result_inputs(heads, self.o8),
        )  # fmt: skip

    def splits(self, tokens: int) -> int:
        """Shares per token when `tokens` tokens are run."""
        return self._launch(tokens)[1]

    def looks_up(self, tokens: int) -> bool:
        """Return whether a run of `tokens` gets a table of pages in place of slots: where a share is one tile.

        In the loop of longer shares every tile would wait for one more trip to memory.
        """
        return self.lookup and self._one(tokens)

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (a plan lives as long as the process)
    def _one(self, tokens: int) -> bool:
        window, topk = self.shape["window"], self.shape["topk"]
        config, splits = self._launch(tokens)
        return bool(window + topk <= FIXED_WIDTH and splits == tile_count(config, window, topk))

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (a plan lives as long as the process)
    def _launch(self, tokens: int) -> tuple[DecodeConfig, int]:
        """Configuration and shares per token for a token count."""
        heads = self.shape["heads"]
        config = select(self.arch, heads, tokens)
        tiles = tile_count(config, self.shape["window"], self.shape["topk"])
        return config, split_count(config, tokens, heads, tiles, self.multiprocessors)

    def run(
        self,
        *,
        q: torch.Tensor,
        swa_cache: torch.Tensor,
        swa_idx: torch.Tensor,
        swa_len: torch.Tensor,
        cmp_cache: torch.Tensor,
        cmp_idx: torch.Tensor,
        cmp_len: torch.Tensor | None = None,
        sink: torch.Tensor,
        positions: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        pages: tuple[int, int] | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        table: torch.Tensor | None = None,
        request: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the package docstring. Returns (o, lse) or, with the fused epilogue, (code, scale): views of the plan's
        buffers, or `out`, contiguous tensors of those shapes.

        q may be the first H heads of a wider [T, q_heads, 512], as engines pad it.
        """
        shape, tokens = self.shape, q.shape[0]
        heads, window, topk = shape["heads"], shape["window"], shape["topk"]
        results = out or (self.o[:tokens], self.scale[:tokens] if self.o8 else self.lse[:tokens])
        lookup = self.looks_up(tokens)
        if (cmp_len if lookup else table) is not None:
            raise ValueError(
                f"{self.operation}: {'cmp_len' if lookup else 'table'} is given, a run of {tokens} tokens gets "
                f"{'table, request and counts' if lookup else 'cmp_len'}"
            )
        entries = {"table": table, "request": request, "counts": counts} if lookup else {"cmp_len": cmp_len}
        if topk:
            entries["cmp_cache"] = cmp_cache
        if self.o8:
            entries |= {"positions": positions, "cos_sin": cos_sin}
        (self.looked_up if lookup else self.inputs).check(
            q=q, swa_cache=swa_cache, swa_idx=swa_idx, swa_len=swa_len, cmp_idx=cmp_idx, sink=sink, **entries,
            out=results[0], **{"out_scale" if self.o8 else "out_lse": results[1]},
        )  # fmt: skip
        if not tokens:
            return results
        positions, cos_sin = (sink, sink) if positions is None or cos_sin is None else (positions, cos_sin)
        config, splits = self._launch(tokens)
        fixed = window + topk <= FIXED_WIDTH
        whole = results[0].view(torch.float8_e4m3fn) if self.o8 else results[0]
        lse, scale = (self.lse, results[1]) if self.o8 else (results[1], self.scale)
        _mla_decode[(tokens, -(-heads // config.block_h), splits)](
            q_ptr=q, swa_ptr=swa_cache, swa_idx_ptr=swa_idx, swa_len_ptr=swa_len, cmp_ptr=cmp_cache,
            cmp_idx_ptr=cmp_idx, cmp_len_ptr=cmp_len, table_ptr=table, request_ptr=request, counts_ptr=counts,
            table_stride=None if table is None else table.stride(0), sink_ptr=sink, position_ptr=positions,
            cos_sin_ptr=cos_sin, o_ptr=self.part_o if splits > 1 else whole,
            lse_ptr=self.part_lse if splits > 1 else lse, scale_ptr=scale,
            tokens=tokens, splits=splits, H=heads, QH=self.q_heads, W=window, K=topk, SWA_PAGE=shape["pages"][0],
            SWA_STRIDE=shape["strides"][0], CMP_PAGE=shape["pages"][1], CMP_STRIDE=shape["strides"][1],
            SWA_SHIFT=shape["pages"][0].bit_length() - 1, CMP_SHIFT=shape["pages"][1].bit_length() - 1,
            BH=config.block_h, BN=config.block_n, SPLIT=splits > 1,
            ONE=self._one(tokens), FIXED=fixed, O8=self.o8 and splits == 1,
            PIN=not interpreting(),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        if splits > 1:
            launch_merge(
                self.arch, self.part_o, self.part_lse, self.part_o, self.part_lse, sink, positions, cos_sin,
                results[0], lse, scale, tokens, splits, False, self.o8, early=not interpreting(),
            )  # fmt: skip
        return results

    def warmup(self) -> None:
        """Run one token count for every pair of configuration and kind of merge that the planned count can reach."""

        def kind(tokens: int) -> tuple[DecodeConfig, bool, MergeConfig | None]:
            config, splits = self._launch(tokens)
            merge = merge_config(self.arch, splits, tokens, self.shape["heads"]) if splits > 1 else None
            return config, self._one(tokens), merge

        for tokens in self.first_of_each(self.shape["tokens"], kind):
            # No row has an entry, so that no slot is read.
            inputs = self.looked_up if self.looks_up(tokens) else self.inputs
            zeros = {name: one for name, one in inputs.zeros(tokens=tokens).items() if not name.startswith("out")}
            self.run(**{"cmp_cache": zeros["swa_cache"], **zeros})


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """1 to 128 heads, any widths and page sizes, 16-byte aligned pages."""
    if not 1 <= params["heads"] <= MAX_HEADS:
        return Support(f"mla_decode: {params['heads']} heads, needs 1 to {MAX_HEADS}")
    if params["window"] < 1:
        return Support("mla_decode: the window's index row is empty, needs a width of at least 1")
    for name, stride in zip(("swa", "cmp"), params.get("strides", ()), strict=False):
        if stride % 16:
            return Support(f"mla_decode: pages of {name}_cache are {stride} bytes apart, needs a multiple of 16")
    if not table(arch).rows:
        return Support(f"mla_decode: no configuration for {arch}")
    return SUPPORTED


def _plan(o8: bool, params: Mapping[str, Any], device: torch.device, arch: Arch | None) -> DecodePlan:
    return DecodePlan(
        params["tokens"],
        params["heads"],
        params["window"],
        params["topk"],
        device,
        pages=params.get("pages", (64, 64)),
        strides=params.get("strides"),
        o8=o8,
        arch=arch,
        lookup=params.get("lookup", False),
    )


def _nbytes(params: Mapping[str, Any]) -> int:
    """Gathered rows, indices, q and o (the fused output is a little smaller)."""
    entries = params["window"] + params["topk"]
    return int(params["tokens"] * (entries * 588 + params["heads"] * 2048))


def _cases() -> tuple[Any, ...]:
    rows = [
        case("empty", "cpu gpu", tokens=0, heads=8, window=32, topk=16),
        case("window", "cpu gpu", tokens=2, heads=8, window=70, topk=0, pages=(53, 64)),
        case("both", "cpu gpu", tokens=3, heads=16, window=40, topk=50, pages=(64, 2)),
        # DSpark's drafts: window and block, in a row padded to 64 entries.
        case("drafts", "cpu gpu", tokens=2, heads=8, window=192, topk=0, pages=(32, 64)),
        case("lookup", "cpu gpu", tokens=5, heads=16, window=40, topk=50, pages=(64, 2), lookup=True),
        case("lookup-pages", "cpu gpu", tokens=2, heads=8, window=64, topk=128, lookup=True),
        case("split", "cpu gpu", tokens=1, heads=5, window=128, topk=200, pages=(61, 2)),
        case("wide", "gpu", tokens=7, heads=8, window=256, topk=1152),
        case("pro", "gpu", tokens=5, heads=128, window=128, topk=1024),
        case("hca", "gpu", tokens=3, heads=64, window=128, topk=8192, pages=(64, 2)),
    ]
    rows += [case(f"h{h}", "gpu", tokens=9, heads=h, window=128, topk=512) for h in (8, 13, 24, 32, 48, 65, 100)]
    for heads in (64, 32, 16):
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            # The first bench case is also the one that is captured in the tests.
            tags = "gpu bench" if tokens in (1, 8, 128) else "bench"
            rows.append(case(f"t{tokens}-h{heads}", tags, tokens=tokens, heads=heads, window=128, topk=512))
    return tuple(rows)


# The limits of FlashMLA's own tests; the products are bf16 with float32 sums, as there: two thirds of them are usual.
_OUT = Tolerance(absolute=1e-3, relative=2.01 / 128, diff=5e-6)
_LSE = Tolerance(absolute=1e-3, relative=8.01 / 65536)
# Both sides are quantised: an error of the attention that crosses a rounding boundary is one step of E4M3, 1/8 at
# worst.
_QUANTISED = Tolerance(rms=4e-2, diff=1e-3)

OPERATIONS = (
    *_MLA_MERGE,
    Operation(
        name="mla_decode",
        summary="sparse MLA decode over window and compressed caches, with sinks",
        folder="mla_decode",
        outputs=("o", "lse"),
        cases=_cases(),
        make_inputs=decode_inputs,
        reference=mla_decode,
        plan=functools.partial(_plan, False),
        is_supported=is_supported,
        nbytes=_nbytes,
        flops=lambda p: p["tokens"] * p["heads"] * (p["window"] + p["topk"]) * 2048,
        tolerance=(_OUT, _LSE),
    ),
    Operation(
        name="mla_decode_o8",
        summary="sparse MLA decode with inverse RoPE and FP8 quantisation fused",
        folder="mla_decode",
        outputs=("value",),
        cases=_cases(),
        make_inputs=o8_inputs,
        reference=mla_decode_o8,
        plan=functools.partial(_plan, True),
        is_supported=is_supported,
        nbytes=_nbytes,
        flops=lambda p: p["tokens"] * p["heads"] * (p["window"] + p["topk"]) * 2048,
        tolerance=(_QUANTISED,),
        compared=as_numbers,
    ),
)
