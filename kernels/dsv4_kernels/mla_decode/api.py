"""Sparse MLA decode as two operations: with bf16 output, and with the fused epilogue."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect, multiprocessors
from dsv4_kernels.launch import Launcher
from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.mla_cache.api import check_cache
from dsv4_kernels.mla_decode.configs import FIXED_WIDTH, DecodeConfig, select, split_count, table, tile_count
from dsv4_kernels.mla_decode.inputs import decode_inputs, o8_inputs
from dsv4_kernels.mla_decode.kernel import mla_decode_kernel
from dsv4_kernels.mla_decode.reference import mla_decode, mla_decode_o8
from dsv4_kernels.mla_merge.api import launch_merge
from dsv4_kernels.mla_merge.configs import select as merge_config
from dsv4_kernels.numerics import as_numbers
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case
from dsv4_kernels.testing.interpreter import interpreting

_mla_decode = Launcher(mla_decode_kernel)

MAX_HEADS = 128


class DecodePlan(Plan):
    """Decode of up to `tokens` query tokens with `heads` local heads.

    A row of q may hold more heads, `q_heads`, of which the first `heads` count (engines pad them).
    `window` and `topk` are the widths of the two index rows (topk 0: no compressed cache), `pages` the page sizes in
    tokens, `strides` the bytes between pages. With `lookup` the pages of few tokens are looked up here (`looks_up`).
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
        self.lookup = lookup
        self.operation = "mla_decode_o8" if o8 else "mla_decode"
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        strides = strides or (ds_mla(pages[0]).page_bytes, ds_mla(pages[1]).page_bytes)
        self.shape = {
            "tokens": tokens,
            "heads": heads,
            "window": window,
            "topk": topk,
            "pages": pages,
            "strides": strides,
        }
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.device, self.o8, self.q_heads = device, o8, q_heads or heads
        self.multiprocessors = multiprocessors(device, self.arch)
        self.o = torch.empty((tokens, heads, 512), dtype=torch.uint8 if o8 else torch.bfloat16, device=device)
        self.scale = torch.empty((tokens, heads, 4), dtype=torch.uint8, device=device)
        self.lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
        rows = max((t * s for t, s in self._shares() if s > 1), default=0)
        self.part_o = torch.empty((rows * heads * 512,), dtype=torch.bfloat16, device=device)
        self.part_lse = torch.empty((rows * heads,), dtype=torch.float32, device=device)

    def splits(self, tokens: int) -> int:
        """Shares per token when `tokens` tokens are run."""
        return self._launch(tokens)[1]

    def looks_up(self, tokens: int) -> bool:
        """Tell whether a run of `tokens` gets a table of pages in place of slots: where a share is one tile.

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

    @functools.lru_cache(maxsize=1)  # noqa: B019  (a plan lives as long as the process)
    def _shares(self) -> tuple[tuple[int, int], ...]:
        return tuple((tokens, self.splits(tokens)) for tokens in range(1, self.shape["tokens"] + 1))

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
        check_query(q, heads, self.q_heads)
        check_tensor("swa_idx", swa_idx, torch.int32, (tokens, window))
        check_tensor("swa_len", swa_len, torch.int32, (tokens,))
        check_tensor("cmp_idx", cmp_idx, torch.int32, (tokens, topk))
        self._check_entries(tokens, cmp_len, table, request, counts)
        check_tensor("sink", sink, torch.float32, (heads,))
        check_cache("swa_cache", swa_cache, shape["pages"][0], shape["strides"][0])
        if topk:
            check_cache("cmp_cache", cmp_cache, shape["pages"][1], shape["strides"][1])
        if tokens > shape["tokens"]:
            raise ValueError(f"q has {tokens} tokens, the plan holds {shape['tokens']}")
        if self.o8:
            if positions is None or cos_sin is None:
                raise ValueError("mla_decode_o8 needs positions and cos_sin")
            check_tensor("positions", positions, torch.int64, (tokens,))
            check_tensor("cos_sin", cos_sin, torch.float32, (None, 64))
        results = out or (self.o[:tokens], self.scale[:tokens] if self.o8 else self.lse[:tokens])
        check_tensor("out", results[0], self.o.dtype, (tokens, heads, 512))
        check_tensor(
            "out", results[1], torch.uint8 if self.o8 else torch.float32, (tokens, heads, *((4,) if self.o8 else ()))
        )
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

    def _check_entries(
        self,
        tokens: int,
        cmp_len: torch.Tensor | None,
        table: torch.Tensor | None,
        request: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> None:
        """Raise ValueError unless the compressed entries come as the plan takes them for so many tokens."""
        if not self.looks_up(tokens):
            if cmp_len is None or table is not None:
                raise ValueError(f"cmp_len is missing or a table is given: {tokens} tokens come with slots")
            check_tensor("cmp_len", cmp_len, torch.int32, (tokens,))
            return
        if table is None or request is None or counts is None or cmp_len is not None:
            raise ValueError(
                f"table, request and counts are missing or cmp_len is given: {tokens} tokens are looked up"
            )
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
            raise ValueError(
                f"table must be int32 [requests, ·] with contiguous rows, is {table.dtype} {table.stride()}"
            )
        for name, tensor, dtype in (("request", request, torch.int32), ("counts", counts, torch.bool)):
            if tensor.dtype != dtype or tensor.shape != (tokens,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} [{tokens}], is {tensor.dtype} {tuple(tensor.shape)}"
                )

    def warmup(self) -> None:
        """Run one token count for every pair of configuration and kind of merge that the planned count can reach."""
        seen = set()
        for tokens, splits in self._shares():
            config, _ = self._launch(tokens)
            merge = merge_config(self.arch, splits, tokens, self.shape["heads"]) if splits > 1 else None
            kind = (config, self._one(tokens), merge)
            if kind not in seen:
                seen.add(kind)
                self.run(**self._empty_rows(tokens))

    def _empty_rows(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return inputs whose rows have no entry, so that no slot is read: one page of each cache."""
        shape = self.shape
        zeros = functools.partial(torch.zeros, device=self.device)
        inputs = {
            "q": zeros((tokens, self.q_heads, 512), dtype=torch.bfloat16)[:, : shape["heads"]],
            "sink": zeros((shape["heads"],), dtype=torch.float32),
            "positions": zeros((tokens,), dtype=torch.int64),
            "cos_sin": zeros((1, 64), dtype=torch.float32),
        }
        for name, width, stride in zip(("swa", "cmp"), (shape["window"], shape["topk"]), shape["strides"], strict=True):
            inputs[f"{name}_cache"] = zeros((1, stride), dtype=torch.uint8)
            inputs[f"{name}_idx"] = zeros((tokens, width), dtype=torch.int32)
            inputs[f"{name}_len"] = zeros((tokens,), dtype=torch.int32)
        if self.looks_up(tokens):
            del inputs["cmp_len"]
            inputs |= {"table": zeros((1, 1), dtype=torch.int32), "request": zeros((tokens,), dtype=torch.int32)}
            inputs["counts"] = zeros((tokens,), dtype=torch.bool)
        return inputs


def check_query(q: torch.Tensor, heads: int, q_heads: int) -> None:
    """Raise ValueError unless `q` is bf16 [T, heads, 512] with rows of `q_heads` heads, 16-byte aligned."""
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.shape[1:] != (heads, 512) or q.stride()[1:] != (512, 1):
        raise ValueError(f"q must be bf16 [T, {heads}, 512] with contiguous heads, is {q.dtype} {tuple(q.shape)}")
    if (q.shape[0] > 1 and q.stride(0) != q_heads * 512) or q.data_ptr() % 16:
        raise ValueError(
            f"q has rows {q.stride(0)} values apart, the plan was made for {q_heads * 512}, 16-byte aligned"
        )


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
