"""The quantiser as an operation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.fp8_quant.configs import select
from dsv4_kernels.fp8_quant.kernel import fp8_quant_kernel, silu_mul_quant_kernel
from dsv4_kernels.fp8_quant.reference import fp8_quant, silu_mul_quant
from dsv4_kernels.launch import Launcher
from dsv4_kernels.numerics import as_numbers
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case

_fp8_quant = Launcher(fp8_quant_kernel)
_silu_mul_quant = Launcher(silu_mul_quant_kernel)


class _RowsPlan(Plan):
    """Up to `tokens` rows of `k` values."""

    def __init__(self, tokens: int, k: int, device: torch.device, arch: Arch | None = None) -> None:
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        support = is_supported({"tokens": tokens, "k": k}, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.shape, self.device = {"tokens": tokens, "k": k}, device


class QuantPlan(_RowsPlan):
    """Up to `tokens` tokens of `k` values."""

    operation = "fp8_quant"

    @functools.cached_property
    def out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of the runs that name no place for them; made by the first of them."""
        tokens, k = self.shape["tokens"], self.shape["k"]
        return places(tokens, k, self.device)

    def run(
        self, *, x: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x bf16 [T ≤ tokens, K] → (code uint8 [T, K], scale uint8 [T, K/128]): `out`, or buffers of the plan that its
        next run overwrites.
        """
        tokens, k = x.shape[0], self.shape["k"]
        check_tensor("x", x, torch.bfloat16, (tokens, k))
        if tokens > self.shape["tokens"]:
            raise ValueError(f"x has {tokens} tokens, the plan holds {self.shape['tokens']}")
        code, scale = (self.out[0][:tokens], self.out[1][:tokens]) if out is None else out
        check_tensor("code", code, torch.uint8, (tokens, k))
        check_tensor("scale", scale, torch.uint8, (tokens, k // 128))
        if tokens:
            c = select(self.arch, tokens, k)
            grid = (-(-tokens // c.block_t), -(-k // c.block_k))
            _fp8_quant[grid](
                x_ptr=x, code_ptr=code.view(torch.float8_e4m3fn), scale_ptr=scale, tokens=tokens, K=k,
                BLOCK_T=c.block_t, BLOCK_K=c.block_k,
                num_warps=c.num_warps, num_stages=1,
            )  # fmt: skip
        return code, scale

    def warmup(self) -> None:
        """Run once per configuration that the token count can select."""
        k = self.shape["k"]
        for tokens in {min(self.shape["tokens"], 1), self.shape["tokens"]}:
            x = torch.zeros((tokens, k), dtype=torch.bfloat16, device=self.device)
            self.run(x=x, out=places(tokens, k, self.device))


class SiluMulPlan(_RowsPlan):
    """`silu_mul_quant` of up to `tokens` tokens of `k` values each of gate and up."""

    operation = "silu_mul_quant"

    @functools.cached_property
    def out(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Results of the runs that name no place for them; made by the first of them."""
        return silu_places(self.shape["tokens"], self.shape["k"], self.device)

    def run(
        self, *, x: torch.Tensor, limit: float, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x bf16 [T ≤ tokens, 2K] → (y bf16 [T, K], code uint8 [T, K], scale uint8 [T, K/128]): `out`, or buffers of
        the plan that its next run overwrites.
        """
        tokens, k = x.shape[0], self.shape["k"]
        check_tensor("x", x, torch.bfloat16, (tokens, 2 * k))
        if tokens > self.shape["tokens"]:
            raise ValueError(f"x has {tokens} tokens, the plan holds {self.shape['tokens']}")
        y, code, scale = (self.out[0][:tokens], self.out[1][:tokens], self.out[2][:tokens]) if out is None else out
        check_tensor("y", y, torch.bfloat16, (tokens, k))
        check_tensor("code", code, torch.uint8, (tokens, k))
        check_tensor("scale", scale, torch.uint8, (tokens, k // 128))
        if tokens:
            c = select(self.arch, tokens, k)
            _silu_mul_quant[-(-tokens // c.block_t), -(-k // c.block_k)](
                x_ptr=x, y_ptr=y, code_ptr=code.view(torch.float8_e4m3fn), scale_ptr=scale, tokens=tokens,
                limit=float(limit), K=k, BLOCK_T=c.block_t, BLOCK_K=c.block_k,
                num_warps=c.num_warps, num_stages=1,
            )  # fmt: skip
        return y, code, scale

    def warmup(self) -> None:
        """Run once per configuration that the token count can select."""
        k = self.shape["k"]
        for tokens in {min(self.shape["tokens"], 1), self.shape["tokens"]}:
            x = torch.zeros((tokens, 2 * k), dtype=torch.bfloat16, device=self.device)
            self.run(x=x, limit=10.0, out=silu_places(tokens, k, self.device))


def silu_places(tokens: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for the results of `silu_mul_quant`: y bf16 [T, K], then code and scale."""
    return torch.empty((tokens, k), dtype=torch.bfloat16, device=device), *places(tokens, k, device)


def places(tokens: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the results: code uint8 [T, K] and scale uint8 [T, K/128]."""
    code = torch.empty((tokens, k), dtype=torch.uint8, device=device)
    return code, torch.empty((tokens, k // 128), dtype=torch.uint8, device=device)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any token count; K must be a multiple of 128."""
    if params["k"] % 128:
        return Support(f"fp8_quant: k is {params['k']}, needs a multiple of 128")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn((params["tokens"], params["k"]), generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (params["tokens"], 1), generator=generator).float())
    return {"x": x.to(torch.bfloat16).to(device)}


def _silu_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    x = _inputs({"tokens": params["tokens"], "k": 2 * params["k"]}, device, seed)["x"]
    return {"x": x, "limit": params["limit"]}


OPERATIONS = (
    Operation(
        name="fp8_quant",
        summary="per-token 1×128 FP8 quantisation with UE8M0 scales",
        folder="fp8_quant",
        outputs=("code", "scale"),
        cases=(
            case("empty", "cpu gpu", tokens=0, k=256),
            case("one", "cpu gpu bench", tokens=1, k=4096),
            case("odd", "cpu gpu", tokens=61, k=384),
            case("prefill", "gpu bench", tokens=4096, k=7168),
        ),
        make_inputs=_inputs,
        reference=fp8_quant,
        plan=lambda p, device, arch: QuantPlan(p["tokens"], p["k"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (3 * p["k"] + p["k"] // 128),
        flops=lambda p: 0,
        tolerance=(Tolerance(bitwise=True), Tolerance(bitwise=True)),
    ),
    Operation(
        name="silu_mul_quant",
        summary="clamped SwiGLU between an expert's products, and its FP8 quantisation",
        folder="fp8_quant",
        outputs=("y", "value"),
        cases=(
            case("empty", "cpu gpu", tokens=0, k=128, limit=10.0),
            case("one", "cpu gpu bench", tokens=1, k=2048, limit=10.0),
            case("odd", "cpu gpu", tokens=61, k=384, limit=10.0),
            case("open", "cpu gpu", tokens=66, k=128, limit=float("inf")),
            case("prefill", "gpu bench", tokens=4096, k=2048, limit=10.0),
        ),
        make_inputs=_silu_inputs,
        reference=silu_mul_quant,
        plan=lambda p, device, arch: SiluMulPlan(p["tokens"], p["k"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (7 * p["k"] + p["k"] // 128),
        flops=lambda p: 0,
        # A value next to a rounding boundary may fall on the other side of the float64 one's: one step of E4M3.
        tolerance=(
            Tolerance(absolute=1e-6, relative=2.0**-8),
            Tolerance(relative=2.0**-3, absolute=1e-6, rms=5e-3, mismatch=1e-3),
        ),
        compared=lambda outputs: (outputs[0], *as_numbers(outputs[1:])),
    ),
)
