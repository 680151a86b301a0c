"""The comparison of running operations with their references (`benchmarks/gpu/layers.py`), around real plans."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.mla_decode.api import DecodePlan
from dsv4_kernels.mla_decode.reference import o8_inputs
from dsv4_kernels.registry import as_outputs, operation

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu.layers import ALONE, TOGETHER, TOKENS, layers_noted, page, prompt, record_steps
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.samples import sample

CASES = [
    ("fp8_quant", "odd"),
    ("silu_mul_quant", "odd"),
    ("front_norm", "odd"),
    ("fp8_gemm", "wide"),
    ("wo_a_einsum", "small"),
    ("mla_decode_o8", "both"),
    ("mla_decode_o8", "lookup"),
    ("mla_prefill", "few"),
    ("mla_prefill_lists", "ratio4"),
    ("front_norm", "odd"),
    ("front_insert", "odd"),
    ("mla_merge_o8", "few"),
    ("mhc_pre", "one"),
    ("mhc_pre_broadcast", "one"),
    ("mhc_post_pre", "odd"),
    ("mhc_post", "one"),
    ("mhc_head", "one"),
    ("compressor_save", "chunks4"),
    ("compressor_store", "chunks4"),
    ("projections", "small"),
    ("compressor_store_indexer", "apart4"),
    ("indexer_query", "odd"),
    ("indexer_logits", "few"),
    ("indexer_paged_logits", "next3"),
    ("moe_w4a16", "seven-holes"),
    ("moe_w4a16", "adds-sorted"),
    ("router", "padded-hashed"),
    ("topk", "k256"),
]
EVERY = pytest.mark.parametrize(("name", "case"), CASES, ids=[name for name, _ in CASES])


def made(name: str, case: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    op = operation(name)
    params = next(c.params for c in op.cases if c.name == case)
    arch = None if device.type == "cuda" else Arch.SM_90
    inputs = op.make_inputs(params, device, 3)
    # The engine does not pass the pages; the plan knows them.
    return op.plan(params, device, arch), {key: value for key, value in inputs.items() if key != "pages"}


def recorded(plan: Any, inputs: dict[str, Any]) -> tuple[Recorder, Any]:
    recorder = Recorder()
    with recorder.attached(), recorder.step("decode"):
        recorder.layer = "2"
        if plan.operation == "fp8_quant":
            plan.warmup()  # Plans that are made while serving warm up at once, on inputs of their own.
        result = plan.run(**inputs)
    return recorder, result


def tamper(tensor: torch.Tensor) -> None:
    """Change the last bit of codes and of indices, and numbers by a hundredth."""
    if not tensor.is_floating_point():
        tensor.copy_(tensor ^ 1)
    else:
        tensor.mul_(1.01)


@EVERY
def test_a_right_kernel_is_within_its_tolerance(name: str, case: str, device: torch.device) -> None:
    recorder, _ = recorded(*made(name, case, device))
    assert not recorder.failures
    assert set(recorder.rows) == {(name, "2", "decode")}
    row = recorder.rows[name, "2", "decode"]
    assert (row.calls, row.beyond, row.example) == (1, 0, None)
    assert list(row.outputs) == list(operation(name).outputs)


@EVERY
def test_a_wrong_result_is_beyond_it(
    name: str, case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, inputs = made(name, case, device)
    original: Callable[..., Any] = type(plan).run

    def wrong(self: Any, **kwargs: Any) -> Any:
        result = original(self, **kwargs)
        for output in as_outputs(result):
            tamper(output)
        return result

    monkeypatch.setattr(type(plan), "run", wrong)
    recorder, _ = recorded(plan, inputs)
    assert not recorder.failures
    row = recorder.rows[name, "2", "decode"]
    assert row.beyond == 1
    assert row.example is not None
    assert f"{name}." in row.example
    assert "**" in page(recorder.result())


def test_recording_does_not_change_results(device: torch.device) -> None:
    for name, case in (("fp8_gemm", "small"), ("mhc_post_pre", "one"), ("compressor_save", "chunks4")):
        first, second = (made(name, case, device) for _ in range(2))
        _, found = recorded(*first)
        wanted = second[0].run(**second[1])
        for a, b in zip(as_outputs(found), as_outputs(wanted), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_results_that_are_the_next_inputs(device: torch.device) -> None:
    """As in the model, a seam reads the buffers that it writes."""
    plan, inputs = made("mhc_post_pre", "one", device)
    recorder = Recorder()
    with recorder.attached(), recorder.step("prefill"):
        for _ in range(2):
            residual, post, comb, y = plan.run(**inputs)
            inputs |= {"residual": residual, "post_layer_mix": post, "comb_res_mix": comb, "x": y.clone()}
    row = recorder.rows["mhc_post_pre", "model", "prefill"]
    assert (row.calls, row.beyond) == (2, 0)


def test_padded_heads(device: torch.device) -> None:
    params = {"tokens": 2, "heads": 8, "window": 32, "topk": 16, "pages": (64, 2)}
    inputs = o8_inputs(params, device, 1)
    wide = torch.full((2, 16, 512), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, :8] = inputs["q"]
    arch = None if device.type == "cuda" else Arch.SM_90
    plan = DecodePlan(2, 8, 32, 16, device, pages=(64, 2), o8=True, q_heads=16, arch=arch)
    recorder, _ = recorded(plan, {**{k: v for k, v in inputs.items() if k != "pages"}, "q": wide[:, :8]})
    assert recorder.rows["mla_decode_o8", "2", "decode"].beyond == 0


def test_long_runs_are_compared_at_both_ends(device: torch.device) -> None:
    plan, inputs = made("fp8_gemm", "wide", device)
    taken = sample(plan, operation("fp8_gemm"), inputs)
    assert taken is not None
    assert torch.equal(taken.inputs["a"], torch.cat((inputs["a"][:64], inputs["a"][-64:])))


def test_chosen_keys_of_the_engines_rows(device: torch.device) -> None:
    """Rows of a wider buffer, and lengths by request and row; the reference does not modify the buffer."""
    plan, inputs = made("topk", "one-level", device)
    buffer = torch.full((12, 600), 7, dtype=torch.int32, device=device)
    lengths = inputs["lengths"].view(6, 2)
    recorder, result = recorded(plan, {**inputs, "lengths": lengths, "out": buffer})
    assert recorder.rows["topk", "2", "decode"].beyond == 0
    assert torch.equal(result, buffer[:, :512])
    taken = sample(plan, operation("topk"), {**inputs, "lengths": lengths, "out": buffer})
    assert taken is not None
    assert taken.inputs["out"] is None


def test_a_step_that_stores_nothing_is_no_comparison(device: torch.device) -> None:
    plan, inputs = made("compressor_store", "chunks4", device)
    inputs["kv_slot_mapping"].fill_(-1)
    recorder, _ = recorded(plan, inputs)
    assert not recorder.rows
    assert recorder.result()["wrote_nothing"] == {"compressor_store": 1}


def test_lists_are_compared_at_the_end_of_each_request(device: torch.device) -> None:
    op = operation("mla_prefill_lists")
    params = {"topk": 24, "ratio": 4, "window": 20, "requests": ((90, 7), (3, 60))}
    inputs = op.make_inputs(params, device, 1)
    plan = op.plan(params, device, None if device.type == "cuda" else Arch.SM_90)
    taken = sample(plan, op, inputs)
    assert taken is not None
    assert taken.inputs["query_start_loc"].tolist() == [0, 64, 67]
    results = taken.pick(as_outputs(plan.run(**inputs)))
    assert all(map(torch.equal, results, as_outputs(op.reference(**taken.inputs))))


@pytest.mark.parametrize("wrong", [False, True])
def test_entries_of_the_front_are_compared_without_the_rest_of_their_page(device: torch.device, wrong: bool) -> None:
    """Long steps are sampled at both ends; bytes of other slots are not compared."""
    params = {"tokens": 140, "heads": 8, "padded": 8, "page": 64, "dense": True}
    inputs = operation("front_insert").make_inputs(params, device, 1)
    arch = None if device.type == "cuda" else Arch.SM_90
    plan = operation("front_insert").plan(params, device, arch)
    slots = inputs["slot_mapping"]
    taken = sample(plan, operation("front_insert"), inputs)
    assert taken is not None
    assert taken.inputs["q"].shape[0] == 128
    results = plan.run(**inputs)
    free = next(slot for slot in range(64) if slot not in slots.tolist())
    changed = int(slots[0 if wrong else 70])
    for slot in (free, changed):
        inputs["kv_cache"][slot // 64, slot % 64 * 576] ^= 1
    expected = operation("front_insert").reference(**taken.inputs)
    (_, found), (_, want) = taken.level(taken.pick(as_outputs(results)), as_outputs(expected))
    assert found.shape == (128, 584)
    assert torch.equal(found, want) is not wrong


def test_a_step_without_slots_still_has_queries(device: torch.device) -> None:
    plan, inputs = made("front_insert", "odd", device)
    inputs["slot_mapping"].fill_(-1)
    recorder, _ = recorded(plan, inputs)
    assert not recorder.failures
    assert recorder.rows["front_insert", "2", "decode"].beyond == 0


def test_a_failing_comparison_does_not_fail_the_run(device: torch.device) -> None:
    plan, inputs = made("fp8_quant", "odd", device)
    plan.operation = "unheard of"
    recorder, (code, _) = recorded(plan, inputs)
    assert code.shape == inputs["x"].shape
    assert "no operation 'unheard of'" in next(iter(recorder.failures))
    assert "no operation" in page(recorder.result())


def test_when_the_time_is_over_runs_are_counted(device: torch.device) -> None:
    plan, inputs = made("fp8_quant", "odd", device)
    recorder = Recorder(seconds=0.0)
    with recorder.attached(), recorder.step("decode"):
        plan.run(**inputs)
    assert recorder.result()["left_out"] == {"fp8_quant": 1}
    assert not recorder.rows


def test_layers_and_kinds_of_steps(device: torch.device) -> None:
    plan, inputs = made("fp8_quant", "one", device)

    class DecoderLayer(torch.nn.Module):
        def forward(self) -> None:
            plan.run(**inputs)

    class Worker:
        def __init__(self) -> None:
            self.layers = [DecoderLayer(), DecoderLayer()]

        def execute_model(self, scheduled: Any) -> str:
            for layer in self.layers:
                layer()
            plan.run(**inputs)
            return "output"

    class Scheduled:
        def __init__(self, **counts: int) -> None:
            self.num_scheduled_tokens = counts

    recorder, steps, worker = Recorder(), [], Worker()
    with recorder.attached(), layers_noted(recorder, DecoderLayer):
        record_steps(worker, recorder, steps)
        assert worker.execute_model(Scheduled(a=9, b=1)) == "output"
        worker.execute_model(Scheduled(a=1, b=1))
        worker.execute_model(Scheduled(a=1, b=1))
        plan.run(**inputs)
    found = {(layer, kind): row.calls for (_, layer, kind), row in recorder.rows.items()}
    calls = {"prefill": 1, "decode": 2}
    assert found == {(layer, kind): n for layer in ("0", "1", "model") for kind, n in calls.items()}
    assert [(s["kind"], s["requests"], s["tokens"], s["compared"]) for s in steps] == [
        ("prefill", 2, 10, 3), ("decode", 2, 2, 3), ("decode", 2, 2, 3),
    ]  # fmt: skip
    result = json.loads(json.dumps({"steps": steps, **recorder.result()}))
    text = page(result)
    assert "| operation | output: measure | limit | calls | layer 0 | layer 1 | model |" in text
    assert "| fp8_quant | code: share of elements outside | 0 | 3 / 6 | 0 / 0 | 0 / 0 | 0 / 0 |" in text


def test_prompts_have_the_requested_length() -> None:
    assert [len(prompt(n, 3)) for n in (9, 600, 2500)] == [9, 600, 2500]
    assert prompt(600, 1)[:4] != prompt(600, 2)[:4]


def test_windows_end_in_every_step_that_decodes() -> None:
    for ratio in (4, 128):
        ended = [[(length + step) % ratio == 0 for length in TOGETHER] for step in range(1, TOKENS)]
        assert all(any(step) for step in ended)
        assert any((length + step) % ratio == 0 for length, count in ALONE for step in range(1, count))
    assert sum(TOGETHER) < 8192
