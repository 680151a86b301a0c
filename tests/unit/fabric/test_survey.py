"""Facts of `dsv4 init`: the real program over generated machines, and hostile output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Interface
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Machine, rtx_host, spark

from dsv4_operator.api import Severity
from dsv4_operator.backends.hosts.survey import (
    PROGRAM,
    End,
    MachineNetwork,
    Survey,
    SurveyError,
    common_links,
    disk_finding,
    is_ring,
    link_findings,
    machine_findings,
    no_link,
    parse_survey,
    read_network,
    spare_links,
)
from dsv4_operator.cli.diagnostics import check_copy
from dsv4_runtime.fabric.node import discover_node

GB10 = "0, GPU-7d2f0c1e-0000-0000-0000-000000000000, NVIDIA GB10, 580.95.05, [N/A]"
RTX = (
    "0, GPU-1, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 580.95.05, 97887\n"
    "1, GPU-2, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 580.95.05, 97887"
)


def surveyed(machine: Machine, folder: Path, gpus: str = GB10, nvcc: str = "") -> Survey:
    """Run the program over the files of `machine`; `ip`, `nvidia-smi` and `nvcc` print that machine's output."""
    root, tools = machine.build(folder / "m"), folder / "bin"
    tools.mkdir(exist_ok=True)
    outputs = {"ip": (root / "ip-addr.json").read_text(), "nvidia-smi": gpus, **({"nvcc": nvcc} if nvcc else {})}
    for name, text in outputs.items():
        (folder / name).write_text(text + "\n")
        (tools / name).write_text(f"#!/bin/sh\ncat {folder / name}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-s", "--", str(root), str(folder / "data")],
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder)},
    )
    assert not done.stderr
    return parse_survey(done.stdout)


def network(machine: Machine, folder: Path, name: str) -> MachineNetwork:
    folder.mkdir(exist_ok=True)
    copy = folder / "copy"
    copy.mkdir()
    surveyed(machine, folder).write(copy)
    return read_network(name, check_copy(copy))


@pytest.mark.parametrize("machine", [spark(), spark(cage=1), rtx_host(), Machine()], ids=str)
def test_the_copy_has_the_network_of_the_machine(machine: Machine, tmp_path: Path) -> None:
    survey = surveyed(machine, tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    survey.write(copy)
    here, there = discover_node(tmp_path / "m"), discover_node(copy)
    # The limits are those of a login.
    assert replace(there, limits=here.limits) == here


def test_facts_of_a_spark(tmp_path: Path) -> None:
    (tmp_path / "data/models/V4-Flash").mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "data/models/V4-Flash" / name).write_text("{}")
    survey = surveyed(spark(), tmp_path)
    assert survey.machine is not None
    assert (survey.machine.id, survey.devices, survey.driver) == ("gb10", 1, "580.95.05")
    assert survey.gpus[0].memory_bytes is None, "unified"
    assert survey.checkpoints == (str(tmp_path / "data/models/V4-Flash"),)
    assert survey.disk == str(tmp_path / "data")
    assert survey.disk_free_bytes > 0
    assert survey.time > 1.7e9
    assert survey.cuda == ""
    (tmp_path / "again").mkdir()
    nvcc = "Copyright (c) 2005-2025\nCuda compilation tools, release 13.0, V13.0.88"
    assert surveyed(spark(), tmp_path / "again", nvcc=nvcc).cuda == "13.0"


def test_facts_of_a_workstation(tmp_path: Path) -> None:
    survey = surveyed(rtx_host(), tmp_path, RTX)
    assert survey.machine is not None
    assert (survey.machine.id, survey.devices) == ("rtx-pro-6000-workstation", 2)


def test_the_smaller_spark(tmp_path: Path) -> None:
    survey = surveyed(spark(), tmp_path)
    small = replace(survey, memory_bytes=62 * 2**30)
    assert small.machine is not None
    assert small.machine.id == "gb10-64gb"


def test_output_without_its_end() -> None:
    with pytest.raises(SurveyError, match="incomplete"):
        parse_survey("@@dsv4 time\n1\n")


@given(st.lists(st.sampled_from(PROGRAM.splitlines()) | st.text(max_size=60), max_size=20))
def test_no_output_raises_another_error(lines: Sequence[str]) -> None:
    parse_survey("\n".join(["@@dsv4 files", *lines, "@@dsv4 end"]))


NAMES = st.sampled_from(["..", ".", "a", "", "device", "etc", "sys", "class", "infiniband", "0000:01:00.0", "a b"])

# Few arbitrary names begin as required and leave the copy.
OUTSIDE = st.tuples(st.sampled_from(["sys", "dev"]), st.lists(st.sampled_from(["..", "a"]), min_size=2, max_size=5))
PATHS = st.lists(NAMES, max_size=6) | OUTSIDE.map(lambda path: [path[0], *path[1]])


@given(st.lists(st.tuples(PATHS, st.sampled_from(["files", "links"])), max_size=8))
def test_a_hostile_machine_writes_only_into_its_copy(
    tmp_path_factory: pytest.TempPathFactory, lines: Sequence[tuple[list[str], str]]
) -> None:
    folder = tmp_path_factory.mktemp("h")
    output = [f"@@dsv4 {kind}\n" + ("/".join(parts) + (":x" if kind == "files" else " /a/..")) for parts, kind in lines]
    (folder / "copy").mkdir()
    survey = parse_survey("\n".join([*output, "@@dsv4 end"]))
    survey.write(folder / "copy")
    assert [path.name for path in folder.iterdir()] == ["copy"]
    for path in (*survey.files, *survey.links):
        assert (folder / "copy" / path).resolve().is_relative_to((folder / "copy").resolve())


