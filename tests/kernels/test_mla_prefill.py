"""Sparse MLA prefill beyond the registry's cases: the packed path, order and gaps, refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.mla_cache.api import mla_cache_read, mla_cache_write
from dsv4_kernels.mla_decode.api import DecodePlan
from dsv4_kernels.mla_decode.reference import decode_inputs
from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan
from dsv4_kernels.registry import operation


def test_workspace_and_packed_pages_give_the_same(device: torch.device) -> None:
    """The two forms of prefill: rows dequantised once into a workspace, and mla_decode over the pages."""
    params = {"tokens": 3, "heads": 16, "window": 40, "topk": 24}
    inputs = decode_inputs(params, device, 4)
    packed, packed_lse = DecodePlan(3, 16, 40, 24, device).run(**inputs)
    lists, kv = [], []
    for name in ("swa", "cmp"):
        idx, length = inputs[f"{name}_idx"], inputs[f"{name}_len"]
        behind = torch.arange(idx.shape[1], device=device) >= length[:, None]
        slots = idx.masked_fill(behind, -1).long()
        rows = mla_cache_read(inputs[f"{name}_cache"], slots.flatten(), inputs["pages"][0])
        at = torch.arange(slots.numel(), device=device).view_as(slots) + sum(len(part) for part in kv)
        lists.append(torch.where(slots >= 0, at, -1))
        kv.append(rows)
    indices = torch.cat(lists, 1).int()
    lengths = torch.full((3,), 64, dtype=torch.int32, device=device)
    o, lse = PrefillPlan(3, 16, 64, device).run(
        q=inputs["q"], kv=torch.cat(kv), indices=indices, lengths=lengths, sink=inputs["sink"]
    )
    torch.testing.assert_close(o.float(), packed.float(), atol=2e-3, rtol=2.0**-6)
    torch.testing.assert_close(lse, packed_lse, atol=1e-3, rtol=1e-4)


def test_a_list_may_be_shuffled_and_have_gaps(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(1)
    q = torch.randn((1, 16, 512), generator=draw).bfloat16().to(device)
    kv = (torch.randn((50, 512), generator=draw) / 4).bfloat16().to(device)
    order = torch.randperm(50, generator=draw)
    gaps = torch.full((1, 150), -1, dtype=torch.int32)
    gaps[0, ::3] = order.int()
    plan = PrefillPlan(1, 16, 150, device)
    common = {"q": q, "kv": kv, "sink": torch.zeros(16, device=device)}
    lengths = torch.full((1,), 150, dtype=torch.int32, device=device)
    o, lse = (t.clone() for t in plan.run(indices=gaps.to(device), lengths=lengths, **common))
    plain = torch.full((1, 150), 2**31 - 1, dtype=torch.int32)
    plain[0, :50] = torch.arange(50)
    lengths = torch.full((1,), 50, dtype=torch.int32, device=device)
    want, want_lse = plan.run(indices=plain.to(device), lengths=lengths, **common)
    torch.testing.assert_close(o.float(), want.float(), atol=2e-3, rtol=2.0**-6)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-5)


def test_packed_rows_are_such_as_a_cache_gives() -> None:
    """Packing them again does not change them, so that kernels that read pages can be compared."""
    inputs = operation("mla_prefill").make_inputs(
        {"tokens": 2, "heads": 8, "width": 64, "rows": 70, "packed": True}, torch.device("cpu"), 3
    )
    rows, slots = inputs["kv"][::2], torch.arange(70)
    cache = mla_cache_write(rows, slots, torch.zeros((2, 64 * 585), dtype=torch.uint8))
    assert torch.equal(mla_cache_read(cache, slots), rows)
    assert rows.isfinite().all()
    assert rows.float().std() == pytest.approx(0.25, rel=0.05)


def test_results_are_written_to_the_callers_buffers(device: torch.device) -> None:
    """In an engine, the workspace contains lists and outputs, so the plan has no buffers for them."""
    row = operation("mla_prefill_lists")
    given = row.make_inputs(next(c.params for c in row.cases if c.name == "ratio4"), device, 1)
    tokens = given["chosen"].shape[0]
    common = {"topk": 24, "ratio": 4, "device": device, "window": 20}
    want = ListsPlan(tokens, **common).run(**given)
    plan = ListsPlan(tokens, own_output=False, **common)
    plan.warmup()
    assert plan.indices.shape[0] == 1
    out = (torch.empty_like(want[0]), torch.empty_like(want[1]))
    assert plan.run(**given, out=out) == out
    assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
    with pytest.raises(ValueError, match=r"out_indices has shape \(1, 128\)"):
        plan.run(**given)

    inputs = operation("mla_prefill").make_inputs({"tokens": 3, "heads": 8, "width": 40, "rows": 20}, device, 1)
    wanted, lse = PrefillPlan(3, 8, 40, device).run(**inputs)
    prefill = PrefillPlan(3, 8, 40, device, own_output=False)
    prefill.warmup()
    rows = torch.empty_like(wanted)
    found, found_lse = prefill.run(**inputs, out=rows)
    assert found is rows
    assert torch.equal(rows, wanted)
    assert torch.equal(found_lse, lse)
    with pytest.raises(ValueError, match=r"out has shape \(1, 8, 512\)"):
        prefill.run(**inputs)


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="129 heads"):
        PrefillPlan(1, 129, 64, device)
    with pytest.raises(ValueError, match="no column"):
        PrefillPlan(1, 8, 0, device)


def test_lists_of_the_window_and_of_the_chosen_entries_read_the_right_rows(device: torch.device) -> None:
    """Each row of the workspace contains its identity: request, kind, and number."""
    topk, ratio, window, new, old = 6, 4, 10, [7, 3], [0, 50]
    seq = [n + o for n, o in zip(new, old, strict=True)]
    gather = [n + min(o, window - 1) for n, o in zip(new, old, strict=True)]
    first, rows = max(seq) // ratio, max(seq) // ratio + max(gather)
    who = [("nothing", 0, 0)] * (2 * rows)
    for b in range(2):
        for entry in range(seq[b] // ratio):
            who[b * rows + entry] = ("entry", b, entry)
        for at in range(gather[b]):
            who[b * rows + first + at] = ("position", b, seq[b] - gather[b] + at)
    chosen = torch.arange(topk, dtype=torch.int32, device=device).flip(0).repeat(10, 1)
    chosen[:7] = torch.arange(topk, dtype=torch.int32, device=device)
    values = [torch.tensor(v, dtype=torch.int32, device=device) for v in ([3, 10, 13], seq, gather)]
    sizes = {"topk": topk, "ratio": ratio, "window": window, "rows": rows, "first": first}
    lists, lengths = ListsPlan(16, topk, ratio, device, window).run(
        chosen=chosen, query_start_loc=values[0], seq_lens=values[1], gather_lens=values[2], **sizes
    )
    for token in range(10):
        b, position = (0, token) if token < 7 else (1, 50 + token - 7)
        count = min((position + 1) // ratio, topk)
        want = [("entry", b, int(entry)) for entry in chosen[token, :count]]
        want += [("position", b, p) for p in range(max(0, position - window + 1), position + 1)]
        assert [who[row] for row in lists[token, : lengths[token]].tolist()] == want
        assert bool((lists[token, lengths[token] :] == -1).all())


def test_entries_that_a_token_does_not_see_are_dropped(device: torch.device) -> None:
    """For any choice, no row of a list is outside of those of its token's request and position."""
    op = operation("mla_prefill_lists")
    for case in op.cases_with("cpu"):
        inputs = op.make_inputs(case.params, device, 3)
        draw = torch.Generator().manual_seed(4)
        stray = torch.randint(-(2**31), 2**31 - 1, inputs["chosen"].shape, generator=draw).int()
        chosen = inputs["chosen"].cpu()
        near = chosen + torch.randint(0, 9, stray.shape, generator=draw).int()
        kind = torch.randint(0, 3, stray.shape, generator=draw)
        inputs["chosen"] = torch.where(kind == 0, stray, torch.where(kind == 1, near, chosen)).to(device)
        plan = op.plan(case.params, device, None)
        indices, lengths = plan.run(**inputs)
        want, want_lengths = op.reference(**inputs)
        assert torch.equal(indices, want)
        assert torch.equal(lengths, want_lengths)
        begin = 0
        for request, (tokens, before) in enumerate(case.params["requests"]):
            for token in range(tokens):
                row = indices[begin + token] - request * inputs["rows"]
                seen = (before + token + 1) // case.params["ratio"]
                listed = row[: min(seen, case.params["topk"])]
                own = indices[begin + token, : listed.numel()] == -1
                assert bool((own | ((listed >= 0) & (listed < seen))).all())
            begin += tokens


def test_lists_of_another_layer_are_refused(device: torch.device) -> None:
    plan = ListsPlan(4, 8, 4, device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    inputs = {"query_start_loc": torch.tensor([0, 1], dtype=torch.int32, device=device), "seq_lens": one}
    sizes = {"topk": 8, "ratio": 4, "window": 128, "rows": 9, "first": 2}
    chosen = torch.zeros((1, 8), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"topk, ratio, window are \(8, 128, 128\)"):
        plan.run(chosen=chosen, gather_lens=one, **inputs, **{**sizes, "ratio": 128})
    with pytest.raises(ValueError, match=r"chosen has shape \(1, 7\), needs \[tokens ≤ 4, ≥ 8\]"):
        plan.run(chosen=chosen[:, :7], gather_lens=one, **inputs, **sizes)
    with pytest.raises(ValueError, match=r"gather_lens has shape \(2,\), needs \[requests = 1\]"):
        plan.run(chosen=chosen, gather_lens=one.repeat(2), **inputs, **sizes)
    with pytest.raises(ValueError, match="ratio is 0"):
        ListsPlan(4, 8, 0, device)
