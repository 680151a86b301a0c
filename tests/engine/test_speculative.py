"""Speculative decoding: with an MTP layer or DSpark's stages, `dsv4 up` gives the same greedy results as without.

The acceptance rates are printed (`pytest -s`). They show that drafts are accepted and rejected, and do not apply to a
trained checkpoint: docs/decisions/0002-nano-model.md.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv4_testkit.harness import MANIFEST, Deployment

PROMPTS = (
    *("The river", "now we may", "a day in the sun and the wind over the sea", "who are you"),
    " ".join(["long way home to the world of water"] * 8),
    "xyz qrs 0123456789 " * 9,  # bytes: nearly 200 tokens, more than the window
)
NEW_TOKENS = 40
TIE = 0.125  # nats: two steps of bfloat16 between logits, as in test_equivalence.py
TIES_ALLOWED = 2
TOKENS = {"MTP": 3, "DSpark": 5}

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Answer:
    tokens: tuple[str, ...]
    margins: tuple[float, ...]
    """Margin of each token over the runner-up, in nats."""


def answer(deployment: Deployment, prompt: str) -> Answer:
    asked = {"model": deployment.name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.0, "logprobs": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{deployment.api}/v1/completions",
        json.dumps({**asked, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        told: dict[str, Any] = json.load(response)["choices"][0]["logprobs"]
    margins = []
    for token, own, best in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        margins.append(own - max(value for other, value in best.items() if other != token))
    return Answer(tuple(told["tokens"]), tuple(margins))


def answers(deployment: Deployment) -> list[Answer]:
    """Every prompt alone, then all at once: a step then combines requests with drafts and a request that begins."""
    alone = [answer(deployment, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as together:
        return alone + list(together.map(lambda prompt: answer(deployment, prompt), PROMPTS))


def counted(deployment: Deployment, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=60) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllm:spec_decode_num_{name}_total"
    )


@contextmanager
def deployed(name: str, manifest: str) -> Iterator[Deployment]:
    deployment = Deployment(name, nodes=2, manifest=manifest)
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.destroy()


@pytest.fixture(scope="module")
def without() -> list[Answer]:
    with deployed("plain", MANIFEST) as deployment:
        found = answers(deployment)
        assert counted(deployment, "drafts") == 0
    return found


@pytest.mark.parametrize("method", TOKENS)
def test_drafts_change_no_greedy_token(method: str, without: list[Answer]) -> None:
    manifest = MANIFEST.replace("precision: bf16", f"precision: bf16, drafts: {method}").replace(
        "maxNumBatchedTokens: 512",
        f"maxNumBatchedTokens: 512, speculative: {{{{method: {method}, tokens: {TOKENS[method]}}}}}",
    )
    with deployed(method.lower(), manifest) as deployment:
        found = answers(deployment)
        drafts, drafted, accepted = (
            counted(deployment, name) for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
    print(
        f"\n{method}: {accepted:.0f} of {drafted:.0f} drafted tokens accepted ({accepted / drafted:.0%}),"
        f" {1 + accepted / drafts:.2f} tokens a step of up to {1 + TOKENS[method]}"
    )
    assert 0 < accepted < drafted
    ties = []
    for one, other in zip(without, found, strict=True):
        parting = next((at for at in range(NEW_TOKENS) if one.tokens[at] != other.tokens[at]), None)
        if parting is not None:
            ties.append(one.margins[parting])
    assert all(margin < TIE for margin in ties), ties
    assert len(ties) <= TIES_ALLOWED
