"""Torch references, configurations, plans and registry rows of sparse MLA prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.mla_cache.api import mla_cache_read, mla_cache_write
from dsv4_kernels.mla_prefill.kernel import mla_prefill_kernel, mla_prefill_lists_kernel
from dsv4_kernels.numerics import ds_mla, seeded
from dsv4_kernels.plan import BF16, F32, I32, ROWS, SUPPORTED, Input, Launcher, Plan, Size, Support
from dsv4_kernels.registry import Case, Operation, Tolerance, case


def list_width(topk: int, window: int) -> int:
    """Columns of a list: a multiple of 128, as FlashMLA requires."""
    return -(-(topk + window) // 128) * 128


def mla_prefill_lists(
    chosen: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    *,
    topk: int,
    ratio: int,
    window: int,
    rows: int,
    first: int,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices int32 [T, W], lengths int32 [T]); `exact` changes nothing."""
    starts = (query_start_loc - query_start_loc[0]).tolist()
    lists: list[list[int]] = []
    for request, (seq, gathered) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        held = seq - gathered
        for token in range(starts[request], starts[request + 1]):
            position = seq - starts[request + 1] + token
            entries = (position + 1) // ratio
            picked = chosen[token, : min(entries, topk)].tolist()
            picked = [row if 0 <= row < min(entries, first) else -1 for row in picked]
            seen = [first + other - held for other in range(max(position - window + 1, held), position + 1)]
            lists.append([row if row < 0 else row + request * rows for row in picked + seen])
    width = list_width(topk, window)
    indices = [row + [-1] * (width - len(row)) for row in lists]
    lengths = [len(row) for row in lists]
    device = chosen.device
    return (
        torch.tensor(indices, dtype=torch.int32, device=device).view(-1, width),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    sink: torch.Tensor,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o bf16 [S, H, 512], lse float32 [S, H]); exact: float64."""
    tokens, heads, _ = q.shape
    o = torch.zeros((tokens, heads, 512), dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    # Some tokens at a time: a gathered list is megabytes of float64.
    for start in range(0, tokens, 16):
        part = slice(start, start + 16)
        idx = indices[part]
        valid = (idx >= 0) & (torch.arange(idx.shape[1], device=q.device) < lengths[part, None])
        rows = torch.where(valid[:, :, None], kv[torch.where(valid, idx, 0).long()].double(), 0.0)
        score = torch.einsum("shd,skd->shk", q[part].double(), rows) * 512**-0.5
        score = score.masked_fill(~valid[:, None], -torch.inf)
        lse[part] = torch.logsumexp(score, -1)
        weight = torch.exp(score - lse[part, :, None]).nan_to_num(0.0)
        o[part] = torch.einsum("shk,skd->shd", weight, rows)
        share = 1.0 / (1.0 + torch.exp(sink.double() - lse[part]))
        o[part] *= torch.where(lse[part] > -torch.inf, share, 0.0)[:, :, None]
    return (o, lse) if exact else (o.bfloat16(), lse.float())


@dataclass(frozen=True)
class PrefillConfig:
    """One program: `block_h` heads of one token, tiles of `block_n` entries."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def select(arch: Arch, heads: int) -> PrefillConfig:
    """As many heads as share a gathered tile: half of the registers of sm_90 hold the sums of 64 heads."""
    if arch is Arch.SM_90:
        return PrefillConfig(64, 64, 8, 2) if heads > 32 else PrefillConfig(16, 64, 4, 2)
    return PrefillConfig(32, 32, 8, 2) if heads > 16 else PrefillConfig(16, 32, 4, 2)


WORKERS = 256
BLOCK = 256


_mla_prefill = Launcher(mla_prefill_kernel)
_mla_prefill_lists = Launcher(mla_prefill_lists_kernel)


