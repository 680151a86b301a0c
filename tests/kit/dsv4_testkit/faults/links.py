"""Links of local members that are cut, lose all frames, or are slow; with the kernel and iproute2 only.

All changes are made to the member's port of the bridge, in the loop's network namespace that
`backends/local/network.py` creates. Inside the member the effects equal those of a faulty network of its machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_SECONDS = 10.0
_BRIDGE = "dsv4"
_CLONE_NEWNET = 0x40000000

# linux/if_packet.h: received and sent frames have a header that describes checksums and segments left to the (virtual)
# card. Without it the receiver would drop every frame with a pending checksum.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_LARGEST = 10 + 14 + 65535 + 64


def _run(namespace: int, command: str) -> None:
    words = ["nsenter", f"--net=/proc/{namespace}/ns/net", *command.split()]
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=_SECONDS)


def cut(namespace: int, port: str) -> None:
    """Take the port down: the member's interface loses its carrier, as with a pulled cable.

    Args:
        namespace: any process in the network namespace with the bridge.
        port: the member's port of the bridge.
    """
    _run(namespace, f"ip link set {port} down")


def lose(namespace: int, port: str) -> None:
    """Make the bridge drop every frame from and to the port; carrier and addresses stay unchanged."""
    _run(namespace, f"bridge link set dev {port} state 0")


def restore(namespace: int, port: str) -> None:
    """Revert `lose`; no effect if the member was fenced meanwhile, which removes its port."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _run(namespace, f"bridge link set dev {port} state 3")


def lose_for(namespace: int, port: str, seconds: float) -> Callable[[], None]:
    """Lose all frames for at most `seconds`, however busy the machine is: no process has to start at their end.

    Returns a function that waits for the end.
    """
    lines = (f'echo "link set dev {port} state {state}"' for state in (0, 3))
    command = f"({f'; sleep {seconds}; '.join(lines)}) | nsenter --net=/proc/{namespace}/ns/net bridge -batch -"
    process = subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE, text=True)

    def ended() -> None:
        _, errors = process.communicate(timeout=seconds + _SECONDS)
        # The second line fails if the member was fenced meanwhile.
        assert "-:1" not in errors, errors

    return ended


def blackhole(sender: int, receiver: int) -> None:
    """Drop packets from one member to the address of another; each member is given by its process 1."""
    words = ["nsenter", f"--net=/proc/{receiver}/ns/net", "ip", "-4", "-o", "addr", "show", "scope", "global"]
    found = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
    address = found.split(" inet ", 1)[1].split("/", 1)[0]
    _run(sender, f"ip route add blackhole {address}/32")


class SlowLink:
    """A process between a port and the bridge that delays each frame."""

    def __init__(self, namespace: int, port: str, seconds: float) -> None:
        """Start the process; `seconds` are added to each round trip, half of them in each direction."""
        self._namespace, self._port = namespace, port
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(namespace), port, str(seconds / 2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        if not ready or self._process.stdout.readline() != b"ready\n":
            self._process.kill()
            raise RuntimeError(f"the link of {port} could not be slowed down")

    def end(self) -> None:
        """Connect port and bridge again; no effect if the port no longer exists."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_SECONDS)


def _tap(interface: str) -> socket.socket:
    """Return a socket that receives the frames arriving at an interface and sends frames from it."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    tap.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 * 2**20)
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 2**20)
    tap.bind((interface, 0))
    tap.setblocking(False)
    return tap


def _forward(port: str, seconds: float) -> None:
    """Forward frames between `port` and the bridge, each with a delay of `seconds`, until standard input ends."""
    near, far, sink = f"s{port}", f"b{port}", f"x{port}"
    own = os.getpid()
    _run(own, f"ip link add {near} type veth peer name {far}")
    try:
        # Ports of a bridge that is down drop arriving frames, so no frame bypasses this process into the namespace;
        # packet sockets receive them before that.
        _run(own, f"ip link add {sink} type bridge")
        _run(own, f"ip link set {far} master {_BRIDGE} up")
        _run(own, f"ip link set {near} master {sink} up promisc on")
        _run(own, f"ip link set {port} master {sink} promisc on")
        _pump(_tap(port), _tap(near), seconds)
    finally:
        # The port no longer exists if its member was fenced meanwhile.
        for command in (f"set {port} promisc off master {_BRIDGE}", f"del {near}", f"del {sink}"):
            subprocess.run(["ip", "link", *command.split()], check=False, capture_output=True, timeout=_SECONDS)


def _pump(one: socket.socket, other: socket.socket, seconds: float) -> None:
    across = {one.fileno(): (one, other), other.fileno(): (other, one)}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    number = 0
    poll = select.poll()
    for watched in (0, *across):
        poll.register(watched, select.POLLIN | select.POLLHUP)
    print("ready", flush=True)
    while True:
        bound = None if not waiting else max(0.0, (waiting[0][0] - time.monotonic()) * 1000)
        for descriptor, _ in poll.poll(bound):
            if descriptor == 0:
                return
            source, target = across[descriptor]
            while True:
                try:
                    frame = source.recv(_LARGEST)
                except BlockingIOError:
                    break
                except OSError:
                    return
                number += 1
                heapq.heappush(waiting, (time.monotonic() + seconds, number, target, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            try:
                target.send(frame)
            except BlockingIOError:
                continue  # like a full queue of a real link
            except OSError:
                return


def _enter(namespace: int) -> None:
    descriptor = os.open(f"/proc/{namespace}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "no way into the network namespace")
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    _enter(int(sys.argv[1]))
    _forward(sys.argv[2], float(sys.argv[3]))
