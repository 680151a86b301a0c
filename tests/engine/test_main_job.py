"""The complete main job: up, a chat, deaths and other faults, the end of the budget, and no remains.

One deployment serves all tests of this file, in order; its budget is exactly the number of restarts that the faults
use. `make test` runs some of them, `make engine-test` all of this file, `benchmarks/faults.py` the whole table.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dsv4_runtime.engine.logs import progress
from dsv4_testkit.faults import groups, judge, report
from dsv4_testkit.faults.actions import Frozen, OutOfMemory
from dsv4_testkit.faults.load import Shape
from dsv4_testkit.faults.matrix import BY_NAME
from dsv4_testkit.faults.system import DSV4
from dsv4_testkit.faults.table import BOUND, PROCESS_DEATHS, Fault, Kind
from dsv4_testkit.harness import Deployment, inflict, network_namespaces, shared_memory

pytestmark = pytest.mark.engine

# The code behind `vllm bench serve`; the command itself needs metadata that vLLM's CPU build lacks.
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
READY_SECONDS = 75.0
"""Bound of a start on two cores, weights present."""
BUSY = 2.0
"""The bounds of the table are p95 of an idle machine; this factor allows for other work of a runner."""
SEED = 1
LOAD = Shape(clients=2, tokens=(4, 12))
"""Half of the table's load, so that two processors have time for the engine."""
OTHER_FAULTS = (
    "all frames of member 1 lost for 8 s",
    "exception in a step of rank 0",
    "hang in a step of rank 1",
    "SIGSTOP worker of rank 1",
    "logits of rank 1 are not numbers",
    "member 1 out of memory",
    "link of member 1 down",
    "64 KiB of zeros in a weight file, at the next start",
    "SIGSTOP standby server, then kill -9 EngineCore",
    "kill -9 dashboard",
    "kill -9 waiting worker",
    "kill -9 gateway and kill -9 EngineCore",
    "packets from member 0 to member 1 lost",
    "kill -9 runtime-env agent of rank 1",
    "SIGSTOP API process of a start",
    "GCS frozen",
    "directory of member 1 removed, then kill -9 EngineCore",
)
"""At least one fault for each recovery level and each kind other than a killed process."""
LONG = {fault.name for fault in PROCESS_DEATHS} - {"vLLM exits with code 0", "kill -9 agent of rank 1"} | {
    "packets from member 0 to member 1 lost",
    "hang in a step of rank 1",
    "kill -9 dashboard",
    "kill -9 waiting worker",
    "kill -9 runtime-env agent of rank 1",
    "SIGSTOP API process of a start",
    "directory of member 1 removed, then kill -9 EngineCore",
}
"""Deaths with the same path as another one (`test_gateway.py` kills EngineCore), hangs that are detected by the same
rule as another one, and slow faults whose parts have unit tests."""
_LACKS = groups.lacks()


def parameters(faults: Iterable[Fault]) -> list[Any]:
    found = []
    for fault in faults:
        marks = [pytest.mark.long] if fault.name in LONG else []
        if _LACKS is not None and isinstance(fault.action, (Frozen, OutOfMemory)):
            marks.append(pytest.mark.skip(reason=_LACKS))
        found.append(pytest.param(fault, id=fault.name, marks=marks))
    return found


@pytest.fixture(scope="module")
def budget(request: pytest.FixtureRequest) -> int:
    """Return the number of restarts that the faults of this run use."""
    chosen = [
        item.callspec.params["fault"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec") and "fault" in item.callspec.params
    ]
    return sum(1 + fault.nth for fault in chosen if fault.kind not in (Kind.NONE, Kind.OWN))


@pytest.fixture(scope="module")
def system(budget: int) -> Iterator[DSV4]:
    found = DSV4(restarts=budget, window="1h")
    found.patience = BUSY * max(BOUND.values())
    begun = time.monotonic()
    try:
        found.start()
        print(f"\nup to ready, weights made: {time.monotonic() - begun:.1f} s")
        yield found
    finally:
        found.close()


@pytest.fixture
def deployment(system: DSV4) -> Deployment:
    assert system.deployment is not None
    return system.deployment


def test_status_is_the_object_that_kubectl_would_show(deployment: Deployment) -> None:
    found = deployment.object()
    assert (found["apiVersion"], found["kind"]) == ("dsv4.dev/v1beta1", "DSV4Deployment")
    status = found["status"]
    assert status["phase"] == "Serving"
    assert status["endpoint"] == f"http://127.0.0.1:{deployment.api}/v1"
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert conditions["Ready"] == "True"
    members = status["groups"][0]["members"]
    assert [member["role"] for member in members] == ["Head", "Worker"]
    assert len({member["address"] for member in members}) == 2
    for member in members:
        for process in member["processes"]:
            os.kill(process["pid"], 0)


def test_one_rank_on_each_member(deployment: Deployment) -> None:
    workers = [deployment.pid(rank, "worker") for rank in range(2)]
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in workers}
    assert len(networks) == 2
    assert os.readlink("/proc/self/ns/net") not in networks
    listed = [one["name"] for member in deployment.group()["members"] for one in member["processes"]]
    assert listed.count("worker") == 2