def test_two_sparks(tmp_path: Path) -> None:
    both = [network(spark(host), tmp_path / f"s{host}", f"spark-{host}") for host in (1, 2)]
    links = common_links(both)
    # RoCE ranks first; management, with the same address on both, is no link.
    assert [str(link) for link in links] == [
        "192.168.100.0/24, RoCE, 200 Gbit/s, MTU 9000",
        "192.168.101.0/24, RoCE, 200 Gbit/s, MTU 9000",
    ]
    assert links[0].ends["spark-1"].hca == "rocep1s0f0:1"
    assert spare_links(links, links[0]) == links[1:], "the other half of the port"
    assert not list(link_findings(links[0], both, fabric=True))
    assert not [problem for machine in both for problem in machine.problems]


def test_a_port_without_an_address(tmp_path: Path) -> None:
    bare = spark(2)
    for card in bare.cards:
        card.address = None
    both = [network(spark(1), tmp_path / "a", "spark-1"), network(bare, tmp_path / "b", "spark-2")]
    assert both[1].idle, "the interfaces with carrier and without an address"
    text = str(no_link(both))
    assert "10.0.0.21, which spark-1 and spark-2 have" in text
    assert any("no IPv4 address" in str(problem) for problem in both[1].problems)


def end(address: str, *, hca: str | None = None, speed: int = 10_000, mtu: int = 9000, default: bool = False) -> End:
    return End("eth", IPv4Interface(address), True, mtu, speed, default, hca)


def test_three_sparks_in_a_ring() -> None:
    machines = [
        MachineNetwork("a", (end("10.1.0.1/24", hca="r:1"), end("10.3.0.1/24", hca="s:1"), end("10.0.0.1/24")), ()),
        MachineNetwork("b", (end("10.1.0.2/24", hca="r:1"), end("10.2.0.2/24", hca="s:1"), end("10.0.0.2/24")), ()),
        MachineNetwork("c", (end("10.2.0.3/24", hca="r:1"), end("10.3.0.3/24", hca="s:1"), end("10.0.0.3/24")), ()),
    ]
    assert is_ring(machines)
    (link,) = common_links(machines)
    assert str(link.network) == "10.0.0.0/24"
    assert not list(link_findings(link, machines, fabric=True))
    assert not is_ring(machines[:2])


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans(), st.booleans()), max_size=5),
        min_size=2,
        max_size=4,
    )
)
def test_a_link_connects_all_machines_with_different_addresses(ends: list[list[tuple[int, int, bool, bool]]]) -> None:
    machines = [
        MachineNetwork(
            f"m{number}",
            tuple(
                replace(end(f"10.{net}.0.{host}/24", hca="r:1" if rdma else None), up=up) for net, host, rdma, up in own
            ),
            (),
        )
        for number, own in enumerate(ends)
    ]
    links = common_links(machines)
    for link in links:
        assert set(link.ends) == {machine.name for machine in machines}
        assert len({one.address.ip for one in link.ends.values()}) == len(machines)
        assert all(one.up and one.address.ip in link.network for one in link.ends.values())
    assert sorted(links, key=lambda link: not link.rdma) == links, "RDMA first"


def test_different_mtus_and_link_local_addresses() -> None:
    machines = [
        MachineNetwork("a", (end("169.254.1.1/16", hca="r:1"),), ()),
        MachineNetwork("b", (end("169.254.1.2/16", hca="r:1", mtu=1500),), ()),
    ]
    (link,) = common_links(machines)
    assert [finding.reason for finding in link_findings(link, machines, fabric=True)] == ["MtuDiffers", "LinkLocal"]


def test_findings_of_machines(tmp_path: Path) -> None:
    good = replace(
        surveyed(spark(), tmp_path),
        cuda="13.0",
        user_id=0,
        systemd=True,
        machine_id="1",
        tools=frozenset({"ip", "nvidia-smi"}),
    )

    def reasons(*changed: Survey, offset: float = 0.0) -> set[tuple[str, Severity]]:
        named = {f"m{number}": one for number, one in enumerate((good, *changed))}
        found = list(machine_findings(named, {"m1": (offset, 0.2)}))
        assert all(finding.remedy for finding in found)
        return {(finding.reason, finding.severity) for finding in found}

    other = replace(good, machine_id="2")
    assert reasons(other) == set()
    assert reasons(other, offset=1.1) == set(), "within the uncertainty"
    assert reasons(other, offset=-1.3) == {("ClockOffset", Severity.WARN)}
    assert reasons(good) == {("SameMachine", Severity.REFUSE)}
    assert reasons(replace(other, systemd=False, user_id=1000)) == {
        ("NoSystemd", Severity.WARN),
        ("NoRoot", Severity.WARN),
    }
    assert reasons(replace(other, cuda="")) == {("NoToolkit", Severity.WARN)}
    alone = {"m0": replace(good, cuda="")}
    assert not list(machine_findings(alone, {})), "one machine has that of the packages"
    failed = replace(other, gpus=(), gpu_problem="Failed to initialize NVML", driver="580.95.05")
    assert ("DriverFails", Severity.REFUSE) in reasons(failed)
    assert ("MachinesDiffer", Severity.REFUSE) in reasons(failed)
    assert reasons(replace(other, driver="575")) == {("MachinesDiffer", Severity.WARN)}
    small = disk_finding("m1", replace(good, disk_free_bytes=2**30), 200 * 2**30)
    assert small is not None
    assert f"has 1 GiB free in {good.disk}, and weights and software need 200 GiB" in str(small)
    assert disk_finding("m1", replace(good, disk_free_bytes=2**38), 200 * 2**30) is None
