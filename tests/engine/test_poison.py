"""Requests that kill their engine each time, among others: one, and all of one kind; vLLM with the nano model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial

import openai
import pytest

from dsv4_testkit.faults.system import HOOK
from dsv4_testkit.gateway_clients import SECONDS, Asked
from dsv4_testkit.harness import Deployment, unix

pytestmark = [pytest.mark.engine, pytest.mark.long]

POISON = "The text that nobody may see."
BODIES = (
    {"prompt": "Once upon a time", "stream": True},
    {"prompt": "It was a dark night"},
    {"prompt": "There was a king", "stream": True},
)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    found = Deployment(nodes=1, restarts=10)
    found.environment[HOOK] = str(found.root / "order")
    found.up()
    yield found
    found.destroy()


class Innocent(threading.Thread):
    """A client that sends one request at a time until it is stopped."""

    def __init__(self, deployment: Deployment, body: dict[str, object]) -> None:
        super().__init__()
        self._deployment, self._body = deployment, {**body, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        self._stop_now = threading.Event()
        self.answers: list[Asked] = []
        self.start()

    def run(self) -> None:
        while not self._stop_now.is_set():
            self.answers.append(Asked(self._deployment, "/v1/completions", self._body).answered())

    def stopped(self) -> list[Asked]:
        self._stop_now.set()
        self.join(SECONDS)
        return self.answers


def whole(asked: Asked) -> bool:
    if asked.status != 200:
        return False
    if b"data: " in asked.raw:
        return asked.chunks[-1] == "[DONE]" and asked.choices[-1]["finish_reason"] == "length"
    return bool(json.loads(asked.raw)["usage"]["completion_tokens"] == 24)


def inject(deployment: Deployment, order: dict[str, object]) -> None:
    (deployment.root / "moved").write_text(json.dumps({"kind": "raise", "rank": 0, **order}))
    (deployment.root / "moved").rename(deployment.root / "order")


def deaths_since(deployment: Deployment, begun: float) -> int:
    history = deployment.object()["status"]["groups"][0]["history"]
    return sum(unix(failure["time"]) > begun for failure in history)


def test_a_fatal_request_costs_three_engines_and_other_requests_are_answered(deployment: Deployment) -> None:
    tokens = json.loads(Asked(deployment, "/tokenize", {"prompt": POISON}).answered().raw)["tokens"]
    inject(deployment, {"prompt": tokens})
    begun = time.time()
    innocent = [Innocent(deployment, body) for body in BODIES]
    # OpenAI's client, as commonly used: it repeats a request if the response permits it.
    url = f"http://127.0.0.1:{deployment.api}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=2, timeout=SECONDS)
    ask = partial(client.completions.create, model=deployment.name, prompt=POISON, max_tokens=8)
    try:
        with client, pytest.raises(openai.UnprocessableEntityError) as refused:
            ask(extra_headers={"X-Request-Id": "the-poison"})
        seconds = time.time() - begun
    finally:
        answers = [asked for one in innocent for asked in one.stopped()]
    assert refused.value.code == "engine_fatal"

    deaths = deaths_since(deployment, begun)
    broken = [(asked.status, asked.raw[-200:]) for asked in answers if not whole(asked)]
    slowest = max(asked.seconds for asked in answers)
    print(f"\n{deaths} deaths, refused after {seconds:.0f} s; {len(answers)} others, the slowest {slowest:.0f} s")
    assert deaths <= 3
    assert broken == []

    size = len(refused.value.request.content)
    said = deployment.run("why", deployment.name, timeout=120).stdout
    assert f"the-poison ({size} bytes): 3 engines died of it" in said
    assert POISON not in said
    assert deployment.complete(POISON + " More.")["usage"]["completion_tokens"] == 4


def test_three_engines_at_most_die_of_a_kind_and_other_requests_are_answered(deployment: Deployment) -> None:
    inject(deployment, {"structured": True})
    begun = time.time()
    innocent = [Innocent(deployment, body) for body in BODIES]
    url = f"http://127.0.0.1:{deployment.api}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
    refusals = []
    try:
        # Different requests of one kind: the second one kills no engine.
        for prompt in ("A list of names:", "A list of places:"):
            with pytest.raises(openai.UnprocessableEntityError) as refused:
                client.completions.create(
                    model=deployment.name,
                    prompt=prompt,
                    max_tokens=8,
                    extra_body={"structured_outputs": {"regex": "a+"}},
                )
            refusals.append(refused.value)
    finally:
        client.close()
        answers = [asked for one in innocent for asked in one.stopped()]
        (deployment.root / "order").unlink()
    assert [refused.code for refused in refusals] == ["engine_fatal_kind"] * 2
    assert "structured" in refusals[0].message
    # Two deaths suffice without other requests; a third is needed if another request was in both engines, as here.
    assert deaths_since(deployment, begun) in (2, 3)
    assert [(asked.status, asked.raw[-200:]) for asked in answers if not whole(asked)] == []
    assert deployment.complete("Once more.")["usage"]["completion_tokens"] == 4
