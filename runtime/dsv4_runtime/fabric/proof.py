"""Proof from a member's probes: which paths there must be, and what is wrong with one; pure."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Interface

from dsv4_runtime.contract import FabricPlan, Rail
from dsv4_runtime.fabric.probes import ProbeOutcome


def paths(mine: Sequence[Rail], theirs: Sequence[Rail]) -> list[tuple[Rail, Rail]]:
    """Return the pairs of addresses to probe: those of the sockets, and RDMA rails that share a network.

    The first rail of either side is that of its sockets; a router may lie between the two. RDMA does not cross one.
    """
    found = [(mine[0], theirs[0])] if mine and theirs else []
    for here in mine:
        for there in theirs:
            both = here.hca is not None and there.hca is not None
            if both and (here, there) not in found and _network(here) == _network(there):
                found.append((here, there))
    return found


def in_ring(mine: Sequence[Rail], others: Sequence[Sequence[Rail]]) -> bool:
    """Tell whether an RDMA rail of this member does not reach every other: machines cabled to each other, no switch."""
    return any(
        rail.hca is not None and not any(there.hca and _network(rail) == _network(there) for there in theirs)
        for rail in mine
        for theirs in others
    )


def cannot_be(plan: FabricPlan, rank: int, mine: Sequence[Rail], theirs: Sequence[Rail]) -> str | None:
    """Return what is wrong between the addresses of this member and those of `rank`, before any packet is sent."""
    twice = {_ip(rail) for rail in mine} & {_ip(rail) for rail in theirs}
    if twice:
        return f"rank {rank} has the address {min(twice)} too; give every machine addresses of its own"
    if plan.require_rdma and not any(here.hca and there.hca for here, there in paths(mine, theirs)):
        return (
            f"no RDMA port here is in a network with one of rank {rank} (here: {_show(mine)}; there: {_show(theirs)}); "
            "give the two ends of each cable addresses in one network"
        )
    return None


def wanted(plan: FabricPlan, mine: Rail, theirs: Rail) -> int:
    """Return the size in bytes of the IP packets that the path between two rails must carry."""
    return plan.mtu or min(mine.mtu, theirs.mtu)


def wrong(plan: FabricPlan, who: str, outcome: ProbeOutcome) -> str | None:
    """Return what is wrong with a path to `who`, in one sentence with the remedy; None if nothing is."""
    here, there = _ip(outcome.mine), _ip(outcome.theirs)
    path = f"from {here} ({outcome.mine.interface}) to {there} of {who}"
    if not outcome.arrives:
        if outcome.heard:
            return (
                f"what is sent {path} does not arrive, although packets of {who} arrive here: "
                f"this one direction is blocked; look at the firewalls of both machines and the routes between them"
            )
        return (
            f"nothing comes back {path}, and no packet of {who} arrives here; "
            "look at the cable, the switch, the firewalls (ufw) and the address at the other end"
        )
    want = wanted(plan, outcome.mine, outcome.theirs)
    if outcome.carries < want:
        return (
            f"the path {path} carries packets of {outcome.carries} bytes, not of {want}; "
            f"set the MTU of every interface and switch between them to {want}, or that of both ends to "
            f"{outcome.carries}"
        )
    if not outcome.streams:
        return f"a TCP stream {path} stalls or breaks although packets arrive; look at the firewalls of both machines"
    return None


def notes(rank: int, outcomes: Sequence[ProbeOutcome]) -> list[str]:
    """Return what is not wrong, but not as good as it could be."""
    return [
        f"{outcome.mine.interface} has an MTU of {outcome.mine.mtu}, its peer {_ip(outcome.theirs)} of rank {rank} "
        f"one of {outcome.theirs.mtu}"
        for outcome in outcomes
        if outcome.mine.mtu != outcome.theirs.mtu
    ]


def _show(rails: Sequence[Rail]) -> str:
    return ", ".join(f"{rail.hca} {rail.address}" for rail in rails if rail.hca) or "none"


def _network(rail: Rail) -> object:
    return IPv4Interface(rail.address).network


def _ip(rail: Rail) -> str:
    return str(IPv4Interface(rail.address).ip)
