"""The main job on a cluster: real Ray and real vLLM with the nano model in pods on two nodes, asked and broken.

What it prints can be held against `benchmarks/recovery.py` of the same minutes: the same fault, the same question.
"""

from __future__ import annotations

import json
import time

import httpx
import psutil
import pytest
from nano_world import BACK_SECONDS, Nano, forwarded

from dsv4_operator.api.values import parse_time

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CHAT = {
    "model": "nano",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0.0,
}
# What the harness of the benchmarks asks.
COMPLETION = {"model": "nano", "prompt": "Hello", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
KILL = "import os,signal,sys;" + (
    "found=[int(p) for p in os.listdir('/proc') if p.isdigit() "
    "and b'EngineCore' in open(f'/proc/{p}/cmdline','rb').read().split(b'\\0')[0]];"
    "[os.kill(p,signal.SIGKILL) for p in found];sys.exit(not found)"
)


def test_a_chat_a_killed_engine_and_an_answer(nano: Nano) -> None:
    before = nano.uids()
    assert len({pod["spec"]["nodeName"] for pod in nano.members().values()}) == 2
    with (
        forwarded(nano.cluster, nano.namespace, "svc/nano", 8000) as base,
        httpx.Client(base_url=base, timeout=BACK_SECONDS, trust_env=False) as http,
    ):
        first = http.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        assert first["usage"]["completion_tokens"] == 8
        # Programs, cluster, images, chart and engine: all that the command found missing is in it.
        taken = time.time() - psutil.Process().create_time()
        print(f"a chat through the Service {taken:.0f} s after the command began")

        struck, begun = time.time(), time.monotonic()
        nano.inside(0, KILL)
        # Asked while the engine is dead: the gateway holds it until there is one again.
        answer = http.post("/v1/completions", json=COMPLETION).raise_for_status().json()
        print(f"answered again after {time.monotonic() - begun:.1f} s")
        assert answer["usage"]["completion_tokens"] == 4
        again = http.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert nano.uids() == before
    failure = nano.recovered(struck, "EngineCoreDied")
    noticed = parse_time(failure["time"]) - struck
    print(f"noticed after {noticed:.1f} s, served {failure['recoverSeconds']:.1f} s later")
    assert (failure["culpritRank"], failure["level"]) == (0, 1)


def test_what_an_engine_has_begun_it_finishes_before_an_update(nano: Nano) -> None:
    """Also a stream that no other could continue; then the next one is formed."""
    seeded = {**COMPLETION, "max_tokens": 100, "temperature": 1.0, "seed": 7, "stream": True}
    change = {"spec": {"engine": {"maxNumSeqs": 3, "timeouts": {"drain": "3m"}}}}
    before = nano.group()["incarnation"]
    with (
        forwarded(nano.cluster, nano.namespace, "svc/nano", 8000) as base,
        httpx.Client(base_url=base, timeout=BACK_SECONDS, trust_env=False) as http,
    ):
        with http.stream("POST", "/v1/completions", json=seeded) as stream:
            lines = stream.raise_for_status().iter_lines()
            first = next(lines)
            nano.cluster.kubectl("patch", "dsv4/nano", "-n", nano.namespace, "--type=merge", "-p", json.dumps(change))
            events = [line for line in (first, *lines) if line]
        ended = time.monotonic()
        assert events[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in event for event in events) == 1
        assert not any('"error"' in event for event in events)
        answer = http.post("/v1/completions", json=COMPLETION).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
    print(f"{len(events)} events under an update; the next engine answered {time.monotonic() - ended:.1f} s later")
    assert nano.group()["incarnation"] == before + 1
