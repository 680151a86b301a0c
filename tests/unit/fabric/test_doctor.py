"""`dsv4 doctor` on the command line, on this machine and over copies of other machines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from machines import Machine, spark
from syrupy.assertion import SnapshotAssertion

from dsv4_operator.cli.main import run


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsv4_runtime.fabric.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_good_spark(tmp_path: Path) -> None:
    done = doctor("--root", str(spark().build(tmp_path / "m")))
    assert done.returncode == 0, done.stderr
    assert "ok       rdma" in done.stdout
    assert "NCCL_IB_HCA==rocep1s0f0:1,roceP2p1s0f0:1" in done.stdout
    assert "0 failed, 0 warnings" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "machine",
    [
        spark(),
        spark(memlock="8388608", release="7.0.0-1019-nvidia", cma=(1, 2)),
        Machine(gpu=False),
    ],
    ids=["good", "bad", "without-gpu"],
)
def test_the_text_of_the_checks(machine: Machine, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    done = doctor("--root", str(machine.build(tmp_path / "m")))
    assert (done.stdout + done.stderr).replace(str(tmp_path), "") == snapshot


def test_failed_checks_as_a_document(tmp_path: Path) -> None:
    machine = spark(memlock="8388608", release="7.0.0-1019-nvidia", cma=(1, 2))
    done = doctor("--root", str(machine.build(tmp_path / "m")), "-o", "json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["ok"] is False
    failed = [(check["name"], check["reason"], check["value"]) for check in document["checks"] if "remedy" in check]
    assert failed == [
        ("kernel", "KernelReservesMemory", "7.0.0-1019-nvidia"),
        ("memlock", "LockedMemoryLimit", 8_388_608),
    ]
    assert all(("remedy" in check) is (check["level"] in ("fail", "warn")) for check in document["checks"])
    assert [rail["hca"] for rail in document["rails"]] == ["rocep1s0f0:1", "roceP2p1s0f0:1"]


def test_a_cable_that_brings_nothing_is_a_failure_and_no_cable_is_none(tmp_path: Path) -> None:
    machine = spark()
    for card in machine.cards:
        card.address = None
    assert doctor("--root", str(machine.build(tmp_path / "m"))).returncode == 1
    for card in machine.cards:
        card.up = False
    root = str(machine.build(tmp_path / "m"))
    assert doctor("--root", root).returncode == 0
    assert doctor("--root", root, "--require-rdma").returncode == 1
    assert doctor("--root", str(Machine(gpu=False).build(tmp_path / "m"))).returncode == 0


def test_this_machine_through_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    code = run(["doctor"])
    assert time.monotonic() - begun < 20
    out = capfd.readouterr().out
    if not Path("/sys/class/infiniband").exists():
        assert code == 0
        assert "skipped  rdma " in out
        assert run(["doctor", "--require-rdma", "-o", "json"]) == 1
        document = json.loads(capfd.readouterr().out)
        assert document["ok"] is False
        assert next(check["reason"] for check in document["checks"] if check["level"] == "fail") == "NoDevice"


def test_invalid_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--peer", "spark-2"]) == 2
    assert "--peer 'spark-2' is not an IPv4 address" in capfd.readouterr().err
    assert run(["doctor", "--peer", "198.51.100.9", "--wait", "1s", "-o", "yaml"]) == 1
    found = yaml.safe_load(capfd.readouterr().out)["checks"][-1]
    assert (found["name"], found["level"], found["reason"]) == ("peer 198.51.100.9", "fail", "NoCommonNetwork")
