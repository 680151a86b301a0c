"""Losses of members and nodes of a serving group during requests: it forms again by itself, and no request is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterkit import cgroups
from clusterkit.client import Cluster
from clusterkit.waiting import until
from nano_world import OPERATOR_NODE, Nano, Users, forwarded

from dsv4_operator.api.values import parse_time

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

VERDICT_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _third_node(cluster: Cluster) -> None:
    if cluster.state.settings.nodes < 3:
        pytest.skip("a group of two that loses a node needs a third")


@contextlib.contextmanager
def asking(nano: Nano, away_from: str = "") -> Iterator[Users]:
    """Run users from before the loss until the block ends, through the gateway that is not on the node `away_from`."""
    target = f"pod/{nano.gateway(away_from)}"
    with forwarded(nano.cluster, nano.namespace, target, 8000) as base, Users(base).asking() as found:
        found.next_after(time.time())
        yield found


@pytest.mark.parametrize("rank", [1, 0])
def test_a_deleted_member_is_replaced_by_a_new_incarnation(nano: Nano, rank: int) -> None:
    before, incarnation = nano.uids(), nano.group()["incarnation"]
    with asking(nano) as users:
        struck = time.time()
        nano.cluster.kubectl("delete", "pod", nano.pod(rank), "-n", nano.namespace, "--wait=false")
        death = nano.recovered(struck, "MemberLost")
        noticed = parse_time(death["time"])
        back = noticed - struck + users.next_after(noticed)
    print(f"\nrank {rank} deleted: verdict after {noticed - struck:.1f} s, the next answer after {back:.1f} s")
    print(f"  {nano.phases()}")
    assert (death["culpritRank"], death["level"]) == (rank, 2)
    assert nano.group()["incarnation"] == incarnation + 1
    assert not set(before.values()) & set(nano.uids().values())
    _nothing_lost(users)


@pytest.mark.parametrize(("end", "back"), [("cut", "plug"), ("stop", "start")])
def test_a_lost_node_is_named_and_replaced_and_its_members_never_come_back(nano: Nano, end: str, back: str) -> None:
    """A node is cut off while its processes continue, or is switched off: for Kubernetes both are the same."""
    node, rank = _victim(nano)
    old, incarnation = nano.uids(), nano.group()["incarnation"]
    with asking(nano, away_from=node) as users:
        struck = time.time()
        nano.cluster.node(end, node)
        down = time.time()
        try:
            death = nano.noticed(struck, "NodeLost")
            seen = time.time() - down
            print(f"\n{node} (rank {rank}), {end}: in the status after {seen:.1f} s: NodeLost, {death['message']}")
            assert (death["culpritRank"], death["culpritNode"]) == (rank, node)
            again = nano.recovered(struck, "NodeLost")
            print(f"  serves on other nodes {again['recoverSeconds']:.1f} s after the verdict; {nano.phases()}")
            group, present = nano.group(), nano.uids()
            assert node not in {member["node"] for member in group["members"]}
            assert group["incarnation"] > incarnation
            assert not set(old.values()) & set(present.values())
        finally:
            nano.cluster.node(back, node)
        until(f"{node} Ready", lambda: _ready(nano.cluster, node), seconds=180, every=1)
        # Its remaining processes end, and the serving group is not affected.
        until("the end of its old members", lambda: not _left(nano, node, incarnation), seconds=180, every=1)
        assert nano.uids() == present
        assert nano.group()["incarnation"] == group["incarnation"]
        users.next_after(time.time())
    _nothing_lost(users)
    assert seen <= VERDICT_SECONDS, f"the verdict took {seen:.1f} s"


def _victim(nano: Nano) -> tuple[str, int]:
    """Return a member's node that is not the operator's, and the member's rank."""
    pod = next(one for one in nano.members().values() if one["spec"]["nodeName"] != OPERATOR_NODE)
    return str(pod["spec"]["nodeName"]), int(pod["metadata"]["labels"]["dsv4.dev/rank"])


def _nothing_lost(users: Users) -> None:
    print(f"  {len(users.answered)} questions answered, {len(users.refused)} refused, {len(users.lost)} lost")
    assert not users.lost
    assert not users.refused


def _ready(cluster: Cluster, node: str) -> bool:
    conditions = {one["type"]: one["status"] for one in cluster.get("node", node)["status"]["conditions"]}
    return conditions.get("Ready") == "True"


def _left(nano: Nano, node: str, incarnation: int) -> list[str]:
    """Return agents of `incarnation` that still run on `node`, from the machine's processes and not from Kubernetes."""
    found = []
    for pid in cgroups.processes(f"{nano.cluster.state.settings.cgroup}/{node}"):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if "dsv4_runtime.agent" in command and f"/i{incarnation}/" in command:
            found.append(command)
    return found
