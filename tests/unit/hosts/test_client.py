"""The client of several machines: inventory, upgrades, and the files of a machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import (
    Condition,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    load,
)
from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.hosts.documents import DOWN, HOST_KEY, INVENTORY, MEMBERS, Host, Inventory
from dsv4_operator.backends.hosts.ssh import ConnectionLost, Ssh, SshError
from dsv4_operator.backends.local.backend import query_members
from dsv4_operator.backends.local.software import OwnSoftware
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.local.supervisor import LoopReport
from dsv4_operator.cli import diagnostics, hosts, init, machine, main, processes, sources, up
from dsv4_operator.cli.machine import Record, Settings, save_record
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_runtime.contract import Cause, Phase
from dsv4_testkit.documents import agent_status, group_plan
from dsv4_testkit.hosts_client import MACHINE, NANO, Killed, facts, nano, record


def test_the_facts_of_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", hosts._script(), "check", "/var/lib/dsv4"], capture_output=True, timeout=120, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["free_bytes"] > 0


def test_the_fastest_shared_network_is_chosen() -> None:
    checks = {
        "me@A": facts(
            ("eth0", "10.0.0.1", 10_000, False), ("roce", "10.1.0.1", 1000, True), ("x", "10.2.0.1", 9, True)
        ),
        "b": facts(("eth0", "10.0.0.2", 10_000, False), ("roce1", "10.1.0.2", 1000, True), ("y", "10.3.0.2", 9, True)),
    }
    found = hosts._discovered(["me@A", "b"], checks)
    assert [(one.name, one.target, one.address, one.interface) for one in found.hosts] == [
        ("a", "me@A", "10.1.0.1", "roce"),
        ("b", "b", "10.1.0.2", "roce1"),
    ]


def test_a_port_without_cable_connects_no_machines() -> None:
    checks = {
        name: facts(("eth0", f"10.0.0.{number}", 1000, False), ("roce", f"10.1.0.{number}", -1, True))
        for number, name in enumerate(("a", "b"), 1)
    }
    assert [host.address for host in hosts._discovered(["a", "b"], checks).hosts] == ["10.0.0.1", "10.0.0.2"]


def test_addresses_of_ports_with_and_without_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"eth0": ["UP", "LOWER_UP"], "roce": ["NO-CARRIER", "UP"], "off": ["BROADCAST"]}
    links = [
        {"ifname": name, "flags": found, "addr_info": [{"local": "10.0.0.1", "prefixlen": 24, "scope": "global"}]}
        for name, found in flags.items()
    ]
    (tmp_path / "ip").write_text(f"#!/bin/sh\necho '{json.dumps(links)}'\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert {one["interface"]: one["up"] for one in bootstrap.addresses()} == {"eth0": True, "roce": False, "off": False}


def test_bridges_of_containers_connect_no_machines() -> None:
    docker, nat = ("docker0", "172.17.0.1", 10_000, False), ("nat0", "192.168.122.1", 10_000, False)
    checks = {
        name: facts(("eth0", f"10.0.0.{number}", 1000, False), docker, nat, ("br-1", f"10.9.0.{number}", 10_000, False))
        for number, name in enumerate(("a", "b"), 1)
    }
    assert [host.address for host in hosts._discovered(["a", "b"], checks).hosts] == ["10.0.0.1", "10.0.0.2"]


def test_machines_without_a_shared_network() -> None:
    checks = {"a": facts(("eth0", "10.0.0.1", 1, False)), "b": facts(("eth0", "10.1.0.1", 1, False))}
    with pytest.raises(CommandError, match=r"a, b share no IPv4 network.*--hosts hosts\.yaml"):
        hosts._discovered(["a", "b"], checks)


@pytest.mark.parametrize("text", ["", ",", "-oProxyCommand=x,b", "a,a", "a b"])
def test_invalid_names_of_machines(text: str) -> None:
    with pytest.raises(CommandError, match="--hosts"):
        hosts._read_inventory(text)


def test_a_list_that_is_longer_than_a_name_of_a_file() -> None:
    names = [f"spark-{number}.lab.example.com" for number in range(16)]
    assert hosts._read_inventory(",".join(names)) == names


def test_the_deployment_that_a_command_is_for(tmp_path: Path) -> None:
    assert hosts.find(tmp_path, None) is None
    save_record(tmp_path, record())
    file = tmp_path / "remote" / "nano.json"
    assert file.stat().st_mode & 0o777 == 0o600, "it contains the host key"
    assert hosts.find(tmp_path, None) == hosts.find(tmp_path, "nano") == record()
    assert hosts.find(tmp_path, "other") is None
    save_record(tmp_path, record("two"))
    assert hosts.find(tmp_path, None) is None
    file.write_text("{")
    with pytest.raises(CommandError, match=r"nano\.json cannot be read; remove it"):
        hosts.find(tmp_path, "two")


def test_deployments_on_other_machines_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_record(tmp_path, record().model_copy(update={"sudo": True}))
    assert main.run(["down", "--all", "--state-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "nothing is running" in shown.out
    assert "nano is on other machines and is not ended; `dsv4 down nano` ends it" in shown.err


def run_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Let `ssh` run commands here; return a record with the software of this environment and the state in `folder`."""
    (folder / "bin").mkdir()
    for name, text in (
        ("ssh", '#!/bin/bash\nexec sh -c "${@: -1}"\n'),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    inventory = record().inventory.model_copy(update={"state_dir": str(folder / "machine")})
    return record().model_copy(update={"inventory": inventory, "software": str(folder)})


def test_a_client_examines_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = subprocess.CompletedProcess[str]([], 0, "{}", "")
    monkeypatch.setattr(diagnostics, "_run_checks", lambda *_, **__: checked)
    monkeypatch.setenv("DSV4_STATE_DIR", str(tmp_path / "client"))
    known = run_here(tmp_path, monkeypatch)
    save_record(tmp_path / "client", known)
    state = DeploymentState(tmp_path / "machine", "nano")
    state.directory.mkdir(parents=True)
    (state.directory / INVENTORY).write_text("hosts: []")
    (state.directory / HOST_KEY).write_text("k" * 64)
    (state.root / "other").mkdir()
    (state.root / "other" / INVENTORY).write_text("hosts: [")
    assert main.run(["doctor"]) == ExitCode.FAILED
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"FAIL  nano: {state.directory / INVENTORY} cannot be read: ")
    assert main.run(["doctor", "-o", "json"]) == ExitCode.FAILED
    (found,) = json.loads(capsys.readouterr().out)["machines"]
    assert (found["field"], found["reason"]) == ("nano", "Unreadable")
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho 'No route to host' >&2\nexit 255\n")
    assert main.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("WARN  nano: its machines cannot be examined: spark-1: No route to host")


