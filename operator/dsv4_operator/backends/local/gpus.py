"""NVIDIA GPUs of this machine, read with NVML, and the claims of deployments on them.

A claim is an abstract Unix socket whose name contains the UUID of the GPU. The kernel binds a name to one process at a
time, for all users and state directories, and frees it when that process ends. Claims are made before the loop enters
its own network namespace, because abstract sockets belong to a network namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4_operator.api import Hardware, TopologySpec
from dsv4_operator.backends.local.state import StateError
from dsv4_operator.planning.catalog import GIB, machine_named, product_machine

try:
    import pynvml
except ImportError:
    pynvml = None

_ANSWER_SECONDS = 10.0
"""A driver that has to wake the GPUs takes a few seconds; a broken one never answers."""
_DEVICE = Path("/dev/nvidia0")
"""Created by the driver for the first GPU."""
_HOLDERS = 3
_asking = threading.Lock()
_threads: list[tuple[threading.Thread, list[GpuInventory]]] = []
"""The latest call of the driver, and its answer."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    index: int
    uuid: str
    """`GPU-…`, as used in `CUDA_VISIBLE_DEVICES`."""
    name: str
    capability: tuple[int, int]
    memory_bytes: int | None = None
    """Total memory; None if it is the machine's own (GB10)."""
    free_bytes: int | None = None
    holders: tuple[tuple[int, int], ...] = ()
    """(process id, bytes) of each process with memory on the GPU, as far as the driver reports them."""

    @property
    def machine(self) -> str | None:
        """Return its machine in the catalog; None if it is not listed."""
        return product_machine(self.name)

    @property
    def hardware(self) -> str:
        """Return its value of `spec.topology.hardware`; empty if there is none."""
        return machine_named(self.machine).hardware if self.machine else ""

    @property
    def title(self) -> str:
        """Return its index, name and UUID as text."""
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs that NVML reported."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    """Version of the driver; empty if none answers."""
    problem: str = field(default="", compare=False)
    """Reason why there are no cards."""

    def kinds(self) -> str:
        """Return the cards as text: `2 × NVIDIA H100 80GB HBM3`."""
        names = [card.name for card in self.cards]
        return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"


def find(*, seconds: float = _ANSWER_SECONDS) -> GpuInventory:
    """Return the GPUs of this machine that `CUDA_VISIBLE_DEVICES` does not exclude; none without an answer within
    `seconds`. NVML runs in its own thread, because a broken driver may never answer."""
    if pynvml is None:
        return GpuInventory(problem="the package nvidia-ml-py is not installed (pip install nvidia-ml-py)")
    with _asking:
        # Of a driver that hangs, one thread waits, however often this function is called.
        if not _threads or not _threads[-1][0].is_alive():
            answers: list[GpuInventory] = []
            thread = threading.Thread(target=lambda: answers.append(_ask()), name="nvml", daemon=True)
            _threads[:] = [(thread, answers)]
            thread.start()
        thread, answers = _threads[-1]
    thread.join(seconds)
    if not answers:
        return GpuInventory(
            problem=f"the NVIDIA driver has not answered for {seconds:g} s; see `dmesg` and `nvidia-smi`"
        )
    return answers[0]


def refresh(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return `cards` with their present state. A card without an answer keeps only its identity."""
    if not cards:
        return ()
    now = {card.uuid: card for card in find().cards}
    return tuple(now.get(card.uuid, replace(card, free_bytes=None, holders=())) for card in cards)


def hardware_here() -> tuple[Hardware, str]:
    """Return the hardware of this machine: that of its first GPU in the catalog, else `CPU` and the reason.

    Raises:
        LookupError: there are GPUs, but the driver does not answer. A fallback to CPU would not be intended.
    """
    found = find()
    known = next((card.hardware for card in found.cards if card.hardware), None)
    if known is not None:
        return Hardware(known), ""
    if found.problem and not found.driver and has_device():
        raise LookupError(found.problem)
    return Hardware.CPU, found.problem or f"there is {found.kinds()}, which dsv4 does not support"


def has_device() -> bool:
    """Return whether a driver has found a GPU, even if it does not answer any more."""
    return _DEVICE.exists()


def describe_holders(card: Card) -> str:
    """Return the processes with the most memory on `card`, as text; empty if none are known."""
    most = sorted(card.holders, key=lambda holder: -holder[1])[:_HOLDERS]
    return ", ".join(f"process {pid}{_process_name(pid)} holds {size / GIB:.1f} GiB" for pid, size in most)


