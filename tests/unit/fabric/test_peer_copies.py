"""Copies between GPUs: real processes and calls with a stand-in for the driver, and a fault in each call."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.fabric import main as doctor
from dsv4_runtime.fabric.checks import Check, CheckReason, CheckStatus, choose_fabric, run_checks
from dsv4_runtime.fabric.node import Node, discover_node
from dsv4_runtime.util.peer_copies import CopyTest, Outcome, try_copies, unsafe_copies
from dsv4_testkit.fake_cuda import FUNCTIONS_OF_COPIES, build_cuda
from dsv4_testkit.waiting import wait_until

SOURCE = (Path(__file__).parents[2] / "kit/dsv4_testkit/fake_cuda.c").read_text()
FUNCTIONS = sorted(
    set(re.findall(r"^int (cu[A-Za-z0-9_]+)\(", SOURCE, re.MULTILINE)) - {"cuGetErrorName", "cuCtxDisablePeerAccess"}
)
UUIDS = ("GPU-a", "GPU-b")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return the setter of the environment, in which the driver has two GPUs on PCIe without a fault."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    for name in [name for name in os.environ if name.startswith("FAKE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_copies_in_every_direction_and_way(cuda: pytest.MonkeyPatch) -> None:
    cuda.setenv("FAKE_GPUS", "3")
    # With 16 GPUs the driver's limit applies.
    cuda.setenv("FAKE_LIMIT", "1")
    found = try_copies()
    assert (found.outcome, found.problem) == (Outcome.PASSED, "")
    assert re.fullmatch(
        r"copies of 32 MiB by copy engine, loads and stores between 3 GPUs arrive in all 6 directions, [\d.]+ GB/s at "
        "least",
        found.found,
    )
    # CUDA is initialized in the other process only.
    assert "libcuda.so" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["999", "crash"])
def test_a_fault_in_any_call(cuda: pytest.MonkeyPatch, function: str, kind: str) -> None:
    """Faults before the first copy leave the result open; faults during a copy make it fail."""
    cuda.setenv("FAKE_FAULT", f"{function}:1:{kind}")
    found = try_copies()
    copying = function in FUNCTIONS_OF_COPIES or function == "cuCtxSynchronize"
    assert found.outcome == (Outcome.FAILED if copying else Outcome.SKIPPED), found
    assert (found.problem == found.found) is copying
    assert ("CUDA_ERROR_999" if kind == "999" else f"signal {signal.SIGABRT}") in found.found


@pytest.mark.parametrize("function", ["cuInit", "cuDevicePrimaryCtxRetain", *FUNCTIONS_OF_COPIES])
def test_a_call_that_never_returns(cuda: pytest.MonkeyPatch, function: str) -> None:
    cuda.setenv("FAKE_FAULT", f"{function}:2:hang" if function in FUNCTIONS_OF_COPIES else f"{function}:1:hang")
    # On a busy machine the start of the process, which is a step too, may take longer.
    for seconds in (1, 5, 25):
        begun = time.monotonic()
        found = try_copies(seconds=seconds)
        assert time.monotonic() - begun < 60 + seconds
        if found.outcome is Outcome.HUNG or function not in FUNCTIONS_OF_COPIES:
            break
    assert found.outcome == (Outcome.HUNG if function in FUNCTIONS_OF_COPIES else Outcome.SKIPPED)
    assert found.found.endswith(f"did not end within {seconds} s")
    assert bool(found.problem) == ("from GPU 0000:0" in found.found)


@pytest.mark.parametrize("kind", ["lost", "bit"])
@pytest.mark.parametrize(
    ("call", "way", "source", "target"),
    [
        ("cuMemcpyPeer:1", "copy engine", 1, 2),
        ("cuLaunchKernel:1", "stores", 1, 2),
        ("cuLaunchKernel:2", "loads", 1, 2),
        ("cuMemcpyPeer:2", "copy engine", 2, 1),
        ("cuLaunchKernel:4", "loads", 2, 1),
    ],
)
def test_wrong_bytes(cuda: pytest.MonkeyPatch, call: str, way: str, source: int, target: int, kind: str) -> None:
    cuda.setenv("FAKE_FAULT", f"{call}:{kind}")
    found = try_copies()
    pages = 8192 if kind == "lost" else 1
    assert found.outcome is Outcome.WRONG
    assert found.problem == (
        f"a copy by {way} from GPU 0000:0{source}:00.0 to 0000:0{target}:00.0 arrives with wrong bytes ({pages} of "
        "8192 pages)"
    )


@pytest.mark.parametrize(
    ("settings", "outcome", "text"),
    [
        ({"FAKE_GPUS": "1"}, Outcome.SKIPPED, "1 GPU is visible; copies need two"),
        ({"FAKE_GPUS": "0"}, Outcome.SKIPPED, "no GPU is visible"),
        ({"FAKE_FREE": "70"}, Outcome.SKIPPED, "GPU 0000:01:00.0 is in use"),
        ({"FAKE_PEERS": "0"}, Outcome.PASSED, "the driver offers no copies"),
        ({"FAKE_ATOMICS": "1"}, Outcome.PASSED, "connected by NVLink"),
        ({"FAKE_FAULT": "cuModuleLoadData:1:221"}, Outcome.PASSED, "by copy engine between"),
        ({"LD_LIBRARY_PATH": "/nonexistent"}, Outcome.SKIPPED, "there is no CUDA driver (libcuda.so.1"),
    ],
)
def test_machines_without_copies_to_test(
    cuda: pytest.MonkeyPatch, settings: dict[str, str], outcome: Outcome, text: str
) -> None:
    for name, value in settings.items():
        cuda.setenv(name, value)
    found = try_copies()
    assert found.outcome == outcome
    assert text in found.found
    assert not found.problem


def test_nvlink_is_tested_on_request(cuda: pytest.MonkeyPatch) -> None:
    cuda.setenv("FAKE_ATOMICS", "1")
    assert "2 directions" in try_copies(nvlink=True).found


def test_the_command_prints_json(cuda: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "dsv4_runtime.util.peer_copies", "--seconds"]
    for fault, bounds, code, outcome in (
        ("cuInit:2:999", (60,), 0, "passed"),
        ("cuMemcpyPeer:1:hang", (1, 5, 25), 1, "hung"),
    ):
        cuda.setenv("FAKE_FAULT", fault)
        # As above, the start of the process may take longer.
        for bound in bounds:
            done = subprocess.run([*command, str(bound)], capture_output=True, text=True, check=False, timeout=120)
            found = json.loads(done.stdout)["outcome"]
            if found != "skipped":
                break
        assert (done.returncode, found, done.stderr) == (code, outcome, "")


def test_the_process_ends_with_its_parent(cuda: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda.setenv("FAKE_FAULT", "cuMemcpyPeer:1:hang")
    cuda.setenv("TMPDIR", str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-m", "dsv4_runtime.util.peer_copies"], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    wait_until(lambda: "libcuda" in _maps(children))
    child = int(children.read_text())
    parent.kill()
    parent.wait(60)
    wait_until(lambda: not Path(f"/proc/{child}/maps").exists() or not Path(f"/proc/{child}/maps").read_text())


def _maps(children: Path) -> str:
    try:
        return Path(f"/proc/{int(children.read_text())}/maps").read_text()
    except (OSError, ValueError):
        return ""


@pytest.mark.parametrize("fault", ["cuMemcpyPeer:1:lost", "cuInit:2:999", "cuInit:1:999"])
def test_a_conclusive_test_is_kept_until_the_next_restart(cuda: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    record, root = tmp_path / "copies.json", tmp_path / "root"
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("first\n")
    assert unsafe_copies(UUIDS[:1], record, root) == ""
    assert not record.exists()
    cuda.setenv("FAKE_FAULT", fault)
    first = unsafe_copies(UUIDS, record, root)
    assert ("wrong bytes" in first) == ("lost" in fault)
    conclusive = fault != "cuInit:1:999"
    assert record.exists() is conclusive
    # The driver's result is different from here on.
    cuda.setenv("FAKE_FAULT", "cuMemcpyPeer:1:bit")
    if conclusive:
        assert unsafe_copies(UUIDS[::-1], record, root) == first
        boot.write_text("second\n")
    assert "1 of 8192" in unsafe_copies(UUIDS, record, root)
    cuda.setenv("FAKE_FAULT", "cuMemcpyPeer:1:lost")
    assert "1 of 8192" in unsafe_copies(UUIDS, record, root)
    assert "8192 of 8192" in unsafe_copies(("GPU-a", "GPU-c"), record, root)
    cuda.setenv("FAKE_FAULT", "cuMemcpyPeer:1:bit")
    record.write_text("[")
    assert "1 of 8192" in unsafe_copies(UUIDS, record, root)


PASSED = CopyTest(Outcome.PASSED, "copies arrive", 1.0)
WRONG = CopyTest(Outcome.WRONG, "a copy arrives with wrong bytes (it's 1 page)", 1.0)
BUSY = CopyTest(Outcome.SKIPPED, "GPU 0000:01:00.0 is in use", 1.0)


@pytest.mark.parametrize(
    ("translated", "copies", "level", "reason"),
    [
        ((), None, None, None),
        ((), PASSED, CheckStatus.OK, None),
        ((), WRONG, CheckStatus.WARN, CheckReason.BROKEN_COPIES),
        ((), BUSY, CheckStatus.SKIPPED, None),
        (("0000:01:00.0",), None, CheckStatus.WARN, CheckReason.REDIRECTED_COPIES),
        (("0000:01:00.0",), PASSED, CheckStatus.WARN, CheckReason.REDIRECTED_COPIES),
        (("0000:01:00.0",), WRONG, CheckStatus.WARN, CheckReason.BROKEN_COPIES),
    ],
)
def test_the_check_of_the_doctor(
    tmp_path: Path,
    translated: tuple[str, ...],
    copies: CopyTest | None,
    level: CheckStatus | None,
    reason: CheckReason | None,
) -> None:
    found = peer_to_peer(replace(two_gpus(tmp_path), translated_gpus=translated), copies)
    assert [(one.level, one.reason) for one in found] == ([] if level is None else [(level, reason)])
    for one in found:
        assert copies is None or copies.found in one.found or copies is BUSY
        assert bool(one.remedy) is (level is CheckStatus.WARN)
        if one.remedy:
            command = shlex.split(one.remedy[one.remedy.index("kubectl") :])
            assert command[:4] == ["kubectl", "annotate", "node", "NODE"]
            assert command[4].removeprefix("dsv4.dev/unsafe-peer-copies=") in one.found


def test_the_doctor_tests_copies_of_its_own_machine(
    cuda: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = two_gpus(tmp_path)
    cuda.setattr(doctor, "discover_node", lambda root: node)
    cuda.setenv("FAKE_FAULT", "cuMemcpyPeer:1:lost")
    for words, tested in (([], True), (["--no-copies"], False), (["--root", str(tmp_path)], False)):
        doctor.main(["-o", "json", *words])
        checks = json.loads(capsys.readouterr().out)["checks"]
        assert any("wrong bytes" in one["found"] for one in checks) is tested


def two_gpus(folder: Path) -> Node:
    return replace(discover_node(folder), gpus=("0000:01:00.0", "0000:02:00.0"))


def peer_to_peer(node: Node, copies: CopyTest | None) -> list[Check]:
    return [one for one in run_checks(node, choose_fabric(node), FabricPlan(), 0, copies) if one.name == "peer to peer"]
