"""Files below /sys, /proc and /dev, and what they say about copies between the GPUs of a machine over PCIe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIMIT = 1 << 20
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class SystemTree:
    """A machine's /sys, /proc and /dev, or a copy of them. Unreadable files count as missing; nothing raises."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        """Return the stripped content of a file; None if there is none.

        Reading fails with EINVAL for empty slots of a GID table and for the speed of a link that is down.
        """
        file = self._root / path
        try:
            # Only regular files: opening a FIFO would block.
            if not file.is_file():
                return None
            with file.open("rb") as stream:
                return stream.read(_LIMIT).decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def data(self, path: str) -> bytes:
        """Return the content of a regular file; empty if it cannot be read."""
        try:
            with (self._root / path).open("rb") as stream:
                return stream.read(_LIMIT)
        except (OSError, ValueError):
            return b""

    def parents(self, path: str) -> list[str]:
        """Return the names of the directories above the target of a link, the nearest first; empty if it is none."""
        try:
            return [parent.name for parent in (self._root / path).resolve(strict=True).parents]
        except (OSError, ValueError, RuntimeError):
            return []

    def number(self, path: str) -> float | None:
        """Return the first number of a file; None if there is none. `200 Gb/sec (4X HDR)` is 200."""
        return first_number(self.text(path))

    def names(self, path: str) -> list[str]:
        """Return the entries of a directory, numbers in numeric order; empty if there is none."""
        try:
            found = os.listdir(self._root / path)
        except (OSError, ValueError):
            return []
        return sorted(found, key=lambda name: (0, int(name), name) if _plain(name) else (1, 0, name))

    def target(self, path: str) -> str | None:
        """Return the last component of a link's target; None if it is no valid link."""
        try:
            return (self._root / path).resolve(strict=True).name
        except (OSError, ValueError, RuntimeError):
            return None

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        try:
            return (self._root / path).exists()
        except (OSError, ValueError):
            return False


def first_number(text: str | None) -> float | None:
    """Return the first number of a text, within the range of sysfs values; None if there is none."""
    match = _NUMBER.search(text) if text else None
    return float(match[0]) if match and len(match[0]) <= 18 else None


def _plain(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


@dataclass(frozen=True, slots=True)
class Bridge:
    """A PCIe bridge."""

    address: str
    redirects: bool | None
    """Whether its access control services (ACS) send copies between devices to the root; None if its configuration is
    not readable, which needs root."""


def between_gpus(tree: SystemTree, gpus: list[str]) -> tuple[tuple[str, ...], tuple[Bridge, ...]]:
    """Return the translated ones of several GPUs, and the bridges above them."""
    several = gpus if len(gpus) > 1 else []
    return tuple(name for name in several if _translated(tree, name)), tuple(_bridges(tree, several))


def redirected(translated: Sequence[str], bridges: Iterable[Bridge]) -> str:
    """Return why copies between GPUs over PCIe may hang (vllm-project/vllm#51513); empty: unknown."""
    causes = []
    if translated:
        causes.append(f"the IOMMU translates the DMA of the GPUs {', '.join(translated)}")
    if redirecting := [bridge.address for bridge in bridges if bridge.redirects]:
        causes.append(f"ACS of the PCIe bridges {', '.join(redirecting)} redirects copies between the GPUs")
    return " and ".join(causes)


_PCI = "sys/bus/pci/devices"
_NVIDIA, _DISPLAY = "0x10de", "0x03"


_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EXTENDED, _ACS, _ACS_CONTROL = 0x100, 0x000D, 6
"""Offset of the extended capabilities in the configuration space, and the capability of ACS (PCIe Base 7.7.11)."""
_REDIRECT = 0b1100
"""P2P Request Redirect and P2P Completion Redirect."""


def pci_gpus(tree: SystemTree) -> list[str]:
    """Return the PCI addresses of the NVIDIA GPUs."""
    return [
        name
        for name in tree.names(_PCI)
        if tree.text(f"{_PCI}/{name}/vendor") == _NVIDIA
        and (tree.text(f"{_PCI}/{name}/class") or "").startswith(_DISPLAY)
    ]


def _translated(tree: SystemTree, device: str) -> bool:
    """Return whether the IOMMU domain of a device is another one than `identity`."""
    return (tree.text(f"{_PCI}/{device}/iommu_group/type") or "identity") != "identity"


def _bridges(tree: SystemTree, gpus: list[str]) -> Iterator[Bridge]:
    """Yield every bridge above the devices once."""
    above = (name for gpu in gpus for name in tree.parents(f"{_PCI}/{gpu}") if _ADDRESS.fullmatch(name))
    for name in dict.fromkeys(above):
        yield Bridge(name, _redirects(tree.data(f"{_PCI}/{name}/config")))


def _redirects(config: bytes) -> bool | None:
    """Return whether ACS redirects copies between devices; None without the extended configuration space."""
    if len(config) < _EXTENDED + 4:
        return None
    offset = _EXTENDED
    # Each capability takes 8 bytes at least, so that a chain that leads back ends.
    for _ in range((len(config) - _EXTENDED) // 8):
        word = int.from_bytes(config[offset : offset + 4], "little")
        if word & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[offset + _ACS_CONTROL : offset + _ACS_CONTROL + 2], "little") & _REDIRECT)
        offset = word >> 20
        if offset < _EXTENDED:
            break
    return False


def redirected_copies(root: Path = Path("/")) -> str:
    """Return `redirected` of a machine."""
    tree = SystemTree(root)
    return redirected(*between_gpus(tree, pci_gpus(tree)))
