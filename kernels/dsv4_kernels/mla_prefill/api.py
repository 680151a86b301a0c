"""Sparse MLA prefill as an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.mla_prefill.configs import select
from dsv4_kernels.mla_prefill.kernel import mla_prefill_kernel
from dsv4_kernels.mla_prefill.reference import mla_prefill
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case


class PrefillPlan(Plan):
    """Prefill of up to `tokens` tokens with `heads` local heads and lists of width `width`; results are views."""

    operation = "mla_prefill"

    def __init__(self, tokens: int, heads: int, width: int, device: torch.device, arch: Arch | None = None) -> None:
        require_thawed(self.operation)
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"tokens": tokens, "heads": heads, "width": width}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.tokens, self.heads, self.width, self.device = tokens, heads, width, device
        self.o = torch.empty((tokens, heads, 512), dtype=torch.bfloat16, device=device)
        self.lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)

    def run(
        self,
        *,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        sink: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o bf16 [S, H, 512], lse float32 [S, H])."""
        tokens, heads = int(q.shape[0]), self.heads
        check_tensor("q", q, torch.bfloat16, (None, heads, 512))
        check_tensor("kv", kv, torch.bfloat16, (None, 512))
        check_tensor("indices", indices, torch.int32, (tokens, self.width))
        check_tensor("lengths", lengths, torch.int32, (tokens,))
        check_tensor("sink", sink, torch.float32, (heads,))
        if tokens > self.tokens:
            raise ValueError(f"q has {tokens} tokens, the plan holds {self.tokens}")
        o, lse = self.o[:tokens], self.lse[:tokens]
        if tokens:
            c = select(self.arch, heads)
            mla_prefill_kernel[(tokens, -(-heads // c.block_h))](
                q_ptr=q, kv_ptr=kv, index_ptr=indices, length_ptr=lengths, sink_ptr=sink, o_ptr=o, lse_ptr=lse,
                H=heads, K=self.width, BH=c.block_h, BN=c.block_n,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return o, lse

    def warmup(self) -> None:
        """One launch; there is one configuration."""
        if self.tokens:
            self.run(**_inputs({**self.shape, "tokens": 1, "rows": 1}, self.device, 0))


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """1 to 128 heads, lists of any width."""
    if not 1 <= params["heads"] <= 128:
        return Support(f"mla_prefill: {params['heads']} heads, needs 1 to 128")
    if params["width"] < 1:
        return Support("mla_prefill: the index list has no column, needs a width of at least 1")
    return SUPPORTED


def _inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Lists with gaps and duplicates; every second row of the workspace is NaN and never named."""
    draw = torch.Generator(device=device).manual_seed(seed)
    tokens, heads, width, rows = (params[name] for name in ("tokens", "heads", "width", "rows"))
    kv = torch.full((2 * rows, 512), torch.nan, dtype=torch.bfloat16, device=device)
    kv[::2] = (torch.randn((rows, 512), generator=draw, device=device) / 4).bfloat16()
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
)
