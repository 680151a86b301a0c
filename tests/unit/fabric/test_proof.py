"""The proof between two machines: a network of namespaces made by the test, with every fault that the proof detects.

Skipped on machines that do not allow namespaces, like the engine ring.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.contract import FabricPlan, Rail
from dsv4_runtime.fabric import probes
from dsv4_runtime.fabric.checks import Check, CheckReason, CheckStatus
from dsv4_runtime.fabric.probes import (
    SMALLEST,
    ProbeOutcome,
    Responder,
    address_problem,
    group_key,
    is_ring,
    path_problem,
    paths,
    probe,
)

SIDE = Path(__file__).parent / "side.py"
NETWORK = Path(__file__).parent / "network.py"

Network = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def network(tmp_path: Path) -> Network:
    """Return a function that runs two members in namespaces with a network between them, and returns their results."""

    def run(**how: object) -> list[dict[str, Any]]:
        given = json.dumps({"directory": str(tmp_path), "side": str(SIDE), **how})
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(NETWORK), given]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        if done.stderr.startswith("not here"):
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


def test_a_good_path(network: Network) -> None:
    sides = network(mtu=9000, between=9000, measure=True)
    for side in sides:
        assert side["error"] is None
        assert side["proved"]
        remarks = [note for note in side["notes"] if not note.startswith("nofile")]
        assert remarks == ["bandwidth: skipped, no GPU"]
        assert side["env"]["GLOO_SOCKET_IFNAME"] == "fabric0"
        assert side["env"]["NCCL_IB_DISABLE"] == "1"
        assert side["rails"][0]["mtu"] == 9000


def test_two_agents_over_their_own_api(network: Network) -> None:
    for side in network(mtu=9000, between=9000, agent=True):
        assert side["error"] is None
        assert side["proved"]
        assert side["socket"] == "=fabric0"
        assert "bandwidth: skipped, no GPU" in side["notes"]


def test_a_smaller_mtu_in_the_middle_that_drops_in_silence(network: Network) -> None:
    for side, (here, there) in zip(network(mtu=9000, between=1500), ((0, 1), (1, 0)), strict=True):
        # A device accepts a few bytes more than its MTU, as room for a VLAN tag.
        assert (
            f"from 10.88.1.1{here} (fabric0) to 10.88.1.1{there} of rank {there} carries packets of 150"
            in side["error"]
        )
        assert "not of 9000; set the MTU of every interface and switch between them to 9000" in side["error"]
        assert side["cause"] == "FabricDown"


def test_a_router_with_a_smaller_mtu(network: Network) -> None:
    errors = [side["error"] for side in network(mtu=9000, between=1400, routed=True)]
    assert "from 10.88.1.10 (fabric0) to 10.88.2.11 of rank 1 carries packets of 1400 bytes, not of 9000" in errors[0]
    assert "carries packets of 1400 bytes, not of 9000" in errors[1]


@pytest.mark.parametrize("paused_at", range(12))
async def test_the_other_side_may_be_paused_once(paused_at: int) -> None:
    """A size that passes is not taken for too large because of a pause that is longer than its short waits."""

    class Path1500(probes._Path):
        def __init__(self) -> None:
            self.sizes, self.lost = list[int](), 0

        async def _once(self, size: int, seconds: float) -> bool:
            if size not in self.sizes:
                self.sizes.append(size)
            at_pause = size != SMALLEST and self.sizes.index(size) == paused_at
            if at_pause and self.lost < len(probes._SHORT_WAITS):
                self.lost += 1
                return False
            return size <= 1500

    assert await Path1500().largest(9000) == 1500


def test_a_router_and_all_is_well(network: Network) -> None:
    assert [side["error"] for side in network(mtu=9000, between=9000, routed=True)] == [None, None]


def test_a_block_in_one_direction(network: Network) -> None:
    first, second = network(mtu=1500, between=1500, routed=True, block=0)
    assert "packets sent from 10.88.1.10 (fabric0) to 10.88.2.11 of rank 1 do not arrive" in first["error"]
    assert "although packets of rank 1 arrive here: this direction is blocked" in first["error"]
    assert "nothing comes back from 10.88.2.11 (fabric0) to 10.88.1.10 of rank 0" in second["error"]
    assert "no packet of rank 0 arrives here" in second["error"]


def test_a_block_in_both_directions(network: Network) -> None:
    for side in network(mtu=1500, between=1500, routed=True, block=2):
        assert "nothing comes back" in side["error"]


def test_a_firewall_for_tcp_only_in_one_direction(network: Network) -> None:
    first, second = network(mtu=1500, between=1500, routed=True, block=0, protocol=socket.IPPROTO_TCP)
    assert "a TCP stream from 10.88.1.10 (fabric0) to 10.88.2.11 of rank 1 stalls or breaks" in first["error"]
    assert "a TCP stream" in second["error"]


def test_two_doctors(network: Network) -> None:
    with ThreadPoolExecutor(2) as pool:
        good, narrow = pool.map(lambda between: network(mtu=9000, between=between, doctor=True), (9000, 1500))
    for side in good:
        assert side["code"] == 0, side
        found = side["checks"][-1]
        assert (found["level"], found["value"]) == ("ok", 9000)
        assert found["found"].startswith("fabric0: packets of 9000 bytes arrive, TCP flows, ")
    for side in narrow:
        assert side["code"] == 1
        found = side["checks"][-1]
        assert (found["level"], found["reason"]) == ("fail", "PathMtu")
        assert 1500 <= found["value"] < 1510
        assert "the path from 10.88.1." in found["found"]
        assert found["remedy"].startswith("set the MTU")


# Without a network: loopback of one machine, and pure rules

KEY = group_key("token", 1)


def rail(address: str, hca: str | None = None, interface: str = "lo", mtu: int = 9000) -> Rail:
    return Rail(interface=interface, address=address, mtu=mtu, hca=hca)


@pytest.mark.parametrize("replies", [4, 6, 9, None])
async def test_a_side_that_ends_during_a_search_is_no_limit_of_the_path(
    replies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path loses packets beyond 1500 bytes; the other side ends after this number of replies, or never."""
    monkeypatch.setattr(probes, "_LONG_WAITS", (0.1,) * 3)
    monkeypatch.setattr(probes, "_SHORT_WAITS", (0.1,) * 2)

    class Ending(Responder):
        sent = 0

        def answer(self, data: bytes, rail: Rail) -> bytes | None:
            self.sent += len(data) + 28 <= 1500
            lost = len(data) + 28 > 1500 or (replies is not None and self.sent > replies)
            return None if lost else super().answer(data, rail)

    responder = Ending(KEY)
    try:
        mine, theirs = await responder.open((rail("127.0.0.1/8"), rail("127.0.0.2/8")))
        outcome = await probe(KEY, 3, mine, theirs, 9000)
    finally:
        responder.close()
    assert (outcome.arrives, outcome.carries) == ((True, 1500) if replies is None else (False, 0))


