"""Transport that NCCL uses, as NCCL's own log tells it; pure.

The lines are those of NCCL_DEBUG=INFO with the subsystems INIT and NET, from NCCL 2.4 to 2.30; behind Ray they carry a
prefix with the worker's name.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from dsv4_runtime.util.log_lines import is_nccl, log_reader

_VERSION = re.compile(r"NCCL version (\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)")
_NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) ([A-Za-z0-9_.-]{1,64})")
# `Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`; a `NET/IB : Using …` line only tells what there is.
# The group that is not given up makes it linear: the first arrow is the only one that a match is tried from.
_CONNECTION = re.compile(r"^(?>.*?(?:\[send\]|\[receive\]|->)).* via NET/([A-Za-z0-9_.-]{1,64})/\d")
_NO_DEVICE = re.compile(r"NET/IB ?: No device found")
_DEVICES = re.compile(r"NCCL INFO NET/IB ?: Using (.*)")
_DEVICE = re.compile(r"\[\d{1,4}\] ?([^\s:{},=]{1,64}(?::\d{1,4})?)/RoCE")


@dataclass(slots=True)
class NcclLog:
    """Reads NCCL's lines as they come."""

    version: str | None = None
    network: str | None = None
    """The network that a communicator took last: `IB`, `Socket`, or a plugin's name."""
    devices: tuple[str, ...] = ()
    """RDMA ports that NCCL found."""
    no_device: bool = False
    """NCCL found none."""
    connections: Counter[str] = field(default_factory=Counter)
    """Network to connections between members that were made over it."""
    first_socket: str | None = None
    """The first line that shows sockets in use."""

    @log_reader(lambda: None)
    def feed(self, line: str) -> None:
        """Take note of a line of any program; only lines that start like NCCL's count."""
        if not is_nccl(line):
            return
        if match := _VERSION.search(line):
            self.version = match[1]
        if _NO_DEVICE.search(line):
            self.no_device = True
        if match := _DEVICES.search(line):
            self.devices = tuple(_DEVICE.findall(match[1])) or self.devices
        if match := _NETWORK.search(line):
            self.network = match[1]
            self._note(match[1], line)
        elif match := _CONNECTION.search(line):
            self.connections[match[1]] += 1
            self._note(match[1], line)

    @property
    def transport(self) -> str | None:
        """Return the transport in use: `Socket` as soon as anything uses sockets; None while nothing has been said."""
        if self.first_socket is not None:
            return "Socket"
        return self.network or next(iter(self.connections), None)

    def _note(self, network: str, line: str) -> None:
        if network.lower().startswith("socket") and self.first_socket is None:
            self.first_socket = line.strip()[:400]