def test_each_machine_examines_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = subprocess.CompletedProcess[str]([], 0, "", "")
    monkeypatch.setattr(diagnostics, "_run_checks", lambda *_, **__: checked)
    monkeypatch.setenv("DSV4_STATE_DIR", str(tmp_path))
    # Without ssh.
    monkeypatch.setenv("PATH", str(tmp_path))
    places = (Host(name="spark-1", address="127.0.0.1"), Host(name="spark-2", address="127.0.0.2"))
    inventory = Inventory(hosts=places, state_dir=str(tmp_path), service_port=unused_tcp_port)
    save_record(tmp_path, record().model_copy(update={"inventory": inventory, "key": ""}))
    key = inventory.members("nano").directory / HOST_KEY
    key.parent.mkdir(parents=True)
    key.write_text("k" * 64 + "\n")
    assert main.run(["doctor"]) == ExitCode.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["FAIL  hosts[0].address", "FAIL  hosts[1].address"]


def test_a_client_gets_the_settings_of_clients_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, root = run_here(tmp_path, monkeypatch), tmp_path / "client"
    save_record(root, known)
    state = DeploymentState(tmp_path / "machine", "nano")
    state.directory.mkdir(parents=True)
    keys = {"secretKeyRef": {"name": "keys", "key": "api"}}
    state.save_manifest(nano(listen="127.0.0.1", apiKeys=keys))
    state.save_object(nano(listen="127.0.0.1", apiKeys=keys))
    (state.directory / INVENTORY).touch()
    (root / "secrets" / "keys").mkdir(parents=True)
    (root / "secrets" / "keys" / "api").write_text("sk-of-the-client\n")
    (root / "secrets" / "keys" / "api").chmod(0o600)
    for words in (["connect", "nano"], ["connect"]):
        assert main.run([*words, "--client", "openai", "--state-dir", str(root)]) == 0
        shown = capsys.readouterr()
        assert "export OPENAI_API_KEY=sk-of-the-client" in shown.out
        assert "export OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in shown.out
        assert "`ssh -L 8000:127.0.0.1:8000 spark-1`" in shown.err


def test_a_deployment_stays_on_its_machines() -> None:
    known = record()
    hosts._check_machines(None, known.inventory)
    hosts._check_machines(known, known.inventory)
    other = known.inventory.model_copy(update={"hosts": known.inventory.hosts[:1]})
    with pytest.raises(CommandError, match=r"nano is on spark-1, spark-2.*`dsv4 uninstall nano` first"):
        hosts._check_machines(known, other)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=2), st.booleans(), st.sampled_from(["", "name", "ssh", "dir"]))
def test_only_addresses_may_change(numbers: list[int], interface: bool, other: str) -> None:
    known = record()
    places = [
        old.model_copy(update={"address": f"10.0.0.{number}", "interface": "eth1" if interface else None})
        for old, number in zip(known.inventory.hosts, numbers, strict=True)
    ]
    if other in ("name", "ssh"):
        places[1] = places[1].model_copy(update={other: "spark-9"})
    changes = {"hosts": tuple(places), **({"state_dir": "/srv/dsv4"} if other == "dir" else {})}
    wanted = known.inventory.model_copy(update=changes)
    if other:
        with pytest.raises(CommandError, match="with another inventory"):
            hosts._check_machines(known, wanted)
        return
    moved = hosts._check_machines(known, wanted)
    changed = [place for place in (0, 1) if interface or numbers[place] != place + 1]
    assert [line.split(":")[0] for line in moved] == [f"hosts[{place}].address" for place in changed]


def test_a_changed_address_is_found_over_ssh() -> None:
    known = record().inventory
    same = {"spark-1": facts(("eth0", "10.0.0.1", 1, False)), "spark-2": facts(("eth0", "10.0.0.2", 1, False))}
    assert hosts._present(known, same) == known
    # Without `ip` there, nothing is known.
    assert hosts._present(known, same | {"spark-2": facts()}) == known
    moved = hosts._present(known, same | {"spark-2": facts(("eth0", "10.0.0.7", 1, False))})
    assert [(one.name, one.address) for one in moved.hosts] == [("spark-1", "10.0.0.1"), ("spark-2", "10.0.0.7")]
    with pytest.raises(CommandError, match="share no IPv4 network"):
        hosts._present(known, same | {"spark-2": facts(("eth0", "10.1.0.7", 1, False))})


def test_up_follows_a_changed_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str, str]] = []
    refused: set[str] = set()
    found = {
        target: facts(("eth0", address, 1, False))
        | {"interpreter": "/usr/bin/python3.11"}
        | {"root": True, "sudo": False, "python": "3.11.2", "headers": True, "compilers": ["gcc", "g++"], "time": 0.0}
        | {
            "architecture": "x86_64",
            "free_bytes": 10**12,
            "software": [],
            "partial": {},
            "earlier": {},
            "systemd": True,
            "writable": True,
            "loops": {},
        }
        for target, address in (("spark-1", "10.0.0.1"), ("spark-2", "10.0.0.7"))
    }

    async def check(self: object, target: str, state_dir: str) -> dict[str, object]:
        return found[target]

    async def act(self: object, action: str, given: Settings, seconds: float) -> None:
        address = next(one.address for one in given.record.inventory.hosts if one.name == "spark-2")
        done.append((action, given.host, address))
        if given.host in refused:
            raise CommandError(f"{given.host}: is another machine")

    async def nothing(*given: object, **more: object) -> int:
        return 0

    for name, stand_in in (("_check", check), ("_machine", act), ("_install", nothing), ("_attached", nothing)):
        monkeypatch.setattr(hosts._Client, name, stand_in)
    save_record(tmp_path, record())
    refused.add("spark-2")
    with pytest.raises(CommandError, match="is another machine"):
        hosts.up(str(NANO), "spark-1,spark-2", tmp_path, timeout=1)
    assert done == [("move", "spark-2", "10.0.0.7")], "the loop runs on"
    assert hosts.find(tmp_path, "nano") == record(), "the next attempt checks it again"
    refused.clear()
    done.clear()
    assert hosts.up(str(NANO), "spark-1,spark-2", tmp_path, timeout=1) == ExitCode.OK
    assert [(action, host) for action, host, _ in done] == [
        ("move", "spark-2"),
        ("move", "spark-1"),
        ("apply", "spark-2"),
        ("apply", "spark-1"),
        ("tidy", "spark-1"),
        ("tidy", "spark-2"),
    ]
    done.clear()
    assert hosts.up(str(NANO), "spark-1,spark-2", tmp_path, timeout=1) == ExitCode.OK
    assert done == [("apply", "spark-1", "10.0.0.7"), ("apply", "spark-2", "10.0.0.7")]