def _process_name(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    except OSError:
        # In another process namespace, or ended.
        return ""


def _ask() -> GpuInventory:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuInventory(problem=f"no NVIDIA driver answers ({error})")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        cards = tuple(_cards())
        visible = _visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
        problem = "" if visible else "CUDA_VISIBLE_DEVICES excludes every GPU" if cards else "the driver has no GPU"
        return GpuInventory(visible, driver, problem)
    except pynvml.NVMLError as error:
        return GpuInventory(problem=f"the NVIDIA driver does not list its GPUs ({error})")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _cards() -> Iterator[Card]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            # A GPU that has fallen off the bus keeps its index and does not answer.
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = _optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
            processes = _optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            yield Card(
                index=index,
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                name=str(pynvml.nvmlDeviceGetName(handle)),
                capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                memory_bytes=None if memory is None else int(memory.total),
                free_bytes=None if memory is None else int(memory.free),
                holders=tuple((int(one.pid), int(one.usedGpuMemory or 0)) for one in processes),
            )


def _visible(cards: tuple[Card, ...], variable: str | None) -> tuple[Card, ...]:
    """Return the cards that match `CUDA_VISIBLE_DEVICES`, by index or prefix of the UUID; all if it is not set."""
    if variable is None:
        return cards
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return tuple(card for card in cards if any(_matches(name, card) for name in names))


def _matches(name: str, card: Card) -> bool:
    return int(name) == card.index if name.isdigit() else card.uuid.startswith(name)


def _optional(question: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return question(handle)
    except pynvml.NVMLError:
        return None


_SECONDS = 1.0


@contextmanager
def claimed(
    topology: TopologySpec,
    found: GpuInventory,
    groups: int = 1,
    *,
    claim: Callable[[Card], socket.socket | None] | None = None,
) -> Iterator[tuple[Card, ...]]:
    """Claim the GPUs for `groups` groups of `topology` while entered; GPUs with the most free memory first.

    `claim` returns a socket that holds a card, None if another process has it.

    Raises:
        StateError: there are too few GPUs of that kind, or other deployments hold them.
    """
    fitting = [card for card in found.cards if card.hardware == topology.hardware]
    count = topology.world_size * groups
    held: dict[int, tuple[Card, socket.socket]] = {}
    taken: list[tuple[Card, str]] = []
    try:
        for card in sorted(fitting, key=_least_used):
            if len(held) == count:
                break
            sock = (claim or claim_card)(card)
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
    """Sort key: used memory in steps of a GiB, so that unused GPUs keep their order, then the index."""
    used = (card.memory_bytes or 0) - (card.free_bytes or 0)
    return used // GIB, card.index


def _too_few(
    topology: TopologySpec, count: int, found: GpuInventory, fitting: Sequence[Card], taken: Sequence[tuple[Card, str]]
) -> str:
    kind = topology.hardware
    wanted = f"{count} GPU{'s' if count > 1 else ''} of {kind} {'are' if count > 1 else 'is'} required"
    if not found.cards:
        return (
            f"spec.topology.hardware: {wanted}, and this machine offers none: {found.problem}; install "
            "NVIDIA's driver so that `nvidia-smi` lists the GPUs (https://www.nvidia.com/drivers), or run it elsewhere"
        )
    if len(fitting) < count:
        return (
            f"spec.topology.devicesPerNode: {wanted}, and this machine has {found.kinds()}; write that number and "
            "kind (without `hardware` it is that of the machine), or run it elsewhere"
        )
    holders = "; ".join(f"{card.title} is held by {holder}" for card, holder in taken)
    return (
        f"spec.topology.devicesPerNode: {wanted}, and {len(fitting) - len(taken)} of {len(fitting)} are free: "
        f"{holders}; end that deployment with `dsv4 down`, or write a smaller number"
    )


def _socket_name(card: Card) -> str:
    return f"\0dsv4/{card.uuid}"


def claim_card(card: Card) -> socket.socket | None:
    """Return a socket that holds `card`; None if another process has it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_socket_name(card))
        # Other processes connect to this socket to find its owner.
        sock.listen(1)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return sock


def _holder(card: Card) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_SECONDS)
        try:
            sock.connect(_socket_name(card))
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
