"""Torch references, configurations, plans and registry rows of the mixture of experts: W4A16 and W4A8."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4_kernels.arch import Arch, Table, load_table, native_mx
from dsv4_kernels.moe.columns import moe_columns_down_kernel, moe_columns_up_kernel, moe_planes_kernel
from dsv4_kernels.moe.kernel import (
    moe_combine_kernel,
    moe_decode_down_kernel,
    moe_decode_up_kernel,
    moe_prepare_kernel,
    moe_sort_kernel,
    moe_sorted_down_kernel,
    moe_sorted_up_kernel,
)
from dsv4_kernels.numerics import dequantize_e4m3, dequantize_mxfp4, quantize_e4m3, seeded
from dsv4_kernels.plan import (
    BF16,
    F32,
    I32,
    SUPPORTED,
    U8,
    Input,
    Launcher,
    Plan,
    Size,
    Support,
    counters,
    next_power_of_2,
)
from dsv4_kernels.registry import Operation, Tolerance, case

LIMIT = 10.0
GROUP = 32
AMAX_FLOOR = 1e-10


def _moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    exact: bool = False,
    addend: torch.Tensor | None = None,
    *,
    a8: bool,
) -> torch.Tensor:
    """Shapes in the package's contract. `exact` returns float64 and leaves h unrounded; with `a8` x and h are rounded
    to E4M3 either way.
    """
    x = _through_e4m3(x) if a8 else x.double()
    experts, inter = w13.shape[0], w13.shape[1] // 2
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate_up = x[token] @ dequantize_mxfp4(w13[expert], w13_scale[expert]).T
        gate = gate_up[:, :inter].clamp_max(LIMIT)
        up = gate_up[:, inter:].clamp(-LIMIT, LIMIT)
        h = torch.nn.functional.silu(gate) * up * topk_weights[token, slot].double()[:, None]
        if a8:
            h = _through_e4m3(h)
        elif not exact:
            h = h.to(torch.bfloat16).double()
        out.index_add_(0, token, h @ dequantize_mxfp4(w2[expert], w2_scale[expert]).T)
    routed = out if exact else out.to(torch.bfloat16)
    return routed if addend is None else addend + routed


moe_w4a16, moe_w4a8 = functools.partial(_moe, a8=False), functools.partial(_moe, a8=True)
"""References with bf16 activations and with E4M3 ones."""


def _through_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 with one power-of-two scale per 32; returns float64."""
    code, scale = quantize_e4m3(x, GROUP, AMAX_FLOOR)
    return dequantize_e4m3(code, scale, GROUP)


