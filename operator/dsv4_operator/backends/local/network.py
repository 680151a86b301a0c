"""Private network and namespaces of local members, without any name or interface on the machine.

The loop moves into a new network namespace that contains a bridge; every member gets a namespace with one end of a veth
pair. The kernel removes all of it after the last process inside has ended and its sockets are closed, so no cleanup is
needed. Only listening sockets that the loop opened before it moved (`gateway.bind_loopback`) lead in.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_COMMAND_SECONDS = 10.0

# In new namespaces any address is free.
_PREFIX, _BITS = "10.88", 20
INTERFACE = "eth0"
LOOPBACK = "127.0.0.1"
SHM = "/dev/shm"  # noqa: S108  (shared memory's place, not a temporary file)
_BRIDGE = "dsv4"

_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


class NoNamespacesError(Exception):
    """This process may not create network namespaces, or lacks the tools; the text contains the reason."""


def address(place: int) -> str:
    """Return the address of the member at `place`; places are counted over all groups, rank by rank."""
    number = place + 10
    return f"{_PREFIX}.{number >> 8}.{number & 255}"


def enter_private_network() -> None:
    """Move this process and its later children into a private network with a bridge for the members.

    Must be called before any thread is started.

    Raises:
        NoNamespacesError: not possible here; nothing has changed.
    """
    check_namespaces()
    before = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise NoNamespacesError(f"this user may not make network namespaces ({os.strerror(ctypes.get_errno())})")
        try:
            _ip("link set lo up")
            _ip(f"link add {_BRIDGE} type bridge")
            _ip(f"addr add {_PREFIX}.0.1/{_BITS} dev {_BRIDGE}")
            _ip(f"link set {_BRIDGE} up")
        except subprocess.CalledProcessError as error:
            if _libc.setns(before, _CLONE_NEWNET) != 0:
                raise RuntimeError(f"no way back: {os.strerror(ctypes.get_errno())}") from error
            raise NoNamespacesError(f"no bridge can be made ({error.stderr.strip()})") from error
    finally:
        os.close(before)


def check_namespaces(*, own_network: bool = True) -> None:
    """Check that members can be started with `member_command`.

    Raises:
        NoNamespacesError: a program is missing, or this user has no right to make the namespaces.
    """
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            raise NoNamespacesError(f"the program {tool!r} is not installed (Debian: iproute2, util-linux)")
    # Only an attempt is a reliable test in containers.
    probe = subprocess.run(
        [*_unshare(own_network), "mount", "-t", "tmpfs", "tmpfs", SHM],
        capture_output=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    if probe.returncode != 0:
        said = probe.stderr.decode(errors="replace").strip() or f"exit code {probe.returncode}"
        raise NoNamespacesError(f"this user may not make namespaces ({said})")


def enter(descriptor: int) -> None:
    """Move this thread and its later children into the network namespace of `descriptor`.

    Raises:
        OSError: not permitted.
    """
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unshare(own_network: bool) -> list[str]:
    """Return the command that makes the namespaces of a member: mounts (for its own /dev/shm), System V IPC, processes,
    and its own network if requested. With `--kill-child` and the process namespace, the end of the agent or of
    `unshare` ends the whole member.
    """
    network = ["--net"] if own_network else []
    return ["unshare", *network, "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


def member_command(command: Sequence[str], shm_bytes: int, *, own_network: bool = True) -> list[str]:
    """Return `command` as process 1 of new namespaces, with its own /dev/shm."""
    script = f'mount -t tmpfs -o mode=1777,size={shm_bytes} tmpfs {SHM} && exec "$@"'
    return [*_unshare(own_network), "sh", "-c", script, "member", *command]


def plug_in(pid: int, incarnation: int, place: int) -> None:
    """Create the interface of the network namespace of the member process `pid`, unless it is complete.

    Raises:
        subprocess.CalledProcessError: usually because the process has ended.
    """
    port = _port(incarnation, place)
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    # The last command below brings it up.
    if f" {address(place)}/{_BITS} " in _ip("-o addr show up", inside):
        return
    # A loop that was killed between the commands has left a part.
    unplug(incarnation, place)
    _ip(f"link add {port} type veth peer name {INTERFACE} netns {pid}")
    _ip(f"link set {port} master {_BRIDGE} up")
    _ip("link set lo up", inside)
    _ip(f"addr add {address(place)}/{_BITS} dev {INTERFACE}", inside)
    _ip(f"link set {INTERFACE} up", inside)


def unplug(incarnation: int, place: int) -> None:
    """Disconnect a member permanently; no error if it never had an interface.

    The end of its processes is not sufficient: sockets with unsent data keep the namespace for more than a minute, and
    its interface would answer for an address of the next incarnation.

    Raises:
        subprocess.CalledProcessError: the member could not be disconnected.
    """
    try:
        _ip(f"link del {_port(incarnation, place)}")
    except subprocess.CalledProcessError as error:
        if "Cannot find device" not in error.stderr:
            raise


def _port(incarnation: int, place: int) -> str:
    """Return the name of the member's port on the bridge; interface names are limited to 15 characters."""
    return f"m{incarnation}.{place}"


def in_own_network(pid: int) -> bool:
    """Return whether process `pid` has left the caller's network namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def die_with_parent(number: int) -> None:
    """Set the signal that the kernel sends to this process when its parent ends; survives `exec`."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _ip(arguments: str, prefix: Sequence[str] = ()) -> str:
    """Run `ip` and return its output."""
    command = [*prefix, "ip", *arguments.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS).stdout


def list_children(pid: int) -> list[int]:
    """Return the direct children of `pid`, of its main thread.

    Raises:
        OSError: there is no such process, or it cannot be read.
    """
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def children(pid: int) -> list[int]:
    """Return the direct children of `pid`, none if it has ended."""
    try:
        return list_children(pid)
    except OSError:
        return []


def outside_ids(inside: int) -> dict[int, int]:
    """Map the process ids in the process namespace of `inside` (an id of this machine) to this machine's ids."""
    try:
        wanted = os.readlink(f"/proc/{inside}/ns/pid")
    except OSError:
        return {}
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry.name}/ns/pid") == wanted:
                found[id_inside(Path(entry.path))] = int(entry.name)
    return found


def id_inside(process: Path) -> int:
    """Return the id of a process, a directory of /proc, in its innermost process namespace.

    Raises:
        OSError: it has ended.
    """
    found = re.search(r"^NSpid:.*?(\d+)$", (process / "status").read_text(errors="replace"), re.MULTILINE)
    return int(found[1]) if found else 0
