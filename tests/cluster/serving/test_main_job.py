"""The main job on a cluster: real Ray and vLLM with the nano model in pods on two nodes, with requests and faults.

The printed figures are comparable with `benchmarks/recovery.py` on the same machine: same fault, same request.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from pathlib import Path

import httpx
import psutil
import pytest
from cli_world import PROGRAMS
from nano_world import BACK_SECONDS, Nano, forwarded

from dsv4_operator.api.values import parse_time
from dsv4_runtime.contract import AgentStatus

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CHAT = {
    "model": "nano",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0.0,
}
# The request of the benchmarks' harness.
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
        # Includes programs, cluster, images, chart and engine: everything that had to be built or started.
        taken = time.time() - psutil.Process().create_time()
        print(f"a chat through the Service {taken:.0f} s after the command began")

        struck, begun = time.time(), time.monotonic()
        nano.inside(0, KILL)
        # Sent while the engine is dead: the gateway holds it until the engine is back.
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


def test_the_commands_that_break_and_gather(nano: Nano, tmp_path: Path) -> None:
    environment = {**nano.cluster.environment, "PATH": f"{PROGRAMS}:{nano.cluster.environment['PATH']}"}

    def dsv4(*words: str) -> str:
        command = ["kubectl", "dsv4", *words, "-n", nano.namespace]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
        print(done.stderr)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = nano.uids()
    faults = ("--fault", "kill-engine", "--fault", "kill-worker", "--repeat", "1", "--yes")
    runs = json.loads(dsv4("bench", "recovery", "nano", *faults, "--limit", "12m", "-o", "json"))["runs"]
    assert [(each["fault"], each["lost"], each["levels"]) for each in runs] == [
        ("kill-engine", 0, {"1": 1}),
        ("kill-worker", 0, {"1": 1}),
    ]
    assert nano.uids() == before, "the engine was restarted in place"
    target = tmp_path / "gather.tar.gz"
    dsv4("report", "nano", "--must-gather", str(target))
    with tarfile.open(target) as archive:
        found = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    agents = [AgentStatus.model_validate_json(text) for name, text in found.items() if "/agents/" in name]
    assert sorted(each.rank for each in agents) == [0, 1]
    assert agents[0].engine is None or agents[0].engine.generation >= 3
    assert any(name.startswith("nano/evidence/") for name in found)
    assert all(f"nano/pods/{name}.log" in found for name in before)
    assert "nano/missing.txt" not in found, found["nano/missing.txt"]


def test_an_engine_completes_its_open_requests_before_an_update(nano: Nano) -> None:
    """This includes a stream that no other engine could continue; afterwards the next group is formed."""
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
