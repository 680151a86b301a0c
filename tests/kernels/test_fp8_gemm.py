"""Block-scaled products: bodies, splits, buffers and refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels import registry
from dsv4_kernels.arch import Arch, detect, native_mx
from dsv4_kernels.device import AT_REST
from dsv4_kernels.fp8 import api
from dsv4_kernels.fp8.api import (
    GemmPlan,
    HopperConfig,
    QuantPlan,
    hopper_from,
    hopper_table,
    places,
    quantised_tokens,
    select,
    select_hopper,
    split_count,
)
from dsv4_kernels.plan import freeze, thaw
from dsv4_kernels.registry import case, operation


def test_counters_are_at_rest_again(device: torch.device, arch: Arch | None) -> None:
    """Split sums count the arrived programs; a remaining count would break the next run or graph replay."""
    op = operation("fp8_gemm")
    params = {"tokens": 2, "n": 144, "k": 1536}
    plan = op.plan(params, device, arch)
    assert isinstance(plan, GemmPlan)
    inputs = op.make_inputs(params, device, 1)
    first = plan.run(**inputs).clone()
    assert (plan.count == AT_REST.value).all()
    assert torch.equal(first, plan.run(**inputs))


def test_a_result_comes_with_the_codes_that_the_quantiser_makes(device: torch.device, arch: Arch | None) -> None:
    """Up to 16 tokens; for more tokens there are no codes, and the results are those of any other plan."""
    op = operation("wo_a_einsum")
    shape = (256, 512, 3)
    plans = [GemmPlan(19, *shape, device, arch, quantised=quantised) for quantised in (16, 0)]
    quantiser = QuantPlan(19, 3 * 256, device, arch)
    for tokens in (1, 16, 17):
        inputs = op.make_inputs({"tokens": tokens, "groups": 3, "n": 256, "k": 512}, device, tokens)
        out, plain = (plan.run(**inputs) for plan in plans)
        # Other tiles may split their sums differently.
        assert float((out - plain).abs().max()) <= 2.0**-7 * float(plain.abs().max())
        assert plans[1].codes(tokens) is None
        codes = plans[0].codes(tokens)
        if tokens > 16:
            assert codes is None
            continue
        assert codes is not None
        for found, wanted in zip(codes, quantiser.run(x=out.flatten(1).clone()), strict=True):
            assert torch.equal(found, wanted)


def test_unsupported_shapes_are_not_quantised(device: torch.device) -> None:
    assert GemmPlan(4, 128, 128, 2, device, quantised=2).codes(3) is None
    for tokens, n in ((17, 128), (4, 144)):
        with pytest.raises(ValueError, match=f"of {tokens} tokens with n {n} are to be quantised, needs up to 16"):
            api.EinsumO8Plan(tokens, n, 128, 2, device, quantised=tokens)


def test_results_are_quantised_where_their_tiles_fill_the_machine() -> None:
    """Flash's eight groups, and two of them on a rank; rows without a scale."""
    found = {
        arch: [quantised_tokens(arch, 1024, 4096, groups, arch.spec.multiprocessors) for groups in (8, 2)]
        for arch in Arch
    }
    assert found == {Arch.SM_90: [16, 0], Arch.SM_120: [16, 0], Arch.SM_121: [16, 16]}
    assert quantised_tokens(Arch.SM_90, 1040, 4096, 8, 132) == 0


