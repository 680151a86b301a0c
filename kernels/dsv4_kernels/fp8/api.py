"""Torch references, configurations, plans and registry rows of the quantiser and the block-scaled products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4_kernels.arch import Arch, Table, load_table, multiprocessors, native_mx
from dsv4_kernels.fp8.kernel import fp8_gemm_kernel, fp8_quant_kernel, silu_mul_quant_kernel
from dsv4_kernels.numerics import as_numbers, dequantize_blocks, dequantize_e4m3, quantize_e4m3, seeded
from dsv4_kernels.plan import BF16, SUPPORTED, U8, Input, Launcher, Plan, Size, Support, counters
from dsv4_kernels.registry import Case, Operation, Tolerance, as_outputs, case

FLOOR = 1e-4


def fp8_quant(x: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [T, K] → (code uint8 [T, K], scale uint8 [T, K/128]); `exact` changes nothing, both outputs are bytes."""
    return quantize_e4m3(x, 128, FLOOR)


def silu_mul_quant(x: torch.Tensor, limit: float, exact: bool = False) -> tuple[torch.Tensor, ...]:
    """x bf16 [T, 2K] → (y bf16 [T, K], code uint8 [T, K], scale uint8 [T, K/128]); exact: y float64."""
    gate, up = x.double().chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return (y if exact else y.bfloat16(), *fp8_quant(y.bfloat16()))