class PrefillPlan(Plan):
    """Prefill of up to `tokens` tokens with `heads` local heads and lists of width `width`; results are views.

    `own_output` False: the plan has no room for o, and every run names an `out`.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        width: int,
        device: torch.device,
        arch: Arch | None = None,
        own_output: bool = True,
    ) -> None:
        shape = {"tokens": tokens, "heads": heads, "width": width}
        super().__init__("mla_prefill", shape, device, arch, is_supported)
        self.tokens, self.heads, self.width = tokens, heads, width
        self.inputs = self.declare(
            q=Input(BF16, (Size("tokens", most=tokens), heads, 512)),
            kv=Input(BF16, (None, 512)),
            indices=Input(I32, ("tokens", width)),
            lengths=Input(I32, ("tokens",)),
            sink=Input(F32, (heads,)),
            out=Input(BF16, ("tokens", heads, 512)),
        )
        # Without room of its own one token's, which the warm-up writes.
        rows = tokens if own_output else min(1, tokens)
        self.o = torch.empty((rows, heads, 512), dtype=torch.bfloat16, device=device)
        self.lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)

    def run(
        self,
        *,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        sink: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o bf16 [S, H, 512], lse float32 [S, H]): views of the plan's buffers, or o in `out`."""
        tokens, heads = int(q.shape[0]), self.heads
        o, lse = self.o[:tokens] if out is None else out, self.lse[:tokens]
        self.inputs.check(q=q, kv=kv, indices=indices, lengths=lengths, sink=sink, out=o)
        if tokens:
            c = select(self.arch, heads)
            _mla_prefill[(tokens, -(-heads // c.block_h))](
                q_ptr=q, kv_ptr=kv, index_ptr=indices, length_ptr=lengths, sink_ptr=sink, o_ptr=o, lse_ptr=lse,
                H=heads, K=self.width, BH=c.block_h, BN=c.block_n,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return o, lse

    def warmup(self) -> None:
        """One launch; there is one configuration."""
        if self.tokens:
            self.run(**_inputs({**self.shape, "tokens": 1, "rows": 1}, self.device, 0))


class ListsPlan(Plan):
    """Lists of up to `tokens` tokens for a layer with `topk` compressed entries of `ratio` (0: none) and a `window`.

    `own_output` False: the plan has no room for the lists, and every run names an `out`.
    """

    def __init__(
        self,
        tokens: int,
        topk: int,
        ratio: int,
        device: torch.device,
        window: int = 128,
        arch: Arch | None = None,
        own_output: bool = True,
    ) -> None:
        shape = {"tokens": tokens, "topk": topk, "ratio": ratio, "window": window}
        super().__init__("mla_prefill_lists", shape, device, arch, lists_supported)
        self.topk, self.ratio, self.window = topk, ratio, window
        self.tokens, self.width = tokens, list_width(topk, window)
        self.inputs = self.declare(
            chosen=Input(I32, (Size("tokens", most=tokens), Size(least=topk)), strides=ROWS, aligned=False),
            seq_lens=Input(I32, ("requests",), aligned=False),
            query_start_loc=Input(I32, ("requests+1",), aligned=False),
            gather_lens=Input(I32, ("requests",), aligned=False),
            out_indices=Input(I32, ("tokens", self.width)),
            out_lengths=Input(I32, ("tokens",)),
        )
        # Without room of its own one token's, which the warm-up writes.
        rows = tokens if own_output else min(1, tokens)
        self.indices = torch.empty((rows, self.width), dtype=torch.int32, device=device)
        self.lengths = torch.empty((rows,), dtype=torch.int32, device=device)

    def run(
        self,
        *,
        chosen: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor,
        topk: int,
        ratio: int,
        window: int,
        rows: int,
        first: int,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices int32 [T, W], lengths int32 [T]), `out` where it is given.

        query_start_loc spans the T tokens of chosen.
        """
        tokens, requests = int(chosen.shape[0]), int(seq_lens.shape[0])
        if (topk, ratio, window) != (self.topk, self.ratio, self.window):
            raise ValueError(f"topk, ratio, window are {(topk, ratio, window)}, the plan is for {self.shape}")
        indices, lengths = out or (self.indices[:tokens], self.lengths[:tokens])
        self.inputs.check(
            chosen=chosen, seq_lens=seq_lens, query_start_loc=query_start_loc, gather_lens=gather_lens,
            out_indices=indices, out_lengths=lengths,
        )  # fmt: skip
        if tokens:
            _mla_prefill_lists[(requests, min(tokens, WORKERS))](
                chosen_ptr=chosen, begin_ptr=query_start_loc, seq_ptr=seq_lens, gather_ptr=gather_lens,
                out_ptr=indices, length_ptr=lengths, chosen_stride=chosen.stride(0), out_stride=indices.stride(0),
                rows=rows, first=first, TOPK=topk, RATIO=ratio, WINDOW=window, WIDTH=self.width, BLOCK=BLOCK,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        return indices, lengths

    def warmup(self) -> None:
        """One launch, of a request without tokens; there is one configuration."""
        if not self.tokens:
            return
        none = torch.zeros((2,), dtype=torch.int32, device=self.device)
        self.run(
            chosen=torch.zeros((1, self.topk), dtype=torch.int32, device=self.device), query_start_loc=none,
            seq_lens=none[:1], gather_lens=none[:1], topk=self.topk, ratio=self.ratio, window=self.window, rows=1,
            first=0,
        )  # fmt: skip


def lists_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any counts; ratio and window from 1."""
    for name in ("ratio", "window"):
        if params[name] < 1:
            return Support(f"mla_prefill_lists: {name} is {params[name]}, needs at least 1")
    return SUPPORTED


def _list_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Requests of (tokens, tokens before them); the lists begin at a token of a larger batch, some entries are −1."""
    draw = seeded(device, seed)
    topk, ratio, window = params["topk"], params["ratio"], params["window"]
    new = torch.tensor([tokens for tokens, _ in params["requests"]], device=device)
    old = torch.tensor([before for _, before in params["requests"]], device=device)
    seq, gather = new + old, new + old.clamp(max=window - 1)
    first = int(seq.max()) // ratio if topk else 0
    # One column more than is read, of which nothing may arrive.
    position = torch.cat([torch.arange(before, before + tokens) for tokens, before in params["requests"]])
    seen = ((position + 1) // ratio).clamp(min=1).to(device)[:, None]
    chosen = torch.randint(0, 2**30, (int(new.sum()), topk + 1), generator=draw, device=device) % seen
    chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=draw, device=device) < 0.05, -1)
    return {
        "chosen": chosen.int(),
        "query_start_loc": torch.cat((new.new_full((1,), 7), 7 + new.cumsum(0))).int(),
        "seq_lens": seq.int(),
        "gather_lens": gather.int(),
        "topk": topk,
        "ratio": ratio,
        "window": window,
        "rows": first + int(gather.max()),
        "first": first,
    }


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """1 to 128 heads, lists of any width."""
    if not 1 <= params["heads"] <= 128:
        return Support(f"mla_prefill: {params['heads']} heads, needs 1 to 128")
    if params["width"] < 1:
        return Support("mla_prefill: the index list has no column, needs a width of at least 1")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Lists with gaps and duplicates; every second row of the workspace is NaN and never named.

    packed=True: rows are such as a packed cache gives them.
    """
    draw = seeded(device, seed)
    tokens, heads, width, rows = (params[name] for name in ("tokens", "heads", "width", "rows"))
    kv = torch.full((2 * rows, 512), torch.nan, dtype=torch.bfloat16, device=device)
    values = (torch.randn((rows, 512), generator=draw, device=device) / 4).bfloat16()
    kv[::2] = _through_pages(values) if params.get("packed") else values
    idx = 2 * torch.randint(0, rows, (tokens, width), generator=draw, device=device)
    lengths = torch.full((tokens,), width, device=device)
    sink = torch.randn((heads,), generator=draw, device=device)
    if not params.get("dense"):
        idx = idx.masked_fill(torch.rand(idx.shape, generator=draw, device=device) < 0.1, -1)
        short = torch.randint(0, width + 1, (tokens,), generator=draw, device=device)
        lengths = torch.where(torch.arange(tokens, device=device) % 2 == 1, short, lengths)
        lengths[-1:] = 0 if tokens > 1 else width
        idx[:1] = -1 if tokens > 2 else idx[:1]
        sink[:2] = torch.tensor([-torch.inf, torch.inf], device=device)[: min(2, heads)]
    behind = torch.arange(width, device=device) >= lengths[:, None]
    return {
        "q": (4 * torch.randn((tokens, heads, 512), generator=draw, device=device)).bfloat16(),
        "kv": kv,
        "indices": idx.masked_fill(behind, 2**31 - 1).int(),
        "lengths": lengths.int(),
        "sink": sink,
    }


def _through_pages(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` as they come out of packed pages; such rows come out unchanged."""
    slots = torch.arange(rows.shape[0], device=rows.device)
    pages = (-(-rows.shape[0] // 64), ds_mla(64).page_bytes)
    return mla_cache_read(
        mla_cache_write(rows, slots, torch.zeros(pages, dtype=torch.uint8, device=rows.device)), slots
    )


def _lists_case(
    name: str, tags: str, topk: int, ratio: int, window: int, requests: tuple[tuple[int, int], ...]
) -> Case:
    return case(name, tags, topk=topk, ratio=ratio, window=window, requests=requests)


OPERATIONS = (
    Operation(
        name="mla_prefill",
        summary="sparse MLA prefill over a bf16 workspace, with sinks",
        folder="mla_prefill",
        outputs=("o", "lse"),
        cases=(
            case("empty", "cpu gpu", tokens=0, heads=8, width=16, rows=4),
            case("few", "cpu gpu", tokens=4, heads=5, width=70, rows=40),
            case("h33", "cpu gpu", tokens=3, heads=33, width=130, rows=99),
            case("h128", "gpu", tokens=9, heads=128, width=1152, rows=3000),
            case("hca", "gpu", tokens=5, heads=64, width=8320, rows=9000),
            case("s512-h64", "gpu bench", tokens=512, heads=64, width=640, rows=4096, dense=True),
            case("s2048-h64", "bench", tokens=2048, heads=64, width=640, rows=4096, dense=True),
            case("s2048-h16", "bench", tokens=2048, heads=16, width=640, rows=4096, dense=True),
            case("s2048-h128-k1152", "bench", tokens=2048, heads=128, width=1152, rows=4096, dense=True),
        ),
        make_inputs=_inputs,
        reference=mla_prefill,
        plan=lambda p, device, arch: PrefillPlan(p["tokens"], p["heads"], p["width"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (p["heads"] * 2052 + 4 * p["width"]) + p["rows"] * 1024,
        flops=lambda p: p["tokens"] * p["heads"] * p["width"] * 2048,
        # The limits of FlashMLA's own tests, with room in lse for scores of tens.
        tolerance=(
            Tolerance(absolute=1e-3, relative=2.01 / 128, diff=5e-6),
            Tolerance(absolute=1e-3, relative=8.01 / 65536),
        ),
    ),
    Operation(
        name="mla_prefill_lists",
        summary="each token's rows of the prefill workspace: chosen entries, then the window",
        folder="mla_prefill",
        outputs=("indices", "lengths"),
        cases=(
            _lists_case("window", "cpu gpu", 0, 1, 20, ((9, 0), (1, 60), (30, 5))),
            _lists_case("ratio4", "cpu gpu", 24, 4, 20, ((40, 0), (5, 200), (1, 7))),
            _lists_case("ratio128", "cpu gpu", 5, 128, 128, ((150, 0), (3, 700))),
            _lists_case("s4096-r4", "gpu bench", 512, 4, 128, ((4096, 8192),)),
            _lists_case("s4096-r128", "gpu bench", 8192, 128, 128, ((2048, 65536), (2048, 0))),
        ),
        make_inputs=_list_inputs,
        reference=mla_prefill_lists,
        plan=lambda p, device, arch: ListsPlan(
            sum(tokens for tokens, _ in p["requests"]), p["topk"], p["ratio"], device, p["window"], arch
        ),
        is_supported=lists_supported,
        nbytes=lambda p: 4 * sum(n for n, _ in p["requests"]) * (p["topk"] + list_width(p["topk"], p["window"]) + 1),
        tolerance=(Tolerance(bitwise=True), Tolerance(bitwise=True)),
    ),
)