def test_load_progress_is_reported_in_bytes(deployment: Deployment) -> None:
    logs = list(deployment.root.glob(f"{deployment.name}/i*/m0/ray/session_latest/logs/worker-*.*"))
    told = [
        found for log in logs for line in log.read_text().splitlines() if (found := progress(line)) and found.weights
    ]
    weights = [found.weights for found in told if found.weights and found.weights.bytes_total]
    assert weights, logs
    assert weights[-1].bytes_done == pytest.approx(weights[-1].bytes_total, rel=0.02)
    assert any(found.weights and found.weights.shards == found.weights.shards_total for found in told)


def test_on_cpu_all_operations_are_vllms(deployment: Deployment) -> None:
    done = deployment.run("kernels", deployment.name, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "vLLM's CPU kernels compute every operation" in done.stdout


def test_chat_streams(deployment: Deployment) -> None:
    done = deployment.run("chat", deployment.name, "Say something.", "--max-tokens", "8", "--no-thinking", timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 2


def test_the_openai_client_works_unmodified(deployment: Deployment) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{deployment.api}/v1", api_key="none", timeout=120.0)
    assert [model.id for model in client.models.list()] == ["nano"]
    stream = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=6,
        stream=True,
        extra_body={"chat_template_kwargs": {"thinking": False}, "ignore_eos": True},
    )
    finish = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert finish[-1] == "length"
    client.close()


def test_vllm_bench_serve_works_unmodified(deployment: Deployment, tmp_path: Path) -> None:
    model = next((deployment.root / "weights").glob("nano-*"))
    command = [
        *(sys.executable, "-c", BENCH_SERVE),
        *("--base-url", f"http://127.0.0.1:{deployment.api}", "--model", "nano", "--tokenizer", str(model)),
        *("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "4", "--num-prompts", "4"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json"),
    ]
    environment = {**os.environ, "DSV4_DEV_PLATFORM": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 16


@pytest.mark.parametrize(("header", "status"), [({}, 401), ({"Authorization": "Bearer wrong"}, 403), (None, 200)])
def test_the_dashboard_requires_the_token(deployment: Deployment, header: dict[str, str] | None, status: int) -> None:
    token = (deployment.directory / "token").read_text().strip()
    header = {"Authorization": f"Bearer {token}"} if header is None else header
    request = urllib.request.Request(f"http://127.0.0.1:{deployment.dashboard}/nodes?view=summary", headers=header)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == status
            assert response.read().decode().count('"raylet"') >= 2
    except urllib.error.HTTPError as error:
        assert error.code == status  # noqa: PT017
        error.close()


def test_a_second_up_of_the_same_name_is_refused(deployment: Deployment) -> None:
    done = deployment.run("up", str(deployment.file), timeout=120)
    assert done.returncode == 2
    assert "already running" in done.stderr
    assert deployment.complete()["usage"]["completion_tokens"] == 4


def test_a_busy_port_is_refused_and_nothing_is_left(deployment: Deployment) -> None:
    other = Deployment("other")
    try:
        other.file.write_text(other.file.read_text().replace(str(other.api), str(deployment.api)))
        done = other.run("up", str(other.file), "--detach", timeout=60)
        assert done.returncode == 2
        assert f"port {deployment.api} of 127.0.0.1, which the api needs, cannot be used" in done.stderr
        assert [found for found in other.remains() if found != f"port {other.api}"] == []
    finally:
        other.destroy()


@pytest.mark.parametrize("fault", parameters(PROCESS_DEATHS))
def test_the_deployment_recovers_from_every_death_of_a_process(deployment: Deployment, fault: Fault) -> None:
    before = deployment.group()
    row = inflict(deployment, fault)
    print(f"\n{fault.name}: noticed {row.detected:.2f} s, answered again {row.answered:.1f} s, {row.cause}")
    after = deployment.group()
    assert (row.cause, row.culprit, row.level) == (fault.cause, fault.rank, fault.level)
    assert after["incarnation"] - before["incarnation"] == fault.level - 1
    assert after["totalRestarts"] == before["totalRestarts"] + 1
    assert row.detected < 3.0
    why = deployment.run("why", deployment.name, timeout=120).stdout
    assert fault.cause in why
    assert len(why.splitlines()) <= 10
    if fault.level == 2:
        death = next(found for found in reversed(after["history"]) if found["cause"] == fault.cause)
        assert Path(death["evidence"]).is_dir()


@pytest.mark.parametrize("fault", parameters(BY_NAME[name] for name in OTHER_FAULTS))
def test_every_fault_is_detected_attributed_and_repaired(system: DSV4, fault: Fault) -> None:
    result = judge.inflict(system, fault, 1, SEED, LOAD)
    print(f"\n{fault.name}: {report.line(result)}")
    assert result.false_restarts == 0
    # A stream that had begun may end with an error event; every other request gets a response.
    assert (result.failed, result.silent) == (0, 0), result.errors
    if fault.kind is Kind.NONE:
        assert result.verdict == "Healthy"
        return
    if fault.kind is Kind.OWN:
        assert result.verdict == "Replaced"
        assert result.replaced is not None
        assert result.replaced <= BUSY * BOUND[fault.kind]
        return
    assert not result.missed
    assert result.detected is not None
    assert result.detected <= BUSY * BOUND[fault.kind]
    assert result.cause in fault.causes, result.message
    assert fault.rank is None or result.culprit == fault.rank
    assert result.level == fault.level
    assert result.recovered is not None
    assert result.disorder == ""


def test_an_exhausted_budget_ends_the_deployment_and_is_reported(deployment: Deployment, budget: int) -> None:
    killed = time.time()
    os.kill(deployment.pid(0, "engine-core"), signal.SIGKILL)
    status = deployment.wait("Failed", since=killed, timeout=60)
    exhausted = next(found for found in status["conditions"] if found["type"] == "RecoveryExhausted")
    assert exhausted["status"] == "True"
    assert f"used up its {budget} restarts" in exhausted["message"]
    last = status["groups"][0]["lastFailure"]
    assert (last["cause"], last["culpritRank"], last["level"]) == ("EngineCoreDied", 0, 3)
    with pytest.raises(urllib.error.HTTPError) as refused:
        deployment.complete()
    with refused.value as error:
        assert error.code == 503
        assert json.load(error)["error"]["code"] == "engine_given_up"

    def engines() -> list[str]:
        return [line for line in deployment.remains() if "ray" in line or "vllm" in line.lower()]

    deadline = time.monotonic() + 60
    while engines() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engines() == []


def test_down_leaves_nothing(deployment: Deployment) -> None:
    begun = time.monotonic()
    done = deployment.run("down", deployment.name, timeout=120)
    assert done.returncode == 0, done.stderr
    print(f"\ndown after {time.monotonic() - begun:.1f} s")
    assert deployment.remains() == []
    assert deployment.run("down", deployment.name, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        pytest.param(signal.SIGINT, "up", id="Ctrl-C", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "up", id="kill -9 of dsv4 up", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "supervisor", id="kill -9 of its supervisor"),
        pytest.param(None, "directory", id="its directory removed", marks=pytest.mark.long),
    ],
)
def test_a_deployment_ended_during_its_start_leaves_nothing(
    deployment: Deployment, number: signal.Signals | None, whom: str
) -> None:
    networks, shared = network_namespaces(), shared_memory()
    other = Deployment("short", weights=deployment.root / "weights")
    try:
        up = subprocess.Popen(
            other.command("up", str(other.file)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + READY_SECONDS
        # Ray runs and vLLM is starting: at this moment the most processes could remain.
        while not (other.directory / "i1" / "m0" / "vllm.log").exists():
            assert time.monotonic() < deadline, other.log()
            time.sleep(0.2)
        time.sleep(2)
        assert len(other.remains()) > 10
        supervisor = int((other.directory / "lock").read_text())
        if number is None:
            shutil.rmtree(other.directory)
        else:
            os.kill(up.pid if whom == "up" else supervisor, number)
        up.communicate(timeout=60)

        def left() -> list[str]:
            return [*other.remains(), *(network_namespaces() - networks), *(shared_memory() - shared)]

        deadline = time.monotonic() + 60
        while left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left() == []
    finally:
        other.destroy()


@pytest.mark.long
def test_a_second_start_is_quick(deployment: Deployment) -> None:
    again = Deployment("again", weights=deployment.root / "weights")
    try:
        seconds = again.up()
        phases = json.loads((again.directory / "object.json").read_text())["status"]["groups"][0]
        print(f"\nup to ready, weights present: {seconds:.1f} s (expected {phases['expectedReadySeconds']:.0f} s)")
        assert seconds < READY_SECONDS
        begun = time.monotonic()
        assert again.run("down", again.name, timeout=90).returncode == 0
        print(f"down while serving: {time.monotonic() - begun:.1f} s")
        assert again.remains() == []
    finally:
        again.destroy()
