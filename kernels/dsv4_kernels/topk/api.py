"""The selection as an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.launch import Launcher
from dsv4_kernels.numerics import seeded
from dsv4_kernels.plan import SUPPORTED, Plan, Support, require_thawed
from dsv4_kernels.registry import Operation, Provider, Tolerance, case
from dsv4_kernels.testing.interpreter import interpreting
from dsv4_kernels.topk.configs import CHOOSE_WARPS, FEW_ROWS, PARTS, Few, constexprs, few, levels
from dsv4_kernels.topk.kernel import topk_bound_kernel, topk_choose_kernel, topk_gather_kernel, topk_kernel
from dsv4_kernels.topk.reference import topk

_topk_bound = Launcher(topk_bound_kernel)
_topk_choose = Launcher(topk_choose_kernel)
_topk_gather = Launcher(topk_gather_kernel)
_topk = Launcher(topk_kernel)


class TopkPlan(Plan):
    """Selection of k of rows with up to `width` scores, up to rows × width scores at once."""

    operation = "topk"

    def __init__(self, rows: int, width: int, k: int, device: torch.device, arch: Arch | None = None) -> None:
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"rows": rows, "width": width, "k": k}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.rows, self.width, self.k, self.device = rows, width, k, device
        self.early = not interpreting()
        self.out = torch.empty((rows, k), dtype=torch.int32, device=device)
        # Of each level but the last: candidates of rows × parts chunks.
        sizes = [rows * level.parts * k for level in levels(width, k)[:-1]]
        self.keys = [torch.empty((size,), dtype=torch.int32, device=device) for size in sizes]
        self.columns = [torch.empty((size,), dtype=torch.int32, device=device) for size in sizes]
        # For a few long rows: bound, count and end of every part, and its candidates thrice.
        config = few(min(rows, FEW_ROWS), width, k)
        parts = (min(rows, FEW_ROWS), PARTS) if config else (0, 0)
        self.ends = torch.empty((3, *parts), dtype=torch.int32, device=device)
        self.found = torch.empty((3, *parts, config.chunk if config else 0), dtype=torch.int32, device=device)

    def holds(self, rows: int, width: int) -> bool:
        """Tell whether the buffers have room for `rows` of `width` scores, whose result goes to the caller's rows."""
        if width > self.width:
            return False
        if few(rows, width, self.k):
            return rows <= self.rows
        kept = zip(levels(width, self.k)[:-1], self.keys, strict=False)
        return all(rows * level.parts * self.k <= keys.numel() for level, keys in kept)

    def run(
        self, *, logits: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int32 [R, k]; logits [R, W] with W at most the planned width."""
        rows, width = int(logits.shape[0]), int(logits.shape[1])
        if logits.dtype != torch.float32 or (logits.numel() and logits.stride(1) != 1) or logits.data_ptr() % 16:
            raise ValueError(f"logits must be aligned float32 [R, ·] with contiguous rows, is {logits.dtype}")
        if lengths.dtype != torch.int32 or lengths.numel() != rows or not lengths.is_contiguous():
            raise ValueError(f"lengths must be contiguous int32 of {rows} values, is {tuple(lengths.shape)}")
        if k != self.k or width > self.width:
            raise ValueError(f"k {k} and width {width}, the plan holds k {self.k} and width {self.width}")
        if out is None:
            if rows > self.rows:
                raise ValueError(f"logits has {rows} rows, the plan holds {self.rows}")
            out = self.out[:rows]
        elif out.dtype != torch.int32 or out.shape[0] < rows or out.shape[1] < k or out.stride(1) != 1:
            raise ValueError(f"out must be int32 [{rows}, ≥ {k}] with contiguous rows, is {tuple(out.shape)}")
        config = few(rows, width, k)
        if config is not None and rows:
            self._launch_few(logits, lengths, out, config)
            return out[:rows, :k]
        if not self.holds(rows, width):
            raise ValueError(f"{rows} rows of {width} scores, the plan holds {self.rows} of {self.width}")
        if rows:
            self._launch(logits, lengths, out, levels(width, k))
        return out[:rows, :k]

    def _launch(self, logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, chain: tuple[Any, ...]) -> None:
        rows, early = logits.shape[0], self.early and len(chain) > 1
        scores, columns, stride = logits, self.out, logits.stride(0)
        for index, level in enumerate(chain):
            first, last = index == 0, index == len(chain) - 1
            out_keys = self.out if last else self.keys[index]
            out_columns = out if last else self.columns[index]
            _topk[(rows, level.parts)](
                score_ptr=scores, column_ptr=columns, length_ptr=lengths, out_key_ptr=out_keys, out_ptr=out_columns,
                score_stride=stride, out_stride=out.stride(0), width=level.width, K=self.k,
                KP=1 << (self.k - 1).bit_length(), CHUNK=level.chunk, FIRST=first, LAST=last, EARLY=early,
                num_warps=level.num_warps, num_stages=1, launch_pdl=early and not first,
            )  # fmt: skip
            if not last:
                scores, columns, stride = out_keys, out_columns, level.parts * self.k

    def _launch_few(self, logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, config: Few) -> None:
        rows, stride = logits.shape[0], logits.stride(0)
        bound, count, end = self.ends
        found, keys, flat = self.found
        grid, warps = (rows, PARTS), config.num_warps
        _topk_bound[grid](
            score_ptr=logits, length_ptr=lengths, bound_ptr=bound, score_stride=stride,
            **constexprs("bound", config, self.k, early=self.early),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        _topk_gather[grid](
            score_ptr=logits, length_ptr=lengths, bound_ptr=bound, count_ptr=count, found_ptr=found,
            score_stride=stride, **constexprs("gather", config, self.k, early=self.early),
            num_warps=warps, num_stages=1, launch_pdl=self.early,
        )  # fmt: skip
        _topk_choose[(rows,)](
            score_ptr=logits, length_ptr=lengths, count_ptr=count, found_ptr=found, end_ptr=end, flat_key_ptr=keys,
            flat_ptr=flat, out_ptr=out, score_stride=stride, out_stride=out.stride(0),
            **constexprs("choose", config, self.k, early=self.early),
            num_warps=CHOOSE_WARPS, num_stages=1, launch_pdl=self.early,
        )  # fmt: skip

    def warmup(self) -> None:
        """Every chain of levels up to the planned width, and the launches for a few long rows."""
        widths, width = {self.width}, self.width
        while width > 1:
            width = 1 << (width - 1).bit_length() - 1
            widths.add(width)
        # More rows than a few take the other way at the same width.
        for width in widths:
            for rows in {min(1, self.rows), min(FEW_ROWS + 1, self.rows)} - {0}:
                lengths = torch.full((rows,), width, dtype=torch.int32, device=self.device)
                logits = torch.zeros((1, width), device=self.device).expand(rows, width)
                self.run(logits=logits, lengths=lengths, k=self.k)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any rows and widths; k up to 4096."""
    if not 0 < params["k"] <= 4096:
        return Support(f"topk: k is {params['k']}, needs 1 to 4096")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Rows with many equal scores, −∞ and lengths from 0 up; behind the length everything is NaN."""
    draw = seeded(device, seed)
    rows, width, k = params["rows"], params["width"], params["k"]
    if params.get("dense"):
        logits = torch.randn((rows, width), generator=draw, device=device)
        return {"logits": logits, "lengths": torch.full((rows,), width, device=device).int(), "k": k}
    logits = torch.randn((rows, width + 3), generator=draw, device=device)
    row = torch.arange(rows, device=device)
    coarse = (logits * 2).round() / 2
    logits = torch.where((row % 3 == 1)[:, None], coarse, logits)
    logits = torch.where((row % 5 == 2)[:, None] & (logits < 1.0), -torch.inf, logits)
    lengths = torch.randint(0, width + 1, (rows,), generator=draw, device=device)
    lengths = torch.where(row % 2 == 0, width - row, lengths)
    lengths[-1:] = min(k, width)
    lengths = lengths.clamp(0, width)
    logits = logits.masked_fill(torch.arange(width + 3, device=device) >= lengths[:, None], torch.nan)
    return {"logits": logits[:, :width], "lengths": lengths.int(), "k": k}


def _torch(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    def call(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        return torch.topk(logits, k, dim=1, sorted=False).indices.int()

    return call


def _cases() -> Any:
    bench = [
        case(f"r{rows}-n{width}-k{k}", "gpu bench" if rows * width < 1 << 25 else "bench", rows=rows, width=width, k=k,
             dense=True)
        for rows, width, k in (
            (1, 2048, 512), (1, 16384, 512), (1, 32768, 512), (1, 262144, 512), (1, 262144, 1024), (8, 32768, 512),
            (64, 8192, 512), (2048, 2048, 512), (2048, 32768, 512),
        )
    ]  # fmt: skip
    return (
        case("empty", "cpu gpu", rows=0, width=64, k=16),
        case("narrow", "cpu gpu", rows=3, width=7, k=16),
        case("one-level", "cpu gpu", rows=12, width=1500, k=512),
        case("k256", "cpu gpu", rows=5, width=777, k=256),
        case("two-levels", "cpu gpu", rows=9, width=20000, k=512),
        case("few-long", "cpu gpu", rows=4, width=40000, k=512),
        case("k-odd", "cpu gpu", rows=3, width=20000, k=1000),
        case("three-levels", "gpu", rows=5, width=262144, k=2048),
        case("ties", "gpu", rows=31, width=70000, k=1024),
        *bench,
    )


OPERATIONS = (
    Operation(
        name="topk",
        summary="columns of the k largest scores of every row",
        folder="topk",
        outputs=("columns",),
        cases=_cases(),
        make_inputs=_inputs,
        reference=topk,
        plan=lambda p, device, arch: TopkPlan(p["rows"], p["width"], p["k"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: 4 * p["rows"] * (p["width"] + p["k"] + 1),
        flops=lambda p: 0,
        tolerance=(Tolerance(bitwise=True),),
        extra_providers=(Provider("torch.topk", lambda: None, _torch, rough="takes any of equal scores"),),
        # Others return them in any order.
        compared=lambda outputs: (outputs[0].sort(-1).values,),
    ),
)