async def test_probes_over_loopback() -> None:
    responder = Responder(KEY)
    mine, theirs = await responder.open((rail("127.0.0.1/8"), rail("127.0.0.2/8")))
    try:
        outcome = await probe(KEY, 3, mine, theirs, 9000)
        assert (outcome.arrives, outcome.streams, outcome.carries) == (True, True, 9000)
        assert 0 < outcome.seconds < 10
        assert responder.received(3, theirs) is not None
        assert responder.received(3, mine) is None
        assert responder.received(4, theirs) is None
        # The key of another incarnation opens nothing.
        outcome = await probe(group_key("token", 2), 5, mine, theirs, 9000)
        assert (outcome.arrives, outcome.streams, outcome.carries) == (False, False, 0)
        assert responder.received(5, theirs) is None
        # Beyond the size of any packet on loopback: the largest possible size is found.
        assert (await probe(KEY, 3, mine, theirs, 65_535)).carries >= 60_000
    finally:
        responder.close()
    outcome = await probe(KEY, 3, mine, theirs, 9000)
    assert not outcome.arrives


def test_unauthenticated_probes_get_no_answer_and_no_answer_is_larger_than_its_probe() -> None:
    responder = Responder(KEY)
    here = rail("127.0.0.1/8")
    for data in (b"", b"dsv4", bytes(SMALLEST), b"\xff" * 2000):
        assert responder.answer(data, here) is None
    from dsv4_runtime.fabric.probes import _seal

    probe = _seal(KEY, 1, 7, 42)
    answer = responder.answer(probe, here)
    assert answer is not None
    assert len(answer) <= len(probe)
    # Responses are never answered, so that two responders cannot answer each other endlessly.
    assert responder.answer(answer, here) is None
    for position in range(len(probe)):
        forged = bytearray(probe)
        forged[position] ^= 1
        assert responder.answer(bytes(forged), here) is None


A0, A1 = rail("192.168.100.1/24", "a0:1", "e0"), rail("192.168.101.1/24", "a1:1", "e1")
B0, B1 = rail("192.168.100.2/24", "b0:1", "f0"), rail("192.168.101.2/24", "b1:1", "f1")
C0, C1 = rail("192.168.101.3/24", "c0:1", "g0"), rail("192.168.102.3/24", "c1:1", "g1")
MA, MB = rail("10.0.0.1/24"), rail("10.0.0.2/24")


