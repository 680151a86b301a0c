"""`dsv4 doctor` on a node: all checks with findings and remedies; with `--peer`, the path between two machines in both
directions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from dsv4_runtime.contract import FabricPlan, Rail
from dsv4_runtime.fabric.checks import (
    Check,
    CheckReason,
    CheckStatus,
    FabricChoice,
    Variable,
    choose_fabric,
    failures,
    run_checks,
    variables,
)
from dsv4_runtime.fabric.node import Node, discover_node
from dsv4_runtime.fabric.probes import ProbeOutcome, Responder, group_key, path_problem, probe
from dsv4_runtime.util.peer_copies import try_copies

PEER_PORT = 7471
# Not secret: senders only learn that their packet arrived.
_KEY = group_key("doctor", 0)
# There are no ranks without a plan.
_NO_RANK = 0
# Longer than the longest silent wait of the other side, its TCP stream.
_PEER_SILENCE_SECONDS = 6.0


def rail_to(node: Node, peer: IPv4Address) -> Rail | None:
    """Return the interface in the network of `peer`; None if there is none."""
    for link in node.interfaces.values():
        for address in link.addresses:
            if peer in address.network and peer != address.ip:
                port = next((port for port in node.ports if port.interface == link.name), None)
                hca = port.name if port else None
                return Rail(interface=link.name, address=str(address), mtu=link.mtu, hca=hca)
    return None


async def check_peers(node: Node, peers: list[IPv4Address], seconds: float, mtu: int | None) -> list[Check]:
    """Return one check per peer, where the same command must run within `seconds`."""
    rails = {peer: rail_to(node, peer) for peer in peers}
    mine = {rail.address: rail for rail in rails.values() if rail is not None}
    responder = Responder(_KEY)
    try:
        await responder.open(tuple(mine.values()), PEER_PORT)
    except OSError as error:
        responder.close()
        found, remedy = f"port {PEER_PORT} cannot be used: {error}", "end the program that has it"
        return [Check("peers", CheckStatus.FAIL, found, remedy, CheckReason.PORT_IN_USE, PEER_PORT)]
    try:
        plan = FabricPlan(mtu=mtu)
        tries = [_check_peer(responder, peer, rail, time.monotonic() + seconds, plan) for peer, rail in rails.items()]
        return list(await asyncio.gather(*tries))
    finally:
        responder.close()


async def _check_peer(
    responder: Responder, peer: IPv4Address, mine: Rail | None, deadline: float, plan: FabricPlan
) -> Check:
    name = f"peer {peer}"
    if mine is None:
        found, remedy = "no interface here is in its network", "give both ends addresses in one network"
        return Check(name, CheckStatus.FAIL, found, remedy, CheckReason.NO_COMMON_NETWORK)
    theirs = mine.model_copy(
        update={
            "address": f"{peer}/{IPv4Interface(mine.address).network.prefixlen}",
            "interface": "its",
            "port": PEER_PORT,
        }
    )
    want = plan.mtu or mine.mtu
    outcome = await probe(_KEY, _NO_RANK, mine, theirs, want)
    while not outcome.arrives and time.monotonic() < deadline:
        outcome = await probe(_KEY, _NO_RANK, mine, theirs, want)
    # The other side may have started later: respond until it is silent.
    while (quiet := responder.received(_NO_RANK, mine)) is None or quiet < _PEER_SILENCE_SECONDS:
        if quiet is None and time.monotonic() > deadline:
            break
        await asyncio.sleep(0.25)
    return peer_check(name, replace(outcome, received=quiet is not None), plan)


def peer_check(name: str, outcome: ProbeOutcome, plan: FabricPlan) -> Check:
    """Return the check for the path to a peer."""
    if (problem := path_problem(plan, "the peer", outcome)) is not None:
        return replace(problem, name=name)
    found = (
        f"{outcome.mine.interface}: packets of {outcome.carries} bytes arrive, TCP flows, "
        f"{outcome.seconds * 1e6:.0f} µs there and back"
    )
    if not outcome.received:
        found += "; but nothing of its own came"
        remedy = "run the same command there meanwhile"
        return Check(name, CheckStatus.WARN, found, remedy, CheckReason.NOTHING_RECEIVED, outcome.carries)
    return Check(name, CheckStatus.OK, found, value=outcome.carries)


_COLOURS = {CheckStatus.OK: "32", CheckStatus.WARN: "33", CheckStatus.FAIL: "31", CheckStatus.SKIPPED: "2"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the checks; return 0 if none failed, else 1."""
    given = _parser().parse_args(arguments)
    node = discover_node(given.root)
    # A connected cable implies that RDMA is expected.
    required = given.require_rdma or any(port.active for port in node.ports)
    plan = FabricPlan(require_rdma=required, mtu=given.mtu)
    choice = choose_fabric(node)
    here = given.root == Path("/")
    copies = try_copies() if here and len(node.gpus) > 1 and not given.no_copies else None
    checks = [*run_checks(node, choice, plan, copies=copies), _gpu(node), _bandwidth(node)]
    if given.peer:
        checks += asyncio.run(check_peers(node, given.peer, given.wait, given.mtu))
    environment = variables(choice, plan, 0) if node.ports else ()
    if given.output == "json":
        print(json.dumps(_document(node, checks, choice, environment), indent=2))
    else:
        print(_text(checks, environment, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 1 if failures(checks) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv4 doctor", description="Check whether this machine is fit to be a member."
    )
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    parser.add_argument("--require-rdma", action="store_true")
    parser.add_argument("--mtu", type=int)
    parser.add_argument("--peer", type=IPv4Address, action="append")
    parser.add_argument("--wait", type=float, default=30.0)
    parser.add_argument("--no-copies", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("/"))
    return parser


def _gpu(node: Node) -> Check:
    if node.gpu:
        return Check("gpu", CheckStatus.OK, "the NVIDIA driver is loaded")
    return Check("gpu", CheckStatus.SKIPPED, "no NVIDIA driver (/proc/driver/nvidia is missing)")


def _bandwidth(node: Node) -> Check:
    if not node.gpu:
        return Check("bandwidth", CheckStatus.SKIPPED, "no GPU")
    found = "it takes two members: their agents measure it before the model is loaded, and read NCCL's log"
    return Check("bandwidth", CheckStatus.SKIPPED, found)


def _document(
    node: Node, checks: Sequence[Check], choice: FabricChoice, environment: Sequence[Variable]
) -> dict[str, object]:
    return {
        "ok": not failures(checks),
        "checks": [check.to_dict() for check in checks],
        "interfaces": [
            {
                "name": link.name,
                "up": link.up,
                "mtu": link.mtu,
                "speed": link.speed,
                "addresses": [str(address) for address in link.addresses],
                "defaultRoute": link.default_route,
            }
            for link in node.interfaces.values()
        ],
        "rails": [rail.to_dict() for rail in choice.rails()],
        "environment": [{"name": one.name, "value": one.value, "reason": one.reason} for one in environment],
    }


def _text(checks: Sequence[Check], environment: Sequence[Variable], *, colour: bool) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        word = f"{check.level:<7}"
        word = f"\x1b[{_COLOURS[check.level]}m{word}\x1b[0m" if colour else word
        lines.append(f"{word}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    if environment:
        lines += ["", "Settings for NCCL, Gloo and UCX on this machine:"]
        lines += [f"  {one.name}={one.value}  ({one.reason})" for one in environment]
    bad = failures(checks)
    warned = sum(check.level is CheckStatus.WARN for check in checks)
    lines += ["", f"{len(bad)} failed, {warned} warnings, {len(checks)} checks"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
