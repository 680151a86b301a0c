"""`dsv4 up --hosts` on two machines with systemd: start, chat, death, restart, power cut, loss of ssh, removal, and an
upgrade under clients; and on three with changed addresses."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.faults.load import Load, Outcome, Shape, counts, outage
from dsv4_testkit.faults.machines import OnMachines
from dsv4_testkit.faults.system import MODEL
from dsv4_testkit.nspawn import NETWORK, World, lacks, until

LACKS = lacks()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(LACKS is not None, reason=str(LACKS)),
]

CACHE = Path(os.environ.get("DSV4_TEST_MACHINES", "/var/tmp/dsv4-machines"))
START_SECONDS = 1800.0
"""Only a bound."""
MANIFEST = """\
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0, precision: bf16}}}
  replicas: %s
  topology: {hardware: CPU, nodesPerGroup: %d}
  engine: {maxModelLen: 1024, maxNumSeqs: 4, maxNumBatchedTokens: 512}
  recovery: {maxRestarts: 9, window: 1h, backoff: {base: 1s, max: 30s}}
"""
PROGRAM = (sys.executable, "-m", "dsv4_operator.cli.main")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    count = getattr(request, "param", 2)
    found = World(CACHE, count, linked=count > 2)
    try:
        found.start()
        yield found
    finally:
        found.close()


def dsv4(world: World, *words: str, code: int = 0, seconds: float = 300.0) -> str:
    done = world.dsv4(*words, program=PROGRAM, seconds=seconds)
    assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def up(world: World) -> str:
    """Start one group on two machines, or one on each of three: the nano model cannot be divided by three."""
    replicas, size = (1, 2) if len(world.machines) == 2 else (len(world.machines), 1)
    (world.folder / "nano.yaml").write_text(MANIFEST % (replicas, size))
    targets = ",".join(machine.name for machine in world.machines)
    return dsv4(world, "up", f"{world.folder}/nano.yaml", "--hosts", targets, "--timeout", "30m", seconds=START_SECONDS)


def groups(world: World) -> list[dict[str, Any]]:
    """Return the status of each group; empty while it cannot be read."""
    done = world.dsv4("status", "nano", "-o", "json", program=PROGRAM, seconds=120)
    return list(json.loads(done.stdout)["status"].get("groups", [])) if done.returncode == 0 else []


def group(world: World) -> dict[str, Any]:
    """Return the status of the first group; empty while it cannot be read."""
    return next(iter(groups(world)), {})


def conditions(world: World) -> str:
    """Return the messages of the conditions that are not true."""
    done = world.dsv4("status", "nano", "-o", "json", program=PROGRAM, seconds=120)
    found = json.loads(done.stdout)["status"].get("conditions", []) if done.returncode == 0 else []
    return "; ".join(one.get("message", "") for one in found if one["status"] != "True")


def serves(world: World, after: int) -> bool:
    found = group(world)
    return found.get("phase") == "Serving" and found.get("incarnation", 0) > after


def chat(world: World) -> None:
    assert dsv4(world, "chat", "nano", "hello", "--max-tokens", "4", "--no-thinking").strip()


def test_the_life_of_a_deployment(world: World) -> None:
    up(world)
    chat(world)
    again = up(world)
    assert "software is there" in again
    assert "service started" not in again, "nothing is started twice"
    first = group(world)["incarnation"]

    # The engine dies: it is restarted in place or in a new incarnation.
    restarts = group(world).get("totalRestarts", 0)
    assert world.machines[0].run("pkill", "-KILL", "-f", "VLLM::EngineCore").returncode == 0
    until(lambda: group(world).get("totalRestarts", 0) > restarts, "the death is detected", 300)
    until(lambda: serves(world, first - 1), "it serves after the death of the engine", START_SECONDS)
    chat(world)

    # Without ssh, the deployment does not change.
    before = group(world)
    for machine in world.machines:
        assert machine.run("systemd-run", "--on-active=60", "systemctl", "start", "ssh.service").returncode == 0
        machine.run("systemctl", "stop", "ssh.service")
    dsv4(world, "status", "nano", code=1)
    for machine in world.machines:
        until(lambda machine=machine: machine.run("true").returncode == 0, "ssh is back", 300)
    after = group(world)
    assert (after["incarnation"], after["engineGeneration"]) == (before["incarnation"], before["engineGeneration"])

    # One machine restarts, then both lose power.
    world.machines[1].cut()
    world.machines[1].boot()
    seconds = until(lambda: serves(world, before["incarnation"]), "it serves after a restart", START_SECONDS)
    print(f"serving {seconds:.0f} s after the restart of one machine")
    latest = group(world)["incarnation"]
    for machine in world.machines:
        machine.cut()
    for machine in world.machines:
        machine.boot()
    seconds = until(lambda: serves(world, latest), "it serves after a power cut", START_SECONDS)
    print(f"serving {seconds:.0f} s after a power cut of both")
    chat(world)

    assert "has ended on 2 machines" in dsv4(world, "down", "nano")
    for machine in world.machines:
        assert machine.run("pgrep", "-f", "dsv4_").returncode == 1, "no process is left"
        assert machine.run("ls", "/etc/systemd/system/dsv4-host@nano.service").returncode != 0
    assert "is removed there" in dsv4(world, "uninstall", "nano")
    for machine in world.machines:
        assert machine.run("ls", "/var/lib/dsv4").stdout.split() in ([], ["weights"])
        assert machine.run("ls", "/usr/local/bin/dsv4").returncode != 0


@pytest.mark.parametrize("world", [3], indirect=True)
def test_three_machines(world: World) -> None:
    up(world)
    chat(world)
    first = groups(world)
    assert sorted(one["members"][0]["node"] for one in first) == sorted(machine.name for machine in world.machines)

    # One machine loses power, then two of them.
    for machines in (world.machines[2:], world.machines[:2]):
        latest = {one["index"]: one["incarnation"] for one in groups(world)}
        names = {machine.name for machine in machines}
        for machine in machines:
            machine.cut()
        for machine in machines:
            machine.boot()

        def serve(latest: dict[int, int] = latest, names: set[str] = names) -> bool:
            found = groups(world)
            return len(found) == 3 and all(
                one["phase"] == "Serving"
                and (one["incarnation"] > latest[one["index"]]) == (one["members"][0]["node"] in names)
                for one in found
            )

        seconds = until(serve, "it serves after a power cut", START_SECONDS)
        print(f"serving {seconds:.0f} s after a power cut of {len(machines)} of 3")
    chat(world)

    # A machine gets another address on the link; ssh uses its name.
    latest = {one["index"]: one["incarnation"] for one in groups(world)}
    begun = time.monotonic()
    world.machines[2].readdress(33)
    until(lambda: f"{NETWORK}.3" in conditions(world), "the lost address is named", 180)
    print(f"named {time.monotonic() - begun:.0f} s after the change: {conditions(world)}")
    assert f"has {NETWORK}.33, and had {NETWORK}.3;" in up(world)
    assert all(one["incarnation"] > latest[one["index"]] for one in groups(world))
    print(f"serving {time.monotonic() - begun:.0f} s after the change of an address")
    chat(world)
    assert "has ended on 3 machines" in dsv4(world, "down", "nano")
    for machine in world.machines:
        assert machine.run("pgrep", "-f", "dsv4_").returncode == 1, "no process is left"


def version(folder: Path, file: str, text: str) -> tuple[str, ...]:
    """Copy this checkout with another text of a file; return the start of command lines of its `dsv4`."""
    checkout = Path(__file__).parents[2]
    for part in ("operator", "runtime", "kernels"):
        shutil.copytree(checkout / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for pins in checkout.glob("requirements*.txt"):
        shutil.copy(pins, folder)
    (folder / file).write_text(text)
    path = ":".join(str(folder / part) for part in ("operator", "runtime", "kernels"))
    return ("env", f"PYTHONPATH={path}", *PROGRAM)


def software(world: World) -> list[set[str]]:
    """Return the directories of software on each machine."""
    found = [machine.run("ls", "/var/lib/dsv4/software").stdout.split() for machine in world.machines]
    return [{name for name in names if not name.endswith(".input")} for names in found]


def test_an_upgrade_under_clients(tmp_path: Path) -> None:
    system = OnMachines(CACHE)
    world = system.world
    words = ("up", f"{world.folder}/nano.yaml", "--hosts", ",".join(machine.address for machine in world.machines))
    try:
        system.start()
        system.ready()
        (old,), _ = software(world)
        restarts = system.group().get("totalRestarts", 0)

        newer = version(tmp_path / "newer", "operator/dsv4_operator/cli/__init__.py", "# Newer.\n")
        with Load(system.api, MODEL, Shape(pause=0.2), "upgrade") as load:
            until(lambda: load.answered() > 8, "clients are answered", 120)
            begun = time.time()
            done = world.dsv4(*words, "--timeout", "10m", program=newer, seconds=START_SECONDS)
            ended = time.time()
            print(done.stdout)
            assert done.returncode == 0, done.stderr
            until(lambda: load.answered(ended) > 4, "clients are answered again", 120)
            requests = load.stop()
        found, longest = counts(requests), max(one.ended - one.sent for one in requests)
        print(
            f"up {ended - begun:.0f} s, answered again after {outage(requests, begun) or 0.0:.1f} s, longest request "
            f"{longest:.1f} s: {found}"
        )
        assert found[Outcome.ANSWERED] == len(requests), [
            one for one in requests if one.outcome is not Outcome.ANSWERED
        ]
        (new,), _ = software(world)
        assert software(world) == [{new}, {new}], "the earlier software is removed"
        assert new != old
        for machine in world.machines:
            assert machine.run("pgrep", "-f", f"software/{old}").returncode == 1, "nothing runs with it"
            for unit in machine.run("ls", "/etc/systemd/system").stdout.split():
                text = machine.run("cat", f"/etc/systemd/system/{unit}").stdout if unit.startswith("dsv4-") else new
                assert new in text
        assert system.group().get("totalRestarts", 0) == restarts

        broken = version(tmp_path / "broken", "runtime/dsv4_runtime/agent/main.py", "raise SystemExit('broken')\n")
        with Load(system.api, MODEL, Shape(pause=0.2), "back") as load:
            until(lambda: load.answered() > 8, "clients are answered", 120)
            begun = time.time()
            done = world.dsv4(*words, program=broken, seconds=START_SECONDS)
            ended = time.time()
            print(f"going back took {ended - begun:.0f} s: {done.stdout}\n{done.stderr}")
            assert done.returncode == 1
            assert "the start failed: " in done.stdout + done.stderr
            assert "it serves again with the earlier software" in done.stderr
            until(lambda: load.answered(ended) > 4, "clients are answered again", 120)
            requests = load.stop()
        failed = [one for one in requests if one.outcome is not Outcome.ANSWERED]
        print(f"answered again after {outage(requests, begun) or 0.0:.1f} s: {counts(requests)}, {failed}")
        assert not failed
        system.ready()
        assert all(new in names for names in software(world))
        for machine in world.machines:
            assert machine.run("pgrep", "-f", f"software/{new}").returncode == 0

        # Commands of the client, and another client.
        assert dsv4(world, "chat", MODEL, "hello", "--max-tokens", "4", "--no-thinking").strip()
        assert "export OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in dsv4(world, "connect", MODEL)
        assert "machines cannot be examined" not in world.dsv4("doctor", program=PROGRAM, seconds=120).stdout
        other = ("env", f"DSV4_STATE_DIR={tmp_path / 'other'}", *newer)
        done = world.dsv4(*words, program=other, seconds=300)
        assert done.returncode == 2
        assert "already running, and " in done.stderr
        assert " started it at " in done.stderr
        dsv4(world, "uninstall", MODEL)
        assert software(world) == [set(), set()]
    finally:
        system.close()
