"""The block-scaled products as operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect, multiprocessors, native_mx
from dsv4_kernels.fp8_gemm.configs import (
    GROUP,
    HOPPER_N,
    QUANTISED_N,
    QUANTISED_TOKENS,
    GemmConfig,
    HopperConfig,
    hopper_from,
    select,
    select_hopper,
    split_count,
)
from dsv4_kernels.fp8_gemm.kernel import fp8_gemm_kernel
from dsv4_kernels.fp8_gemm.reference import fp8_gemm, wo_a_einsum, wo_a_einsum_o8
from dsv4_kernels.fp8_quant.api import places
from dsv4_kernels.launch import Launcher
from dsv4_kernels.numerics import as_numbers, quantize_e4m3, seeded
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, counters, require_thawed
from dsv4_kernels.registry import Case, Operation, Tolerance, case

_fp8_gemm = Launcher(fp8_gemm_kernel)


class GemmPlan(Plan):
    """Products of up to `tokens` tokens with weights [groups, n, k]; groups None: without that dimension.

    Split sums need `tokens` small, so their buffer stays small. `quantised`: runs of up to so many tokens quantise
    their results too, see `codes`.
    """

    def __init__(
        self,
        tokens: int,
        n: int,
        k: int,
        groups: int | None,
        device: torch.device,
        arch: Arch | None = None,
        quantised: int = 0,
    ) -> None:
        self.operation = "fp8_gemm" if groups is None else "wo_a_einsum"
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"tokens": tokens, "n": n, "k": k, "groups": groups or 1}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.device, self.grouped = device, groups is not None
        self.hopper_from = hopper_from(self.arch, n, k, groups or 1) if device.type != "cpu" else None
        self.mx = native_mx(self.arch)
        self.multiprocessors = multiprocessors(device, self.arch)
        if quantised and (quantised > QUANTISED_TOKENS or n % QUANTISED_N):
            raise ValueError(
                f"{self.operation}: results of {quantised} tokens with n {n} are to be quantised, needs up to "
                f"{QUANTISED_TOKENS} tokens and a multiple of {QUANTISED_N}"
            )
        self.quantised = min(tokens, quantised)
        self._code, self._scale = places(self.quantised, n * (groups or 1), device)
        parts, tiles = 1, 1
        # The body for many tokens splits no sums.
        for t in range(1, min(tokens, (self.hopper_from or tokens + 1) - 1) + 1):
            config, splits = self._launch(t)
            if splits > 1 and isinstance(config, GemmConfig):
                parts = max(parts, splits * t * (groups or 1) * n)
                tiles = max(tiles, -(-t // config.block_m) * -(-n // config.block_n) * (groups or 1))
        self.part = torch.empty((parts,), dtype=torch.float32, device=device)
        self.count = counters(tiles, device)

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (a plan lives as long as the process)
    def _launch(self, tokens: int) -> tuple[GemmConfig | HopperConfig, int]:
        """Configuration and shares of K for a token count."""
        s = self.shape
        if self.hopper_from is not None and tokens >= self.hopper_from:
            return select_hopper(tokens, s["n"], s["k"], s["groups"], self.multiprocessors), 1
        config = select(self.arch, tokens, s["n"] * s["groups"], s["k"], tokens <= self.quantised)
        return config, split_count(config, tokens, s["n"], s["k"], s["groups"], self.multiprocessors)

    @functools.cached_property
    def out(self) -> torch.Tensor:
        """Results of the runs that name no place for them; made by the first of them."""
        s = self.shape
        return torch.empty((s["tokens"], s["groups"], s["n"]), dtype=torch.bfloat16, device=self.device)

    def codes(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the result of the last run, of `tokens` tokens, as `fp8_quant` makes it: code uint8 [T, groups·n] and
        scale uint8 [T, groups·n/128], views of the plan's buffers. None if it does not quantise so many.
        """
        return (self._code[:tokens], self._scale[:tokens]) if tokens <= self.quantised else None

    def run(
        self,
        *,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the package docstring. Writes `out` bf16 [T, groups, n] (or [T, n]); without it a buffer of the plan that
        its next run overwrites.
        """
        s, tokens = self.shape, a.shape[0]
        n, k, groups = s["n"], s["k"], s["groups"]
        lead: tuple[int, ...] = (groups,) if self.grouped else ()
        check_tensor("a", a, torch.uint8, (tokens, *lead, k))
        check_tensor("a_scale", a_scale, torch.uint8, (tokens, *lead, k // 128))
        check_tensor("w", w, torch.uint8, (*lead, n, k))
        check_tensor("w_scale", w_scale, torch.uint8, (*lead, -(-n // 128), k // 128))
        if tokens > s["tokens"]:
            raise ValueError(f"a has {tokens} tokens, the plan holds {s['tokens']}")
        if out is None:
            out = self.out[:tokens] if self.grouped else self.out[:tokens, 0]
        check_tensor("out", out, torch.bfloat16, (tokens, *lead, n))
        if not tokens:
            return out
        config, splits = self._launch(tokens)
        codes, weights = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
        if isinstance(config, HopperConfig):
            self._run_hopper(config, codes, a_scale, weights, w_scale, out)
        else:
            self._run(config, splits, codes, a_scale, weights, w_scale, out)
        return out

    def _run(
        self,
        c: GemmConfig,
        splits: int,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        tokens, n, k, groups = a.shape[0], self.shape["n"], self.shape["k"], self.shape["groups"]
        grid = (-(-tokens // c.block_m) * -(-n // c.block_n), groups, splits)
        _fp8_gemm[grid](
            a_ptr=a, a_scale_ptr=a_scale, w_ptr=w, w_scale_ptr=w_scale, out_ptr=out, part_ptr=self.part,
            count_ptr=self.count, code_ptr=self._code.view(torch.float8_e4m3fn), scale_ptr=self._scale, tokens=tokens,
            splits=splits, N=n, K=k, G=groups, BM=c.block_m, BN=c.block_n, GROUP=GROUP, SPLIT=splits > 1, MX=self.mx,
            QUANT=tokens <= self.quantised,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip

    def _run_hopper(
        self,
        c: HopperConfig,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        descriptor, kernel = _hopper()
        tokens, n, k, groups = a.shape[0], self.shape["n"], self.shape["k"], self.shape["groups"]
        kernel[(min(c.tiles(tokens, n, groups), self.multiprocessors),)](
            a_desc=descriptor(a.view(tokens, groups * k), 64), a_scale_ptr=a_scale,
            w_desc=descriptor(w.view(groups * n, k), HOPPER_N), w_scale_ptr=w_scale,
            out_desc=descriptor(out.view(tokens, groups * n), 64), tokens=tokens, n=n, blocks=k // 128, groups=groups,
            WARPGROUPS=c.warpgroups, GROUP=GROUP, STAGES=c.num_stages, num_warps=4,
        )  # fmt: skip

    def warmup(self) -> None:
        """One token count for every pair of configuration and split or whole."""
        seen = set()
        for tokens in range(1, self.shape["tokens"] + 1):
            config, splits = self._launch(tokens)
            kind = (config, splits > 1, tokens <= self.quantised)
            if kind not in seen:
                seen.add(kind)
                s = self.shape
                lead = (s["groups"],) if self.grouped else ()
                zeros = functools.partial(torch.zeros, dtype=torch.uint8, device=self.device)
                self.run(
                    a=zeros((tokens, *lead, s["k"])),
                    a_scale=zeros((tokens, *lead, s["k"] // 128)),
                    w=zeros((*lead, s["n"], s["k"])),
                    w_scale=zeros((*lead, -(-s["n"] // 128), s["k"] // 128)),
                    out=torch.empty((tokens, *lead, s["n"]), dtype=torch.bfloat16, device=self.device),
                )


class EinsumO8Plan(GemmPlan):
    """`wo_a_einsum_o8`."""

    def __init__(
        self, tokens: int, n: int, k: int, groups: int, device: torch.device, arch: Arch | None = None
    ) -> None:
        super().__init__(tokens, n, k, groups, device, arch, quantised=tokens)
        self.operation = "wo_a_einsum_o8"

    def run(self, **inputs: Any) -> Any:
        """Return (out, code, scale)."""
        out = super().run(**inputs)
        return out, self._code[: out.shape[0]], self._scale[: out.shape[0]]


@functools.cache
def _hopper() -> tuple[Callable[[torch.Tensor, int], Any], Any]:
    """Return what describes tensors and the kernel of specialised warps; other architectures need no Gluon."""
    from dsv4_kernels.fp8_gemm.hopper import descriptor, fp8_gemm_hopper_kernel

    return descriptor, Launcher(fp8_gemm_hopper_kernel)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """K a multiple of 128, N of 16."""
    if params["k"] % 128 or params["k"] < 128:
        return Support(f"fp8_gemm: k is {params['k']}, needs a positive multiple of 128")
    if params["n"] % 16 or params["n"] < 16:
        return Support(f"fp8_gemm: n is {params['n']}, needs a positive multiple of 16")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    generator = seeded(device, seed)
    lead: tuple[int, ...] = (params["groups"],) if "groups" in params else ()
    tokens, n, k = params["tokens"], params["n"], params["k"]
    x = torch.randn((tokens, *lead, k), generator=generator, device=device)
    x *= torch.exp2(torch.randint(-3, 4, (tokens, *lead, 1), generator=generator, device=device).float())
    a, a_scale = quantize_e4m3(x.bfloat16(), 128, 1e-4)
    w = (torch.randn((*lead, n, k), generator=generator, device=device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    w_scale = torch.randint(112, 121, (*lead, -(-n // 128), k // 128), generator=generator, device=device)
    return {"a": a, "a_scale": a_scale, "w": w.view(torch.uint8), "w_scale": w_scale.to(torch.uint8)}


# Flash: fused wq_a+wkv, wq_b, wo_b, shared w13 and w2, indexer wq_b; then three of Pro.
SHAPES = {
    "wqa_wkv": (1536, 4096),
    "wq_b": (32768, 1024),
    "wo_b": (4096, 8192),
    "w13": (4096, 4096),
    "w2": (4096, 2048),
    "idx": (8192, 1024),
}
PRO = {"pro_wq_b": (65536, 1536), "pro_wo_b": (7168, 16384), "pro_w2": (7168, 3072)}


def _gemm_cases() -> tuple[Case, ...]:
    rows = [
        case("empty", "cpu gpu", tokens=0, n=64, k=128),
        case("small", "cpu gpu", tokens=3, n=80, k=256),
        case("split", "cpu gpu", tokens=2, n=144, k=1536),
        case("middle", "cpu gpu", tokens=19, n=192, k=128),
        case("wide", "cpu gpu", tokens=140, n=144, k=128),
        # Tokens and rows that no tile divides, tiles of 192 tokens, and a k that specialised warps do not take.
        case("many", "gpu", tokens=1025, n=2000, k=1536),
        case("many-tall", "gpu", tokens=2049, n=1552, k=256),
        case("many-short-k", "gpu", tokens=1100, n=144, k=384),
    ]
    for name, (n, k) in {**SHAPES, **PRO}.items():
        for tokens in (1, 8, 16, 128, 1024, 4096, *((2048, 8192) if name in SHAPES else ())):
            tags = "gpu bench" if tokens <= 1024 and name in SHAPES else "bench"
            rows.append(case(f"{name}-t{tokens}", tags, tokens=tokens, n=n, k=k))
    return tuple(rows)


def _einsum_cases() -> tuple[Case, ...]:
    rows = [
        case("empty", "cpu gpu", tokens=0, groups=2, n=64, k=128),
        case("small", "cpu gpu", tokens=5, groups=3, n=80, k=256),
        case("split", "cpu gpu", tokens=1, groups=2, n=64, k=1024),
    ]
    rows += [case("many", "gpu", tokens=1333, groups=3, n=384, k=512)]
    rows += [case("many-narrow", "gpu", tokens=1333, groups=2, n=144, k=512)]
    rows += [
        case(f"flash-t{t}", "gpu bench", tokens=t, groups=8, n=1024, k=4096)
        for t in (1, 8, 128, 1024, 2048, 4096, 8192)
    ]
    rows += [case(f"flash-tp4-t{t}", "gpu bench", tokens=t, groups=2, n=1024, k=4096) for t in (1, 8, 128)]
    return tuple(rows)


def _nbytes(p: Mapping[str, Any]) -> int:
    n, k, groups, tokens = p["n"], p["k"], p.get("groups", 1), p["tokens"]
    weights = groups * (n * k + -(-n // 128) * (k // 128))
    return int(weights + tokens * groups * (k + k // 128 + 2 * n))


def _plan(p: Mapping[str, Any], device: torch.device, arch: Arch | None) -> GemmPlan:
    return GemmPlan(p["tokens"], p["n"], p["k"], p.get("groups"), device, arch)


# One rounding to bf16 is 2^-9 relative, diff 1.3e-6 of it; Hopper's FP8 sums keep 14 bits within a block of 128.
_TOLERANCE = (Tolerance(rms=3e-3, diff=5e-6),)

_PLAIN = tuple(
    Operation(
        name=name,
        summary=summary,
        folder="fp8_gemm",
        outputs=("out",),
        cases=cases,
        make_inputs=_inputs,
        reference=reference,
        plan=_plan,
        is_supported=is_supported,
        nbytes=_nbytes,
        flops=lambda p: 2 * p["tokens"] * p.get("groups", 1) * p["n"] * p["k"],
        tolerance=_TOLERANCE,
    )
    for name, summary, cases, reference in (
        ("fp8_gemm", "FP8 product with block scales (1, 128, 128)", _gemm_cases(), fp8_gemm),
        ("wo_a_einsum", 'grouped FP8 product "bhr,hdr->bhd" with block scales', _einsum_cases(), wo_a_einsum),
    )
)

OPERATIONS = (
    *_PLAIN,
    Operation(
        name="wo_a_einsum_o8",
        summary="the grouped product of few tokens, its result quantised too",
        folder="fp8_gemm",
        outputs=("out", "value"),
        cases=(
            case("empty", "cpu gpu", tokens=0, groups=2, n=128, k=128),
            case("small", "cpu gpu", tokens=5, groups=3, n=256, k=256),
            case("split", "cpu gpu", tokens=11, groups=2, n=128, k=1024),
            *(case(f"flash-t{t}", "gpu bench", tokens=t, groups=8, n=1024, k=4096) for t in (1, 8, 16)),
        ),
        make_inputs=_inputs,
        reference=wo_a_einsum_o8,
        plan=lambda p, device, arch: EinsumO8Plan(p["tokens"], p["n"], p["k"], p["groups"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: _nbytes(p) + p["tokens"] * p["groups"] * (p["n"] + p["n"] // 128),
        flops=lambda p: 2 * p["tokens"] * p["groups"] * p["n"] * p["k"],
        # Both sides are quantised: a sum beside a rounding boundary of bf16 is one step of E4M3, seldom.
        tolerance=(*_TOLERANCE, Tolerance(relative=2.0**-3, absolute=1e-6, rms=5e-3, mismatch=1e-3)),
        compared=lambda outputs: (outputs[0], *as_numbers(outputs[1:])),
    ),
)
