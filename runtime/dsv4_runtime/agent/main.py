"""`dsv4-agent`: process 1 of a member."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

from dsv4_runtime.agent.addresses import AddressError, resolve
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan


def main() -> None:
    """Live as one member of a plan until SIGTERM or SIGINT; exit code 0 then, 2 for an unusable plan."""
    parser = argparse.ArgumentParser(prog="dsv4-agent", description=main.__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="the GroupPlan, a JSON file")
    parser.add_argument("--rank", type=int, required=True, help="which member of the plan this is")
    parser.add_argument("--directory", type=Path, required=True, help="where this member's files go")
    parser.add_argument("--address", help="this member's own IPv4 address, where the plan has a name instead")
    parser.add_argument("--evidence", type=Path, help="where evidence of deaths goes [default: below --directory]")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    try:
        plan = GroupPlan.model_validate_json(options.plan.read_text())
        token = Path(plan.ray_token_file).read_text().strip()
        plan.members[options.rank]
        options.directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"dsv4-agent: --plan {options.plan} --rank {options.rank}: {error}")
    try:
        asyncio.run(_run(options, plan, token))
    except AddressError as error:
        sys.exit(f"dsv4-agent: {error}")


async def _run(options: argparse.Namespace, plan: GroupPlan, token: str) -> None:
    # Before anything that takes time: process 1 of a container does not end of a signal that it does not handle.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    named = await _unless(stop, resolve(plan, options.rank, options.address))
    if named is None:
        return
    member = Member(named, options.rank, options.directory, token)
    member.evidence_root = options.evidence or options.directory / "evidence"
    await member.run(stop)


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, GroupPlan]) -> GroupPlan | None:
    """Return what `work` returns; None if `stop` is set before."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()


if __name__ == "__main__":
    main()