def test_every_split_covers_k_once() -> None:
    for arch in Arch:
        for n, k in ((1536, 4096), (4096, 8192), (7168, 16384), (512, 128)):
            for tokens in (1, 8, 17, 4096):
                config = select(arch, tokens, n, k)
                splits = split_count(config, tokens, n, k, 1, arch.spec.multiprocessors)
                share = -(-(k // 128) // splits)
                assert (splits - 1) * share < k // 128


def test_fewer_tokens_than_planned(device: torch.device, arch: Arch | None) -> None:
    op = operation("wo_a_einsum")
    plan = op.plan({"tokens": 20, "groups": 2, "n": 64, "k": 256}, device, arch)
    for tokens in (1, 7, 20):
        inputs = op.make_inputs({"tokens": tokens, "groups": 2, "n": 64, "k": 256}, device, tokens)
        registry.compare(op, (plan.run(**inputs),), (op.reference(**inputs, exact=True),))


def test_blocks_of_weights_have_their_own_scales(device: torch.device, arch: Arch | None) -> None:
    """Changing the scale of one 128-block changes exactly its rows."""
    op = operation("fp8_gemm")
    params = {"tokens": 3, "n": 272, "k": 256}
    plan = op.plan(params, device, arch)
    inputs = op.make_inputs(params, device, 1)
    first = plan.run(**inputs).clone()
    inputs["w_scale"][1, 1] += 3
    second = plan.run(**inputs)
    assert torch.equal(first[:, :128], second[:, :128])
    assert torch.equal(first[:, 256:], second[:, 256:])
    assert bool((first[:, 128:256] != second[:, 128:256]).any())


@pytest.mark.parametrize(("n", "k", "message"), [(64, 100, "multiple of 128"), (40, 128, "multiple of 16")])
def test_unsupported_shapes_are_refused(n: int, k: int, message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        GemmPlan(1, n, k, None, device)


def test_misaligned_inputs_are_refused(device: torch.device) -> None:
    op = operation("fp8_gemm")
    params = {"tokens": 1, "n": 64, "k": 256}
    inputs = op.make_inputs(params, device, 1)
    shifted = torch.zeros(300, dtype=torch.uint8, device=device)[1:257].view(1, 256)
    with pytest.raises(ValueError, match=r"a has address 0x[0-9a-f]+, needs a multiple of 16"):
        op.plan(params, device, None).run(**{**inputs, "a": shifted})


def test_sm_90_has_no_native_block_scaling() -> None:
    assert not native_mx(Arch.SM_90)


@pytest.mark.gpu
def test_split_sums_repeat_bit_by_bit(device: torch.device) -> None:
    op = operation("fp8_gemm")
    params = {"tokens": 8, "n": 1536, "k": 4096}
    plan = op.plan(params, device, None)
    inputs = op.make_inputs(params, device, 1)
    first = plan.run(**inputs).clone()
    for _ in range(50):
        assert torch.equal(first, plan.run(**inputs))


def test_a_plan_refuses_more_tokens_than_it_holds(device: torch.device, arch: Arch | None) -> None:
    op = operation("fp8_gemm")
    plan = GemmPlan(8, 64, 256, None, device, arch)
    with pytest.raises(ValueError, match=r"a has shape \(9, 256\), needs \[tokens ≤ 8, 256\]"):
        plan.run(**op.make_inputs({"tokens": 9, "n": 64, "k": 256}, device, 1))


def test_the_quantiser_writes_to_the_given_output(device: torch.device, arch: Arch | None) -> None:
    plan = QuantPlan(20, 256, device, arch)
    x = torch.randn((7, 256), dtype=torch.bfloat16, device=device)
    out = places(7, 256, device)
    assert plan.run(x=x, out=out)[0] is out[0]
    assert all(torch.equal(*pair) for pair in zip(out, plan.run(x=x), strict=True))
    with pytest.raises(ValueError, match="code has shape"):
        plan.run(x=x, out=places(8, 256, device))


@pytest.mark.parametrize(
    ("arch", "n", "k", "groups", "takes"),
    [
        (Arch.SM_90, 4096, 8192, 1, True),
        (Arch.SM_90, 2000, 256, 1, True),
        (Arch.SM_90, 1024, 4096, 8, True),
        (Arch.SM_90, 4096, 384, 1, False),  # an odd count of blocks
        (Arch.SM_90, 2000, 256, 2, False),  # a tile would run into the next group
        (Arch.SM_120, 4096, 8192, 1, False),
    ],
)
def test_which_products_specialised_warps_take(arch: Arch, n: int, k: int, groups: int, takes: bool) -> None:
    assert (hopper_from(arch, n, k, groups) is not None) is takes


@pytest.mark.parametrize(
    ("tokens", "n", "k", "groups", "block_m"),
    # Measured on an H100: the taller tile if it saves a round of the multiprocessors, or if there are many rounds; not
    # for the longest k and not for groups.
    [
        (1024, 4096, 4096, 1, 128),
        (2048, 1536, 4096, 1, 192),
        (4096, 4096, 4096, 1, 128),
        (8192, 1536, 4096, 1, 192),
        (8192, 7168, 16384, 1, 128),
        (8192, 1024, 4096, 8, 128),
    ],
)
def test_the_tile_that_is_done_first(tokens: int, n: int, k: int, groups: int, block_m: int) -> None:
    assert select_hopper(tokens, n, k, groups, 132).block_m == block_m


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if detect(device) is not Arch.SM_90:
        pytest.skip("the body of specialised warps is for compute capability 9.0")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("config", [row.config for row in hopper_table().rows], ids=lambda c: c.label)
@pytest.mark.parametrize(
    ("tokens", "n", "k", "groups"),
    [
        (1, 16, 256, 1),
        (65, 144, 256, 1),
        (333, 2000, 1536, 1),
        (1000, 1536, 1024, 1),
        (200, 1024, 512, 3),
        (4097, 4096, 512, 1),
    ],
)
def test_specialised_warps_at_odd_sizes(
    config: HopperConfig,
    tokens: int,
    n: int,
    k: int,
    groups: int,
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gluon has no interpreter, so the numbers are only checked on a GPU.

    Covers fewer and more tiles than multiprocessors, tokens and rows that no tile divides, and groups; nothing is
    written past the ends.
    """
    monkeypatch.setattr(api, "hopper_from", lambda *_: 1)
    monkeypatch.setattr(api, "select_hopper", lambda *_: config)
    sizes = {"tokens": tokens, "n": n, "k": k}
    if groups == 1:
        registry.run_case(operation("fp8_gemm"), case("odd", "gpu", **sizes), hopper, 1)
    else:
        registry.run_case(operation("wo_a_einsum"), case("odd", "gpu", **sizes, groups=groups), hopper, 1)


@pytest.mark.gpu
def test_many_tokens_are_warm_and_can_be_captured(hopper: torch.device) -> None:
    op = operation("fp8_gemm")
    params = {"tokens": 2304, "n": 1536, "k": 512}
    plan = GemmPlan(**params, groups=None, device=hopper)
    plan.warmup()
    freeze()
    try:
        for tokens in (8, 128, 129, 1000, 1600, 2304):
            inputs = op.make_inputs({**params, "tokens": tokens}, hopper, tokens)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = plan.run(**inputs)
            out.fill_(float("nan"))
            graph.replay()
            registry.compare(op, (out,), (op.reference(**inputs, exact=True),))
    finally:
        thaw()
