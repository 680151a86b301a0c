"""Claims on the GPUs of this machine: which deployment has which.

A claim is an abstract Unix socket with the GPU's UUID in its name: the kernel gives a name to one process at a time,
whoever its user and wherever its state directory, and takes it back when that process ends. It is made before the loop
moves into a network of its own, because such names belong to a network namespace.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsv4_operator.api import TopologySpec
from dsv4_operator.backends.local.gpus import Card, Found
from dsv4_operator.backends.local.state import StateError
from dsv4_operator.planning.catalog import GIB

_SECONDS = 1.0


@contextmanager
def claimed(topology: TopologySpec, found: Found, groups: int = 1) -> Iterator[tuple[Card, ...]]:
    """Hold as many GPUs as so many groups of `topology` need, while entered; those with the most free memory first.

    Raises:
        StateError: there are too few of that kind, or other deployments have them.
    """
    fitting = [card for card in found.cards if card.hardware == topology.hardware]
    count = topology.world_size * groups
    held: dict[int, tuple[Card, socket.socket]] = {}
    taken: list[tuple[Card, str]] = []
    try:
        for card in sorted(fitting, key=_least_used):
            if len(held) == count:
                break
            sock = _claim(card)
            if sock is None:
                taken.append((card, _holder(card)))
            else:
                held[card.index] = card, sock
        if len(held) < count:
            raise StateError(_too_few(topology, count, found, fitting, taken))
        yield tuple(card for _, (card, _) in sorted(held.items()))
    finally:
        for _, sock in held.values():
            sock.close()


def _least_used(card: Card) -> tuple[int, int]:
    """Rank by used memory in steps of a GiB, so that GPUs which nobody uses come in their own order."""
    used = (card.memory_bytes or 0) - (card.free_bytes or 0)
    return used // GIB, card.index


def _too_few(
    topology: TopologySpec, count: int, found: Found, fitting: Sequence[Card], taken: Sequence[tuple[Card, str]]
) -> str:
    kind = topology.hardware
    wanted = f"{count} GPU{'s' if count > 1 else ''} of {kind}"
    if not found.cards:
        return (
            f"spec.topology.hardware: {wanted} are asked for, and this machine offers none: {found.problem}; install "
            "NVIDIA's driver so that `nvidia-smi` lists the GPUs (https://www.nvidia.com/drivers), or run it elsewhere"
        )
    if len(fitting) < count:
        return (
            f"spec.topology.devicesPerNode: {wanted} are asked for, and this machine has {found.kinds()}; write what "
            "is there (leave hardware out to take it from the machine), or run it elsewhere"
        )
    holders = "; ".join(f"{card.title} is held by {holder}" for card, holder in taken)
    return (
        f"spec.topology.devicesPerNode: {wanted} are asked for, and {len(fitting) - len(taken)} of {len(fitting)} are "
        f"free: {holders}; end that deployment with `dsv4 down`, or ask for fewer"
    )


def _name(card: Card) -> str:
    return f"\0dsv4/{card.uuid}"


def _claim(card: Card) -> socket.socket | None:
    """Return a socket that holds `card`; None if another process has it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(card))
        # Whoever finds the name taken connects to learn whose it is.
        sock.listen(1)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return sock


def _holder(card: Card) -> str:
    """Say who has `card`, for people."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_SECONDS)
        try:
            sock.connect(_name(card))
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "a deployment that has just ended or does not answer"
    pid = struct.unpack("3i", credentials)[0]
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    named = words[words.index("--name") + 1] if "--name" in words[:-1] else ""
    return f"the deployment {named!r} (process {pid})" if named else f"process {pid}"
