"""The mixture of experts beyond the cases of the registry: formats, sorting, repeated experts, isolation, freezing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsv4_kernels import plan as planning
from dsv4_kernels import registry
from dsv4_kernels.arch import Arch
from dsv4_kernels.moe import api
from dsv4_kernels.moe.api import moe_w4a8, moe_w4a16
from dsv4_kernels.moe.columns import moe_planes_kernel, widen_e4m3
from dsv4_kernels.moe.kernel import moe_sort_kernel, widen_bf16
from dsv4_kernels.numerics import dequantize_mxfp4
from dsv4_kernels.registry import operation

TINY = {"tokens": 8, "hidden": 128, "inter": 32, "experts": 8, "topk": 6}
# With these sizes small batches run with the columns kernels on sm_90.
WIDE = {**TINY, "inter": 128}
SIZES = pytest.mark.parametrize("sizes", [TINY, WIDE], ids=["tiny", "wide"])
REFERENCES = {False: moe_w4a16, True: moe_w4a8}


def make(params: dict[str, int], device: torch.device, arch: Arch | None, a8: bool = False) -> api.MoePlan:
    return api.MoePlan(**params, a8=a8, device=device, arch=arch)


def check(plan: api.MoePlan, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    op = operation(plan.operation)
    out = plan.run(**inputs).clone()
    want = op.reference(**inputs, exact=True)
    registry.judge("out", registry.measure(out, want, op.tolerance[0]), op.tolerance[0])
    return out


def inputs_for(params: dict[str, int], device: torch.device, seed: int = 3) -> dict[str, torch.Tensor]:
    return operation("moe_w4a16").make_inputs(params, device, seed)


@triton.jit
def _widen_kernel(w_ptr, scale_ptr, even_ptr, odd_ptr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, 64)[:, None]
    byte = tl.arange(0, 64)[None, :]
    w = tl.load(w_ptr + row * 64 + byte)
    scale = tl.load(scale_ptr + row * 4 + tl.arange(0, 4)[None, :])
    even, odd = widen_bf16(w, scale, PTX)
    tl.store(even_ptr + row * 64 + byte, even)
    tl.store(odd_ptr + row * 64 + byte, odd)


def test_widening_is_exact_for_every_byte_and_scale(device: torch.device) -> None:
    """All 256 bytes under all scale codes 64..190; the same lanes have different scales, so that none may be shared."""
    w = torch.arange(256, dtype=torch.uint8, device=device).repeat(16).view(64, 64)
    even, odd = (torch.empty((64, 64), dtype=torch.bfloat16, device=device) for _ in range(2))
    codes = torch.arange(64, 191, device=device, dtype=torch.int64)
    for first in range(0, len(codes), 64):
        at = (torch.arange(256, device=device) + first) % len(codes)
        scale = codes[at].to(torch.uint8).view(64, 4).contiguous()
        _widen_kernel[(1,)](w, scale, even, odd, api.PTX)
        want = dequantize_mxfp4(w, scale) * 2.0**-63
        assert torch.equal(even.double(), want[:, ::2])
        assert torch.equal(odd.double(), want[:, 1::2])


@triton.jit
def _widen_e4m3_kernel(w_ptr, even_ptr, odd_ptr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    even, odd = widen_e4m3(tl.load(w_ptr + at), PTX)
    tl.store(even_ptr + at, even)
    tl.store(odd_ptr + at, odd)


def test_widening_to_e4m3_is_exact_for_every_byte(device: torch.device) -> None:
    w = torch.arange(256, dtype=torch.uint8, device=device).repeat(16).view(64, 64)
    even, odd = (torch.empty((64, 64), dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    _widen_e4m3_kernel[(1,)](w, even, odd, api.PTX)
    want = dequantize_mxfp4(w, torch.full((64, 4), 127, dtype=torch.uint8, device=device)) * 2.0**-6
    assert torch.equal(even.double(), want[:, ::2])
    assert torch.equal(odd.double(), want[:, 1::2])


@pytest.mark.parametrize("hidden", [128, 384])
def test_two_planes_hold_a_bf16(device: torch.device, hidden: int) -> None:
    """Exact within 2^-13 of the group's maximum, otherwise within 2^-21 of it; all copies are equal."""
    generator = torch.Generator().manual_seed(11)
    tokens, copies, groups = 3, 2, hidden // 32
    x = torch.randn((tokens, hidden), generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, (tokens, hidden), generator=generator).float())
    x[0, :32] = 0.0
    x[1, :32] = torch.exp2(-torch.arange(32.0)) * 1.9921875
    x = x.bfloat16().to(device)
    planes = torch.empty((copies, tokens, 2, hidden), dtype=torch.float8_e4m3fn, device=device)
    factor = torch.full((copies, tokens, 2, groups), torch.nan, device=device)
    moe_planes_kernel[(tokens, hidden // 128, copies)](x, planes, factor, hidden, 128, api.PTX)
    assert torch.equal(planes[0].view(torch.uint8), planes[1].view(torch.uint8))
    assert torch.equal(factor[0], factor[1])
    parts = planes[0].double().view(tokens, 2, groups, 32) * factor[0].double()[..., None] / 64
    both = parts.sum(1).view(tokens, groups, 2, 16).transpose(2, 3).reshape(tokens, groups, 32)
    want = x.double().view(tokens, groups, 32)
    largest = want.abs().amax(2, keepdim=True)
    wrong = (both - want).abs()
    assert (wrong[want.abs() >= largest * 2.0**-13] == 0).all()
    assert (wrong <= largest * 2.0**-21).all()


@SIZES
@pytest.mark.parametrize(
    ("codes13", "codes2", "power"), [((64, 66), (188, 191), 55), ((188, 191), (64, 66), -55), ((64, 191), (64, 191), 0)]
)
def test_all_scales_of_the_contract(
    device: torch.device,
    arch: Arch | None,
    sizes: dict[str, int],
    codes13: tuple[int, int],
    codes2: tuple[int, int],
    power: int,
) -> None:
    """Scales at both ends, with x of a size that keeps h within the clamp, and all of them mixed."""
    params = {**sizes, "tokens": 2}
    inputs = inputs_for(params, device)
    generator = torch.Generator().manual_seed(2)
    for name, codes in (("w13_scale", codes13), ("w2_scale", codes2)):
        inputs[name] = torch.randint(*codes, inputs[name].shape, generator=generator).to(torch.uint8).to(device)
    inputs["x"] *= 2.0**power
    out = make(params, device, arch).run(**inputs)
    want = moe_w4a16(**inputs, exact=True)
    assert torch.isfinite(out).all()
    assert registry.measure(out, want, operation("moe_w4a16").tolerance[0]).rms < 5e-3


@pytest.mark.parametrize("block", [8, 64])
def test_sort_is_stable_and_leaves_invalid_ids_out(device: torch.device, block: int) -> None:
    experts, pairs = 24, 1500
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-2, experts + 2, (pairs,), generator=generator, dtype=torch.int32)
    ids[ids == 7] = 3
    most = pairs // block + experts
    rows = torch.full((most * block + 64,), 12345, dtype=torch.int32, device=device)
    tile = torch.full((1 + most + 64,), 12345, dtype=torch.int32, device=device)
    moe_sort_kernel[(experts,)](ids.to(device), rows, tile, pairs, experts, 32, block, 1024, num_warps=8)
    want_rows, want_tiles = [], []
    for expert in range(experts):
        mine = torch.nonzero(ids == expert).flatten().tolist()
        count = -(-len(mine) // block)
        want_rows += mine + [-1] * (count * block - len(mine))
        want_tiles += [expert] * count
    assert tile[: 1 + len(want_tiles)].tolist() == [len(want_tiles), *want_tiles]
    assert rows[: len(want_rows)].tolist() == want_rows
    assert (rows[len(want_rows) :] == 12345).all()
    assert (tile[1 + len(want_tiles) :] == 12345).all()


@SIZES
@pytest.mark.parametrize("tokens", [8, 12])
def test_one_expert_six_times(device: torch.device, arch: Arch | None, tokens: int, sizes: dict[str, int]) -> None:
    """More pairs of one expert than a tile contains, without a sort (8 tokens) and with one (12)."""
    params = {**sizes, "tokens": tokens}
    inputs = inputs_for(params, device)
    inputs["topk_ids"].fill_(5)
    check(make(params, device, arch), inputs)


@SIZES
@pytest.mark.parametrize("a8", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_unused_weights_are_not_touched(
    device: torch.device, arch: Arch | None, tokens: int, a8: bool, sizes: dict[str, int]
) -> None:
    """Experts without a valid id have NaN scales, h and y start as NaN: neither may affect the result."""
    params = {**sizes, "tokens": tokens}
    inputs = inputs_for(params, device)
    ids = inputs["topk_ids"]
    ids[:] = torch.tensor([2, -1, 4, 8, -7, 2], dtype=torch.int32, device=device)
    if tokens > 1:
        ids[1] = -1
    for name in ("w13_scale", "w2_scale"):
        kept = inputs[name][[2, 4]].clone()
        inputs[name].fill_(255)
        inputs[name][[2, 4]] = kept
    plan = make(params, device, arch, a8)
    small = plan.columns
    for buffer in (
        plan.h,
        plan.h_scale,
        plan.y,
        plan.out,
        small.x,
        small.x_factor,
        small.h,
        small.h_factor,
        small.part,
    ):
        buffer.view(torch.uint8).fill_(255)
    out = plan.run(**inputs)
    assert torch.isfinite(out).all()
    if tokens > 1:
        assert (out[1] == 0).all()
    # The reference only reads experts with a valid id, so NaN scales do not affect it.
    tolerance = operation(plan.operation).tolerance[0]
    registry.judge("out", registry.measure(out, REFERENCES[a8](**inputs, exact=True), tolerance), tolerance)


@SIZES
@pytest.mark.parametrize("tokens", [4, 12])
def test_a_row_does_not_depend_on_the_others(
    device: torch.device, arch: Arch | None, tokens: int, sizes: dict[str, int]
) -> None:
    params = {**sizes, "tokens": tokens}
    plan, inputs = make(params, device, arch), inputs_for(params, device)
    first = plan.run(**inputs).clone()
    other = inputs_for(params, device, seed=4)
    for name in ("x", "topk_ids", "topk_weights"):
        other[name][-1] = inputs[name][-1]
    mixed = {**inputs, **{name: other[name] for name in ("x", "topk_ids", "topk_weights")}}
    assert torch.equal(plan.run(**mixed)[-1], first[-1])


def test_reasons_and_wrong_tensors(device: torch.device) -> None:
    for broken, word in (
        ({"hidden": 192}, "128"),
        ({"inter": 48}, "32"),
        ({"topk": 9}, "1..8"),
        ({"experts": 5}, "experts"),
    ):
        support = api.is_supported({**TINY, **broken}, Arch.SM_120)
        assert not support
        assert word in (support.reason or "")
        with pytest.raises(ValueError, match="moe"):
            make({**TINY, **broken}, device, Arch.SM_120)
    inputs = inputs_for(TINY, device)
    plan = make({**TINY, "tokens": 4}, device, Arch.SM_120)
    with pytest.raises(ValueError, match=r"x has shape \(8, \d+\), needs \[tokens ≤ 4, "):
        plan.run(**inputs)
    with pytest.raises(ValueError, match="topk_ids"):
        make(TINY, device, Arch.SM_120).run(**{**inputs, "topk_ids": inputs["topk_ids"].long()})


@pytest.mark.parametrize("mma", ["dot", "mx"])
@pytest.mark.parametrize("table", list(Arch))
def test_tables_fit_every_shard_and_warmup_reaches_every_variant(table: Arch, mma: str) -> None:
    if mma == "mx" and table is Arch.SM_90:
        return
    for hidden, whole, experts in ((4096, 2048, 256), (7168, 3072, 384)):
        for parts in (1, 2, 4, 8, 16):
            inter = whole // parts
            seen = {}
            for tokens in range(1, 3000, 1 if parts == 1 else 97):
                c = api.select(table, mma, tokens, 6, experts, hidden, inter)
                decode = api.is_decode(tokens, 6)
                assert inter % c.up_n == 0
                assert hidden % c.down_n == 0
                assert (hidden // c.up_split) % c.up_k == 0
                assert (inter // c.down_split) % c.down_k == 0
                assert c.up_n % 32 == 0, "h is quantised in groups of 32 columns"
                assert decode or (c.up_split == c.down_split == 1)
                seen[c, decode, tokens == 1] = tokens
            warmed = {
                (api.select(table, mma, t, 6, experts, hidden, inter), api.is_decode(t, 6), t == 1)
                for t in api.reachable(table, mma, 2999, 6, experts)
            }
            assert set(seen) <= warmed


def test_columns_fit_every_shard_and_warmup_reaches_every_variant() -> None:
    for hidden, whole, experts in ((4096, 2048, 256), (7168, 3072, 384)):
        for parts in (1, 2, 4, 8, 16):
            inter = whole // parts
            chosen = {t: api.select_columns(Arch.SM_90, t, 6, hidden, inter) for t in range(1, 20)}
            assert api.select_columns(Arch.SM_120, 1, 6, hidden, inter) is None
            for tokens, c in chosen.items():
                assert (c is not None) == (inter % 128 == 0 and api.is_decode(tokens, 6))
                if c is not None:
                    assert inter % c.up_n == hidden % c.up_k == hidden % c.down_n == inter % c.down_k == 0
                    assert c.up_n % 32 == 0, "h is quantised in groups of 32 columns"
                    assert c.down_n % 64 == 0, "one counter for 64 rows"
            warmed = {chosen[t] for t in api.reachable(Arch.SM_90, "dot", 19, 6, experts) if t in chosen}
            assert set(chosen.values()) <= warmed


@pytest.mark.gpu
@pytest.mark.parametrize("inter", [192, 256])
@pytest.mark.parametrize("a8", [False, True])
def test_every_batch_size_after_freeze_twice_the_same(device: torch.device, a8: bool, inter: int) -> None:
    params = {"tokens": 90, "hidden": 512, "inter": inter, "experts": 64, "topk": 6}
    plan, inputs = make(params, device, None, a8), inputs_for(params, device)
    plan.warmup()
    planning.freeze()
    try:
        for tokens in range(params["tokens"] + 1):
            part = {n: v[:tokens] if n in ("x", "topk_ids", "topk_weights") else v for n, v in inputs.items()}
            part["x"], part["topk_ids"] = part["x"].clone(), part["topk_ids"].clone()
            part["topk_weights"] = part["topk_weights"].clone()
            first = check(plan, part)
            assert torch.equal(plan.run(**part), first)
    finally:
        planning.thaw()


@pytest.mark.gpu
def test_decode_captures_and_replays_on_new_routing(device: torch.device) -> None:
    params = {"tokens": 8, "hidden": 1024, "inter": 256, "experts": 64, "topk": 6}
    plan, inputs = make(params, device, None), inputs_for(params, device)
    plan.run(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.run(**inputs)
    for seed in range(20):
        fresh = inputs_for(params, device, seed)
        for name in ("x", "topk_ids", "topk_weights"):
            inputs[name].copy_(fresh[name])
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.equal(check(plan, inputs), got)