# Up to here every program finds the pairs of its expert by itself; above, one launch sorts them first.
DECODE_PAIRS = 64


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of both products. `m` is the pairs of a tile; `up_n` counts columns of h (2·up_n rows of w13), `down_n` of
    the output.

    `*_split` is the number of ranges of k inside a tile (decode only, else 1).
    """

    m: int
    up_n: int
    up_k: int
    up_warps: int
    up_stages: int
    up_split: int
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int
    down_split: int


@dataclass(frozen=True)
class ColumnsConfig:
    """Tiles of both products of the columns kernels.

    `up_early`: the up kernel's programs are placed while x is prepared. That hides a launch, but they then lie unevenly
    on the multiprocessors, which costs more where all of them run at once. `down_shares`: a token's experts are shared
    out to so many programs.
    """

    up_n: int
    up_k: int
    up_warps: int
    up_stages: int
    up_early: bool
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int
    down_shares: int


def _largest(wanted: int, length: int) -> int:
    """The largest power of two up to `wanted` that divides `length`."""
    while length % wanted:
        wanted //= 2
    return wanted


def fit(config: MoeConfig, hidden: int, inter: int, decode: bool) -> MoeConfig:
    """Shrink tiles that do not divide the model's sizes; every loop then runs without masks."""
    up_split, down_split = _split(config.up_split, hidden), _split(config.down_split, inter)
    up_k, down_k = _largest(config.up_k, hidden // up_split), _largest(config.down_k, inter // down_split)
    # Triton 3.6 gives NaN for some wgmma loops of three and more stages over blocks of 64 (H200, 7 of 40 tiles tried;
    # none of 60 with blocks of 128 or of two stages). Only tensor-parallel shards that 128 does not divide come here.
    return replace(
        config,
        up_n=_largest(config.up_n, inter),
        up_k=up_k,
        up_stages=config.up_stages if decode or up_k >= 128 else 1,
        up_split=up_split,
        down_n=_largest(config.down_n, hidden),
        down_k=down_k,
        down_stages=config.down_stages if decode or down_k >= 128 else 1,
        down_split=down_split,
    )


def _split(wanted: int, length: int) -> int:
    # Ranges shorter than 128 make the rows that are read too short for memory.
    while wanted > 1 and length % (wanted * 128):
        wanted //= 2
    return wanted


def is_decode(tokens: int, topk: int) -> bool:
    """Return whether the batch runs without a sort."""
    return tokens * topk <= DECODE_PAIRS


def select(arch: Arch, mma: str, tokens: int, topk: int, experts: int, hidden: int, inter: int) -> MoeConfig:
    """The table's row for the batch, fitted to the sizes."""
    decode = is_decode(tokens, topk)
    table = _table(arch, mma, decode)
    # Sorted tables: by the pairs per expert if the router spreads evenly, rounded up.
    row = table.select(tokens=tokens, inter=inter) if decode else table.select(rows=-(-tokens * topk // experts))
    return fit(row, hidden, inter, decode)


def select_columns(arch: Arch, tokens: int, topk: int, hidden: int, inter: int) -> ColumnsConfig | None:
    """The columns kernels' row for a W4A16 batch, fitted to the sizes; None where another body runs it.

    They need FP8 products that take one side from registers (sm_90), and 128 values of k to a row. Not for W4A8, where
    h is rounded to E4M3: that instruction's short sums tip the rounding often enough to be seen.
    """
    if arch is not Arch.SM_90 or hidden % 128 or inter % 128 or not is_decode(tokens, topk):
        return None
    for row in _columns_table().rows:
        if row.holds({"tokens": tokens, "inter": inter}):
            c = row.config
            return replace(
                c,
                up_n=_largest(c.up_n, inter),
                up_k=_largest(c.up_k, hidden),
                down_n=_largest(c.down_n, hidden),
                down_k=_largest(c.down_k, inter),
            )
    return None


def _columns_table() -> Table[ColumnsConfig]:
    return load_table(Path(__file__).parent, Arch.SM_90, "decode_columns", ColumnsConfig)


def reachable(arch: Arch, mma: str, tokens: int, topk: int, experts: int) -> list[int]:
    """One batch size for every table row that batches of 1..tokens can select."""
    last_decode = min(tokens, DECODE_PAIRS // topk)
    rows = [row.when for row in _table(arch, mma, True).rows]
    if arch is Arch.SM_90:
        rows += [row.when for row in _columns_table().rows]
    # 1 and 2 as well: a single token has a kernel of its own.
    found = {t for t in (1, 2, *(when["tokens"][0] for when in rows)) if 1 <= t <= last_decode}
    first_sorted = last_decode + 1
    for row in _table(arch, mma, False).rows:
        low = max((row.when["rows"][0] - 1) * experts // topk + 1, first_sorted)
        if low <= tokens:
            found.add(low)
    if tokens >= first_sorted:
        found.add(tokens)
    return sorted(found)


def _table(arch: Arch, mma: str, decode: bool) -> Table[MoeConfig]:
    return load_table(Path(__file__).parent, arch, f"{'decode' if decode else 'sorted'}_{mma}", MoeConfig)


_moe_columns_down = Launcher(moe_columns_down_kernel)
_moe_columns_up = Launcher(moe_columns_up_kernel)
_moe_planes = Launcher(moe_planes_kernel)


class MoeRun(NamedTuple):
    """Inputs and outputs of the launches of a run: tensors of the package's contract, `ready` of `MoePlan.run`."""

    out: torch.Tensor
    addend: torch.Tensor | None
    ready: Callable[[], None]
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def copies_of(tokens: int) -> int:
    """Return how often x is kept for a batch: about sixteen rows in all. One row, read by 384 programs at once, takes a
    third longer; more than sixteen change nothing (H200)."""
    return max(1, 16 // tokens)


class Columns:
    """Buffers for the batch sizes that `configs` names (tokens to configuration), and how they are run."""

    def __init__(
        self, configs: Mapping[int, ColumnsConfig], shape: Mapping[str, int], ptx: bool, device: torch.device
    ) -> None:
        self.configs, self.shape, self.ptx = configs, shape, ptx
        tokens = max(configs, default=0)
        pairs, hidden, inter = tokens * shape["topk"], shape["hidden"], shape["inter"]

        def empty(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((rows, 2, width), dtype=dtype, device=device)

        copies = max((t * copies_of(t) for t in configs), default=0)
        self.x = empty(copies, hidden, torch.float8_e4m3fn)
        self.x_factor = empty(copies, hidden // 32, torch.float32)
        self.h = empty(pairs, inter, torch.float8_e4m3fn)
        self.h_factor = empty(pairs, inter // 32, torch.float32)
        shares = max((t * c.down_shares for t, c in configs.items() if c.down_shares > 1), default=0)
        self.part = torch.empty((shares * hidden,), dtype=torch.float32, device=device)
        self.count = counters(tokens * hidden // 64, device)

    def run(self, run: MoeRun) -> None:
        """Launch."""
        out, addend, ready, x, ids, weights, w13, w13_scale, w2, w2_scale = run
        tokens = x.shape[0]
        c = self.configs[tokens]
        hidden, inter, experts, topk = (self.shape[n] for n in ("hidden", "inter", "experts", "topk"))
        block, copies = min(1024, hidden & -hidden), copies_of(tokens)
        _moe_planes[(tokens, hidden // block, copies)](
            x_ptr=x, planes_ptr=self.x, factor_ptr=self.x_factor, HIDDEN=hidden, BLOCK=block, PTX=self.ptx,
        )  # fmt: skip
        _moe_columns_up[(tokens * topk, inter // c.up_n)](
            x_ptr=self.x, x_factor_ptr=self.x_factor, ids_ptr=ids, weight_ptr=weights, w_ptr=w13,
            w_scale_ptr=w13_scale, h_ptr=self.h, h_factor_ptr=self.h_factor, copies=copies, EXPERTS=experts, TOPK=topk,
            HIDDEN=hidden, INTER=inter, LIMIT=LIMIT, BLOCK_N=c.up_n, BLOCK_K=c.up_k, STAGES=c.up_stages, PTX=self.ptx,
            num_warps=c.up_warps, num_stages=c.up_stages, launch_pdl=self.ptx and c.up_early,
        )  # fmt: skip
        # Where another stream is waited for, not launched early: no such pair has been captured in a graph yet.
        ready()
        _moe_columns_down[(tokens, -(-hidden // c.down_n), c.down_shares)](
            h_ptr=self.h, h_factor_ptr=self.h_factor, ids_ptr=ids, w_ptr=w2, w_scale_ptr=w2_scale, out_ptr=out,
            addend_ptr=addend, part_ptr=self.part, count_ptr=self.count, EXPERTS=experts, TOPK=topk, HIDDEN=hidden,
            INTER=inter, BLOCK_N=c.down_n, BLOCK_K=c.down_k, STAGES=c.down_stages, SHARES=c.down_shares, PTX=self.ptx,
            num_warps=c.down_warps, num_stages=c.down_stages, launch_pdl=self.ptx and addend is None,
        )  # fmt: skip


_moe_combine = Launcher(moe_combine_kernel)
_moe_decode_down = Launcher(moe_decode_down_kernel)
_moe_decode_up = Launcher(moe_decode_up_kernel)
_moe_prepare = Launcher(moe_prepare_kernel)
_moe_sort = Launcher(moe_sort_kernel)
_moe_sorted_down = Launcher(moe_sorted_down_kernel)
_moe_sorted_up = Launcher(moe_sorted_up_kernel)

SHAPE = ("tokens", "hidden", "inter", "experts", "topk")
# The interpreter does not support inline PTX; kernels then use plain Triton with the same steps.
PTX = os.environ.get("TRITON_INTERPRET") != "1"


def _at_once() -> None:
    """Wait for nothing: the addend is there."""


class MoePlan(Plan):
    """Buffers for up to `tokens` tokens; `a8` chooses W4A8. With `adds` every run gets an addend."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        a8: bool,
        device: torch.device,
        arch: Arch | None = None,
        adds: bool = False,
    ) -> None:
        shape = {"tokens": tokens, "hidden": hidden, "inter": inter, "experts": experts, "topk": topk}
        super().__init__("moe_w4a8" if a8 else "moe_w4a16", shape, device, arch, is_supported)
        self.a8, self.adds = a8, adds
        self.inputs = self.declare(
            x=Input(BF16, (Size("tokens", most=tokens), hidden)),
            topk_ids=Input(I32, ("tokens", topk)),
            topk_weights=Input(F32, ("tokens", topk)),
            w13=Input(U8, (experts, 2 * inter, hidden // 2)),
            w13_scale=Input(U8, (experts, 2 * inter, hidden // 32)),
            w2=Input(U8, (experts, hidden, inter // 2)),
            w2_scale=Input(U8, (experts, hidden, inter // 32)),
            out=Input(BF16, ("tokens", hidden)),
            **({"addend": Input(BF16, ("tokens", hidden))} if adds else {}),
        )
        self.mma = "mx" if a8 and native_mx(self.arch) else "dot"
        decode = [t for t in range(1, tokens + 1) if is_decode(t, topk)]
        columns = {t: select_columns(self.arch, t, topk, hidden, inter) for t in decode if not a8}
        self.columns = Columns({t: c for t, c in columns.items() if c}, self.shape, PTX, device)
        self._configs = {t: self._select(t) for t in decode if t not in self.columns.configs}
        pairs = tokens * topk
        act = torch.float8_e4m3fn if self.mma == "mx" else torch.bfloat16

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.h = empty(pairs, inter, dtype=act)
        self.h_scale = empty(pairs, inter // 32, dtype=torch.uint8)
        self.y = self.rows = self.tile = self.x = self.x_scale = self.h[:0]
        if not is_decode(tokens, topk):
            most = max(
                self._tiles(t) * self._select(t).m for t in reachable(self.arch, self.mma, tokens, topk, experts)
            )
            self.rows = empty(most, dtype=torch.int32)
            self.tile = empty(1 + most // 8, dtype=torch.int32)
            self.y = empty(pairs, hidden, dtype=torch.bfloat16)
            self.x = empty(tokens, hidden, dtype=act)
            self.x_scale = empty(tokens, hidden // 32, dtype=torch.uint8)

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (a plan lives as long as the process)
    def _select(self, tokens: int) -> MoeConfig:
        s = self.shape
        return select(self.arch, self.mma, tokens, s["topk"], s["experts"], s["hidden"], s["inter"])

    def _tiles(self, tokens: int) -> int:
        """Most tiles that `tokens` tokens can need: every expert that has any may leave one tile unfilled."""
        pairs = tokens * self.shape["topk"]
        return int(pairs // self._select(tokens).m + min(pairs, self.shape["experts"]))

    def run(
        self,
        *,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        out: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Shapes as in the package's contract, T ≤ the plan's tokens.

        `ready` is called before the launch that reads `addend`, the last one: where another stream computes it, it has
        the current one wait. Returns bf16 [T, H]: `out`, or a buffer of the plan that its next run overwrites.
        """
        tokens = x.shape[0]
        out = self.out[:tokens] if out is None else out
        if addend is not None and not self.adds:
            raise ValueError(f"{self.operation}: addend is given, the plan was made with adds=False")
        self.inputs.check(
            x=x, topk_ids=topk_ids, topk_weights=topk_weights, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale,
            out=out, **({"addend": addend} if self.adds else {}),
        )  # fmt: skip
        if tokens:
            inputs = (x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale)
            self._launch(MoeRun(out, addend, ready or _at_once, *inputs))
        return out

    @functools.cached_property
    def out(self) -> torch.Tensor:
        """Results of the runs that name no place for them; made by the first of them."""
        return torch.empty((self.shape["tokens"], self.shape["hidden"]), dtype=torch.bfloat16, device=self.device)

    def _launch(self, run: MoeRun) -> None:
        tokens = run.x.shape[0]
        if tokens in self.columns.configs:
            self.columns.run(run)
        elif tokens in self._configs:
            self._decode(self._configs[tokens], run)
        else:
            self._sorted(self._select(tokens), run)

    def _decode(self, c: MoeConfig, run: MoeRun) -> None:
        out, addend, ready, x, ids, weights, w13, w13_scale, w2, w2_scale = run
        tokens, hidden, inter, experts, topk = x.shape[0], *(self.shape[n] for n in SHAPE[1:])
        pairs = tokens * topk
        slots = 0 if tokens == 1 else DECODE_PAIRS
        _moe_decode_up[(inter // c.up_n, pairs)](
            x_ptr=x, ids_ptr=ids, weight_ptr=weights, w_ptr=w13, w_scale_ptr=w13_scale, h_ptr=self.h,
            h_scale_ptr=self.h_scale, pairs=pairs, EXPERTS=experts, TOPK=topk, HIDDEN=hidden, INTER=inter, LIMIT=LIMIT,
            PAIRS=slots, BLOCK_M=c.m, BLOCK_N=c.up_n, BLOCK_K=c.up_k, STAGES=c.up_stages, MMA=self.mma, A8=self.a8,
            PTX=PTX, SPLIT=c.up_split,
            num_warps=c.up_warps, num_stages=c.up_stages,
        )  # fmt: skip
        # Where another stream is waited for, not launched early: no such pair has been captured in a graph yet.
        ready()
        _moe_decode_down[(tokens, hidden // c.down_n)](
            h_ptr=self.h, h_scale_ptr=self.h_scale, ids_ptr=ids, w_ptr=w2, w_scale_ptr=w2_scale, out_ptr=out,
            addend_ptr=addend, EXPERTS=experts, TOPK=topk, HIDDEN=hidden, INTER=inter, BLOCK_N=c.down_n,
            BLOCK_K=c.down_k, STAGES=c.down_stages, MMA=self.mma, PTX=PTX, SPLIT=c.down_split,
            num_warps=c.down_warps, num_stages=c.down_stages, launch_pdl=PTX and addend is None,
        )  # fmt: skip

    def _sorted(self, c: MoeConfig, run: MoeRun) -> None:
        out, addend, ready, x, ids, weights, w13, w13_scale, w2, w2_scale = run
        tokens, hidden, inter, experts, topk = x.shape[0], *(self.shape[n] for n in SHAPE[1:])
        tiles = self._tiles(tokens)
        block = hidden & -hidden if hidden & -hidden < 1024 else 1024
        _moe_sort[(experts,)](
            ids_ptr=ids, rows_ptr=self.rows, tile_ptr=self.tile, pairs=tokens * topk, EXPERTS=experts,
            BINS=next_power_of_2(experts), BLOCK_M=c.m, CHUNK=1024,
            num_warps=8,
        )  # fmt: skip
        _moe_prepare[(tokens, hidden // block)](
            x_ptr=x, out_ptr=self.x, scale_ptr=self.x_scale, FLOOR=AMAX_FLOOR, HIDDEN=hidden, BLOCK=block,
            MMA=self.mma, A8=self.a8,
        )  # fmt: skip
        _moe_sorted_up[(inter // c.up_n, tiles)](
            x_ptr=self.x, x_scale_ptr=self.x_scale, weight_ptr=weights, rows_ptr=self.rows, tile_ptr=self.tile,
            w_ptr=w13, w_scale_ptr=w13_scale, h_ptr=self.h, h_scale_ptr=self.h_scale, TOPK=topk, HIDDEN=hidden,
            INTER=inter, LIMIT=LIMIT, BLOCK_M=c.m, BLOCK_N=c.up_n, BLOCK_K=c.up_k, STAGES=c.up_stages, MMA=self.mma,
            A8=self.a8, PTX=PTX,
            num_warps=c.up_warps, num_stages=c.up_stages,
        )  # fmt: skip
        _moe_sorted_down[(hidden // c.down_n, tiles)](
            h_ptr=self.h, h_scale_ptr=self.h_scale, rows_ptr=self.rows, tile_ptr=self.tile, w_ptr=w2,
            w_scale_ptr=w2_scale, y_ptr=self.y, HIDDEN=hidden, INTER=inter, BLOCK_M=c.m, BLOCK_N=c.down_n,
            BLOCK_K=c.down_k, STAGES=c.down_stages, MMA=self.mma, PTX=PTX,
            num_warps=c.down_warps, num_stages=c.down_stages,
        )  # fmt: skip
        ready()
        _moe_combine[(tokens, hidden // block)](
            y_ptr=self.y, ids_ptr=ids, out_ptr=out, addend_ptr=addend, EXPERTS=experts, TOPK=topk, HIDDEN=hidden,
            BLOCK=block,
        )  # fmt: skip

    def warmup(self) -> None:
        """Run every variant once with ids of −1, which read no weight."""
        device, topk = self.device, self.shape["topk"]
        byte = torch.zeros(16, dtype=torch.uint8, device=device)
        for tokens in reachable(self.arch, self.mma, self.shape["tokens"], topk, self.shape["experts"]):
            x = torch.zeros((tokens, self.shape["hidden"]), dtype=torch.bfloat16, device=device)
            ids = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
            weights = torch.zeros(ids.shape, dtype=torch.float32, device=device)
            addend = x if self.adds else None
            self._launch(MoeRun(torch.empty_like(x), addend, _at_once, x, ids, weights, byte, byte, byte, byte))


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Sizes that the tiles can be cut to; any architecture with a table."""
    hidden, inter, experts, topk = (params[n] for n in SHAPE[1:])
    if hidden % 128:
        return Support(f"moe: hidden is {hidden}, needs a multiple of 128")
    if inter % 32:
        return Support(f"moe: intermediate size is {inter}, needs a multiple of 32 (one scale group)")
    if not 1 <= topk <= 8:
        return Support(f"moe: top-k is {topk}, needs 1..8")
    if not topk <= experts <= 1024:
        return Support(f"moe: {experts} experts, needs top-k..1024")
    if 2 * inter * hidden // 2 >= 2**31:
        return Support(f"moe: one expert has {inter * hidden} bytes, needs less than 2^31")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Random codes and scales of the size that a trained layer has: gates of a few units, some beyond the clamp."""
    generator = seeded(device, seed)
    tokens, hidden, inter, experts, topk = (params[n] for n in SHAPE)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)

    def scales(length: int, *size: int) -> torch.Tensor:
        # E2M1 codes drawn evenly have a standard deviation of 2.9, so this keeps the products near unit size.
        middle = 127 - round(0.5 * torch.tensor(8.5 * length).log2().item())
        return torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, device=device, generator=generator)

    x = torch.randn((tokens, hidden), device=device, generator=generator).to(torch.bfloat16)
    score = torch.rand((tokens, experts), device=device, generator=generator)
    routing = params.get("routing", "even")
    if routing == "one":
        score[:, : experts - topk] = 0.0
    ids = (
        score.topk(topk, dim=1).indices.to(torch.int32)
        if tokens
        else torch.empty((0, topk), dtype=torch.int32, device=device)
    )
    if routing == "holes" and tokens:
        # Expert parallelism, padding, an id past the end, an expert listed twice, a token with nothing.
        kind = torch.randint(0, 8, ids.shape, device=device, generator=generator)
        ids = torch.where(kind == 0, -1, torch.where(kind == 1, experts + 3, torch.where(kind == 2, ids[:, :1], ids)))
        ids[-1] = -1
    if (ranks := params.get("ranks", 1)) > 1:
        # The experts of other ranks.
        ids = torch.where(torch.rand(ids.shape, device=device, generator=generator) < 1 / ranks, ids, -1)
    weights = torch.rand((tokens, topk), device=device, generator=generator)
    inputs = {
        "x": x,
        "topk_ids": ids.to(torch.int32).contiguous(),
        "topk_weights": (1.5 * weights / weights.sum(1, keepdim=True)).contiguous(),
        "w13": codes(experts, 2 * inter, hidden // 2),
        "w13_scale": scales(hidden, experts, 2 * inter, hidden // 32),
        "w2": codes(experts, hidden, inter // 2),
        "w2_scale": scales(inter, experts, hidden, inter // 32),
    }
    if params.get("adds"):
        inputs["addend"] = torch.randn(x.shape, device=device, generator=generator).to(torch.bfloat16)
    return inputs


def _nbytes(params: Mapping[str, Any]) -> int:
    tokens, hidden, inter, experts, topk = (params[n] for n in SHAPE)
    # Distinct experts that an evenly spread batch is expected to use.
    hit = experts * (1.0 - (1.0 - topk / experts) ** tokens)
    weights = hit * 3 * inter * hidden * (0.5 + 1 / 32)
    return int(weights + tokens * ((6 if params.get("adds") else 4) * hidden + 8 * topk))


TINY = {"hidden": 256, "inter": 64, "experts": 16, "topk": 6}
FLASH = {"hidden": 4096, "inter": 2048, "experts": 256, "topk": 6}
PRO = {"hidden": 7168, "inter": 384, "experts": 384, "topk": 6}
CASES = (
    case("none", "cpu gpu", tokens=0, **TINY),
    case("one", "cpu gpu", tokens=1, **TINY),
    case("seven-holes", "cpu gpu", tokens=7, routing="holes", **TINY),
    case("eight-one-expert-set", "cpu gpu", tokens=8, routing="one", **TINY),
    case("sorted-holes", "cpu gpu", tokens=13, routing="holes", **TINY),
    case("odd-shard", "cpu gpu", tokens=2, hidden=384, inter=96, experts=12, topk=4),
    case("columns-1", "cpu gpu", tokens=1, **{**TINY, "inter": 128}),
    case("columns-5-holes", "cpu gpu", tokens=5, routing="holes", hidden=384, inter=256, experts=12, topk=4),
    case("adds-2", "cpu gpu", tokens=2, adds=True, **TINY),
    case("adds-sorted", "cpu gpu", tokens=13, adds=True, **TINY),
    case("adds-columns", "cpu gpu", tokens=1, adds=True, **{**TINY, "inter": 128}),
    case("columns-10-one", "gpu", tokens=10, routing="one", **{**TINY, "inter": 384}),
    case("flash-1", "gpu bench", tokens=1, **FLASH),
    case("flash-8", "gpu bench", tokens=8, **FLASH),
    case("flash-63-holes", "gpu", tokens=63, routing="holes", **FLASH),
    case("flash-100", "gpu bench", tokens=100, **FLASH),
    case("pro-tp16-70", "gpu", tokens=70, **{**PRO, "inter": 192}),
    case("flash-tp8-7", "gpu", tokens=7, **{**FLASH, "inter": 256}),
    case("pro-tp8-1", "gpu bench", tokens=1, **PRO),
    case("pro-tp8-8", "gpu bench", tokens=8, **PRO),
    case("pro-tp16-9", "gpu", tokens=9, **{**PRO, "inter": 192}),
    case("flash-512", "gpu bench", tokens=512, **FLASH),
    case("flash-2048", "gpu bench", tokens=2048, **FLASH),
    case("flash-4096", "gpu bench", tokens=4096, **FLASH),
)


def _operation(a8: bool) -> Operation:
    return Operation(
        name="moe_w4a8" if a8 else "moe_w4a16",
        summary=f"MXFP4 mixture of experts, {'MXFP8' if a8 else 'bf16'} activations",
        folder="moe",
        outputs=("out",),
        cases=CASES,
        make_inputs=_inputs,
        reference=moe_w4a8 if a8 else moe_w4a16,
        plan=lambda p, device, arch: MoePlan(
            **{n: p[n] for n in SHAPE}, a8=a8, device=device, arch=arch, adds=p.get("adds", False)
        ),
        is_supported=is_supported,
        nbytes=_nbytes,
        flops=lambda p: 6 * p["tokens"] * p["topk"] * p["hidden"] * p["inter"],
        # Inputs are drawn so that the output's RMS is near one; the element limit then is 2e-2 of it plus bf16's own
        # rounding.
        tolerance=(Tolerance(absolute=2e-2, relative=2e-2, rms=5e-3),),
    )


OPERATIONS = (_operation(False), _operation(True))
