"""`dsv4 doctor` on the command line, on this machine and over copies of other machines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from machines import Machine, spark
from syrupy.assertion import SnapshotAssertion

from dsv4_operator.cli.main import run


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsv4_runtime.fabric.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


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
    assert time.monotonic() - begun < 60
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


def report(folder: Path, node: str, addresses: Sequence[str], peers: Mapping[str, str]) -> str:
    """Write the output of `dsv4 doctor -o json` on a node with RDMA ports; return the path of the file."""
    document = {
        "rails": [{"address": address, "hca": f"mlx5_{n}"} for n, address in enumerate(addresses)],
        "interfaces": [
            {"name": f"p{n}", "up": True, "mtu": 9000, "speed": 200_000, "addresses": [address], "defaultRoute": False}
            for n, address in enumerate(addresses)
        ],
        "checks": [{"name": f"peer {peer}", "level": level, "found": ""} for peer, level in peers.items()],
    }
    file = folder / f"{node}.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_labels_follow_tested_paths_and_not_networks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two pairs in one network: only a path tells who is at the other end."""
    files = [
        report(tmp_path, "a", ["10.0.0.1/24"], {"10.0.0.4": "ok", "10.0.0.2": "fail"}),
        report(tmp_path, "b", ["10.0.0.2/24"], {"10.0.0.3": "ok"}),
        report(tmp_path, "c", ["10.0.0.3/24"], {"10.0.0.2": "ok"}),
        # The path of a to d counts for both.
        report(tmp_path, "d", ["10.0.0.4/24"], {"192.168.1.1": "ok"}),
    ]
    assert run(["doctor", *files]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "kubectl label node --overwrite a d dsv4.dev/cabled=a",
        "kubectl label node --overwrite b c dsv4.dev/cabled=b",
    ]
    assert run(["doctor", *files, "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "label": "dsv4.dev/cabled",
        "nodes": {"a": "a", "b": "b", "c": "b", "d": "a"},
    }


@pytest.mark.parametrize(("size", "code"), [(3, 0), (4, 2), (5, 2)])
def test_only_a_ring_of_three_has_a_label(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int, code: int
) -> None:
    """Cable n between node n and the next has the network 10.0.n.0/24. In longer rings the order matters."""
    ends = {n: [f"10.0.{n}.1/24", f"10.0.{(n - 1) % size}.2/24"] for n in range(size)}
    peers = {n: {f"10.0.{n}.2": "ok"} for n in range(size)}
    files = [report(tmp_path, f"n{n}", ends[n], peers[n]) for n in range(size)]
    assert run(["doctor", *files]) == code
    found = capfd.readouterr()
    if code:
        assert "n0 and n2 reach other nodes, but have no tested path to each other" in found.err
    else:
        (line,) = found.out.splitlines()
        assert line.endswith(" dsv4.dev/cabled=n0")


def test_reports_that_prove_nothing_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refused(*files: str) -> str:
        assert run(["doctor", *files]) == 2
        return capfd.readouterr().err

    first = report(tmp_path, "a", ["10.0.0.1/24"], {"10.0.0.2": "ok"})
    second = report(tmp_path, "b", ["10.0.0.2/24"], {})
    twin = report(tmp_path, "c", ["10.0.0.2/24"], {})
    assert "10.0.0.2 is an address of b and c; give each cable a network of its own" in refused(first, second, twin)
    untested = report(tmp_path, "d", ["10.0.0.9/24"], {})
    assert "d has no tested path to the RDMA port of another node" in refused(first, second, untested)
    # A chain: the nodes at its ends do not reach each other.
    chain = report(tmp_path, "e", ["10.0.1.5/24"], {})
    first = report(tmp_path, "a", ["10.0.0.1/24"], {"10.0.0.2": "ok", "10.0.1.5": "ok"})
    assert "b and e reach other nodes, but have no tested path to each other" in refused(first, second, chain)
    odd = tmp_path / "Spark_1.json"
    odd.write_text("{}")
    assert "'Spark_1' is not the name of a node" in refused(str(odd))
    for text in ("", "[]", "{}", '{"rails": 1, "interfaces": [], "checks": []}', '{"rails": [], "interfaces": []}'):
        (tmp_path / "f.json").write_text(text)
        assert "f.json is not a report" in refused(str(tmp_path / "f.json"))
    assert "f.json is not a report" in refused(str(tmp_path / "none" / "f.json"))
    (tmp_path / "g").mkdir()
    again = report(tmp_path / "g", "b", ["10.0.0.7/24"], {})
    assert "another file is named b too" in refused(second, again)
    assert "mutually exclusive" in refused(second, "--peer", "10.0.0.1")
