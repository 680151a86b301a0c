"""`dsv4-agent`: process 1 of a member."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dsv4_runtime.agent.head import Head
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan, Role


def main() -> None:
    """Live as one member of a plan until SIGTERM or SIGINT; exit code 0 then, 2 for an unusable plan."""
    parser = argparse.ArgumentParser(prog="dsv4-agent", description=main.__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="the GroupPlan, a JSON file")
    parser.add_argument("--rank", type=int, required=True, help="which member of the plan this is")
    parser.add_argument("--directory", type=Path, required=True, help="where this member's files go")
    parser.add_argument("--evidence", type=Path, help="where evidence of deaths goes [default: below --directory]")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    try:
        plan = GroupPlan.model_validate_json(options.plan.read_text())
        token = Path(plan.ray_token_file).read_text().strip()
        role = plan.members[options.rank].role
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"dsv4-agent: --plan {options.plan} --rank {options.rank}: {error}")
    kind = Head if role is Role.HEAD else Member
    member = functools.partial(kind, plan, options.rank, options.directory, token)
    asyncio.run(_run(member, options.evidence or options.directory / "evidence"))


async def _run(make: Callable[[], Member], evidence: Path) -> None:
    member = make()
    member.evidence_root = evidence
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await member.run(stop)


if __name__ == "__main__":
    main()
