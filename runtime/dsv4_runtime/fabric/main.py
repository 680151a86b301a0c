"""`dsv4 doctor` on a node: every check with what was found and the remedy."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path

from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.fabric.checks import Check, CheckStatus, examine, failures
from dsv4_runtime.fabric.choose import FabricChoice, choose_fabric
from dsv4_runtime.fabric.discover import discover_node
from dsv4_runtime.fabric.environment import Variable, variables
from dsv4_runtime.fabric.node import Node
from dsv4_runtime.fabric.peer import try_peers

_COLOURS = {CheckStatus.OK: "32", CheckStatus.WARN: "33", CheckStatus.FAIL: "31", CheckStatus.SKIPPED: "2"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the checks; 0 if none failed, else 1."""
    given = _parser().parse_args(arguments)
    node = discover_node(given.root)
    # Whoever plugged a cable in wants RDMA.
    required = given.require_rdma or any(port.active for port in node.ports)
    plan = FabricPlan(require_rdma=required, mtu=given.mtu)
    choice = choose_fabric(node)
    checks = [*examine(node, choice, plan), _gpu(node), _bandwidth(node)]
    if given.peer:
        checks += asyncio.run(try_peers(node, given.peer, given.wait, given.mtu))
    told = variables(choice, plan, 0) if node.ports else ()
    if given.output == "json":
        print(json.dumps(_document(checks, choice, told), indent=2))
    else:
        print(_text(checks, told, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
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


def _document(checks: Sequence[Check], choice: FabricChoice, told: Sequence[Variable]) -> dict[str, object]:
    return {
        "ok": not failures(checks),
        "checks": [check.to_dict() for check in checks],
        "rails": [rail.to_dict() for rail in choice.rails()],
        "environment": [{"name": one.name, "value": one.value, "reason": one.reason} for one in told],
    }


def _text(checks: Sequence[Check], told: Sequence[Variable], *, colour: bool) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        word = f"{check.level:<7}"
        word = f"\x1b[{_COLOURS[check.level]}m{word}\x1b[0m" if colour else word
        lines.append(f"{word}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    if told:
        lines += ["", "What dsv4 tells NCCL, Gloo and UCX here:"]
        lines += [f"  {one.name}={one.value}  ({one.reason})" for one in told]
    bad = failures(checks)
    warned = sum(check.level is CheckStatus.WARN for check in checks)
    lines += ["", f"{len(bad)} failed, {warned} to look at, {len(checks)} checks"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
