"""Requests over the death of a real engine: what the gateway promises, with vLLM and the nano model.

One deployment serves all tests of this file, in order; the last one ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from harness import Deployment

pytestmark = pytest.mark.engine

SECONDS = 240.0
TOKENS = 160
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    found = Deployment(nodes=1, restarts=10)
    found.up()
    yield found
    found.destroy()


class Asked(threading.Thread):
    """One request, answered in a thread of its own."""

    def __init__(self, deployment: Deployment, path: str, body: dict[str, Any], tell: threading.Event | None = None):
        super().__init__()
        self._url, self._body = f"http://127.0.0.1:{deployment.api}{path}", {"model": deployment.name, **body}
        self._tell = tell or threading.Event()
        self.status, self.raw, self.seconds = 0, b"", 0.0
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        data, headers = json.dumps(self._body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url, data, headers), timeout=SECONDS) as answer:
                self.status = answer.status
                for line in answer:
                    self.raw += line
                    if self.raw.count(b"\n\n") == TOKENS // 4:
                        self._tell.set()
        except urllib.error.HTTPError as error:
            self.status, self.raw = error.code, error.read()
        self.seconds = time.monotonic() - begun

    def answered(self) -> Asked:
        self.join(SECONDS)
        assert not self.is_alive()
        return self

    @property
    def chunks(self) -> list[Any]:
        events = self.raw.decode().split("\n\n")
        assert events.pop() == ""
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks if isinstance(chunk, dict) for choice in chunk.get("choices", ())]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def kill_engine(deployment: Deployment) -> float:
    os.kill(deployment.pid(0, "engine-core"), signal.SIGKILL)
    return time.time()


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me of the sea."}]}),
    ],
)
def test_a_greedy_stream_goes_on_to_the_letter(deployment: Deployment, path: str, ask: dict[str, Any]) -> None:
    body = {**ask, **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    whole = Asked(deployment, path, body).answered()
    assert whole.chunks[-1] == "[DONE]"
    tell = threading.Event()
    broken = Asked(deployment, path, body, tell)
    assert tell.wait(SECONDS)
    killed = kill_engine(deployment)
    broken.answered()
    print(f"\n{path}: {whole.seconds:.1f} s whole, {broken.seconds:.1f} s over a death")
    assert broken.text == whole.text
    assert broken.chunks[-1] == "[DONE]"
    assert broken.chunks.count("[DONE]") == 1
    assert broken.chunks[-2]["usage"] == whole.chunks[-2]["usage"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in broken.chunks[:-1]}) == 1
    assert b'token_ids":[' not in broken.raw
    status = deployment.wait("Serving", since=killed)
    assert status["groups"][0]["lastFailure"]["cause"] == "EngineCoreDied"


def test_one_death_and_every_other_kind_of_request(deployment: Deployment) -> None:
    ask = {"prompt": "Once upon a time", **GREEDY}
    whole = json.loads(Asked(deployment, "/v1/completions", ask).answered().raw)
    tell = threading.Event()
    asked = {
        "whole answer": Asked(deployment, "/v1/completions", ask),
        "seeded": Asked(deployment, "/v1/completions", {**ask, "stream": True, "temperature": 1.0, "seed": 7}, tell),
        "unseeded": Asked(deployment, "/v1/completions", {**ask, "stream": True, "temperature": 1.0}),
    }
    assert tell.wait(SECONDS)
    kill_engine(deployment)
    deadline = time.monotonic() + 10
    while deployment.group()["phase"] == "Serving" and time.monotonic() < deadline:
        time.sleep(0.1)
    asked["held"] = Asked(deployment, "/v1/completions", {**ask, "max_tokens": 4})
    for name, request in asked.items():
        request.answered()
        print(f"\n{name}: {request.status} after {request.seconds:.1f} s")
        assert request.status == 200
    assert json.loads(asked["whole answer"].raw)["choices"][0]["text"] == whole["choices"][0]["text"]
    assert json.loads(asked["held"].raw)["usage"]["completion_tokens"] == 4
    *delivered, last = asked["seeded"].chunks
    assert "seed" in last["error"]["message"]
    assert delivered
    assert "[DONE]" not in delivered
    assert asked["unseeded"].chunks[-1] == "[DONE]"
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in asked["unseeded"].chunks[:-1]]
    assert finishes.count("length") == 1


def test_its_figures_stand_beside_vllms(deployment: Deployment) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"\nvllm:{name}{{" in text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dsv4_gateway"))
    assert float(figures["dsv4_gateway_continued_total"]) == 3
    assert float(figures["dsv4_gateway_replayed_total"]) >= 1
    assert float(figures["dsv4_gateway_cut_total"]) == 1


def test_a_gateway_that_is_killed_is_back_within_a_second(deployment: Deployment) -> None:
    old = _gateway(deployment)
    old.kill()
    killed = time.monotonic()
    new = _gateway(deployment)
    assert time.monotonic() - killed < 1.0
    assert new.pid != old.pid
    assert new.ppid() == int((deployment.directory / "lock").read_text())
    assert deployment.complete()["usage"]["completion_tokens"] == 4


def test_down_finishes_what_was_begun(deployment: Deployment) -> None:
    tell = threading.Event()
    body = {"prompt": "Once", **GREEDY, "stream": True}
    asked = Asked(deployment, "/v1/completions", body, tell)
    assert tell.wait(SECONDS)
    deployment.run("down", deployment.name, timeout=90)
    assert asked.answered().chunks[-1] == "[DONE]"
    assert deployment.remains() == []


def _gateway(deployment: Deployment) -> psutil.Process:
    loop = psutil.Process(int((deployment.directory / "lock").read_text()))
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for process in loop.children():
            # One that was just killed is a zombie until the loop has heard of it.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "dsv4_runtime.gateway.main" in process.cmdline():
                    return process
        time.sleep(0.02)
    raise AssertionError(f"no gateway within 5 s:\n{deployment.log()}")
