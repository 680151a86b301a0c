"""Configurations, plans and registry rows of the hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4_kernels.arch import Arch, multiprocessors
from dsv4_kernels.fp8.api import CodesPlan, WithCodes
from dsv4_kernels.interpreter import interpreting
from dsv4_kernels.mhc.kernel import mhc_apply_kernel, mhc_mix_kernel, mhc_planes_kernel
from dsv4_kernels.mhc.reference import (
    head_inputs,
    mhc_head,
    mhc_post,
    mhc_post_pre,
    mhc_post_pre_o8,
    mhc_pre,
    mhc_pre_broadcast,
    post_inputs,
    post_pre_inputs,
    pre_broadcast_inputs,
    pre_inputs,
)
from dsv4_kernels.numerics import as_numbers
from dsv4_kernels.plan import BF16, F32, SUPPORTED, Input, Launcher, Size, Support, next_power_of_2
from dsv4_kernels.registry import Operation, Tolerance, case


@dataclass(frozen=True)
class MixConfig:
    """One program of the mix kernel takes `block_t` tokens and `span` columns of each stream, `block_c` at a time.

    `apart`: the terms of fn are made first, by a kernel of its own, instead of in every block of tokens. A program of
    the apply kernel for post and comb takes `coefficients` tokens, 0 as many as fit its registers with all splits at
    once.
    """

    block_t: int
    block_c: int
    span: int
    num_warps: int
    num_stages: int
    apart: bool = False
    apply_warps: int = 8
    coefficients: int = 0


MAX_SPLITS = 128
# Values of fn that one program takes apart.
PLANES_BLOCK = 1024
# Up to here programs are few and short, and the products are those of the least tile.
FEW_TOKENS = 256


def select(arch: Arch, tokens: int, hidden: int, multiprocessors: int) -> MixConfig:
    """Columns of few tokens are cut until every multiprocessor has a program.

    Of more, small tiles hide most of the time to memory: of 20 candidates for 1,024 to 8,192 tokens and both hidden
    sizes sm_90's was the fastest each time (H100, 2026-11-24). On SM12x, where none was timed, Triton 3.9 would keep
    two of its registers in local memory; nothing of these tiles is there.
    """
    if tokens <= FEW_TOKENS:
        return MixConfig(16, 32, _span(32, -(-tokens // 16), hidden, multiprocessors), 4, 2)
    if arch is Arch.SM_90:
        return MixConfig(32, 32, 512, 4, 2, apart=True, coefficients=32)
    return MixConfig(64, 32, 512, 8, 2, apart=True, coefficients=32)


def _span(block_c: int, blocks: int, hidden: int, programs: int) -> int:
    """Columns of one program: spans that halve from the whole row down make few different kernels, all warmed up."""
    wanted = max(1, min(-(-programs // blocks), MAX_SPLITS))
    span = block_c
    while -(-hidden // span) > wanted:
        span *= 2
    return span


def coefficient_tile(config: MixConfig, splits: int) -> tuple[int, int]:
    """Return the splits and tokens that a program for post and comb loads at once, a tile that registers hold."""
    if config.coefficients:
        return 1, config.coefficients
    return next_power_of_2(splits), max(1, min(16, 32 // next_power_of_2(splits)))


_mhc_apply = Launcher(mhc_apply_kernel)
_mhc_mix = Launcher(mhc_mix_kernel)
_mhc_planes = Launcher(mhc_planes_kernel)


class MhcPlan(CodesPlan):
    """Buffers of one form for up to `tokens` tokens of `hidden` values; see the package docstring for `run`.

    Results are views of the plan's buffers, valid until its next run, and may be that run's inputs.
    `norms`: whether runs come with a norm's weight; both are compiled unless there is one kind.
    `quantised`: runs of up to so many tokens quantise y too, see `codes`.
    """

    def __init__(
        self,
        operation: str,
        tokens: int,
        hidden: int,
        device: torch.device,
        arch: Arch | None = None,
        norms: tuple[bool, ...] = (True, False),
        quantised: int = 0,
    ) -> None:
        quantised = min(quantised, tokens)
        shape = {"tokens": tokens, "hidden": hidden, "quantised": quantised}
        super().__init__(operation, shape, device, arch, is_supported)
        self.tokens, self.hidden, self.norms = tokens, hidden, norms
        self.inputs = self.declare(**_declared(operation, tokens, hidden))
        self.early = not interpreting()
        self.multiprocessors = multiprocessors(device, self.arch)
        self.residual = torch.empty((tokens, 4, hidden), dtype=BF16, device=device)
        self.y = torch.empty((tokens, hidden), dtype=BF16, device=device)
        self.make_codes(quantised, hidden)
        self.post = torch.empty((tokens, 4, 1), dtype=F32, device=device)
        self.comb = torch.empty((tokens, 4, 4), dtype=F32, device=device)
        configs = [self._config(t) for t in range(1, tokens + 1)]
        rows = max((t * self._splits(c) for t, c in enumerate(configs, 1)), default=0)
        self.part = torch.empty((rows * 32,), dtype=F32, device=device)
        terms = 3 * _FN_VALUES[operation] * hidden if any(c.apart for c in configs) else 0
        self.terms = torch.empty((terms,), dtype=BF16, device=device)

    def _config(self, tokens: int) -> MixConfig:
        return select(self.arch, tokens, self.hidden, self.multiprocessors)

    def _splits(self, config: MixConfig) -> int:
        return -(-self.hidden // config.span)

    def _fn(self, config: MixConfig, fn: torch.Tensor, streams: int) -> torch.Tensor:
        """Return fn as the mix kernel reads it: as it is or, of shape [3, rows, columns], as its terms."""
        rows, columns = fn.shape[0], streams * self.hidden
        if not config.apart:
            return fn
        values = rows * columns
        _mhc_planes[(-(-values // PLANES_BLOCK),)](
            fn_ptr=fn, out_ptr=self.terms, N=values, BLOCK=PLANES_BLOCK, num_warps=4
        )
        return self.terms.view(3, rows, columns)

    def _mix(
        self, config: MixConfig, tokens: int, residual: torch.Tensor, fn: torch.Tensor | None, streams: int,
        post: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Launch the mix kernel for `tokens` tokens; post: (x, post_layer_mix, comb_res_mix) or ()."""
        x, post_mix, comb_mix = post or (residual, self.post, self.comb)
        rows = 0 if fn is None else fn.shape[-2]
        blocks, splits = -(-tokens // config.block_t), self._splits(config)
        _mhc_mix[(splits, blocks) if rows else (blocks, splits)](
            x_ptr=x, residual_ptr=residual, post_ptr=post_mix,
            comb_ptr=comb_mix, fn_ptr=residual if fn is None else fn,
            out_ptr=self.residual, part_ptr=self.part, tokens=tokens, H=self.hidden, STREAMS=streams,
            ROWS=rows, POST=bool(post), SPAN=config.span, BT=config.block_t, BC=config.block_c,
            STAGES=config.num_stages, APART=rows > 0 and config.apart, EARLY=self.early and rows > 0,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def _apply(
        self, config: MixConfig, tokens: int, residual: torch.Tensor, scale: torch.Tensor,
        base: torch.Tensor, streams: int, weight: torch.Tensor | None, eps: tuple[float, float, float, float],
        post_mult: float, repeat: int,
    ) -> None:  # fmt: skip
        """Launch the apply kernel; eps: of the mix's norm, of pre, of Sinkhorn, of the layer's norm."""
        head = self.operation == "mhc_head"
        splits = self._splits(config)
        block_s, block_t = coefficient_tile(config, splits)
        programs = tokens if head else tokens + -(-tokens // block_t)
        _mhc_apply[(programs,)](
            part_ptr=self.part, scale_ptr=scale, base_ptr=base, residual_ptr=residual,
            weight_ptr=residual if weight is None else weight, stream_ptr=self.residual,
            post_ptr=self.post, comb_ptr=self.comb, y_ptr=self.y,
            code_ptr=self._code.view(torch.float8_e4m3fn), code_scale_ptr=self._scale,
            tokens=tokens, splits=splits, rms_eps=eps[0], pre_eps=eps[1], sinkhorn_eps=eps[2], post_mult=post_mult,
            norm_eps=eps[3], repeat=repeat, H=self.hidden, STREAMS=streams, NORM=weight is not None, HEAD=head,
            BS=next_power_of_2(splits), CS=block_s, CT=block_t, BH=next_power_of_2(self.hidden),
            QUANT=tokens <= self.quantised,
            EARLY=self.early, num_warps=config.apply_warps, num_stages=1, launch_pdl=self.early,
        )  # fmt: skip

    def _both(
        self, residual: torch.Tensor, fn: torch.Tensor, streams: int, post: tuple[Any, ...], *apply: Any
    ) -> torch.Tensor:
        """Launch both kernels and return y; apply: further arguments of `_apply`."""
        tokens = residual.shape[0]
        config = self._config(tokens)
        self._mix(config, tokens, residual, self._fn(config, fn, streams), streams, post)
        self._apply(config, tokens, self.residual if post else residual, *apply)
        return self.y[:tokens]

    def warmup(self) -> None:
        """Every configuration that a token count up to the planned one selects."""
        for tokens in self.first_of_each(self.tokens, lambda t: (self._config(t), t <= self.quantised)):
            for norm in self.norms:
                params = {"tokens": tokens, "hidden": self.hidden, "norm": norm}
                self.run(**_INPUTS[self.operation](params, self.device, 0))


def _declared(operation: str, tokens: int, hidden: int) -> dict[str, Input]:
    """Return the tensors of a run of `operation`."""
    head, broadcast = operation == "mhc_head", operation == "mhc_pre_broadcast"
    streams, rows = (() if broadcast else (4,)), 4 if head else 24
    declared = {"hs_flat" if head else "residual": Input(BF16, (Size("tokens", most=tokens), *streams, hidden))}
    if operation in ("mhc_post", "mhc_post_pre"):
        declared |= {
            "x": Input(BF16, ("tokens", hidden)),
            "post_layer_mix": Input(F32, ("tokens", 4, 1)),
            "comb_res_mix": Input(F32, ("tokens", 4, 4)),
        }
    if operation == "mhc_post":
        return declared
    declared["fn_broadcast" if broadcast else "fn"] = Input(F32, (rows, hidden if broadcast else 4 * hidden))
    declared |= {"hc_scale": Input(F32, (1 if head else 3,)), "hc_base": Input(F32, (rows,))}
    return declared if head else declared | {"norm_weight": Input(BF16, (hidden,), optional=True)}


class PrePlan(MhcPlan):
    """`mhc_pre`, `mhc_pre_broadcast` and `mhc_post_pre`."""

    def run(
        self,
        *,
        residual: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        fn: torch.Tensor | None = None,
        fn_broadcast: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        post_layer_mix: torch.Tensor | None = None,
        comb_res_mix: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[torch.Tensor, ...]:
        """Return (post, comb, y), with the new residual in front for the broadcast and the seam."""
        broadcast, seam = self.operation == "mhc_pre_broadcast", self.operation == "mhc_post_pre"
        streams = 1 if broadcast else 4
        given = {
            "residual": residual, "x": x, "post_layer_mix": post_layer_mix, "comb_res_mix": comb_res_mix, "fn": fn,
            "fn_broadcast": fn_broadcast, "hc_scale": hc_scale, "hc_base": hc_base, "norm_weight": norm_weight,
        }  # fmt: skip
        self.inputs.check(**{name: given[name] for name in self.inputs.declared})
        tokens = int(residual.shape[0])
        y = self.y[:tokens]
        weights = fn_broadcast if broadcast else fn
        if tokens and weights is not None:
            post: tuple[Any, ...] = (x, post_layer_mix, comb_res_mix) if seam else ()
            eps = (rms_eps, hc_pre_eps, hc_sinkhorn_eps, norm_eps)
            last = (streams, norm_weight, eps, hc_post_mult_value, sinkhorn_repeat)
            y = self._both(residual, weights, streams, post, hc_scale, hc_base, *last)
        results = (self.post[:tokens], self.comb[:tokens], y)
        return (self.residual[:tokens], *results) if broadcast or seam else results


class SeamO8Plan(WithCodes, PrePlan):
    """`mhc_post_pre_o8`."""


class PostPlan(MhcPlan):
    """`mhc_post`."""

    def _config(self, tokens: int) -> MixConfig:
        # It has no products, so its tiles are free: enough columns in flight, one token.
        return MixConfig(1, 1024, 1024, 4, 1)

    def run(
        self,
        *,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
    ) -> torch.Tensor:
        """Return the new residual bf16 [T, 4, H]."""
        self.inputs.check(residual=residual, x=x, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix)
        tokens = int(residual.shape[0])
        if tokens:
            self._mix(self._config(tokens), tokens, residual, None, 4, (x, post_layer_mix, comb_res_mix))
        return self.residual[:tokens]


class HeadPlan(MhcPlan):
    """`mhc_head`."""

    def run(
        self,
        *,
        hs_flat: torch.Tensor,
        fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        rms_eps: float,
        hc_eps: float,
    ) -> torch.Tensor:
        """Return bf16 [T, H]."""
        self.inputs.check(hs_flat=hs_flat, fn=fn, hc_scale=hc_scale, hc_base=hc_base)
        if not hs_flat.shape[0]:
            return self.y[:0]
        return self._both(hs_flat, fn, 4, (), hc_scale, hc_base, 4, None, (rms_eps, hc_eps, 0.0, 0.0), 0.0, 1)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any token count; rows must start at multiples of 32 bytes and a row of one stream must fit the registers."""
    if params["hidden"] % 16 or not 0 < params["hidden"] <= 16384:
        return Support(f"mhc: hidden is {params['hidden']}, needs a multiple of 16 up to 16384")
    if params.get("quantised") and params["hidden"] % 128:
        return Support(f"mhc: hidden is {params['hidden']}, needs a multiple of 128 to be quantised")
    return SUPPORTED


_INPUTS = {
    "mhc_pre": pre_inputs,
    "mhc_pre_broadcast": pre_broadcast_inputs,
    "mhc_post_pre": post_pre_inputs,
    "mhc_post_pre_o8": post_pre_inputs,
    "mhc_post": post_inputs,
    "mhc_head": head_inputs,
}
_CASES = (
    case("empty", "cpu gpu", tokens=0, hidden=64, norm=True),
    case("one", "cpu gpu", tokens=1, hidden=256, norm=True),
    case("odd", "cpu gpu", tokens=19, hidden=144, norm=False),
    case("many", "cpu gpu", tokens=257, hidden=64, norm=True),
    case("flash-t1", "gpu bench", tokens=1, hidden=4096, norm=True),
    case("flash-t8", "gpu bench", tokens=8, hidden=4096, norm=True),
    case("flash-t128", "gpu bench", tokens=128, hidden=4096, norm=True),
    case("flash-t4096", "gpu bench", tokens=4096, hidden=4096, norm=True),
    case("pro-t1", "gpu bench", tokens=1, hidden=7168, norm=True),
    case("pro-t4096", "gpu bench", tokens=4096, hidden=7168, norm=True),
)
_O8_CASES = (
    case("empty", "cpu gpu", tokens=0, hidden=128, norm=True),
    case("one", "cpu gpu", tokens=1, hidden=384, norm=True),
    case("odd", "cpu gpu", tokens=19, hidden=128, norm=False),
    *(one for one in _CASES if "bench" in one.tags),
)
# Tensor cores add float32 with truncation: on an H100 up to 1.0e-4 at 4096 tokens, with an RMS of 2e-5 at most
# (2026-11-23). The TF32 product of DeepGEMM, which vLLM takes, was seen at 2e-4 on GB10.
_COEFFICIENT = Tolerance(absolute=2e-4, rms=5e-5)
_ROUNDED = Tolerance(absolute=2e-4, relative=2.0**-8, mismatch=1e-3, rms=3e-3)
# y of the seam comes from the rounded residual, which may fall on the other side of a boundary than the reference's.
_AFTER_ROUNDED = Tolerance(absolute=2e-4, relative=2.0**-8, mismatch=2e-3, rms=3e-3)
# One step of E4M3 where y was rounded to the other side.
_QUANTISED = Tolerance(relative=2.0**-3, absolute=1e-4, mismatch=2e-3, rms=5e-3)
_SEAM = ("residual", "post", "comb", "y")
_SEAM_LIMITS = (_ROUNDED, _COEFFICIENT, _COEFFICIENT, _AFTER_ROUNDED)
_RESULTS = {
    "mhc_pre": (("post", "comb", "y"), (_COEFFICIENT, _COEFFICIENT, _ROUNDED)),
    "mhc_pre_broadcast": (
        ("residual", "post", "comb", "y"),
        (Tolerance(bitwise=True), _COEFFICIENT, _COEFFICIENT, _ROUNDED),
    ),
    "mhc_post_pre": (_SEAM, _SEAM_LIMITS),
    "mhc_post_pre_o8": ((*_SEAM, "value"), (*_SEAM_LIMITS, _QUANTISED)),
    "mhc_post": (("residual",), (_ROUNDED,)),
    "mhc_head": (("y",), (_ROUNDED,)),
}
# Rows of H bf16 values that each form reads and writes per token, and products per value of the residual.
_ROWS = {"mhc_pre": 5, "mhc_pre_broadcast": 6, "mhc_post_pre": 10, "mhc_post": 9, "mhc_head": 5}
_PRODUCTS = {"mhc_pre": 24, "mhc_pre_broadcast": 6, "mhc_post_pre": 29, "mhc_post": 5, "mhc_head": 4}
_FN_VALUES = {"mhc_pre": 96, "mhc_pre_broadcast": 24, "mhc_post_pre": 96, "mhc_post": 0, "mhc_head": 16}


def _seam_o8() -> Operation:
    seam = _row("mhc_post_pre", PrePlan, "", mhc_post_pre)
    return replace(
        seam,
        name="mhc_post_pre_o8",
        summary="hyper-connections between two sublayers, y quantised too",
        outputs=_RESULTS["mhc_post_pre_o8"][0],
        tolerance=_RESULTS["mhc_post_pre_o8"][1],
        cases=_O8_CASES,
        reference=mhc_post_pre_o8,
        plan=lambda p, device, arch: SeamO8Plan(
            "mhc_post_pre", p["tokens"], p["hidden"], device, arch, quantised=p["tokens"]
        ),
        is_supported=lambda p, arch: is_supported({**p, "quantised": p["tokens"]}, arch),
        nbytes=lambda p: seam.nbytes(p) + p["tokens"] * (p["hidden"] + p["hidden"] // 128),
        compared=lambda outputs: (*outputs[:-2], *as_numbers(outputs[-2:])),
    )


def _row(name: str, plan: type[MhcPlan], summary: str, reference: Any) -> Operation:
    return Operation(
        name=name,
        summary=summary,
        folder="mhc",
        outputs=_RESULTS[name][0],
        cases=_CASES,
        make_inputs=_INPUTS[name],
        reference=reference,
        plan=lambda p, device, arch: plan(name, p["tokens"], p["hidden"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["hidden"] * (2 * _ROWS[name] * p["tokens"] + 4 * _FN_VALUES[name]) + 160 * p["tokens"],
        flops=lambda p: 8 * p["tokens"] * p["hidden"] * (_PRODUCTS[name] + 1),
        tolerance=_RESULTS[name][1],
    )


OPERATIONS = (
    _row("mhc_pre", PrePlan, "hyper-connections before a sublayer, with its RMSNorm", mhc_pre),
    _row("mhc_pre_broadcast", PrePlan, "hyper-connections before the first sublayer", mhc_pre_broadcast),
    _row("mhc_post_pre", PrePlan, "hyper-connections between two sublayers", mhc_post_pre),
    _seam_o8(),
    _row("mhc_post", PostPlan, "hyper-connections after a sublayer", mhc_post),
    _row("mhc_head", HeadPlan, "hyper-connections' collapse to one stream", mhc_head),
)
