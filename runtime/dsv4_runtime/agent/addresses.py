"""Names in a plan become addresses.

On a pod network a plan is written before anybody knows the addresses of its members, so it has their DNS names. Ray,
vLLM and NCCL want addresses, and the same ones on every member. So each agent, before anything else, puts the address
of each member in the place of its name, wherever the plan has it: in arguments and variables too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping

from dsv4_runtime.contract import GroupPlan

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.3
_TELL_SECONDS = 10.0


class AddressError(Exception):
    """A member's name has no address."""


def names(plan: GroupPlan) -> dict[str, int]:
    """Map the members' names that are no addresses to their ranks."""
    return {member.address: member.rank for member in plan.members if not _is_address(member.address)}


def replaced(plan: GroupPlan, addresses: Mapping[str, str]) -> GroupPlan:
    """Return `plan` with each name in `addresses` replaced, wherever it is. Members' names are in nothing else."""
    text = plan.to_json()
    for name, address in addresses.items():
        text = text.replace(name, address)
    return GroupPlan.model_validate_json(text)


async def resolve(plan: GroupPlan, rank: int, own: str | None) -> GroupPlan:
    """Return `plan` with addresses in the place of all names; wait until each has one, `timeouts.formation` at most.

    Args:
        plan: as it was written.
        rank: this member.
        own: this member's address, known to whoever started it; None: its name is looked up like the others'.

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
    deadline, tell = loop.time() + plan.timeouts.formation, loop.time() + 1.0
    while missing := [name for name in wanted if name not in found]:
        answers = await asyncio.gather(*(_lookup(name) for name in missing))
        found |= {name: address for name, address in zip(missing, answers, strict=True) if address is not None}
        missing = [name for name in missing if name not in found]
        if not missing:
            break
        who = ", ".join(f"rank {wanted[name]} ({name})" for name in missing)
        if loop.time() > deadline:
            raise AddressError(f"no address after {plan.timeouts.formation:.0f} s for {who}; its pod did not start")
        if loop.time() > tell:
            _log.info("waiting for the address of %s", who)
            tell = loop.time() + _TELL_SECONDS
        await asyncio.sleep(_AGAIN_SECONDS)
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
