"""Mixed load of a GPU's benchmark: the same requests for the same seed, of all kinds, within the context length."""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "gpu_mixed", Path(__file__).parents[3] / "benchmarks" / "gpu" / "mixed.py"
)
assert _SPEC
assert _SPEC.loader
mixed = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mixed)


class Parameters(SimpleNamespace):
    """Stand-in for vLLM's sampling parameters."""


class Engine:
    """Stand-in for `vllm.LLM`: refuses one kind of requests, generates the maximum number of tokens for others."""

    def __init__(self) -> None:
        self.aborted = 0
        self.largest = 0
        self.llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states={"a": 1}), abort_request=self.abort
        )

    def abort(self, requests: list[str], internal: bool) -> None:
        self.aborted += len(requests)

    def generate(self, prompts: list[dict[str, list[int]]], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        if any(hasattr(one, "logit_bias") for one in parameters):
            raise ValueError("no logit_bias here")
        self.largest = max(self.largest, *(len(p["prompt_token_ids"]) for p in prompts))
        # Only time within this call counts as served.
        time.sleep(0.003)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * one.max_tokens)]) for one in parameters]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    vllm, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = Parameters  # type: ignore[attr-defined]
    parameters.StructuredOutputsParams = Parameters  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    return Engine()


@pytest.mark.usefixtures("engine")
def test_a_seed_gives_the_same_requests_of_every_kind() -> None:
    kinds = list(mixed.KINDS)
    first, again = (
        [mixed.batch(draw, kinds, 3000) for _ in range(40)] for draw in (random.Random(1), random.Random(1))
    )
    assert first == again
    requests = [request for batch in first for request in batch]
    assert {kind for kind, _, _ in requests} == set(kinds)
    assert {min(map(len, first)), max(map(len, first))} <= set(range(1, mixed.MOST_REQUESTS + 1))
    assert max(len(ids) for _, ids, _ in requests) <= 3000
    assert all(1 <= options["max_tokens"] <= mixed.MOST_TOKENS for _, _, options in requests)
    numbers = {options["logprobs"] for kind, _, options in requests if kind == "logprobs"}
    assert {0, 20} <= numbers <= set(range(21))


def test_a_refused_kind_of_request_is_reported_once_and_left_out(engine: Engine) -> None:
    served = mixed.serve(engine, 0.3, 1024)
    assert served["refused"] == {"logit_bias": "ValueError: no logit_bias here"}
    assert engine.aborted == 1
    assert served["requests"] == sum(served["kinds"].values()) > 0
    assert "logit_bias" not in served["kinds"]
    assert served["tokens"] > 0
    assert engine.largest <= 1024 - mixed.MOST_TOKENS
