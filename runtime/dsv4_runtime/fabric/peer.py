"""`dsv4 doctor --peer`: two people's doctors, one on each machine, try the path between them in both directions."""

from __future__ import annotations

import asyncio
import time
from ipaddress import IPv4Address, IPv4Interface

from dsv4_runtime.contract import FabricPlan, Rail
from dsv4_runtime.fabric.checks import Check, CheckStatus
from dsv4_runtime.fabric.node import Node
from dsv4_runtime.fabric.probes import Answerer, ProbeOutcome, ask, group_key
from dsv4_runtime.fabric.proof import wrong

PORT = 7471
# No secret: whoever can send here may learn that a packet of his arrived.
_KEY = group_key("doctor", 0)
# What a doctor calls itself; there are no ranks before a plan.
_NOBODY = 0
# Longer than anything that the other side waits for in silence: its TCP stream.
_QUIET_SECONDS = 6.0


def rail_to(node: Node, peer: IPv4Address) -> Rail | None:
    """Return the interface of this machine in whose network `peer` is; None if there is none."""
    for link in node.interfaces.values():
        for address in link.addresses:
            if peer in address.network and peer != address.ip:
                port = next((port for port in node.ports if port.interface == link.name), None)
                hca = port.name if port else None
                return Rail(interface=link.name, address=str(address), mtu=link.mtu, hca=hca)
    return None


async def try_peers(node: Node, peers: list[IPv4Address], seconds: float, mtu: int | None) -> list[Check]:
    """Return one check for each peer, where the same command has to run within `seconds`."""
    rails = {peer: rail_to(node, peer) for peer in peers}
    mine = {rail.address: rail for rail in rails.values() if rail is not None}
    answerer = Answerer(_KEY)
    try:
        await answerer.open(tuple(mine.values()), PORT)
    except OSError as error:
        answerer.close()
        return [Check("peers", CheckStatus.FAIL, f"port {PORT} cannot be used: {error}", "end the program that has it")]
    try:
        plan = FabricPlan(mtu=mtu)
        tries = [_try(answerer, peer, rail, time.monotonic() + seconds, plan) for peer, rail in rails.items()]
        return list(await asyncio.gather(*tries))
    finally:
        answerer.close()


async def _try(answerer: Answerer, peer: IPv4Address, mine: Rail | None, deadline: float, plan: FabricPlan) -> Check:
    name = f"peer {peer}"
    if mine is None:
        return Check(
            name, CheckStatus.FAIL, "no interface here is in its network", "give both ends addresses in one network"
        )
    theirs = mine.model_copy(
        update={"address": f"{peer}/{IPv4Interface(mine.address).network.prefixlen}", "interface": "its", "port": PORT}
    )
    want = plan.mtu or mine.mtu
    outcome = await ask(_KEY, _NOBODY, mine, theirs, want)
    while not outcome.arrives and time.monotonic() < deadline:
        outcome = await ask(_KEY, _NOBODY, mine, theirs, want)
    # The other side may have begun later: answer until it has fallen silent.
    while (quiet := answerer.heard(_NOBODY, mine)) is None or quiet < _QUIET_SECONDS:
        if quiet is None and time.monotonic() > deadline:
            break
        await asyncio.sleep(0.25)
    return judge(name, outcome.with_heard(quiet is not None), plan)


def judge(name: str, outcome: ProbeOutcome, plan: FabricPlan) -> Check:
    """Return what the path to a peer is like."""
    if (problem := wrong(plan, "the peer", outcome)) is not None:
        found, _, remedy = problem.partition("; ")
        return Check(name, CheckStatus.FAIL, found, remedy)
    found = (
        f"{outcome.mine.interface}: packets of {outcome.carries} bytes arrive, TCP flows, "
        f"{outcome.seconds * 1e6:.0f} µs there and back"
    )
    if not outcome.heard:
        return Check(
            name, CheckStatus.WARN, f"{found}; but nothing of its own came", "run the same command there meanwhile"
        )
    return Check(name, CheckStatus.OK, found)