def test_which_paths_there_must_be() -> None:
    assert paths((A0, A1), (B0, B1)) == [(A0, B0), (A1, B1)]
    # Crossed addresses: the path of the sockets, and pairs of rails that share a network.
    assert paths((A0, A1), (B1, B0)) == [(A0, B1), (A0, B0), (A1, B1)]
    assert paths((MA, A0, A1), (MB, C0, C1)) == [(MA, MB), (A1, C0)]
    assert paths((), (B0,)) == []


def test_a_ring_is_seen() -> None:
    assert not is_ring((A0, A1), [(B0, B1)])
    assert is_ring((MA, A0, A1), [(MB, B0), (MB, C0)])
    assert not is_ring((MA,), [(MB, B0)])


def test_impossible_combinations_of_addresses_are_reported() -> None:
    rdma, any_way = FabricPlan(require_rdma=True), FabricPlan()
    assert address_problem(rdma, 0, 1, {0: (A0, A1), 1: (B0, B1)}) is None
    twice = address_problem(any_way, 0, 1, {0: (A0,), 1: (A0,)})
    assert twice is not None
    assert (twice.reason, twice.value) == (CheckReason.DUPLICATE_ADDRESS, "192.168.100.1")
    apart = address_problem(rdma, 0, 1, {0: (MA, A0), 1: (MB, C0, C1)})
    assert apart is not None
    assert apart.reason is CheckReason.NO_COMMON_NETWORK
    assert "(here: a0:1 192.168.100.1/24; there: c0:1 192.168.101.3/24, c1:1 192.168.102.3/24)" in apart.found
    assert address_problem(any_way, 0, 1, {0: (MA, A0), 1: (MB, C0, C1)}) is None


@given(order=st.integers(3, 8).flatmap(lambda count: st.permutations(range(count))))
def test_a_ring_without_a_switch_needs_an_nccl_for_it_and_the_order_of_the_cables(order: list[int]) -> None:
    count = len(order)

    def end(machine: int, cable: int) -> Rail:
        return Rail(interface=f"c{cable}", address=f"10.10.{cable}.{10 + machine}/24", mtu=9000, hca=f"h{cable}:1")

    def sockets(machine: int) -> Rail:
        return Rail(interface="lan", address=f"10.0.0.{10 + machine}/24", mtu=1500)

    # Cable n leads from machine n to the next one; rank r runs on machine order[r].
    rails = {
        rank: (sockets(machine), end(machine, machine), end(machine, (machine - 1) % count))
        for rank, machine in enumerate(order)
    }
    pairs = list(combinations(range(count), 2))

    def problems(plan: FabricPlan) -> list[Check]:
        return [found for own, rank in pairs if (found := address_problem(plan, own, rank, rails))]

    assert len(problems(FabricPlan(require_rdma=True))) == len(pairs) - count
    assert all("NCCL_SWITCHLESS_RING_ONLY" in str(one) for one in problems(FabricPlan(require_rdma=True)))
    assert not problems(FabricPlan(neighbours_only=True))
    in_order = {abs(order[rank] - order[rank - 1]) for rank in range(count)} <= {1, count - 1}
    wrong = problems(FabricPlan(require_rdma=True, neighbours_only=True))
    assert bool(wrong) is not in_order
    assert all("order of the cables" in str(one) for one in wrong)


@pytest.mark.parametrize(
    ("arrives", "streams", "carries", "received", "mtu", "reason", "value"),
    [
        (True, True, 4500, True, 4200, None, None),
        (True, True, 4500, True, None, CheckReason.PATH_MTU, 4500),
        (True, False, 9000, True, None, CheckReason.TCP_BROKEN, None),
        (False, False, 0, True, None, CheckReason.ONE_WAY, None),
        (False, False, 0, False, None, CheckReason.NO_REPLY, None),
    ],
)
def test_problems_of_a_path(
    arrives: bool,
    streams: bool,
    carries: int,
    received: bool,
    mtu: int | None,
    reason: CheckReason | None,
    value: int | None,
) -> None:
    found = path_problem(FabricPlan(mtu=mtu), "rank 1", ProbeOutcome(A0, B0, arrives, streams, carries, received, 1.0))
    assert (found and found.reason, found and found.value) == (reason, value)
    assert found is None or (found.level is CheckStatus.FAIL and found.remedy and "of rank 1" in found.found)


def test_a_peer_s_rail_by_its_address() -> None:
    from dsv4_runtime.fabric.main import rail_to
    from dsv4_runtime.fabric.node import discover_node

    assert rail_to(discover_node(), IPv4Address("127.0.0.77")) == rail("127.0.0.1/8", mtu=65_536)
    assert rail_to(discover_node(), IPv4Address("198.51.100.1")) is None