def wo_a_einsum(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> torch.Tensor:
    """a uint8 [T, G, K], a_scale [T, G, K/128], w uint8 [G, N, K], w_scale [G, ⌈N/128⌉, K/128] → bf16 [T, G, N]."""
    wide = dequantize_e4m3(a, a_scale, 128)
    out = torch.stack([wide[:, g] @ dequantize_blocks(w[g], w_scale[g]).T for g in range(w.shape[0])], 1)
    return out if exact else out.to(torch.bfloat16)


def wo_a_einsum_o8(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return `wo_a_einsum` bf16 [T, G, N], and its code uint8 [T, G·N] and scale uint8 [T, G·N/128]."""
    out = wo_a_einsum(a, a_scale, w, w_scale, exact)
    return (out, *quantize_e4m3(out.to(torch.bfloat16).flatten(1), 128, 1e-4))


def fp8_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> torch.Tensor:
    """a uint8 [T, K], a_scale [T, K/128], w uint8 [N, K], w_scale [⌈N/128⌉, K/128] → bf16 [T, N]."""
    return wo_a_einsum(a[:, None], a_scale[:, None], w[None], w_scale[None], exact)[:, 0]


@dataclass(frozen=True)
class QuantConfig:
    """One program quantises `block_t` tokens × `block_k` values."""

    block_t: int
    block_k: int
    num_warps: int


def select_quant(arch: Arch, tokens: int, k: int) -> QuantConfig:
    """Small batches are spread over K so that every multiprocessor has work; large ones keep a whole row segment per
    program.
    """
    if tokens <= 64:
        return QuantConfig(1, 512, 1)
    return QuantConfig(4, 512, 4)


_fp8_quant = Launcher(fp8_quant_kernel)
_silu_mul_quant = Launcher(silu_mul_quant_kernel)


class _RowsPlan(Plan):
    """Up to `tokens` rows of `k` values."""

    def __init__(self, tokens: int, k: int, device: torch.device, arch: Arch | None = None) -> None:
        super().__init__(self.operation, {"tokens": tokens, "k": k}, device, arch, quant_supported)
        silu = self.operation == "silu_mul_quant"
        self.inputs = self.declare(
            x=Input(BF16, (Size("tokens", most=tokens), 2 * k if silu else k)),
            **({"y": Input(BF16, ("tokens", k))} if silu else {}),
            code=Input(U8, ("tokens", k)),
            scale=Input(U8, ("tokens", k // 128)),
        )

    def warmup(self) -> None:
        """Run once per configuration that the token count can select."""
        limit = {"limit": 10.0} if "y" in self.inputs.declared else {}
        for tokens in {min(self.shape["tokens"], 1), self.shape["tokens"]}:
            x, *out = self.inputs.zeros(tokens=tokens).values()
            self.run(x=x, out=tuple(out), **limit)


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
        code, scale = (self.out[0][:tokens], self.out[1][:tokens]) if out is None else out
        self.inputs.check(x=x, code=code, scale=scale)
        if tokens:
            c = select_quant(self.arch, tokens, k)
            grid = (-(-tokens // c.block_t), -(-k // c.block_k))
            _fp8_quant[grid](
                x_ptr=x, code_ptr=code.view(torch.float8_e4m3fn), scale_ptr=scale, tokens=tokens, K=k,
                BLOCK_T=c.block_t, BLOCK_K=c.block_k,
                num_warps=c.num_warps, num_stages=1,
            )  # fmt: skip
        return code, scale


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
        y, code, scale = (self.out[0][:tokens], self.out[1][:tokens], self.out[2][:tokens]) if out is None else out
        self.inputs.check(x=x, y=y, code=code, scale=scale)
        if tokens:
            c = select_quant(self.arch, tokens, k)
            _silu_mul_quant[-(-tokens // c.block_t), -(-k // c.block_k)](
                x_ptr=x, y_ptr=y, code_ptr=code.view(torch.float8_e4m3fn), scale_ptr=scale, tokens=tokens,
                limit=float(limit), K=k, BLOCK_T=c.block_t, BLOCK_K=c.block_k,
                num_warps=c.num_warps, num_stages=1,
            )  # fmt: skip
        return y, code, scale


def silu_places(tokens: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for the results of `silu_mul_quant`: y bf16 [T, K], then code and scale."""
    return torch.empty((tokens, k), dtype=torch.bfloat16, device=device), *places(tokens, k, device)


def places(tokens: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the results: code uint8 [T, K] and scale uint8 [T, K/128]."""
    code = torch.empty((tokens, k), dtype=torch.uint8, device=device)
    return code, torch.empty((tokens, k // 128), dtype=torch.uint8, device=device)


class CodesPlan(Plan):
    """A plan whose runs of up to `quantised` tokens also quantise a result, as `fp8_quant` does."""

    def make_codes(self, quantised: int, k: int) -> None:
        """Allocate the codes of rows of `k` values."""
        self.quantised = quantised
        self._code, self._scale = places(quantised, k, self.device)

    def codes(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the codes of the last run, of `tokens` tokens: uint8 [T, K] and scales uint8 [T, K/128], views of the
        plan's buffers. None if a run of so many does not quantise.
        """
        return (self._code[:tokens], self._scale[:tokens]) if tokens <= self.quantised else None


class WithCodes(CodesPlan):
    """Mixin of plans for operations with codes among their results: every run returns them last."""

    def run(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the results, then code and scale."""
        results = as_outputs(super().run(**inputs))  # type: ignore[safe-super]
        return *results, *(self.codes(results[0].shape[0]) or ())


def quant_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any token count; K must be a multiple of 128."""
    if params["k"] % 128:
        return Support(f"fp8_quant: k is {params['k']}, needs a multiple of 128")
    return SUPPORTED


def _quant_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn((params["tokens"], params["k"]), generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (params["tokens"], 1), generator=generator).float())
    return {"x": x.to(torch.bfloat16).to(device)}


def _silu_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    x = _quant_inputs({"tokens": params["tokens"], "k": 2 * params["k"]}, device, seed)["x"]
    return {"x": x, "limit": params["limit"]}


_FP8_QUANT = (
    Operation(
        name="fp8_quant",
        summary="per-token 1×128 FP8 quantisation with UE8M0 scales",
        folder="fp8",
        outputs=("code", "scale"),
        cases=(
            case("empty", "cpu gpu", tokens=0, k=256),
            case("one", "cpu gpu bench", tokens=1, k=4096),
            case("odd", "cpu gpu", tokens=61, k=384),
            case("prefill", "gpu bench", tokens=4096, k=7168),
        ),
        make_inputs=_quant_inputs,
        reference=fp8_quant,
        plan=lambda p, device, arch: QuantPlan(p["tokens"], p["k"], device, arch),
        is_supported=quant_supported,
        nbytes=lambda p: p["tokens"] * (3 * p["k"] + p["k"] // 128),
        tolerance=(Tolerance(bitwise=True), Tolerance(bitwise=True)),
    ),
    Operation(
        name="silu_mul_quant",
        summary="clamped SwiGLU between an expert's products, and its FP8 quantisation",
        folder="fp8",
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
        is_supported=quant_supported,
        nbytes=lambda p: p["tokens"] * (7 * p["k"] + p["k"] // 128),
        # A value next to a rounding boundary may fall on the other side of the float64 one's: one step of E4M3.
        tolerance=(
            Tolerance(absolute=1e-6, relative=2.0**-8),
            Tolerance(relative=2.0**-3, absolute=1e-6, rms=5e-3, mismatch=1e-3),
        ),
        compared=lambda outputs: (outputs[0], *as_numbers(outputs[1:])),
    ),
)


# Fewer blocks of 128 than this per share are not worth another program.
LEAST_BLOCKS = 4
GROUP = 8
# Most tokens whose results a product quantises as it stores them, in tiles of as many rows as a scale stands for.
QUANTISED_TOKENS = 16
QUANTISED_N = 128
# Weight rows of a tile of the sm_90 body for many tokens.
HOPPER_N = 128


@dataclass(frozen=True)
class GemmConfig:
    """One program: `block_n` weights rows × `block_m` tokens. `waves`: programs per multiprocessor that splitting K
    aims at.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"m{self.block_m}-n{self.block_n}-w{self.num_warps}-s{self.num_stages}"


@dataclass(frozen=True)
class HopperConfig:
    """A program of the sm_90 body for many tokens: `warpgroups` × 64 tokens × 128 weight rows. `cost`: time of a tile
    per token, in units of the others' of the table.
    """

    warpgroups: int
    num_stages: int
    cost: float

    @property
    def block_m(self) -> int:
        """Tokens of a tile."""
        return 64 * self.warpgroups

    def tiles(self, tokens: int, n: int, groups: int) -> int:
        """Tiles of a product."""
        return -(-tokens // self.block_m) * -(-n // HOPPER_N) * groups

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"m{self.block_m}-n{HOPPER_N}-s{self.num_stages}"


@functools.cache
def table(arch: Arch) -> Table[GemmConfig]:
    """The rows of `arch`, by tokens, n and k."""
    return load_table(Path(__file__).parent, arch, "fp8_gemm", GemmConfig)


def select(arch: Arch, tokens: int, n: int, k: int, quantised: bool = False) -> GemmConfig:
    """The configuration for one product; `n` counts the rows of all groups."""
    config = table(arch).select(tokens=tokens, n=n, k=k)
    return replace(config, block_n=QUANTISED_N) if quantised else config


def hopper_from(arch: Arch, n: int, k: int, groups: int) -> int | None:
    """Least tokens from which the body of specialised warps computes a product on a GPU; None where it never does.

    It takes two blocks of 128 values of k a step, and its tiles of weights may run past the end of the last group only.
    """
    if arch is not Arch.SM_90 or k % 256 or (groups > 1 and n % HOPPER_N):
        return None
    return min(row.when["tokens"][0] for row in hopper_table().rows)


@functools.cache
def hopper_table() -> Table[HopperConfig]:
    """The rows of the sm_90 body for many tokens, by tokens, k and groups."""
    return load_table(Path(__file__).parent, Arch.SM_90, "fp8_gemm_hopper", HopperConfig)


def select_hopper(tokens: int, n: int, k: int, groups: int, multiprocessors: int) -> HopperConfig:
    """Of the rows that hold the shape, the one whose tiles are done first: all multiprocessors take one tile at a time,
    the taller tile takes longer.
    """

    def time(c: HopperConfig) -> float:
        return -(-c.tiles(tokens, n, groups) // multiprocessors) * c.block_m * c.cost

    shape = {"tokens": tokens, "k": k, "groups": groups}
    return min((row.config for row in hopper_table().rows if row.holds(shape)), key=time)


def split_count(config: GemmConfig, tokens: int, n: int, k: int, groups: int, multiprocessors: int) -> int:
    """Shares of K: as many as fill the machine, none shorter than `LEAST_BLOCKS` blocks, all but the last equal."""
    tiles = -(-n // config.block_n) * -(-max(1, tokens) // config.block_m) * groups
    blocks = k // 128
    wanted = max(1, min(blocks // LEAST_BLOCKS, config.waves * multiprocessors // tiles))
    return -(-blocks // -(-blocks // wanted))


def quantised_tokens(arch: Arch, n: int, k: int, groups: int, multiprocessors: int) -> int:
    """Return the most tokens whose results a product should quantise: none where tiles of `QUANTISED_N` rows are too
    few for the machine, since they take longer than a launch then.
    """
    config = select(arch, 1, n * groups, k, quantised=True)
    programs = -(-n // QUANTISED_N) * groups * split_count(config, 1, n, k, groups, multiprocessors)
    return QUANTISED_TOKENS if n % QUANTISED_N == 0 and programs >= multiprocessors else 0


_fp8_gemm = Launcher(fp8_gemm_kernel)


class GemmPlan(CodesPlan):
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
        operation = "fp8_gemm" if groups is None else "wo_a_einsum"
        shape = {"tokens": tokens, "n": n, "k": k, "groups": groups or 1}
        super().__init__(operation, shape, device, arch, is_supported)
        self.grouped = groups is not None
        lead = (groups,) if groups is not None else ()
        self.inputs = self.declare(
            a=Input(U8, (Size("tokens", most=tokens), *lead, k)),
            a_scale=Input(U8, ("tokens", *lead, k // 128)),
            w=Input(U8, (*lead, n, k)),
            w_scale=Input(U8, (*lead, -(-n // 128), k // 128)),
            out=Input(BF16, ("tokens", *lead, n)),
        )
        self.hopper_from = hopper_from(self.arch, n, k, groups or 1) if device.type != "cpu" else None
        self.mx = native_mx(self.arch)
        self.multiprocessors = multiprocessors(device, self.arch)
        if quantised and (quantised > QUANTISED_TOKENS or n % QUANTISED_N):
            raise ValueError(
                f"{self.operation}: results of {quantised} tokens with n {n} are to be quantised, needs up to "
                f"{QUANTISED_TOKENS} tokens and a multiple of {QUANTISED_N}"
            )
        self.make_codes(min(tokens, quantised), n * (groups or 1))
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
        tokens = a.shape[0]
        if out is None:
            out = self.out[:tokens] if self.grouped else self.out[:tokens, 0]
        self.inputs.check(a=a, a_scale=a_scale, w=w, w_scale=w_scale, out=out)
        if not tokens:
            return out
        c, splits = self._launch(tokens)
        n, k, groups = self.shape["n"], self.shape["k"], self.shape["groups"]
        codes, weights = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
        if isinstance(c, HopperConfig):
            descriptor, kernel = _hopper()
            kernel[(min(c.tiles(tokens, n, groups), self.multiprocessors),)](
                a_desc=descriptor(codes.view(tokens, groups * k), 64), a_scale_ptr=a_scale,
                w_desc=descriptor(weights.view(groups * n, k), HOPPER_N), w_scale_ptr=w_scale,
                out_desc=descriptor(out.view(tokens, groups * n), 64), tokens=tokens, n=n, blocks=k // 128,
                groups=groups, WARPGROUPS=c.warpgroups, GROUP=GROUP, STAGES=c.num_stages, num_warps=4,
            )  # fmt: skip
            return out
        _fp8_gemm[(-(-tokens // c.block_m) * -(-n // c.block_n), groups, splits)](
            a_ptr=codes, a_scale_ptr=a_scale, w_ptr=weights, w_scale_ptr=w_scale, out_ptr=out, part_ptr=self.part,
            count_ptr=self.count, code_ptr=self._code.view(torch.float8_e4m3fn), scale_ptr=self._scale, tokens=tokens,
            splits=splits, N=n, K=k, G=groups, BM=c.block_m, BN=c.block_n, GROUP=GROUP, SPLIT=splits > 1, MX=self.mx,
            QUANT=tokens <= self.quantised,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
        return out

    def warmup(self) -> None:
        """One token count for every pair of configuration and split or whole."""

        def kind(tokens: int) -> tuple[GemmConfig | HopperConfig, bool, bool]:
            config, splits = self._launch(tokens)
            return config, splits > 1, tokens <= self.quantised

        for tokens in self.first_of_each(self.shape["tokens"], kind):
            self.run(**self.inputs.zeros(tokens=tokens))


class EinsumO8Plan(WithCodes, GemmPlan):
    """`wo_a_einsum_o8`."""


@functools.cache
def _hopper() -> tuple[Callable[[torch.Tensor, int], Any], Any]:
    """Return the constructor of tensor descriptors and the kernel of specialised warps.

    Imported on use: other architectures need no Gluon.
    """
    from dsv4_kernels.fp8.hopper import descriptor, fp8_gemm_hopper_kernel

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
        folder="fp8",
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
    *_FP8_QUANT,
    *_PLAIN,
    Operation(
        name="wo_a_einsum_o8",
        summary="the grouped product of few tokens, its result quantised too",
        folder="fp8",
        outputs=("out", "value"),
        cases=(
            case("empty", "cpu gpu", tokens=0, groups=2, n=128, k=128),
            case("small", "cpu gpu", tokens=5, groups=3, n=256, k=256),
            case("split", "cpu gpu", tokens=11, groups=2, n=128, k=1024),
            *(case(f"flash-t{t}", "gpu bench", tokens=t, groups=8, n=1024, k=4096) for t in (1, 8, 16)),
        ),
        make_inputs=_inputs,
        reference=wo_a_einsum_o8,
        plan=lambda p, device, arch: EinsumO8Plan(
            p["tokens"], p["n"], p["k"], p["groups"], device, arch, quantised=p["tokens"]
        ),
        is_supported=is_supported,
        nbytes=lambda p: _nbytes(p) + p["tokens"] * p["groups"] * (p["n"] + p["n"] // 128),
        flops=lambda p: 2 * p["tokens"] * p["groups"] * p["n"] * p["k"],
        # Both sides are quantised: a sum beside a rounding boundary of bf16 is one step of E4M3, seldom.
        tolerance=(*_TOLERANCE, Tolerance(relative=2.0**-3, absolute=1e-6, rms=5e-3, mismatch=1e-3)),
        compared=lambda outputs: (outputs[0], *as_numbers(outputs[1:])),
    ),
)
