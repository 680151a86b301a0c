"""`dsv4-agent`: process 1 of a member."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path

from dsv4_runtime.agent.echo import LogEcho, exit_message
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.ray import with_command
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.plan import RAY_COMMAND
from dsv4_runtime.util import LOG_FORMAT
from dsv4_runtime.util.files import LOG_FORMATS, format_logs

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.3
_LOG_SECONDS = 10.0


class AddressError(Exception):
    """A member's name cannot be resolved."""


def names(plan: GroupPlan) -> dict[str, int]:
    """Map the members' names that need resolution to their ranks."""
    return {member.address: member.rank for member in plan.members if not _is_address(member.address)}


def replaced(plan: GroupPlan, addresses: Mapping[str, str]) -> GroupPlan:
    """Return `plan` with all occurrences of the names in `addresses` replaced; members' names occur nowhere else."""
    text = plan.to_json()
    for name, address in addresses.items():
        text = text.replace(name, address)
    return GroupPlan.model_validate_json(text)


async def resolve(plan: GroupPlan, rank: int, own: str | None) -> GroupPlan:
    """Return `plan` with addresses in place of all names; wait at most `timeouts.formation` until each has one.

    `own` is this member's address, from `--address`; None: its name is resolved like the others.

    Raises:
        AddressError: a name had no address in time, or `own` is no IPv4 address.
    """
    wanted = names(plan)
    found: dict[str, str] = {}
    if own is not None and plan.members[rank].address in wanted:
        if not _is_address(own):
            raise AddressError(f"--address {own!r} is no IPv4 address; give the pod's")
        found[plan.members[rank].address] = own
    loop = asyncio.get_running_loop()
    deadline, log_at = loop.time() + plan.timeouts.formation, loop.time() + 1.0
    while missing := [name for name in wanted if name not in found]:
        answers = await asyncio.gather(*(_lookup(name) for name in missing))
        found |= {name: address for name, address in zip(missing, answers, strict=True) if address is not None}
        missing = [name for name in missing if name not in found]
        if not missing:
            break
        waiting = ", ".join(f"rank {wanted[name]} ({name})" for name in missing)
        if loop.time() > deadline:
            raise AddressError(f"no address after {plan.timeouts.formation:.0f} s for {waiting}; its pod did not start")
        if loop.time() > log_at:
            _log.info("waiting for the address of %s", waiting)
            log_at = loop.time() + _LOG_SECONDS
        await asyncio.sleep(_RETRY_SECONDS)
    return replaced(plan, found) if found else plan


async def _lookup(name: str) -> str | None:
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(name, None, family=socket.AF_INET)
    except OSError:
        return None
    return str(entries[0][4][0]) if entries else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Run one member of a plan until SIGTERM or SIGINT; exit code 0 then, 2 for an unusable plan."""
    parser = argparse.ArgumentParser(prog="dsv4-agent", description=main.__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="the GroupPlan, a JSON file")
    parser.add_argument("--rank", type=int, required=True, help="rank of this member in the plan")
    parser.add_argument("--directory", type=Path, required=True, help="directory of this member's files")
    parser.add_argument("--address", help="this member's own IPv4 address, where the plan has a name instead")
    parser.add_argument("--evidence", type=Path, help="directory of evidence of deaths [default: below --directory]")
    parser.add_argument("--echo", action="store_true", help="copy the logs of Ray and vLLM to stdout")
    parser.add_argument("--exit-message", type=Path, metavar="FILE", help="keep the reason of an exit there")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=f"of the log [default: ${LOG_FORMAT}, else text]")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    identity: dict[str, object] = {"rank": options.rank}
    format_logs(options.log_format, lambda: identity)
    with exit_message(options.exit_message):
        _run_member(options, identity)


def _run_member(options: argparse.Namespace, identity: dict[str, object]) -> None:
    try:
        plan = GroupPlan.model_validate_json(options.plan.read_text())
        token = Path(plan.ray_token_file).read_text().strip()
        plan.members[options.rank]
        if command := os.environ.get(RAY_COMMAND):
            plan = with_command(plan, options.rank, command)
        options.directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"dsv4-agent: --plan {options.plan} --rank {options.rank}: {error}")
    identity |= {"namespace": plan.namespace, "deployment": plan.deployment}
    identity |= {"group": plan.group, "incarnation": plan.incarnation}
    try:
        asyncio.run(_run(options, plan, token, identity))
    except AddressError as error:
        sys.exit(f"dsv4-agent: {error}")


async def _run(options: argparse.Namespace, plan: GroupPlan, token: str, identity: dict[str, object]) -> None:
    # First of all: a signal without a handler does not end process 1 of a container.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    named = await _unless(stop, resolve(plan, options.rank, options.address))
    if named is None:
        return
    member = Member(named, options.rank, options.directory, token)
    format_logs(options.log_format, lambda: {**identity, "generation": member.context.record.generation})
    member.context.evidence_root = options.evidence or options.directory / "evidence"
    echo = LogEcho(options.directory, options.rank, lambda: member.context.record.phase)
    with echo if options.echo else contextlib.nullcontext():
        await member.run(stop)


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, GroupPlan]) -> GroupPlan | None:
    """Return the result of `work`; None if `stop` is set first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()


if __name__ == "__main__":
    main()
