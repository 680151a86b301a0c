"""Block-scaled products: bodies, splits, buffers and refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.arch import Arch, native_mx
from dsv4_kernels.fp8_gemm.api import GemmPlan
from dsv4_kernels.fp8_gemm.configs import select, split_count
from dsv4_kernels.registry import operation
from dsv4_kernels.testing import harness


def test_count_of_arrivals_is_zero_again(device: torch.device, arch: Arch | None) -> None:
    """Split sums count the programs that have arrived; a count that stays would break the next run or graph replay."""
    op = operation("fp8_gemm")
    params = {"tokens": 2, "n": 144, "k": 1536}
    plan = op.plan(params, device, arch)
    assert isinstance(plan, GemmPlan)
    inputs = op.make_inputs(params, device, 1)
    first = plan.run(**inputs).clone()
    assert int(plan.count.abs().sum()) == 0
    assert torch.equal(first, plan.run(**inputs))


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
        harness.compare(op, (plan.run(**inputs),), (op.reference(**inputs, exact=True),))


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
def test_what_is_not_supported_is_said(n: int, k: int, message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        GemmPlan(1, n, k, None, device)


def test_misaligned_inputs_are_refused(device: torch.device) -> None:
    op = operation("fp8_gemm")
    params = {"tokens": 1, "n": 64, "k": 256}
    inputs = op.make_inputs(params, device, 1)
    shifted = torch.zeros(300, dtype=torch.uint8, device=device)[1:257].view(1, 256)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
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
