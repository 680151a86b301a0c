"""Selection of ports, environment variables and findings from copies of /sys."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import RDMA, V1, V2, Card, Machine, check, mapped, outcome, rtx_host, seen, spark, told

from dsv4_runtime.contract import FabricPlan, FabricSetting
from dsv4_runtime.fabric.checks import CheckReason, CheckStatus, choose_fabric, failures, nccl_gid, run_checks
from dsv4_runtime.fabric.node import discover_node

STALE = mapped("169.254.3.4")


@pytest.mark.parametrize("cage", [0, 1])
def test_a_spark_uses_both_halves_of_the_cage_that_has_a_cable(tmp_path: Path, cage: int) -> None:
    choice, checks = seen(spark(cage=cage), tmp_path / "m", address="192.168.100.10")
    names = [f"rocep1s0f{cage}:1", f"roceP2p1s0f{cage}:1"]
    assert sorted(fit.port.name for fit in choice.fit) == sorted(names)
    assert not failures(checks)
    assert [found.name for found in checks if found.level is CheckStatus.WARN] == []
    assert check(checks, "twins").level is CheckStatus.OK
    assert check(checks, f"port rocep1s0f{1 - cage}:1").level is CheckStatus.SKIPPED
    env = told(choice)
    assert sorted(env["NCCL_IB_HCA"].removeprefix("=").split(",")) == sorted(names)
    assert env["NCCL_SOCKET_IFNAME"] == f"=enp1s0f{cage}np{cage}"
    assert env["GLOO_SOCKET_IFNAME"] == f"enp1s0f{cage}np{cage}"
    assert env["NCCL_IB_DISABLE"] == "0"
    assert env["NCCL_NET"] == "IB"
    # NCCL selects the right GID itself; a pinned index would fail on the next machine.
    assert "NCCL_IB_GID_INDEX" not in env
    assert "NCCL_IB_ADDR_RANGE" not in env
    assert "NCCL_CROSS_NIC" not in env


def test_the_choice_does_not_depend_on_names_of_interfaces(tmp_path: Path) -> None:
    machine = spark()
    for number, card in enumerate(machine.cards):
        card.hca, card.interface = f"zz{9 - number}", f"lan{number}"
    choice, checks = seen(machine, tmp_path / "m", address="192.168.101.10")
    assert [fit.interface.name for fit in choice.fit] == ["lan0", "lan1"]
    assert choice.sockets is not None
    assert choice.sockets.name == "lan1"
    assert check(checks, "twins").level is CheckStatus.OK
    assert not failures(checks)


def test_sockets_over_the_management_interface_and_data_over_rdma(tmp_path: Path) -> None:
    choice, checks = seen(spark(), tmp_path / "m", address="10.0.0.21")
    assert told(choice, ring=True)["NCCL_SOCKET_IFNAME"] == "=enP7s7"
    assert told(choice, ring=True)["NCCL_IB_SUBNET_AWARE_ROUTING"] == "1"
    assert len(choice.rails()) == 3
    assert [rail.hca for rail in choice.rails()] == [None, "rocep1s0f0:1", "roceP2p1s0f0:1"]
    assert not failures(checks)


def test_an_rtx_host_leaves_its_way_outside_alone(tmp_path: Path) -> None:
    choice, checks = seen(rtx_host(), tmp_path / "m")
    assert [fit.port.hca for fit in choice.fit] == ["mlx5_1"]
    assert outcome(checks, "port mlx5_0:1") == (CheckStatus.SKIPPED, CheckReason.DEFAULT_ROUTE, None)
    assert check(checks, "twins").level is CheckStatus.SKIPPED
    assert not failures(checks)


def test_a_port_with_the_default_route_is_used_when_set_by_hand(tmp_path: Path) -> None:
    plan = FabricPlan(require_rdma=True, settings={0: FabricSetting(hcas=("mlx5_0",))})
    choice, checks = seen(rtx_host(), tmp_path / "m", plan)
    assert [fit.port.hca for fit in choice.fit] == ["mlx5_0"]
    assert outcome(checks, "mtu") == (CheckStatus.WARN, CheckReason.SMALL_MTU, 1500)
    assert outcome(checks, "port mlx5_1:1") == (CheckStatus.SKIPPED, CheckReason.NOT_SELECTED, None)
    assert not failures(checks)


def test_the_default_route_over_the_only_fabric_port(tmp_path: Path) -> None:
    machine = rtx_host()
    machine.cards = machine.cards[:1]
    choice, checks = seen(machine, tmp_path / "m")
    assert not choice.fit
    assert [(found.name, found.reason) for found in failures(checks)] == [
        ("rdma", CheckReason.NO_USABLE_PORT),
        ("port mlx5_0:1", CheckReason.DEFAULT_ROUTE),
    ]
    assert "spec.network.fabric" in check(checks, "port mlx5_0:1").remedy


def test_a_device_set_by_hand_that_is_not_there(tmp_path: Path) -> None:
    plan = FabricPlan(require_rdma=True, settings={0: FabricSetting(hcas=("mlx5_7",))})
    _, checks = seen(rtx_host(), tmp_path / "m", plan)
    assert outcome(failures(checks), "rdma") == (CheckStatus.FAIL, CheckReason.UNKNOWN_DEVICE, "mlx5_7")
    assert failures(checks)[0].remedy == "correct spec.network.fabric"


def test_no_rdma(tmp_path: Path) -> None:
    machine = Machine(gpu=False)
    choice, checks = seen(machine, tmp_path / "m", FabricPlan(), address="10.0.0.21")
    assert check(checks, "rdma").level is CheckStatus.SKIPPED
    assert not failures(checks)
    env = told(choice, FabricPlan())
    assert env["NCCL_IB_DISABLE"] == "1"
    assert env["NCCL_SOCKET_IFNAME"] == "=enP7s7"
    assert "NCCL_NET" not in env
    _, checks = seen(machine, tmp_path / "m", RDMA)
    assert [(found.name, found.reason) for found in failures(checks)] == [("rdma", CheckReason.NO_DEVICE)]


def test_a_link_that_is_down(tmp_path: Path) -> None:
    machine = spark()
    for card in machine.cards:
        card.up = False
    choice, checks = seen(machine, tmp_path / "m")
    assert not choice.fit
    assert outcome(checks, "port rocep1s0f0:1") == (CheckStatus.FAIL, CheckReason.LINK_DOWN, None)
    assert "DOWN, Disabled" in check(checks, "port rocep1s0f0:1").found
    assert "cable" in check(checks, "port rocep1s0f0:1").remedy
    assert len(failures(checks)) == 5


def test_one_half_without_an_address(tmp_path: Path) -> None:
    machine = spark()
    machine.cards[1].address = None
    choice, checks = seen(machine, tmp_path / "m")
    assert len(choice.fit) == 1
    assert outcome(checks, "twins") == (CheckStatus.WARN, CheckReason.UNUSED_TWIN, None)
    assert outcome(checks, "port roceP2p1s0f0:1") == (CheckStatus.WARN, CheckReason.NO_ADDRESS, None)
    assert not failures(checks)


def test_both_halves_in_one_network(tmp_path: Path) -> None:
    machine = spark()
    machine.cards[1].address = "192.168.100.11/24"
    _, checks = seen(machine, tmp_path / "m")
    assert [(found.name, found.reason) for found in failures(checks)] == [("networks", CheckReason.SHARED_NETWORK)]
    assert "enP2p1s0f0np0 (192.168.100.11/24)" in failures(checks)[0].found


def test_a_bond_of_both_halves_of_a_port(tmp_path: Path) -> None:
    machine = spark()
    for card in machine.cards[:2]:
        card.interface, card.address = "bond0", "192.168.100.10/24"
    _, checks = seen(machine, tmp_path / "m")
    assert outcome(checks, "networks") == (CheckStatus.FAIL, CheckReason.SHARED_INTERFACE, "bond0")
    assert "rocep1s0f0:1 and roceP2p1s0f0:1 share the interface bond0" in check(checks, "networks").found


def test_a_bond_that_the_card_makes_is_one_device(tmp_path: Path) -> None:
    machine = spark()
    machine.cards = machine.cards[:1]
    machine.cards[0].hca, machine.cards[0].interface = "mlx5_bond_0", "bond0"
    choice, checks = seen(machine, tmp_path / "m")
    assert [fit.port.name for fit in choice.fit] == ["mlx5_bond_0:1"]
    assert not failures(checks)


def test_ipv6_gids_only(tmp_path: Path) -> None:
    machine = spark()
    for card in machine.cards:
        card.gids = [(V1, "fe80::1"), (V2, "fe80::1"), (V2, "fd00::7")]
    choice, checks = seen(machine, tmp_path / "m")
    assert not choice.fit
    assert "no RoCE v2 GID stands for 192.168.100.10" in check(checks, "port rocep1s0f0:1").found
    machine.cards[0].address = None
    _, checks = seen(machine, tmp_path / "m")
    assert "has no IPv4 address" in check(checks, "port rocep1s0f0:1").found


def test_the_gid_is_found_wherever_it_is(tmp_path: Path) -> None:
    machine = spark()
    for card, host in ((machine.cards[0], "192.168.100.10"), (machine.cards[1], "192.168.101.10")):
        card.gids = [(V2, mapped(host)), None, (V1, mapped(host)), (V2, "fe80::1"), (V1, "fe80::1")]
    choice, checks = seen(machine, tmp_path / "m")
    assert [fit.gid for fit in choice.fit] == [0, 0]
    assert not failures(checks)
    # By NCCL's rule the first entry stays: it is IPv4 already, and the other one is of version 1.
    assert "NCCL_IB_GID_INDEX" not in told(choice)


def test_a_stale_entry_before_the_right_one_at_the_same_place_on_both(tmp_path: Path) -> None:
    machine = spark()
    for card, host in ((machine.cards[0], "192.168.100.10"), (machine.cards[1], "192.168.101.10")):
        card.gids = [(V1, "fe80::1"), (V2, "fe80::1"), (V1, STALE), (V2, STALE), (V1, mapped(host)), (V2, mapped(host))]
    choice, checks = seen(machine, tmp_path / "m")
    assert told(choice)["NCCL_IB_GID_INDEX"] == "5"
    assert check(checks, "gid").level is CheckStatus.WARN
    assert "169.254.3.4" in check(checks, "gid").found


def test_a_stale_entry_on_one_of_the_two_only(tmp_path: Path) -> None:
    machine = spark()
    host = mapped("192.168.100.10")
    machine.cards[0].gids = [(V1, "fe80::1"), (V1, STALE), (V2, STALE), (V1, host), (V2, host)]
    choice, checks = seen(machine, tmp_path / "m")
    assert sorted(fit.gid for fit in choice.fit) == [3, 4]
    env = told(choice)
    # No single index fits both; the common network of the addresses excludes the stale entry.
    assert "NCCL_IB_GID_INDEX" not in env
    assert env["NCCL_IB_ADDR_RANGE"] == "192.168.100.0/23"
    assert not failures(checks)


def test_a_stale_entry_that_nothing_can_pass_over(tmp_path: Path) -> None:
    machine = spark()
    host, old = mapped("192.168.100.10"), mapped("192.168.100.77")
    machine.cards[0].gids = [(V1, "fe80::1"), (V1, old), (V2, old), (V1, host), (V2, host)]
    choice, checks = seen(machine, tmp_path / "m")
    assert [(found.name, found.reason) for found in failures(checks)] == [("gid", CheckReason.STALE_GIDS)]
    assert not {"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE"} & told(choice).keys()


def test_an_index_by_hand(tmp_path: Path) -> None:
    right = FabricPlan(settings={0: FabricSetting(gid_index=3)})
    choice, checks = seen(spark(), tmp_path / "m", right)
    assert told(choice, right)["NCCL_IB_GID_INDEX"] == "3"
    assert not failures(checks)
    _, checks = seen(spark(), tmp_path / "m", FabricPlan(settings={0: FabricSetting(gid_index=1)}))
    assert outcome(failures(checks), "gid") == (CheckStatus.FAIL, CheckReason.WRONG_GID_INDEX, 1)


def test_a_container_without_the_device_files(tmp_path: Path) -> None:
    machine = spark()
    for card in machine.cards:
        card.verbs = False
    choice, checks = seen(machine, tmp_path / "m")
    assert not choice.fit
    assert check(checks, "port rocep1s0f0:1").reason is CheckReason.NO_DEVICE_FILE
    assert "/dev/infiniband" in check(checks, "port rocep1s0f0:1").remedy


def test_infiniband_ports_are_reported_as_not_ethernet(tmp_path: Path) -> None:
    machine = rtx_host()
    machine.cards[1].link_layer = "InfiniBand"
    _, checks = seen(machine, tmp_path / "m")
    assert check(checks, "port mlx5_1:1").reason is CheckReason.NOT_ETHERNET


def test_a_card_that_came_up_degraded(tmp_path: Path) -> None:
    machine = spark()
    # Firmware before 2026-04: the second function has two lanes and reports two as its maximum.
    for card in (machine.cards[1], machine.cards[3]):
        card.width = card.max_width = 2
    _, checks = seen(machine, tmp_path / "m")
    assert outcome(checks, "pcie") == (CheckStatus.WARN, CheckReason.REDUCED_PCIE, None)
    assert "0002:01:00.0 runs at 32 GT/s x2" in check(checks, "pcie").found
    machine = rtx_host()
    machine.cards[1].width = 8
    _, checks = seen(machine, tmp_path / "m")
    assert check(checks, "pcie").found == "0000:41:00.1 runs at 32 GT/s x8 of 32 GT/s x16"
    machine = spark()
    for card in machine.cards:
        card.speed = 100_000
    _, checks = seen(machine, tmp_path / "m")
    assert outcome(checks, "speed rocep1s0f0:1") == (CheckStatus.WARN, CheckReason.SLOW_LINK, 100_000)
    # The full speed of other cards is unknown.
    machine = rtx_host()
    machine.cards[1].speed = 100_000
    assert check(seen(machine, tmp_path / "m")[1], "speed mlx5_1:1").level is CheckStatus.OK


def test_every_failure_and_warning_has_a_remedy(tmp_path: Path) -> None:
    odd = spark(memlock="1", nofile="10", release="7.0.0-1", cma=(1, 2))
    for number, card in enumerate(odd.cards):
        card.up, card.mtu, card.verbs, card.width = True, 1500, number != 2, number + 1
        card.address = None if number == 3 else "192.168.100.1/24"
    _, checks = seen(odd, tmp_path / "m")
    assert len({found.name for found in checks if found.level in (CheckStatus.FAIL, CheckStatus.WARN)}) >= 6
    for found in checks:
        problem = found.level in (CheckStatus.FAIL, CheckStatus.WARN)
        assert bool(found.remedy) is problem, found
        assert found.reason is not None or not problem, found


def test_this_machine() -> None:
    node = discover_node()
    assert node.interfaces["lo"].mtu == 65_536
    assert node.interface_of(IPv4Address("127.0.0.1")) == node.interfaces["lo"]
    checks = list(run_checks(node, choose_fabric(node), FabricPlan()))
    if not Path("/sys/class/infiniband").exists():
        assert node.ports == ()
        assert check(checks, "rdma").level is CheckStatus.SKIPPED
        assert not failures(checks)


# Discovery never raises, for arbitrary contents of the tree.

_ODD = st.sampled_from(
    ["", "\0\0", "N/A", "-1", "9" * 400, "4: ACTIVE", "fe80::zz", "::ffff:1.2.3.4", "\udcff", "[]", "{}"]
)


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() or path.is_symlink())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_damaged_trees_raise_no_exception(tmp_path: Path, data: st.DataObject) -> None:
    root = data.draw(st.sampled_from([spark, rtx_host]))().build(tmp_path / "m")
    for path in data.draw(st.lists(st.sampled_from(_files(root)), max_size=12, unique=True)):
        match data.draw(st.sampled_from(["gone", "text", "bytes", "folder", "loop", "pipe", "unreadable"])):
            case "gone":
                path.unlink()
            case "text":
                if path.is_file():
                    path.write_text(data.draw(_ODD), errors="surrogateescape")
            case "bytes":
                if path.is_file():
                    path.write_bytes(data.draw(st.binary(max_size=64)))
            case "folder":
                path.unlink()
                path.mkdir()
            case "loop":
                path.unlink()
                path.symlink_to(path.name)
            case "pipe":
                path.unlink()
                os.mkfifo(path)
            case "unreadable":
                path.chmod(0)
    address = data.draw(st.sampled_from([None, "192.168.100.10", "nonsense", "10.9.9.9"]))
    setting = data.draw(
        st.sampled_from(
            [FabricSetting(), FabricSetting(interface="nowhere", hcas=("x",)), FabricSetting(gid_index=200)]
        )
    )
    plan = FabricPlan(require_rdma=True, mtu=9000, settings={0: setting})
    node = discover_node(root)
    choice = choose_fabric(node, address, setting)
    assert all(found.found for found in run_checks(node, choice, plan))
    told(choice, plan)
    for rail in choice.rails():
        assert rail.address.count(".") == 3


@given(
    st.lists(st.none() | st.tuples(st.sampled_from([V1, V2]), st.sampled_from([STALE, mapped("10.1.1.1"), "fe80::1"])))
)
@settings(max_examples=200, deadline=None)
def test_nccl_takes_a_roce_v2_ipv4_entry_wherever_there_is_one(table: list[tuple[str, str] | None]) -> None:
    from ipaddress import IPv6Address

    from dsv4_runtime.fabric.node import Gid

    gids = [Gid(index, entry[0], IPv6Address(entry[1]), None) for index, entry in enumerate(table) if entry]
    taken = {gid.index: gid for gid in gids}.get(nccl_gid(gids))
    if any(gid.kind == V2 and gid.ipv4 for gid in gids):
        assert taken is not None
        assert taken.ipv4 is not None
        assert taken.kind == V2


def test_nothing_at_all(tmp_path: Path) -> None:
    node = discover_node(tmp_path / "nothing")
    assert node.ports == ()
    assert run_checks(node, choose_fabric(node), RDMA)


def test_two_ports_of_one_function(tmp_path: Path) -> None:
    """A device with two ports has both interfaces at one PCI function; the GIDs assign them to ports."""
    machine = Machine([Card("mlx5_0", "ens1", "0000:05:00.0", "10.1.0.1/24")])
    root = machine.build(tmp_path / "m")
    (root / "sys/class/infiniband/mlx5_0/device/net/ens0").mkdir()
    for name, port in (("ens0", 1), ("ens1", 0)):
        base = root / "sys/class/net" / name
        base.mkdir(exist_ok=True)
        (base / "mtu").write_text("1500")
        (base / "dev_port").write_text(str(port))
    assert discover_node(root).ports[0].interface == "ens1"
    for kind in ("ndevs", "types"):
        for path in (root / "sys/class/infiniband/mlx5_0/ports/1/gid_attrs" / kind).iterdir():
            path.unlink()
    assert discover_node(root).ports[0].interface == "ens1"
