"""Torch references, configurations, plans and registry rows of the norms, RoPE and the cache entry of the window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.fp8.api import CodesPlan, WithCodes, fp8_quant
from dsv4_kernels.front.kernel import front_insert_kernel, front_norm_kernel
from dsv4_kernels.mla_cache.api import cache_input, mla_cache_write
from dsv4_kernels.mla_decode.reference import rope_inputs
from dsv4_kernels.numerics import as_numbers, ds_mla, rotate, seeded
from dsv4_kernels.plan import BF16, F32, I64, ROWS, SUPPORTED, Input, Launcher, Plan, Size, Support, next_power_of_2
from dsv4_kernels.registry import Operation, Tolerance, case


def _norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def front_norm(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (qr bf16 [T, Q], kv bf16 [T, 512]); exact: float64."""
    results = _norm(qr, eps) * q_weight.double(), _norm(kv, eps) * kv_weight.double()
    return results if exact else (results[0].bfloat16(), results[1].bfloat16())


def front_norm_o8(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    exact: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`front_norm`, and its qr quantised once it is rounded → (qr, kv, code, scale)."""
    results = front_norm(qr, kv, q_weight, kv_weight, eps, exact)
    return (*results, *fp8_quant(results[0].bfloat16()))


def front_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    padded_heads: int,
    eps: float,
    page: int,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the entries into kv_cache in place; return (q bf16 [T, padded_heads, 512], kv_cache); exact: q float64."""
    tokens, heads, _ = q.shape
    out = torch.zeros((tokens, padded_heads, 512), dtype=torch.float64, device=q.device)
    out[:, :heads] = rotate(_norm(q, eps), positions, cos_sin_cache)
    count = slot_mapping.shape[0]
    rows = rotate(kv[:count], positions[:count], cos_sin_cache)
    # Through float32, as every result is rounded.
    mla_cache_write(rows.float().bfloat16(), slot_mapping, kv_cache, page)
    return out if exact else out.bfloat16(), kv_cache


# Four heads are 64 bytes per thread of four warps.
BLOCK_HEADS = 4


_front_insert = Launcher(front_insert_kernel)
_front_norm = Launcher(front_norm_kernel)


class NormPlan(CodesPlan):
    """`front_norm` of up to `tokens` tokens with low rank `rank`; results are views of the plan's buffers.

    `quantised`: every run quantises its qr too.
    """

    operation = "front_norm"

    def __init__(
        self, tokens: int, rank: int, device: torch.device, arch: Arch | None = None, quantised: bool = False
    ) -> None:
        shape = {"tokens": tokens, "rank": rank, "quantised": quantised}
        super().__init__(self.operation, shape, device, arch, is_supported)
        self.tokens, self.rank = tokens, rank
        self.make_codes(tokens if quantised else 0, rank)
        self.inputs = self.declare(
            qr=Input(BF16, (Size("tokens", most=tokens), rank), strides=ROWS, step=8),
            kv=Input(BF16, ("tokens", 512), strides=ROWS, step=8),
            q_weight=Input(BF16, (rank,)),
            kv_weight=Input(BF16, (512,)),
        )
        self.qr = torch.empty((tokens, rank), dtype=BF16, device=device)
        self.kv = torch.empty((tokens, 512), dtype=BF16, device=device)

    def run(
        self, *, qr: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (qr bf16 [T, Q], kv bf16 [T, 512])."""
        tokens = int(qr.shape[0])
        self.inputs.check(qr=qr, kv=kv, q_weight=q_weight, kv_weight=kv_weight)
        if tokens:
            _front_norm[(tokens, 2)](
                qr_ptr=qr, kv_ptr=kv, q_weight_ptr=q_weight, kv_weight_ptr=kv_weight, qr_out_ptr=self.qr,
                kv_out_ptr=self.kv, code_ptr=self._code.view(torch.float8_e4m3fn), scale_ptr=self._scale,
                qr_stride=qr.stride(0), kv_stride=kv.stride(0), eps=eps, Q=self.rank,
                BLOCK=next_power_of_2(self.rank),
                QUANT=tokens <= self.quantised,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        return self.qr[:tokens], self.kv[:tokens]

    def warmup(self) -> None:
        """One launch; there is one configuration."""
        self.run(**_norm_inputs({"tokens": min(1, self.tokens), "rank": self.rank}, self.device, 0))


class NormO8Plan(WithCodes, NormPlan):
    """`front_norm_o8`."""


class InsertPlan(Plan):
    """`front_insert` of up to `tokens` tokens; q is a view of the plan's buffer.

    `own_output` False: the plan has no room for q, and every run names an `out`.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        padded_heads: int,
        device: torch.device,
        page: int = 64,
        stride: int | None = None,
        arch: Arch | None = None,
        own_output: bool = True,
    ) -> None:
        self.stride = stride or ds_mla(page).page_bytes
        shape = {"tokens": tokens, "heads": heads, "padded": padded_heads, "page": page, "stride": self.stride}
        super().__init__("front_insert", shape, device, arch, is_supported)
        self.tokens, self.heads, self.padded, self.page = tokens, heads, padded_heads, page
        self.inputs = self.declare(
            q=Input(BF16, (Size("tokens", most=tokens), heads, 512)),
            slot_mapping=Input(I64, (Size("slots", most="tokens"),)),
            kv=Input(BF16, (Size(least="slots"), 512)),
            kv_cache=cache_input(page, self.stride),
            positions=Input(I64, ("tokens",)),
            cos_sin_cache=Input(F32, (None, 64)),
            out=Input(BF16, ("tokens", padded_heads, 512)),
        )
        # Without room of its own one token's, which the warm-up writes.
        rows = tokens if own_output else min(1, tokens)
        self.q = torch.empty((rows, padded_heads, 512), dtype=BF16, device=device)

    def run(
        self,
        *,
        q: torch.Tensor,
        kv: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        padded_heads: int,
        eps: float,
        page: int,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the entries into kv_cache; return (q bf16 [T, P, 512], kv_cache); q is `out` where it is given."""
        tokens, count = int(q.shape[0]), int(slot_mapping.shape[0])
        if (padded_heads, page) != (self.padded, self.page):
            raise ValueError(f"{padded_heads} heads and page {page}, the plan was made for {self.shape}")
        rows = self.q[:tokens] if out is None else out
        self.inputs.check(
            q=q, slot_mapping=slot_mapping, kv=kv, kv_cache=kv_cache, positions=positions,
            cos_sin_cache=cos_sin_cache, out=rows,
        )  # fmt: skip
        if tokens:
            _front_insert[(tokens, 1 + -(-self.padded // BLOCK_HEADS))](
                q_ptr=q, kv_ptr=kv, cache_ptr=kv_cache, slot_ptr=slot_mapping, position_ptr=positions,
                cos_sin_ptr=cos_sin_cache, out_ptr=rows, count=count, eps=eps, H=self.heads, P=self.padded,
                PAGE=self.page, STRIDE=self.stride, BH=BLOCK_HEADS,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        return rows, kv_cache

    def warmup(self) -> None:
        """One launch; there is one configuration. No slot is written."""
        inputs = _insert_inputs({**self.shape, "tokens": min(1, self.tokens)}, self.device, 0)
        inputs["slot_mapping"].fill_(-1)
        self.run(**inputs)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any tokens; a low rank whose rows start at multiples of 16 bytes; at least as many padded heads as heads."""
    if "rank" in params and (params["rank"] % 8 or not 0 < params["rank"] <= 8192):
        return Support(f"front_norm: rank is {params['rank']}, needs a multiple of 8 up to 8192")
    if params.get("quantised") and params["rank"] % 128:
        return Support(f"front_norm: rank is {params['rank']}, needs a multiple of 128 to be quantised")
    if "heads" in params and not 1 <= params["heads"] <= params["padded"]:
        return Support(f"front_insert: {params['heads']} heads of {params['padded']} padded ones")
    stride = params.get("stride", 16)
    return (
        SUPPORTED if stride % 16 == 0 else Support(f"front_insert: pages {stride} bytes apart, needs multiples of 16")
    )


def _norm_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Halves of one projection, as in the model."""
    draw = seeded(device, seed)
    tokens, rank = params["tokens"], params["rank"]
    both = torch.randn((tokens, rank + 512), generator=draw, device=device)
    both *= torch.exp2(torch.randint(-9, 5, (tokens, 1), generator=draw, device=device).float())
    both = both.bfloat16()
    weights = [(1 + 0.2 * torch.randn((n,), generator=draw, device=device)).bfloat16() for n in (rank, 512)]
    return {"qr": both[:, :rank], "kv": both[:, rank:], "q_weight": weights[0], "kv_weight": weights[1], "eps": 1e-6}


def _insert_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Slots anywhere, every eighth token without one, and fewer slots than tokens."""
    draw = seeded(device, seed)
    tokens, page = params["tokens"], params["page"]
    rope = rope_inputs(tokens, torch.Generator().manual_seed(seed))
    pages = -(-2 * max(tokens, 4) // page)
    slots = torch.randperm(pages * page, generator=draw, device=device)[:tokens]
    if not params.get("dense"):
        slots = slots.masked_fill(torch.arange(tokens, device=device) % 8 == 3, -1)[: max(0, tokens - 1) or tokens]
    scale = torch.exp2(torch.randint(-12, 8, (tokens, 1), generator=draw, device=device).float())
    stride = params.get("stride") or ds_mla(page).page_bytes
    return {
        "q": torch.randn((tokens, params["heads"], 512), generator=draw, device=device).mul_(scale[:, None]).bfloat16(),
        "kv": torch.randn((tokens, 512), generator=draw, device=device).mul_(scale).bfloat16(),
        "kv_cache": torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=device),
        "slot_mapping": slots,
        "positions": rope["positions"].to(device),
        "cos_sin_cache": rope["cos_sin"].to(device),
        "padded_heads": params["padded"],
        "eps": 1e-6,
        "page": page,
    }


_ROUNDED = Tolerance(absolute=1e-6, relative=2.0**-8)
# The same, one step of E4M3.
_QUANTISED = Tolerance(relative=2.0**-3, absolute=1e-6, rms=5e-3, mismatch=1e-3)
# A rotated value next to a rounding boundary may fall on the other side of the float64 one's.
_BYTES = Tolerance(bitwise=True, mismatch=1e-4)

OPERATIONS = (
    Operation(
        name="front_norm",
        summary="RMSNorm of the query's low-rank part and of the KV row",
        folder="front",
        outputs=("qr", "kv"),
        cases=(
            case("empty", "cpu gpu", tokens=0, rank=64),
            case("odd", "cpu gpu", tokens=5, rank=72),
            case("t1", "cpu gpu bench", tokens=1, rank=1024),
            case("t4096", "gpu bench", tokens=4096, rank=1024),
        ),
        make_inputs=_norm_inputs,
        reference=front_norm,
        plan=lambda p, device, arch: NormPlan(p["tokens"], p["rank"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: 4 * (p["tokens"] + 1) * (p["rank"] + 512),
        tolerance=(_ROUNDED, _ROUNDED),
    ),
    Operation(
        name="front_norm_o8",
        summary="RMSNorm of the query's low-rank part and of the KV row, the former quantised too",
        folder="front",
        outputs=("qr", "kv", "value"),
        cases=(
            case("empty", "cpu gpu", tokens=0, rank=128),
            case("odd", "cpu gpu", tokens=5, rank=384),
            case("t1", "cpu gpu bench", tokens=1, rank=1024),
            case("t4096", "gpu bench", tokens=4096, rank=1024),
        ),
        make_inputs=_norm_inputs,
        reference=front_norm_o8,
        plan=lambda p, device, arch: NormO8Plan(p["tokens"], p["rank"], device, arch, quantised=True),
        is_supported=lambda p, arch: is_supported({**p, "quantised": True}, arch),
        nbytes=lambda p: 4 * (p["tokens"] + 1) * (p["rank"] + 512) + p["tokens"] * (p["rank"] + p["rank"] // 128),
        tolerance=(_ROUNDED, _ROUNDED, _QUANTISED),
        compared=lambda outputs: (*outputs[:2], *as_numbers(outputs[2:])),
    ),
    Operation(
        name="front_insert",
        summary="norm and RoPE of the queries, RoPE, quantisation and insertion of the KV row",
        folder="front",
        outputs=("q", "cache"),
        cases=(
            case("empty", "cpu gpu", tokens=0, heads=8, padded=8, page=64),
            case("odd", "cpu gpu", tokens=9, heads=5, padded=8, page=53),
            case("padded", "cpu gpu", tokens=3, heads=8, padded=16, page=2, stride=4096),
            case("t1-h64", "gpu bench", tokens=1, heads=64, padded=64, page=64, dense=True),
            case("t32-h64", "gpu bench", tokens=32, heads=64, padded=64, page=64, dense=True),
            case("t4096-h64", "gpu bench", tokens=4096, heads=64, padded=64, page=64, dense=True),
        ),
        make_inputs=_insert_inputs,
        reference=front_insert,
        plan=lambda p, device, arch: InsertPlan(
            p["tokens"], p["heads"], p["padded"], device, p["page"], p.get("stride"), arch
        ),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (1024 * (p["heads"] + p["padded"] + 1) + 584 + 16 + 256),
        tolerance=(_ROUNDED, _BYTES),
        mutates=("kv_cache",),
    ),
)
