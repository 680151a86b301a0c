"""Selection beyond the registry's cases: every value equal, special values, the caller's buffer, refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.indexer.api import TopkPlan
from dsv4_kernels.indexer.reference import topk


def test_equal_scores_give_the_lowest_columns_across_chunks(device: torch.device) -> None:
    logits = torch.full((1, 40000), 1.5, device=device)
    logits[0, 39990:] = 2.0
    lengths = torch.full((1,), 40000, dtype=torch.int32, device=device)
    got = TopkPlan(1, 40000, 64, device).run(logits=logits, lengths=lengths, k=64)[0]
    want = torch.cat((torch.arange(54), torch.arange(39990, 40000))).int()
    assert torch.equal(got.cpu(), want)


def test_infinities_and_signs_are_ordered(device: torch.device) -> None:
    """−∞ inside the row is chosen before absent positions, and subnormal and negative scores keep their order."""
    values = torch.tensor([-torch.inf, -1.0, -2.0, 1e-42, -1e-42, 0.0, torch.inf, -torch.inf, -torch.inf])
    logits = values.repeat(3, 1).to(device)
    lengths = torch.tensor([9, 8, 5], dtype=torch.int32, device=device)
    for k in (3, 4, 8):
        got = TopkPlan(3, 9, k, device).run(logits=logits, lengths=lengths, k=k)
        assert torch.equal(got, topk(logits, lengths, k))
    assert got[2].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_the_callers_rows_may_be_apart_and_lengths_two_dimensional(device: torch.device) -> None:
    logits = torch.randn((4, 90), generator=torch.Generator().manual_seed(1)).to(device)
    lengths = torch.tensor([[90, 7], [0, 64]], dtype=torch.int32, device=device)
    out = torch.full((6, 32), 77, dtype=torch.int32, device=device)
    TopkPlan(4, 90, 16, device).run(logits=logits, lengths=lengths, k=16, out=out)
    assert torch.equal(out[:4, :16], topk(logits, lengths, 16))
    assert bool((out[4:] == 77).all())
    assert bool((out[:, 16:] == 77).all())


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="k is 5000"):
        TopkPlan(1, 9000, 5000, device)
    plan = TopkPlan(2, 64, 16, device)
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="the plan holds 2"):
        plan.run(logits=torch.zeros((3, 64), device=device), lengths=lengths, k=16)
    with pytest.raises(ValueError, match=r"logits has shape \(1, 65\), needs \[rows, ≤ 64\]"):
        plan.run(logits=torch.zeros((1, 65), device=device), lengths=lengths[:1], k=16)
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\), needs \[rows = 1\]"):
        plan.run(logits=torch.zeros((1, 64), device=device), lengths=lengths, k=16)


def test_a_plan_holds_as_many_rows_as_its_candidates_have_room_for(device: torch.device) -> None:
    plan = TopkPlan(9, 40000, 512, device)
    # Three chunks of the planned width, two of half of it; rows of one chunk need no candidates.
    assert [plan.holds(*shape) for shape in ((9, 40000), (10, 40000), (13, 20000), (14, 20000))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert plan.holds(10000, 16384)
    assert not plan.holds(1, 40001)
    assert plan.holds(8, 40000)
    assert not TopkPlan(2, 40000, 512, device).holds(3, 40000)


@pytest.mark.parametrize("spread", ["anywhere", "together", "one part", "last"])
def test_few_long_rows_wherever_the_best_scores_lie(device: torch.device, spread: str) -> None:
    """The bound also holds if the parts have very different scores, and if more scores reach it than fit at once."""
    width, k = 40000, 512
    logits = torch.randn((2, width), generator=torch.Generator().manual_seed(2))
    best = {
        "anywhere": torch.arange(0, width, 75),
        "together": torch.arange(7000, 7540),
        # The parts alternate every four columns, so all of these are in one part.
        "one part": torch.arange(0, width - 4, 512)[:, None].add(torch.arange(4)).flatten(),
        "last": torch.arange(width - 600, width),
    }[spread]
    logits[0, best] += 100
    logits[1] = (logits[1] * 0.5).round() + torch.isin(torch.arange(width), best) * 0.5
    lengths = torch.tensor([width, width - 1], dtype=torch.int32)
    plan = TopkPlan(2, width, k, device)
    got = plan.run(logits=logits.to(device), lengths=lengths.to(device), k=k)
    assert torch.equal(got.cpu(), topk(logits, lengths, k))