V1, V2, V3 = (f"/var/lib/dsv4/software/{name}" for name in ("one", "two", "three"))
_EVENTS = st.tuples(st.sampled_from([V1, V2, V3]), st.sampled_from(["served", "interrupted", "ended", "back"]))


@given(st.lists(_EVENTS, max_size=8))
def test_the_software_that_served_is_never_removed(events: list[tuple[str, str]]) -> None:
    known, served, installed = record().model_copy(update={"software": V1}), V1, {V1}
    for software, end in events:
        fallback, unused = hosts._earlier_software(known, software)
        assert software not in unused
        assert served in (software, fallback), "it is started again if the other one does not become ready"
        installed.add(software)
        assert {software, *unused} == installed, "nothing is forgotten"
        if end == "served":
            served, installed, fallback, unused = software, {software}, "", ()
        elif end == "back" and fallback:
            unused = tuple({*unused, software} - {fallback})
            software, fallback = fallback, ""
        elif end == "ended":
            # Interrupted before the first start of the other software.
            unused = tuple({*known.unused, software} - {known.software})
            software, fallback = known.software, known.fallback or known.software
        known = known.model_copy(update={"software": software, "fallback": fallback, "unused": unused})


class Machines:
    """Stand-ins for the machines of `hosts.up`, with the order of the actions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.done: list[str] = []
        self.runs = True
        self.waits: list[int | CommandError] = []
        self.fails: dict[str, BaseException] = {}
        self.software = ""
        self.installed: list[str] = []
        self.waited: list[Settings] = []
        self.loops: dict[str, dict[str, str]] = {}
        found = {
            name: {**MACHINE, **facts(("eth0", f"10.0.0.{number}", 1000, False))}
            for number, name in enumerate(("spark-1", "spark-2"), 1)
        }
        machines = self

        async def check(client: object, target: str, state_dir: str) -> dict[str, object]:
            return {**found[target], "loops": machines.loops, "software": machines.installed}

        async def act(client: object, action: str, given: Settings, seconds: float, *, shown: bool = True) -> list[str]:
            machines.done.append(f"{action} {given.host} {Path(given.record.software).name}")
            if error := machines.fails.pop(action, None):
                raise error
            ended = action == "prepare" and machines.runs
            machines.runs = (machines.runs and not ended and action != "stop-loop") or action == "apply"
            return ["ending the members"] if ended else []

        async def install(client: object, known: Record, *given: object) -> None:
            machines.software = Path(known.software).name

        async def attached(client: object, known: Record, host: Host, words: object, given: Settings) -> int:
            machines.waited.append(given)
            outcome = machines.waits.pop(0)
            if isinstance(outcome, CommandError):
                raise outcome
            return outcome

        @contextlib.asynccontextmanager
        async def held(client: object, given: Settings) -> AsyncIterator[None]:
            machines.done.append("hold")
            try:
                yield
            finally:
                machines.done.append("let go")

        stand_ins = {"_check": check, "_machine": act, "_install": install, "_attached": attached, "_held": held}
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(hosts._Client, name, stand_in)
        self._root = root

    def up(self, *waits: int | CommandError, timeout: float | None = 1, file: Path = NANO) -> ExitCode:
        self.done.clear()
        self.waited.clear()
        self.waits = [*waits]
        return hosts.up(str(file), "spark-1,spark-2", self._root, timeout=timeout)

    def record(self) -> Record:
        found = hosts.find(self._root, "nano")
        assert found is not None
        return found


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machines:
    found = Machines(monkeypatch, tmp_path)
    save_record(tmp_path, record().model_copy(update={"software": V1}))
    return found


def test_up_of_another_version_is_an_upgrade(machines: Machines) -> None:
    assert machines.up(0) is ExitCode.OK
    new = machines.software
    # Members of the earlier software must not be started by the new loop, so the first machine is the last.
    steps = ["prepare spark-1", "apply spark-2", "apply spark-1"]
    expected = ["hold", *(f"{step} {new}" for step in steps), "let go", f"tidy spark-1 {new}", f"tidy spark-2 {new}"]
    assert machines.done == expected
    found = machines.record()
    assert (Path(found.software).name, found.fallback, found.unused) == (new, "", ())
    assert machines.up(0) is ExitCode.OK
    assert machines.done == [f"apply spark-1 {new}", f"apply spark-2 {new}"], "it is the same version"


@pytest.mark.parametrize("fails", ["wait", "apply"])
def test_an_upgrade_that_does_not_become_ready_goes_back(
    fails: str, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    if fails == "apply":
        machines.fails["apply"] = CommandError("spark-2: the host service did not start")
    with pytest.raises(CommandError, match=r"nano did not become ready with .*; it serves again with the earlier"):
        machines.up(*[1, 0] if fails == "wait" else [0])
    assert machines.waited[-1].timeout == 600.0, "not the short limit of this attempt"
    assert not machines.waited[-1].replaces, "the earlier software may recover"
    new = machines.software
    steps = [f"stop-loop spark-1 {new}", "apply spark-2 one", "apply spark-1 one", "let go"]
    assert machines.done[-4:] == steps, "connections wait until the earlier loop has the socket"
    assert machines.done.count("hold") == 1
    found = machines.record()
    assert (found.software, found.fallback) == (V1, "")
    assert [Path(path).name for path in found.unused] == [new]
    assert (fails == "apply") == ("spark-2: the host service did not start" in capsys.readouterr().err)
    # The next attempt is an upgrade again.
    assert machines.up(0) is ExitCode.OK
    assert Path(machines.record().software).name == new


def test_an_upgrade_has_a_bound_of_its_own(tmp_path: Path, machines: Machines) -> None:
    text = NANO.read_text().replace("nano: {seed: 0, precision: bf16}", "path: /srv/weights")
    assert "/srv/weights" in text
    (tmp_path / "nano.yaml").write_text(f"{text}  rollout: {{progressDeadline: 20m}}\n")
    run = partial(machines.up, file=tmp_path / "nano.yaml")
    machines.runs = False
    assert run(1, timeout=None) is ExitCode.FAILED
    first_start, deadline, given = (172_800.0, False), (1200.0, True), (7200.0, True)
    assert [(one.timeout, one.replaces) for one in machines.waited] == [first_start], "it may download weights"
    # The software that served is another one.
    save_record(tmp_path, record().model_copy(update={"software": V1}))
    machines.runs = True
    with pytest.raises(CommandError, match="serves again with the earlier"):
        run(1, 0, timeout=None)
    assert [(one.timeout, one.replaces) for one in machines.waited] == [deadline, (1200.0, False)]
    machines.runs = True
    assert run(0, timeout=7200) is ExitCode.OK
    assert [(one.timeout, one.replaces) for one in machines.waited] == [given]
    # After an attempt that was interrupted, an earlier death is no reason to go back.
    save_record(tmp_path, record().model_copy(update={"software": V2, "fallback": V1}))
    machines.runs = False
    assert run(0, timeout=None) is ExitCode.OK
    assert [(one.timeout, one.replaces) for one in machines.waited] == [(1200.0, False)]


def test_settings_of_a_wait_restart_no_service() -> None:
    sent = Settings(record=record(), host="spark-1", deployment=nano())
    assert sent.model_copy(update={"replaces": True, "timeout": 1.0}).digest() == sent.digest()


@pytest.mark.parametrize(("replaces", "incarnation", "ends"), [(True, 8, True), (True, 7, False), (False, 8, False)])
def test_the_first_start_of_other_software_is_the_last(
    replaces: bool, incarnation: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    known = record().model_copy(update={"inventory": inventory})
    sent = Settings(record=known, host="spark-1", timeout=1.0, replaces=replaces)
    state = sent.loop
    state.directory.mkdir()
    (state.directory / machine.BEFORE).write_text('{"0": 7}')
    death = FailureStatus(time=1.0, cause=Cause.ENGINE_CORE_DIED, incarnation=incarnation, message="no such kernel")
    group = GroupStatus(index=0, phase=GroupPhase.FORMING, incarnation=9, history=(death,), last_failure=death)
    state.save_object(nano())
    monkeypatch.setattr(machine, "read_kept_status", lambda pid: "")
    with state.lock():
        state.save_object(nano().model_copy(update={"status": DeploymentStatus(groups=(group,))}))
        with pytest.raises(CommandError) as caught:
            machine.wait(sent)
    (message,) = caught.value.messages
    expected = "nano: the start failed: EngineCoreDied: no such kernel" if ends else "nano was not ready within 1s"
    assert message.startswith(expected)


def test_an_upgrade_that_cannot_go_back_has_both_reasons(machines: Machines) -> None:
    with pytest.raises(CommandError) as caught:
        machines.up(1, CommandError("of the earlier one"))
    assert caught.value.messages[0] == "of the earlier one"
    assert "nor with the earlier one; correct the reason, and repeat" in caught.value.messages[1]


def test_an_interrupted_upgrade_continues(machines: Machines, tmp_path: Path) -> None:
    machines.fails["apply"] = SshError("spark-2: no route to host")
    with pytest.raises(CommandError, match="no route to host"):
        machines.up()
    assert not [line for line in machines.done if line.startswith("stop-loop")], "what runs there is not known"
    assert (Path(machines.record().software).name, machines.record().fallback) == (machines.software, V1)
    with pytest.raises(hosts._Unreachable):
        machines.up(hosts._Unreachable("the connection was lost"))
    # The software that served before is not forgotten, although another one runs now.
    with pytest.raises(CommandError, match="serves again"):
        machines.up(1, 0)
    assert machines.record().software == V1


def test_a_deployment_that_did_not_run_does_not_go_back(machines: Machines) -> None:
    machines.runs = False
    assert machines.up(1) is ExitCode.FAILED
    assert not [line for line in machines.done if line.endswith(" one")]
    assert machines.record().fallback == ""
    assert machines.up(0) is ExitCode.OK
    assert machines.done[-1].startswith("tidy"), "the earlier software is removed once this one has served"
    assert machines.record().unused == ()


def end_in_prepare(machines: Machines, error: BaseException) -> None:
    """Interrupt an upgrade after its `prepare` has ended the members."""
    machines.fails["prepare"] = error
    with pytest.raises((Killed, CommandError)):
        machines.up()
    machines.runs = False
    assert machines.done == ["hold", f"prepare spark-1 {machines.software}", "let go"]
    found = machines.record()
    assert (found.software, found.fallback) == (V1, V1)
    assert [Path(path).name for path in found.unused] == [machines.software]


@pytest.mark.parametrize(
    "error", [Killed(), SshError("spark-1: no route to host"), CommandError("spark-1: `systemctl` failed")]
)
def test_an_upgrade_that_ended_the_members_can_still_go_back(error: BaseException, machines: Machines) -> None:
    end_in_prepare(machines, error)
    with pytest.raises(CommandError, match="serves again with the earlier"):
        machines.up(1, 0)
    found = machines.record()
    assert (found.software, found.fallback) == (V1, "")
    assert [Path(path).name for path in found.unused] == [machines.software]


def test_an_upgrade_that_ended_the_members_continues(machines: Machines) -> None:
    end_in_prepare(machines, Killed())
    assert machines.up(0) is ExitCode.OK
    new = machines.software
    assert machines.done[-2:] == [f"tidy spark-1 {new}", f"tidy spark-2 {new}"]
    found = machines.record()
    assert (Path(found.software).name, found.fallback, found.unused) == (new, "", ())


def test_the_earlier_software_returns_after_an_interrupted_upgrade(tmp_path: Path, machines: Machines) -> None:
    assert machines.up(0) is ExitCode.OK
    served = machines.record()
    save_record(tmp_path, served.model_copy(update={"fallback": served.software, "unused": (V2,)}))
    machines.runs = False
    applied = [f"apply spark-1 {machines.software}", f"apply spark-2 {machines.software}"]
    assert machines.up(1) is ExitCode.FAILED, "there is nothing to go back to"
    assert machines.done == applied
    assert machines.record() == served.model_copy(update={"unused": (V2,)})
    assert machines.up(0) is ExitCode.OK
    assert machines.done == [*applied, f"tidy spark-1 {machines.software}", f"tidy spark-2 {machines.software}"]
    assert machines.record() == served


@pytest.mark.parametrize("uninstall", [False, True])
def test_an_interrupted_upgrade_is_ended(uninstall: bool, tmp_path: Path, machines: Machines) -> None:
    end_in_prepare(machines, Killed())
    machines.installed = ["one", machines.software]
    machines.done.clear()
    assert hosts.down(tmp_path, machines.record(), uninstall=uninstall) is ExitCode.OK
    ended = ["stop-loop spark-1 one", "stop-host spark-1 one", "stop-host spark-2 one"]
    assert machines.done == [*ended, *(["remove spark-1 one", "remove spark-2 one"] if uninstall else [])]
    assert (hosts.find(tmp_path, "nano") is None) is uninstall


def test_software_that_may_be_removed_does_not_start_again(machines: Machines) -> None:
    machines.fails["tidy"] = Killed()
    with pytest.raises(Killed):
        machines.up(0)
    found = machines.record()
    assert (Path(found.software).name, found.fallback, found.unused) == (machines.software, "", (V1,))
    assert machines.up(1) is ExitCode.FAILED
    assert not [line for line in machines.done if line.startswith("stop-loop") or line.endswith(" one")]
    assert machines.up(0) is ExitCode.OK
    assert machines.done[-1] == f"tidy spark-2 {machines.software}", "the rest"
    assert machines.record().unused == ()


def test_a_refused_upgrade_changes_nothing(machines: Machines) -> None:
    reason = "spark-1: nano is already running; it runs with other values"
    machines.fails["prepare"] = CommandError(reason, code=ExitCode.BAD_INPUT)
    before = machines.record()
    with pytest.raises(CommandError, match="other values"):
        machines.up()
    assert machines.record() == before
    assert machines.done == ["hold", f"prepare spark-1 {machines.software}", "let go"]


@pytest.mark.parametrize("key", [None, "", "z" * 64])
def test_another_client_installs_nothing(
    key: str | None, tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DeploymentState(tmp_path / "machine", "nano")
    state.directory.mkdir(parents=True)
    (state.directory / HOST_KEY).write_text(record().key + "\n")
    assert bootstrap._loops(str(state.root)) == {}, "it does not run"
    with state.lock():
        assert bootstrap._loops(str(state.root))["nano"]["who"] == "another client started it"
        (state.directory / bootstrap.CLIENT).write_text("me@laptop\n")
        machines.loops = bootstrap._loops(str(state.root))
    assert machines.up(0) is ExitCode.OK, "it has the key"
    before = machines.record().model_copy(update={"key": key or ""})
    save_record(tmp_path, before)
    if key is None:
        (tmp_path / "remote" / "nano.json").unlink()
    with pytest.raises(
        CommandError, match=r"running, and me@laptop started it at \d{4}-.*copy ~/\.dsv4/remote/nano\.json"
    ):
        machines.up()
    assert not machines.done
    assert hosts.find(tmp_path, "nano") == (None if key is None else before)


def test_software_that_another_deployment_uses_stays(tmp_path: Path) -> None:
    inventory, software = record().inventory.model_copy(update={"state_dir": str(tmp_path)}), tmp_path / "software"
    for name in ("one", "two", "three", "four.input", "one.input"):
        (software / name).mkdir(parents=True)
        (software / name / bootstrap.COMPLETE).touch()
    (tmp_path / "elsewhere").mkdir()
    unused = (*(str(software / name) for name in ("one", "two", "three")), str(tmp_path / "elsewhere"))
    known = record().model_copy(update={"inventory": inventory, "software": str(software / "three"), "unused": unused})
    other = inventory.members("other")
    other.directory.mkdir(parents=True)
    other.save_manifest(nano("other"))
    sent = Settings(record=known, host="spark-2")
    names = {path.name for path in software.iterdir()}
    machine.tidy(sent)
    assert {path.name for path in software.iterdir()} == names, "an earlier version started the other one"
    (other.directory / machine.SOFTWARE).write_text(str(software / "two"))
    machine.tidy(sent)
    assert {path.name for path in software.iterdir()} == {"two", "three", "four.input"}
    assert (tmp_path / "elsewhere").exists()


EXAMPLES = sorted(file for file in NANO.parent.glob("*.yaml") if "hardware:" in file.read_text())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_older_software_gets_no_fields_that_the_user_left_out(file: Path) -> None:
    sent = Settings(record=record(), host="spark-1", deployment=load(file.read_text()), secrets={"keys/api": "a\nb"})
    text = sent.message()
    assert text.count(b"\n") == 1
    assert Settings.model_validate_json(text) == sent
    assert Settings.model_validate_json(text).digest() == sent.digest()
    assert "drain" not in json.loads(text)["deployment"]["spec"].get("gateway", {})


def test_only_the_machines_of_a_deployment_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def check(self: object, target: str, state_dir: str) -> dict[str, object]:
        asked.append(target)
        raise CommandError(f"{target}: does not answer")

    monkeypatch.setattr(hosts._Client, "_check", check)
    file = tmp_path / "hosts.yaml"
    file.write_text(json.dumps({"hosts": [{"name": f"h{n}", "address": f"10.0.0.{n}"} for n in (1, 2, 3)]}))
    for place in ("h1,h2,h3", str(file)):
        asked.clear()
        with pytest.raises(CommandError):
            hosts.up(str(NANO), place, tmp_path, timeout=1)
        assert asked == ["h1", "h2"]
    asked.clear()
    with pytest.raises(CommandError, match="the deployment needs 2 machines, and h1 has 1; add some"):
        hosts.up(str(NANO), "h1", tmp_path, timeout=1)
    assert not asked


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, "with systemd"),
        ({"sudo": True}, "with systemd; sudo is used for namespaces, units and /var/lib/dsv4"),
        ({"root": False}, "without root, so not started after a reboot"),
        ({"systemd": False}, "without systemd, so not started after a reboot"),
    ],
)
def test_rights_and_their_use_are_named(
    change: dict[str, object], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = Inventory(hosts=(Host(name="spark-1", address="10.0.0.1"),))
    client = hosts._Client(None)  # type: ignore[arg-type]
    client._judge(inventory, {"spark-1": {**MACHINE, **change}}, OwnSoftware({"requirements.txt": b""}, "3.12", 1))
    assert capsys.readouterr().out.strip().endswith(f"1000 GB free, {shown}")


def test_a_status_of_an_earlier_run_is_not_ready(tmp_path: Path) -> None:
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    sent = Settings(record=record().model_copy(update={"inventory": inventory}), host="spark-1", timeout=0.5)
    state = sent.loop
    state.directory.mkdir()
    ready = {"type": "Ready", "status": "True", "reason": "EngineReady", "message": "", "lastTransitionTime": 1.0}
    ready["observedGeneration"] = nano().metadata.generation
    status = DeploymentStatus(conditions=(Condition.model_validate(ready),))
    state.save_object(nano().model_copy(update={"status": status}))
    # The supervisor of a loop that has not reported yet.
    with state.lock(), pytest.raises(CommandError, match="nano was not ready within"):
        machine.wait(sent)


def test_the_client_on_another_machine_of_the_deployment_keeps_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_COMMAND", tmp_path / "bin" / "dsv4")
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        inventory = record().inventory.model_copy(update={"state_dir": folder})
        known = record().model_copy(update={"inventory": inventory})
        sent = Settings(record=known, host="spark-2", deployment=nano())
        machine._write_files(sent, nano())
        assert hosts.find(Path(folder), "nano") == known.model_copy(update={"key": ""})
        save_record(Path(folder), known)
        machine._write_files(sent, nano())
        assert hosts.find(Path(folder), "nano") == known


def test_only_the_same_machine_moves(tmp_path: Path) -> None:
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    settings = Settings(record=record().model_copy(update={"inventory": inventory}), host="spark-2")
    key = settings.members.directory / HOST_KEY
    with pytest.raises(CommandError, match=r"spark-2 has no files of nano, .*run `dsv4 uninstall nano` first"):
        machine.move(settings)
    key.parent.mkdir(parents=True)
    key.write_text("of another deployment\n")
    with pytest.raises(CommandError, match="is not the machine"):
        machine.move(settings)
    key.write_text(f"{settings.record.key}\n")
    assert machine.move(settings) == ExitCode.OK


def test_the_machine_of_the_loop_forwards_nothing(tmp_path: Path) -> None:
    assert not hosts.is_here(tmp_path, record())
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / INVENTORY).touch()
    assert hosts.is_here(tmp_path, record())


def test_logs_and_status_on_the_first_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = DeploymentState(tmp_path, "nano")
    state.incarnation(3).mkdir(parents=True)
    state.save_manifest(nano())
    (state.directory / INVENTORY).touch()
    state.log.write_text("of the loop\n")
    member = DeploymentState(tmp_path / MEMBERS, "nano").member(3, 0)
    member.mkdir(parents=True)
    (member / "vllm.log").write_text("of the engine\n")
    group = GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=3)
    state.save_object(nano().model_copy(update={"status": DeploymentStatus(groups=(group,))}))
    assert main.run(["status", "nano", "--state-dir", str(tmp_path)]) == 0
    assert "The loop of nano ended after" in capsys.readouterr().out, "its members may run"
    for words, shown in ((["logs"], "[0 vllm] of the engine"), (["logs", "-c", "loop"], "of the loop")):
        assert main.run([*words, "--state-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.strip() == shown


@pytest.mark.parametrize("several", [True, False])
def test_agents_are_queried_when_the_loop_does_not_respond(several: bool, tmp_path: Path, unused_tcp_port: int) -> None:
    state, token = DeploymentState(tmp_path, "nano"), "0" * 96
    plan = group_plan(("127.0.0.1",))
    ports = plan.members[0].ports.model_copy(update={"agent": unused_tcp_port})
    head = plan.members[0].model_copy(update={"ports": ports})
    state.incarnation(1).mkdir(parents=True)
    (state.incarnation(1) / "plan.json").write_text(plan.model_copy(update={"members": (head,)}).to_json())
    # The loop of several machines has a token for each incarnation; its members have their own files.
    (state.incarnation(1) / "token" if several else state.token()).write_text(token)

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == f"Bearer {token}" and self.path == "/v1/status"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(agent_status(now=time.time()).to_json().encode())

        def log_message(self, *_: object) -> None: ...

    group = GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=1)
    found = nano().model_copy(update={"status": DeploymentStatus(groups=(group,))})
    with HTTPServer(("127.0.0.1", unused_tcp_port), Agent) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        seen, heard = query_members(state, found, LoopReport(os.getpid(), None, None))
    assert heard
    assert [member.phase for member in seen.status.groups[0].members] == [Phase.SERVING]


def test_the_state_directory_of_the_client_is_not_forwarded() -> None:
    words = ["status", "--state-dir", "/a", "nano", "--state-dir=/b", "-o", "json"]
    assert sources._without_state_dir(words) == ["status", "nano", "-o", "json"]


def test_settings_survive_the_way_to_a_machine() -> None:
    sent = Settings(record=record(), host="spark-2", deployment=nano(), secrets={"keys/api": "x"})
    again = Settings.model_validate_json(sent.to_json())
    assert again == sent
    assert not again.first
    assert again.digest() == sent.model_copy(update={"timeout": 9.0}).digest()
    assert again.digest() != sent.model_copy(update={"secrets": {}}).digest()


def test_a_newer_client_ends_a_deployment_of_an_older_version() -> None:
    sent = json.loads(Settings(record=record(), host="spark-2").to_json())
    newer = {**sent, "added": 1, "record": {**sent["record"], "added": 1}}
    assert Settings.model_validate(newer) == Settings(record=record(), host="spark-2")


def test_login_files_that_print_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ssh"
    program.write_text("#!/bin/bash\necho 'Welcome to spark-1'\nexec sh -c \"${@: -1}\"\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CommandError, match=r"spark-1: its login files print 'Welcome to spark-1"):
        hosts.down(tmp_path, record(), uninstall=False)


def test_without_ssh_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = "the program 'ssh' is not installed"
    with pytest.raises(CommandError, match=missing):
        hosts.down(tmp_path, record(), uninstall=False)
    for words in (["status"], ["logs"]):
        with pytest.raises(CommandError, match=missing):
            hosts.forward(record(), words)
    with pytest.raises(CommandError, match=missing):
        init.run(init.InitOptions(hosts=("a", "b"), yes=True), tmp_path, tmp_path)


def test_a_long_name_of_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="'ssh' is not installed"):
        hosts.forward(record(), ["status"])


def test_one_client_at_a_time_changes_a_machine(tmp_path: Path) -> None:
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    sent = Settings(record=record().model_copy(update={"inventory": inventory}), host="spark-2")
    command = [sys.executable, "-m", "dsv4_operator.cli.machine", "stop-host"]
    with machine.alone(str(tmp_path)):
        other = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert other.stdin is not None
        other.stdin.write(sent.to_json().encode())
        other.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
    assert other.wait(60) == 0


def test_down_on_the_first_machine_waits_for_a_client(tmp_path: Path) -> None:
    state = DeploymentState(tmp_path, "nano")
    state.directory.mkdir()
    state.save_manifest(nano())
    (state.directory / INVENTORY).touch()
    command = [sys.executable, "-m", "dsv4_operator.cli.main", "down", "nano", "--state-dir", str(tmp_path)]
    with machine.alone(str(tmp_path)):
        other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.communicate(timeout=3)
        assert not (state.directory / DOWN).exists()
    out, errors = other.communicate(timeout=120)
    assert (other.returncode, out) == (0, "nano is not running\n"), errors


def answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def first_machine(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> Iterator[tuple[Settings, list[Settings]]]:
    """Yield the settings of a first machine without systemd, and a list for those that are to be ended."""
    if os.geteuid() != 0:
        pytest.skip("only root may make namespaces everywhere")
    started: list[subprocess.Popen[bytes]] = []
    start_loop = processes.start_loop
    monkeypatch.setattr(machine, "has_systemd", lambda: False)
    monkeypatch.setattr(processes, "start_loop", lambda *given: started.append(start_loop(*given)))
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        monkeypatch.setattr(machine, "_COMMAND", Path(folder) / "bin" / "dsv4")
        spec = {**nano().to_dict()["spec"]}  # type: ignore[dict-item]
        spec |= {
            "network": {"ports": {name: unused_tcp_port_factory() for name in ("api", "dashboard", "gcs", "agent")}}
        }
        spec |= {"model": {"variant": "Nano", "source": {"path": f"{folder}/missing"}}}
        places = (Host(name="spark-1", address="127.0.0.1"), Host(name="spark-2", address="127.0.0.2"))
        inventory = Inventory(hosts=places, state_dir=folder, service_port=unused_tcp_port_factory())
        known = record().model_copy(update={"inventory": inventory, "client": "me@laptop"})
        deployment = nano().model_copy(update={"spec": type(nano().spec).model_validate(spec)})
        settings = Settings(record=known, host="spark-1", deployment=deployment)
        used = [settings]
        try:
            yield settings, used
        finally:
            machine.stop_loop(used[-1])
            machine.stop_host(used[-1])
        for process in started:
            process.wait(20)
        machine.remove(used[-1])
        assert [path.name for path in Path(folder).iterdir() if path.name != "bin"] == ["weights"]


def test_the_services_of_a_machine(
    first_machine: tuple[Settings, list[Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings, used = first_machine
    known, inventory = settings.record, settings.record.inventory
    machine.apply(settings)
    assert machine.loop_service(settings.loop).running(), "another client finds it"
    assert machine.host_service(settings).running()
    assert "host service started\ncontrol loop started" in capsys.readouterr().out
    # An end that a loss of power interrupted must not apply to the next restart of the machine.
    (settings.loop.directory / DOWN).touch()
    machine.apply(settings)
    assert not (settings.loop.directory / DOWN).exists()
    assert capsys.readouterr().out == ""
    # Another client is refused, also with other software.
    other = settings.model_copy(
        update={"record": known.model_copy(update={"key": "z" * 64, "software": V1, "client": "you@desk"})}
    )
    for action in (machine.apply, machine.prepare):
        with pytest.raises(
            CommandError, match=r"already running, and me@laptop started it at \d{4}-.*remote/nano\.json"
        ):
            action(other)
    secret = settings.model_copy(update={"secrets": {"keys/api": "x"}})
    for action in (machine.apply, machine.prepare):
        with pytest.raises(CommandError, match=r"nano is already running.*other machines, software or secrets"):
            action(secret)
    # The machine gets another address.
    moved = (inventory.hosts[0].model_copy(update={"address": "127.0.0.9"}),)
    inventory = inventory.model_copy(update={"hosts": moved})
    settings = settings.model_copy(update={"record": known.model_copy(update={"inventory": inventory})})
    used.append(settings)
    assert machine.move(settings) == ExitCode.OK
    assert not machine.loop_service(settings.loop).running()
    assert machine.host_service(settings).running()
    machine.apply(settings)
    assert "host service started\ncontrol loop started" in capsys.readouterr().out
    deadline = time.monotonic() + 60
    while not answers("127.0.0.9", inventory.service_port):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not answers("127.0.0.1", inventory.service_port)


def test_other_software_replaces_the_services(
    first_machine: tuple[Settings, list[Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings, used = first_machine
    newer = settings.model_copy(update={"record": settings.record.model_copy(update={"software": V2})})
    machine.prepare(newer)
    machine.apply(settings)
    api = ("127.0.0.1", nano_ports(settings)["api"])
    deadline = time.monotonic() + 60
    while not answers(*api):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    capsys.readouterr()
    machine.prepare(settings)
    assert capsys.readouterr().out == "", "it is the same software"
    with pytest.raises(CommandError, match="maxNumSeqs"):
        machine.prepare(newer.model_copy(update={"deployment": changed(newer)}))
    command = [sys.executable, "-m", "dsv4_operator.cli.machine", "hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write(newer.message())
            holder.stdin.flush()
            assert holder.stdout.readline().decode().strip() == machine.READY
            machine.prepare(newer)
            assert "ending the members and the loop" in capsys.readouterr().out
            assert not machine.loop_service(settings.loop).running()
            # A client between the two loops is not refused, also if the newer software never serves.
            with socket.create_connection(api, 5) as early:
                early.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                machine.apply(newer)
                used.append(newer)
                assert json.loads((settings.loop.directory / machine.BEFORE).read_text()) == {"0": 0}
                assert (settings.members.directory / machine.SOFTWARE).read_text() == V2
                assert V2 in machine._COMMAND.read_text()
                machine.stop_loop(newer)
                machine.apply(settings)
                used.append(settings)
                early.settimeout(2)
                with pytest.raises(TimeoutError):
                    early.recv(1)
                # After the upgrade the gateways start without a group that serves.
                holder.stdin.close()
                early.settimeout(60)
                assert early.recv(100).startswith(b"HTTP/1.1 200")
        finally:
            holder.stdin.close()
            assert holder.wait(20) == 0


def nano_ports(settings: Settings) -> dict[str, int]:
    assert settings.deployment is not None
    return settings.deployment.spec.network.ports.model_dump()


def changed(settings: Settings) -> DSV4Deployment:
    """Return the manifest with another value of a field."""
    assert settings.deployment is not None
    found = settings.deployment.to_dict()
    spec = found["spec"] | {"engine": {"maxNumSeqs": 7}}  # type: ignore[operator]
    return DSV4Deployment.model_validate({**found, "spec": spec})


def test_the_only_argument_may_be_the_prompt_or_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded = []
    monkeypatch.setattr(hosts, "forward", lambda record, words: forwarded.append((record.name, list(words))) or 0)
    save_record(tmp_path, record())
    for words in (["chat", "Where is the river?"], ["logs", "0"], ["logs", "nano", "0"], ["status"]):
        monkeypatch.setattr(sys, "argv", ["dsv4", *words])
        assert main.run([*words, "--state-dir", str(tmp_path)]) == 0
        assert forwarded.pop() == ("nano", words)
    assert main.run(["logs", "other", "0", "--state-dir", str(tmp_path)]) == ExitCode.BAD_INPUT
    (tmp_path / "vllm.log").touch()
    assert main.run(["why", "--log", str(tmp_path / "vllm.log"), "--state-dir", str(tmp_path)]) == ExitCode.FAILED
    assert not forwarded


def test_one_name_is_on_one_or_on_several_machines(tmp_path: Path) -> None:
    state = DeploymentState(tmp_path, "nano")
    save_record(tmp_path, record())
    with pytest.raises(CommandError, match="nano is a deployment on several machines; start it with --hosts"):
        up.run(str(NANO), tmp_path, detach=True, timeout=1)
    (tmp_path / "remote" / "nano.json").unlink()
    state.directory.mkdir()
    with state.lock(), pytest.raises(CommandError, match="nano runs on this machine alone; run `dsv4 down nano`"):
        hosts.up(str(NANO), "a,b", tmp_path, timeout=1)
    (state.directory / INVENTORY).touch()
    with pytest.raises(CommandError, match="on several machines"):
        up.run(str(NANO), tmp_path, detach=True, timeout=1)
    state.save_manifest(nano())
    with pytest.raises(CommandError, match="--purge: nano is on several machines; run `dsv4 uninstall nano`"):
        up.down(tmp_path, "nano", all_deployments=False, purge=True)


def test_known_machines_are_checked_with_their_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    async def check(self: object, target: str, state_dir: str) -> dict[str, object]:
        checked.append((target, state_dir))
        raise CommandError("that is enough")

    monkeypatch.setattr(hosts._Client, "_check", check)
    inventory = record().inventory.model_copy(update={"state_dir": "/srv/dsv4"})
    save_record(tmp_path, record().model_copy(update={"inventory": inventory}))
    for names, folder in (("spark-1,spark-2", "/srv/dsv4"), ("spark-1,spark-3", "/var/lib/dsv4")):
        checked.clear()
        with pytest.raises(CommandError, match="enough"):
            hosts.up(str(NANO), names, tmp_path, timeout=1)
        assert {each for _, each in checked} == {folder}


_LOSSY_SSH = """\
#!/bin/bash
cat > /dev/null
echo x >> {folder}/calls
calls=$(wc -l < {folder}/calls)
echo "$calls.5 of 7.1 GB copied" >&2
[ "$calls" -gt {lost} ] || exit 255
"""


@pytest.mark.parametrize(("lost", "calls"), [(0, 1), (2, 3), (9, 4)])
def test_a_step_continues_after_a_lost_connection(
    lost: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ssh"
    program.write_text(_LOSSY_SSH.format(folder=tmp_path, lost=lost))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "_PAUSE_SECONDS", 0.0)

    async def copy() -> None:
        known = record()
        await hosts._Client(Ssh(Path("/tmp/s")))._bootstrap(known, known.inventory.hosts[0], ["fetch"])

    if lost < 9:
        asyncio.run(copy())
    else:
        with pytest.raises(ConnectionLost, match=r"the connection was lost after `4.5 of 7.1 GB copied`"):
            asyncio.run(copy())
    assert (tmp_path / "calls").read_text().count("x") == calls
    assert capsys.readouterr().out.count("the connection was lost; continuing") == min(lost, 3)
