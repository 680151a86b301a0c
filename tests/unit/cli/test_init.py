"""`dsv4 init` with real sshds in network namespaces, and on this machine."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_operator.api import load
from dsv4_operator.backends.hosts.documents import load_inventory
from dsv4_operator.backends.hosts.survey import parse_survey
from dsv4_operator.cli import init
from dsv4_operator.cli.init import InitOptions, host_names, split_hosts
from dsv4_operator.cli.main import run
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_testkit.ssh_machines import NotHere, SshMachines, ssh_machines

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
NAMES = ("spark-1", "spark-2")
YES = InitOptions(NAMES, yes=True)


@pytest.fixture
def machines() -> Iterator[SshMachines]:
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        try:
            with ssh_machines(Path(folder), NAMES) as found:
                yield found
        except NotHere as error:
            pytest.skip(str(error))


def test_two_machines(machines: SshMachines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    options = replace(YES, listen="0.0.0.0")
    assert init.run(options, tmp_path, state, ssh_options=machines.options) is ExitCode.OK
    inventory = load_inventory((tmp_path / "hosts.yaml").read_text())
    assert [(host.name, host.address, host.interface) for host in inventory.hosts] == [
        ("spark-1", "10.88.1.1", "fabric0"),
        ("spark-2", "10.88.1.2", "fabric0"),
    ]
    text = (tmp_path / "dsv4.yaml").read_text()
    deployment = load(text)
    assert deployment.spec.topology.nodes_per_group == 2
    assert deployment.spec.gateway.listen == "0.0.0.0"
    keys = deployment.spec.gateway.api_keys
    assert keys is not None
    file = state / "secrets" / keys.secret_key_ref.name / keys.secret_key_ref.key
    assert file.stat().st_mode & 0o777 == 0o600
    shown = capsys.readouterr()
    assert "spark-1 to spark-2: TCP" in shown.out
    key = file.read_text().strip()
    assert len(key) > 40
    assert key not in shown.out + shown.err + text, "the key is referenced, not printed"
    # A second run requires --force to replace files, and then keeps the key.
    with pytest.raises(CommandError, match=r"dsv4\.yaml exists; add --force"):
        init.run(options, tmp_path, state, ssh_options=machines.options)
    again = replace(options, force=True, measure=False)
    assert init.run(again, tmp_path, state, ssh_options=machines.options) is ExitCode.OK
    assert file.read_text().strip() == key


def test_all_problems_of_the_link(machines: SshMachines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines.ip("spark-1", "link set fabric0 mtu 1400")
    # Replies of spark-2 are dropped, as by a firewall.
    machines.ip("spark-2", "route add blackhole 10.88.1.1/32")
    with pytest.raises(CommandError) as failed:
        init.run(YES, tmp_path, tmp_path / "state", ssh_options=machines.options)
    assert [finding.reason for finding in failed.value.findings] == ["LinkBlocked", "LinkBlocked"]
    assert "no TCP stream of 10.88.1.0/24 arrives" in str(failed.value)
    assert "has different MTUs: fabric0 of spark-1 1400, fabric0 of spark-2 1500" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_machines_without_a_common_network(machines: SshMachines, tmp_path: Path) -> None:
    machines.ip("spark-2", "addr flush dev fabric0")
    machines.ip("spark-2", "addr add 10.99.1.2/24 dev fabric0")
    with pytest.raises(CommandError, match=r"spark-1: fabric0 10\.88\.1\.1/24; spark-2: fabric0 10\.99\.1\.2/24"):
        init.run(YES, tmp_path, tmp_path / "state", ssh_options=machines.options)


def test_every_unreachable_machine_is_reported(machines: SshMachines, tmp_path: Path) -> None:
    options = replace(YES, hosts=("spark-1", "gone.invalid", "me@lost.invalid"))
    with pytest.raises(CommandError) as failed:
        init.run(options, tmp_path, tmp_path / "state", ssh_options=machines.options)
    first, second = failed.value.messages
    assert first.startswith("gone.invalid: ssh: Could not resolve")
    assert second.startswith("me@lost.invalid: ssh: Could not resolve")
    assert second.endswith("`ssh me@lost.invalid true` must work without a question")


def test_one_other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    address = {"family": "inet", "local": "10.0.0.7", "prefixlen": 24, "scope": "global"}
    link = {"ifname": "eth0", "flags": ["UP", "LOWER_UP"], "operstate": "UP", "mtu": 1500, "addr_info": [address]}
    for name, text in {"ssh": 'exec sh -c "${@: -1}"', "ip": f"echo '{json.dumps([link])}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert init.run(InitOptions(("spark-1",), name="one", yes=True), tmp_path, tmp_path / "state") is ExitCode.OK
    inventory = load_inventory((tmp_path / "hosts.yaml").read_text())
    assert [(host.name, host.address) for host in inventory.hosts] == [("spark-1", "10.0.0.7")]
    deployment = load((tmp_path / "dsv4.yaml").read_text())
    assert deployment.spec.topology.nodes_per_group == 1
    assert deployment.spec.gateway.api_keys is not None
    assert f"dsv4 up {tmp_path}/dsv4.yaml --hosts {tmp_path}/hosts.yaml" in capsys.readouterr().out


def test_facts_of_this_machine_that_are_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "PROGRAM", "exit 1")
    with pytest.raises(CommandError, match="this machine: the output of its shell is incomplete"):
        init.run(InitOptions((), yes=True), tmp_path, tmp_path / "s")


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "--yes", "--directory", str(tmp_path), "--state-dir", str(tmp_path / "s"), "--name", "mine"]
    assert run(words) == 0
    deployment = load((tmp_path / "dsv4.yaml").read_text())
    assert deployment.metadata.name == "mine"
    assert deployment.spec.gateway.api_keys is None
    assert [path.name for path in tmp_path.iterdir()] == ["dsv4.yaml"]
    assert f"dsv4 up {tmp_path}/dsv4.yaml --state-dir" in capsys.readouterr().out


def test_a_listener_beyond_loopback_has_a_key(tmp_path: Path) -> None:
    options = InitOptions((), name="mine", listen="192.0.2.7", yes=True)
    assert init.run(options, tmp_path, tmp_path / "s") is ExitCode.OK
    assert load((tmp_path / "dsv4.yaml").read_text()).spec.gateway.api_keys is not None


def test_without_a_terminal_defaults_must_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--hosts", "spark-1"]) == 2
    assert "stdin is not a terminal; add --yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("spark-1,spark-1", "DUPLICATE"),
        ("me@spark-1,you@spark-1", "DUPLICATE"),
        ("-oProxyCommand=x", "is not a target of ssh"),
        ("a b;c", "is not a target of ssh"),
    ],
)
def test_invalid_targets(hosts: str, problem: str) -> None:
    with pytest.raises(CommandError) as failed:
        host_names(split_hosts(hosts))
    text = "is used twice" if problem == "DUPLICATE" else problem
    assert text in str(failed.value)


def test_the_summary_has_the_toolkits() -> None:
    found = [
        init._Found(f"spark-{number}", None, SimpleNamespace(cuda=release), (0.0, 0.0))  # type: ignore[arg-type]
        for number, release in enumerate(("13.0", "13.0", ""), 1)
    ]
    assert init._toolkits(found) == "CUDA 13.0 on spark-1 and spark-2, none on spark-3"


def test_names_of_targets() -> None:
    assert host_names(("me@Spark-1.local", "192.168.1.5")) == {
        "spark-1.local": "me@Spark-1.local",
        "192.168.1.5": "192.168.1.5",
    }


def test_the_context_of_sparks_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same for every set of options, and takes seconds.
    monkeypatch.setattr(init, "offers", functools.cache(init.offers))
    survey = parse_survey(
        "@@dsv4 gpus\n0, GPU-1, NVIDIA GB10, 580.95, [N/A]\n@@dsv4 files\n"
        "proc/meminfo:MemTotal: 125000000 kB\n@@dsv4 disk\nx x x 900000000\n/data\n@@dsv4 end\n"
    )
    found = [init._Found(name, name, survey, (0.0, 0.0)) for name in NAMES]
    prompts = init._Prompts(yes=True)
    options = InitOptions(NAMES, weights="/weights", yes=True)
    arguments = (prompts, found, None, (), tmp_path, tmp_path / "s")
    assert init._choose(options, *arguments) is ExitCode.OK
    spec = load((tmp_path / "dsv4.yaml").read_text()).spec
    assert spec.topology.nodes_per_group == 2
    assert spec.engine.max_model_len == 131_072
    with pytest.raises(CommandError, match=r"--context: 9,000,000 tokens do not fit; write at most \d+"):
        init._choose(replace(options, context=9_000_000), *arguments)
    for option, value in (("model", "V3"), ("build", "vllm-0.1"), ("name", "Flash!"), ("weights", "disk")):
        with pytest.raises(CommandError, match=f"--{option}: '{value}' is n"):
            init._choose(replace(options, **{option: value}), *arguments)
