"""The experts' sum with another tensor in their last launch, as vLLM adds the shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.moe import api
from dsv4_kernels.registry import operation

TINY = {"tokens": 8, "hidden": 128, "inter": 32, "experts": 8, "topk": 6}
# With these sizes small batches run with the columns kernels on sm_90.
WIDE = {**TINY, "inter": 128}


def routed_by_another(
    params: dict[str, int], device: torch.device, arch: Arch | None, a8: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs, and the result of a plan that does not add. Of several tokens the last has no experts."""
    inputs = operation("moe_w4a16").make_inputs(params, device, 3)
    inputs["topk_ids"][1:][-1:] = -1
    return inputs, api.MoePlan(**params, a8=a8, device=device, arch=arch).run(**inputs)


@pytest.mark.parametrize("sizes", [TINY, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("a8", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_an_addend_is_added_as_torch_adds_it(
    device: torch.device, arch: Arch | None, tokens: int, a8: bool, sizes: dict[str, int]
) -> None:
    """The sum of two bf16 tensors, bit for bit, also for tokens without experts; the wait is before the last launch.

    The addend does not exist before: the values that `ready` writes must be in the sum.
    """
    params = {**sizes, "tokens": tokens}
    inputs, routed = routed_by_another(params, device, arch, a8)
    generator = torch.Generator().manual_seed(6)
    # From magnitudes at which the addend is lost in the rounding to those at which the routed part is.
    shared = torch.randn(routed.shape, generator=generator) * torch.exp2(torch.arange(routed.shape[1]) % 24 - 12)
    shared = shared.bfloat16().to(device)
    addend, asked = torch.full_like(shared, torch.nan), []

    def ready() -> None:
        asked.append(True)
        addend.copy_(shared)

    plan = api.MoePlan(**params, a8=a8, device=device, arch=arch, adds=True)
    assert torch.equal(plan.run(**inputs, addend=addend, ready=ready), shared + routed)
    assert asked == [True]


@pytest.mark.interpreter
def test_shared_out_experts_add_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's experts in three programs: the addend is added once, with the sum of their parts."""
    chosen = api.select_columns

    def shared_out(*args: Any) -> api.ColumnsConfig | None:
        found = chosen(*args)
        return found and replace(found, down_shares=3)

    monkeypatch.setattr(api, "select_columns", shared_out)
    params = {**WIDE, "tokens": 2}
    inputs, routed = routed_by_another(params, device, Arch.SM_90)
    shared = torch.randn(routed.shape, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    plan = api.MoePlan(**params, a8=False, device=device, arch=Arch.SM_90, adds=True)
    assert {c.down_shares for c in plan.columns.configs.values()} == {3}
    for _ in range(2):
        assert torch.equal(plan.run(**inputs, addend=shared), shared + routed)


def test_a_plan_adds_always_or_never(device: torch.device) -> None:
    """Its warm-up compiles one of the two forms."""
    inputs = operation("moe_w4a16").make_inputs(TINY, device, 3)
    addend = torch.zeros_like(inputs["x"])
    with pytest.raises(ValueError, match="addend is given, the plan was made with adds=False"):
        api.MoePlan(**TINY, a8=False, device=device, arch=Arch.SM_120).run(**inputs, addend=addend)
    plan = api.MoePlan(**TINY, a8=False, device=device, arch=Arch.SM_120, adds=True)
    with pytest.raises(ValueError, match="moe_w4a16: addend is missing"):
        plan.run(**inputs)
    with pytest.raises(ValueError, match="addend has dtype"):
        plan.run(**inputs, addend=addend.float())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 12])
def test_an_addend_of_another_stream_is_waited_for(device: torch.device, tokens: int) -> None:
    """In a graph and outside of one, although it arrives much later than the other inputs of the last launch."""
    params = {"tokens": tokens, "hidden": 4096, "inter": 512, "experts": 64, "topk": 6}
    inputs, routed = routed_by_another(params, device, None)
    plan = api.MoePlan(**params, a8=False, device=device, adds=True)
    plan.warmup()
    half, addend = torch.zeros_like(inputs["x"]), torch.zeros_like(inputs["x"])
    aside, begun, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def step() -> torch.Tensor:
        begun.record()
        with torch.cuda.stream(aside):
            begun.wait(aside)
            torch.cuda._sleep(1_000_000)
            torch.mul(half, 2, out=addend)
            done.record(aside)
        return plan.run(**inputs, addend=addend, ready=lambda: done.wait(torch.cuda.current_stream()))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(10):
        for run in (step, graph.replay):
            half.normal_()
            out = run()
            torch.cuda.synchronize()
            assert torch.equal(captured if out is None else out, half * 2 + routed)
