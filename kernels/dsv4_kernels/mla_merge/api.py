"""The merges as operations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.launch import Launcher
from dsv4_kernels.mla_merge.configs import BLOCKS, MANY_TOKENS, select
from dsv4_kernels.mla_merge.kernel import mla_merge_kernel
from dsv4_kernels.mla_merge.reference import mla_merge, mla_merge_o8, mla_merge_two
from dsv4_kernels.numerics import as_numbers
from dsv4_kernels.plan import SUPPORTED, Plan, Support, check_tensor, require_thawed
from dsv4_kernels.registry import Operation, Tolerance, case

_mla_merge = Launcher(mla_merge_kernel)


class MergePlan(Plan):
    """Merge of up to `parts` parts of up to `tokens` tokens."""

    def __init__(
        self, operation: str, parts: int, tokens: int, heads: int, device: torch.device, arch: Arch | None = None
    ) -> None:
        require_thawed(operation)
        self.operation = operation
        self.arch = arch or detect(device) or DEFAULT_ARCH
        self.shape = {"parts": parts, "tokens": tokens, "heads": heads}
        support = is_supported(self.shape, self.arch)
        if not support:
            raise ValueError(support.reason)
        self.device = device
        self.o8 = operation.endswith("o8")
        # A kernel takes both; it writes one.
        self._no_lse = torch.empty((1, 1), dtype=torch.float32, device=device)
        self._no_scale = torch.empty((1, 1, 4), dtype=torch.uint8, device=device)

    @functools.cached_property
    def out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of the runs that name no place for them; made by the first of them."""
        return self._results(self.shape["tokens"])

    def _results(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.shape["heads"]
        empty = functools.partial(torch.empty, device=self.device)
        if self.o8:
            return empty((tokens, heads, 512), dtype=torch.uint8), empty((tokens, heads, 4), dtype=torch.uint8)
        return empty((tokens, heads, 512), dtype=torch.bfloat16), empty((tokens, heads), dtype=torch.float32)

    def run(
        self, *, out: tuple[torch.Tensor, torch.Tensor] | None = None, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Same keywords as the reference of the operation.

        Writes `out`, (o, lse) or (code, scale); without it buffers of the plan that its next run overwrites.
        """
        heads = self.shape["heads"]
        two = self.operation == "mla_merge_two"
        o, lse = (tensors["o0"], tensors["lse0"]) if two else (tensors["o"], tensors["lse"])
        parts, tokens = (2, o.shape[0]) if two else (o.shape[0], o.shape[1])
        lead = () if two else (parts,)
        check_tensor("o", o, torch.bfloat16, (*lead, tokens, heads, 512))
        check_tensor("lse", lse, torch.float32, (*lead, tokens, heads))
        if two:
            check_tensor("o1", tensors["o1"], torch.bfloat16, (tokens, heads, 512))
            check_tensor("lse1", tensors["lse1"], torch.float32, (tokens, heads))
        check_tensor("sink", tensors["sink"], torch.float32, (heads,))
        if tokens > self.shape["tokens"] or parts > self.shape["parts"]:
            raise ValueError(f"{parts} parts of {tokens} tokens, the plan holds {self.shape}")
        results = (self.out[0][:tokens], self.out[1][:tokens]) if out is None else out
        positions = tensors.get("positions", lse)
        if self.o8:
            check_tensor("positions", positions, torch.int64, (tokens,))
            check_tensor("cos_sin", tensors["cos_sin"], torch.float32, (None, 64))
        if tokens:
            launch_merge(
                self.arch,
                o,
                lse,
                tensors.get("o1", o),
                tensors.get("lse1", lse),
                tensors["sink"],
                positions,
                tensors.get("cos_sin", lse),
                results[0],
                self._no_lse if self.o8 else results[1],
                results[1] if self.o8 else self._no_scale,
                tokens,
                parts,
                two,
                self.o8,
            )
        return results

    def warmup(self) -> None:
        """Every block of parts up to the planned count, of few tokens and of many."""
        heads = self.shape["heads"]
        sizes = {min(block, self.shape["parts"]) for block in BLOCKS}
        for parts in {2} if self.operation == "mla_merge_two" else sizes:
            for tokens in sorted({1, min(MANY_TOKENS, self.shape["tokens"])}):
                params = {"parts": parts, "tokens": tokens, "heads": heads}
                self.run(**_INPUTS[self.operation](params, self.device, 0))


def launch_merge(
    arch: Arch,
    o: torch.Tensor,
    lse: torch.Tensor,
    o1: torch.Tensor,
    lse1: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
    out_scale: torch.Tensor,
    tokens: int,
    parts: int,
    two: bool,
    o8: bool,
    early: bool = False,
) -> None:
    """Launch the merge over checked tensors; mla_decode uses it for its splits.

    early: programmatic dependent launch, the merge's programs are placed while the kernel before it still runs and wait
    for it.
    """
    heads = out.shape[1]
    config = select(arch, parts, tokens, heads)
    _mla_merge[(tokens * heads // config.rows,)](
        part_ptr=o, part_lse_ptr=lse, second_ptr=o1, second_lse_ptr=lse1, sink_ptr=sink, position_ptr=positions,
        cos_sin_ptr=cos_sin, o_ptr=out.view(torch.float8_e4m3fn) if o8 else out, lse_ptr=out_lse, scale_ptr=out_scale,
        tokens=tokens, parts=parts, H=heads, BS=config.block_parts, ROWS=config.rows, TWO=two, O8=o8, EARLY=early,
        num_warps=config.num_warps, num_stages=1, launch_pdl=early,
    )  # fmt: skip


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any parts, tokens and heads."""
    if params["parts"] < 1:
        return Support(f"mla_merge: {params['parts']} parts, needs at least 1")
    return SUPPORTED


def rope_inputs(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random positions and a table of angles: {"positions": int64 [T], "cos_sin": float32 [4096, 64]}."""
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    positions = torch.randint(0, 4096, (tokens,), generator=generator)
    return {"positions": positions, "cos_sin": torch.cat((angle.cos(), angle.sin()), 1).float()}


def _merge_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    parts, tokens, heads = params["parts"], params["tokens"], params["heads"]
    o = torch.randn((parts, tokens, heads, 512), generator=generator).bfloat16()
    lse = torch.randn((parts, tokens, heads), generator=generator) * 4
    kind = torch.rand(lse.shape, generator=generator)
    lse = torch.where(kind < 0.1, -torch.inf, torch.where(kind < 0.15, torch.inf, lse))
    o = torch.where(torch.isinf(lse)[..., None], torch.nan, o)
    if tokens:
        lse[:, 0, 0], o[:, 0, 0] = -torch.inf, torch.nan
    sink = torch.randn((heads,), generator=generator) * 3
    sink[0], sink[-1] = -torch.inf, torch.inf
    return {"o": o.to(device), "lse": lse.to(device), "sink": sink.to(device)}


def _two_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    whole = _merge_inputs(params, device, seed)
    parts = {f"{name}{i}": whole[name][i].clone() for i in (0, 1) for name in ("o", "lse")}
    return {**parts, "sink": whole["sink"]}


def _o8_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    rope = rope_inputs(params["tokens"], torch.Generator().manual_seed(seed + 1))
    return {**_merge_inputs(params, device, seed), **{name: tensor.to(device) for name, tensor in rope.items()}}


_INPUTS = {"mla_merge": _merge_inputs, "mla_merge_two": _two_inputs, "mla_merge_o8": _o8_inputs}
_CLOSE = Tolerance(absolute=1e-5, relative=2.0**-8)
_LSE = Tolerance(absolute=1e-5, relative=1e-6)


def _row(
    name: str, summary: str, reference: Any, outputs: tuple[str, ...], tolerance: tuple[Tolerance, ...]
) -> Operation:
    parts = (2, 2, 2) if name == "mla_merge_two" else (1, 5, 20)
    return Operation(
        name=name,
        summary=summary,
        folder="mla_merge",
        outputs=outputs,
        cases=(
            case("empty", "cpu gpu", parts=2, tokens=0, heads=8),
            case("few", "cpu gpu", parts=parts[0], tokens=3, heads=8),
            case("some", "cpu gpu", parts=parts[1], tokens=2, heads=5),
            case("many", "cpu gpu", parts=parts[2], tokens=1, heads=16),
            case("heads-together", "cpu gpu", parts=min(parts[0], 2), tokens=128, heads=4),
            case("decode", "gpu bench", parts=min(parts[1] * 2, 10), tokens=8, heads=64),
            case("prefill", "gpu bench", parts=2, tokens=1024, heads=64),
        ),
        make_inputs=_INPUTS[name],
        reference=reference,
        plan=lambda p, device, arch: MergePlan(name, p["parts"], p["tokens"], p["heads"], device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * p["heads"] * (p["parts"] * 1028 + 1028),
        flops=lambda p: p["tokens"] * p["heads"] * p["parts"] * 1024,
        tolerance=tolerance,
        compared=as_numbers if name == "mla_merge_o8" else tuple,
    )


# A float32 value next to a rounding boundary may fall on the other side of the float64 one's: one step of E4M3, seldom.
_QUANTISED = Tolerance(rms=5e-3, relative=2.0**-3, absolute=1e-9, mismatch=1e-4)

OPERATIONS = (
    _row("mla_merge", "merge of split attention with the sink", mla_merge, ("o", "lse"), (_CLOSE, _LSE)),
    _row("mla_merge_two", "merge of two attention subsets with the sink", mla_merge_two, ("o", "lse"), (_CLOSE, _LSE)),
    _row("mla_merge_o8", "merge, inverse RoPE and FP8 quantisation", mla_merge_o8, ("value",), (_QUANTISED,)),
)
