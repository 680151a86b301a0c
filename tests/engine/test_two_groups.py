"""`dsv4 up` with two groups: one is killed during requests and given up, and the other one serves all requests."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from functools import partial

import gateway_groups
import psutil
import pytest
import uvloop

from dsv4_testkit.harness import Deployment, network_namespaces, pid_in
from dsv4_testkit.http_load import quantile

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    # Without restarts the killed group is given up at once, and no other process uses the processors.
    found = Deployment(nodes=1, replicas=2, seqs=8, restarts=0)
    before = network_namespaces()
    found.up()
    yield found
    found.run("down", found.name, timeout=90)
    try:
        assert found.remains() == []
        assert network_namespaces() <= before
    finally:
        found.destroy()


def test_both_groups_serve_with_addresses_and_files_of_their_own(deployment: Deployment) -> None:
    status = deployment.object()["status"]
    assert (status["phase"], status["readyReplicas"]) == ("Serving", 2)
    assert [group["members"][0]["address"] for group in status["groups"]] == ["10.88.0.10", "10.88.0.11"]
    assert (deployment.directory / "i1/m0/vllm.log").exists()
    assert (deployment.directory / "g1/i1/m0/vllm.log").exists()
    said = deployment.run("logs", deployment.name, "--component", "agent", "--tail", "1").stdout
    assert [line.split("]")[0] for line in said.splitlines()] == ["[group 0 0 agent", "[group 1 0 agent"]


def test_a_gateway_that_is_killed_leaves_the_other(deployment: Deployment) -> None:
    mine = [process for process in psutil.process_iter(["cmdline"]) if "--number=0" in (process.info["cmdline"] or ())]
    (gateway,) = [process.pid for process in mine if str(deployment.directory) in " ".join(process.info["cmdline"])]
    os.kill(gateway, signal.SIGKILL)
    for _ in range(5):
        assert deployment.complete(timeout=30)["usage"]["completion_tokens"] == 4


def test_a_killed_group_costs_no_request_and_gets_no_more(deployment: Deployment) -> None:
    url = f"http://127.0.0.1:{deployment.api}/v1/completions"
    body = gateway_groups.NANO_BODY
    warm = uvloop.run(gateway_groups.measure(url, 8, 16.0, lambda: None, body))
    assert warm.failed == 0
    doomed = pid_in(deployment.group(1), 0, "agent")
    found = uvloop.run(gateway_groups.measure(url, 8, 30.0, partial(os.kill, doomed, signal.SIGKILL), body))
    assert (found.failed, found.under) == (0, 8)
    before, after = quantile(found.before, 0.95), quantile(found.after, 0.95)
    print(f"\nfirst byte, p95: {before * 1e3:.0f} ms before, {after * 1e3:.0f} ms after")
    assert after < 1.5 * before + 0.5
    deadline = time.monotonic() + 60
    while deployment.peek()["groups"][1]["phase"] != "Failed":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    status = deployment.object()["status"]
    assert (status["groups"][0]["phase"], status["groups"][0]["incarnation"]) == ("Serving", 1)
    # It stays down and gets no requests: its state is away by its agent's last report, or in doubt without one.
    with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("dsv4_gateway_engine_state{")]
    healthy = {line.partition('group="')[2][0]: line[-3:] for line in lines if 'state="healthy"' in line}
    assert healthy == {"0": "1.0", "1": "0.0"}
    for name in ("route.json", "route-1.json"):
        assert "used up its 0 restarts" in (deployment.directory / name).read_text()
    for _ in range(4):
        assert deployment.complete(timeout=30)["usage"]["completion_tokens"] == 4
