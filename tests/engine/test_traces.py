"""Spans of a real vLLM below those of the gateway, over a death of the engine."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from dsv4_testkit.gateway_clients import Asked
from dsv4_testkit.harness import Deployment, pid_in
from dsv4_testkit.otlp import Received, Receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
PROMPT = "Nobody may read this sentence in a trace"
SECONDS = 60.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllms_spans_are_children_of_the_gateways(tmp_path: Path) -> None:
    with Receiver(f"unix:{tmp_path}/otlp.sock") as receiver:
        deployment = Deployment("traced", nodes=1, environment={"DSV4_TRACES": receiver.url})
        try:
            print(f"up {deployment.up():.0f} s")
            ask = {"model": "traced", "prompt": PROMPT, "max_tokens": 4}
            request = urllib.request.Request(
                f"http://127.0.0.1:{deployment.api}/v1/completions",
                json.dumps(ask).encode(),
                {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"},
            )
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                assert answer.status == 200
            found = receiver.until(lambda spans: len(_of(spans, TRACE)) == 2, SECONDS)
            gateway, vllm = sorted(_of(found, TRACE), key=lambda one: one.span.name)
            assert (gateway.span.name, vllm.span.name) == ("POST /v1/completions", "llm_request")
            assert (gateway.parent, vllm.parent) == (PARENT, gateway.id)
            assert (gateway.resource["service.name"], vllm.resource["service.name"]) == ("dsv4-gateway", "vllm")
            assert gateway.resource["dsv4.deployment"] == "traced"
            assert gateway.attributes["gen_ai.request.id"] == "mine"
            assert re.search(r"\bmine\b", vllm.attributes["gen_ai.request.id"])
            assert vllm.attributes["gen_ai.usage.completion_tokens"] == 4

            begun = threading.Event()
            body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
            stream = Asked(deployment, "/v1/completions", {**body, "stream": True}, begun)
            whole = Asked(deployment, "/v1/completions", body)
            assert begun.wait(SECONDS)
            os.kill(pid_in(deployment.peek()["groups"][0], 0, "engine-core"), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while deployment.peek()["groups"][0]["phase"] == "Serving" and time.monotonic() < deadline:
                time.sleep(0.1)
            held = Asked(deployment, "/v1/completions", {**body, "max_tokens": 4})
            for one in (stream, whole, held):
                one.answered()
                assert one.status == 200
            # Of each request a span of the gateway, and one of the vLLM that answered it.
            # vLLM also sends spans of its start and of the agent's requests.
            found = receiver.until(lambda spans: len(_gateways(spans)) == len(_children(spans)) == 4, SECONDS)
            events = {tuple(name for name, _ in one.events): one for one in _gateways(found)[1:]}
            print(*events, sep="\n")
            names = {path[-1] for path in events}
            assert names == {"continued", "replayed", "sent"}
            assert ("held", "sent") in events
            for path, one in events.items():
                assert "held" in path
                assert one.events[-1][1] == {"dsv4.group": 0, "dsv4.incarnation": 1, "dsv4.generation": 2}
                assert one.attributes["dsv4.held_seconds"] > 1
                (child,) = (each for each in found if each.parent == one.id)
                assert (child.span.name, child.trace) == ("llm_request", one.trace)
            assert PROMPT not in "".join(str(one.span) for one in found)
            failure = deployment.group()["history"][0]
            assert failure["cause"] == "EngineCoreDied"
        finally:
            deployment.destroy()


def _of(spans: list[Received], trace: str) -> list[Received]:
    return [one for one in spans if one.trace == trace]


def _gateways(spans: list[Received]) -> list[Received]:
    return [one for one in spans if one.resource["service.name"] == "dsv4-gateway"]


def _children(spans: list[Received]) -> list[Received]:
    parents = {one.id for one in _gateways(spans)}
    return [one for one in spans if one.parent in parents]
