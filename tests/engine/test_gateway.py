"""Requests over the death of a real engine: what the gateway promises, with vLLM and the nano model.

One deployment serves all tests of this file, in order; the last one ends it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from harness import Deployment

pytestmark = pytest.mark.engine

SECONDS = 240.0
TOKENS = 96
CONTEXT = 1024
"""Of the deployment: tokens of a prompt and its answer together."""
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


STREAMED = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of the sea."}]},
}


def len_in_tokens(deployment: Deployment, content: str) -> int:
    """Of a chat with this message, its template included."""
    asked = Asked(deployment, "/tokenize", {"messages": [{"role": "user", "content": content}]}).answered()
    return int(json.loads(asked.raw)["count"])


class Chat(threading.Thread):
    """A greedy chat of which no limit is given, so that the model's context ends it, read by OpenAI's own client."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        url = f"http://127.0.0.1:{deployment.api}/v1"
        self._api = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
        frame = len_in_tokens(deployment, "7") - 1
        content = "7" * (CONTEXT - TOKENS - frame)
        self._ask: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "model": deployment.name}
        self._ask |= {"temperature": 0.0, "extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
        self.text, self.finish, self.tokens = "", "", 0
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._read()
        finally:
            self.started.set()

    def _read(self) -> None:
        with self._api, self._api.chat.completions.create(**self._ask, stream=True) as stream:
            for number, chunk in enumerate(stream):
                if chunk.usage is not None:
                    self.tokens = chunk.usage.total_tokens
                for choice in chunk.choices:
                    self.text += choice.delta.content or ""
                    self.finish = choice.finish_reason or self.finish
                if number == TOKENS // 4:
                    self.started.set()

    def answered(self) -> Chat:
        self.join(SECONDS)
        assert not self.is_alive()
        return self


def test_greedy_streams_go_on_to_the_letter(deployment: Deployment) -> None:
    more = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    whole = {path: Asked(deployment, path, ask | more) for path, ask in STREAMED.items()}
    whole_chat = Chat(deployment).answered()
    for asked in whole.values():
        assert asked.answered().chunks[-1] == "[DONE]"
    tells = {path: threading.Event() for path in STREAMED}
    broken = {path: Asked(deployment, path, ask | more, tells[path]) for path, ask in STREAMED.items()}
    chat = Chat(deployment)
    assert all(tell.wait(SECONDS) for tell in (*tells.values(), chat.started))
    killed = kill_engine(deployment)
    for path, asked in broken.items():
        found, wanted = asked.answered().chunks, whole[path].chunks
        print(f"\n{path}: {whole[path].seconds:.1f} s whole, {asked.seconds:.1f} s over a death")
        assert asked.text == whole[path].text
        assert (found[-1], found.count("[DONE]")) == ("[DONE]", 1)
        assert found[-2]["usage"] == wanted[-2]["usage"]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found[:-1]}) == 1
        assert b'token_ids":[' not in asked.raw
    assert chat.answered().text == whole_chat.text
    assert (chat.finish, chat.tokens) == (whole_chat.finish, whole_chat.tokens) == ("length", CONTEXT)
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


# Answers each request of a JSON list with status, headers and body, as they came.
_ASK = """
import http.client, json, sys
found = []
for base, path, body in json.load(sys.stdin):
    connection = http.client.HTTPConnection(base, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json", "X-Request-Id": "the-same"})
    answer = connection.getresponse()
    found.append([answer.status, answer.getheaders(), answer.read().decode()])
json.dump(found, sys.stdout)
"""


# The gateway frames anew and names the request in its answer; and the clock runs.
_OF_THE_CONNECTION = ("transfer-encoding", "content-length", "connection", "date", "x-request-id")


def test_healthy_answers_are_vllms_byte_for_byte(deployment: Deployment) -> None:
    stream = {"model": deployment.name, **GREEDY, "max_tokens": 12, "stream": True}
    bodies = [(path, json.dumps({**stream, **ask})) for path, ask in STREAMED.items()]
    bodies += [(path, json.dumps({**stream, **ask, "stream": False})) for path, ask in STREAMED.items()]
    bodies += [("/v1/completions", '{"model": "nano", "prompt": 7.5}'), ("/v1/completions", "{"), ("/v1/nothing", "{}")]
    loop = int((deployment.directory / "lock").read_text())

    def ask(base: str, prefix: list[str]) -> list[Any]:
        asked = json.dumps([(base, *body) for body in bodies])
        command = [*prefix, sys.executable, "-c", _ASK]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
        found = []
        for status, headers, body in json.loads(done.stdout):
            kept = [header for header in headers if header[0].lower() not in _OF_THE_CONNECTION]
            found.append([status, kept, re.sub(r'"created":\d+', '"created":0', body)])
        return found

    direct = ask("10.88.0.10:8000", ["nsenter", f"--net=/proc/{loop}/ns/net"])
    through = ask(f"127.0.0.1:{deployment.api}", [])
    assert [status for status, _, _ in direct] == [200, 200, 200, 200, 400, 400, 404]
    assert direct[0][2].count("data: ") == 13
    assert through == direct


def test_a_client_that_leaves_ends_its_work_in_vllm(deployment: Deployment) -> None:
    def figures() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {line.partition("{")[0].partition(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = figures()
    body = json.dumps({"model": deployment.name, "prompt": "Once", **GREEDY, "max_tokens": 900, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", deployment.api, timeout=60)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert figures()["vllm:num_requests_running"] == 1
    answer.close()
    connection.close()
    left = time.monotonic()
    while figures()["vllm:num_requests_running"]:
        assert time.monotonic() - left < 5
        time.sleep(0.1)
    assert figures()["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 300


def test_its_figures_stand_beside_vllms(deployment: Deployment) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"\nvllm:{name}{{" in text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dsv4_gateway"))
    assert float(figures["dsv4_gateway_continued_total"]) == 4
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
