"""GPU architectures that the kernels are written for, their detection, and configuration tables per architecture.

No tuning happens at run time. A table is a JSON file per architecture, `<operation>/tuning/<arch>.json`, written by the
offline tuner or by hand, with its provenance; `select` takes the first row whose ranges hold the shape.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar


class Arch(StrEnum):
    """One entry per architecture that has its own configuration tables."""

    SM_90 = "sm_90"
    SM_120 = "sm_120"
    SM_121 = "sm_121"

    @property
    def spec(self) -> ArchSpec:
        """Return the limits of the architecture."""
        return _SPECS[self]


@dataclass(frozen=True)
class ArchSpec:
    """Limits of one architecture.

    `capability` is the number in the compiler's target (90, 120, 121); `shared_bytes` the most shared memory of one
    block; `multiprocessors` the count of the machine that the tables were made for (a hint for split counts, never a
    promise); `mx_since` the first Triton that lowers block-scaled products natively, None where the hardware has none.
    """

    capability: int
    shared_bytes: int
    multiprocessors: int
    mx_since: tuple[int, int] | None


_SPECS = {
    Arch.SM_90: ArchSpec(90, 232_448, 132, None),
    Arch.SM_120: ArchSpec(120, 101_376, 188, (3, 6)),
    # Triton before 3.8 emulates block-scaled products in bf16 on sm_121 (Triton PR 10010).
    Arch.SM_121: ArchSpec(121, 101_376, 48, (3, 8)),
}

# Where no GPU is (interpreter, planning), the operations behave as on the architecture that they are written for.
DEFAULT_ARCH = Arch.SM_120


@dataclass(frozen=True)
class TargetGPU:
    """A GPU to compile for: its architecture and its count of multiprocessors.

    `native_mx` is the answer of `native_mx` for it; None: as the installed Triton compiles.
    """

    arch: Arch
    multiprocessors: int
    native_mx: bool | None = None


_TARGETS: dict[str, TargetGPU] = {}


def compile_for(target: TargetGPU, device: str = "meta") -> None:
    """Treat tensors on `device`, a device type of torch, as tensors of `target` in this process (`precompile`)."""
    _TARGETS[device] = target


def detect(device: Any) -> Arch | None:
    """Return the architecture of a torch device; None if it has no table. A CPU counts as `DEFAULT_ARCH`."""
    import torch

    device = torch.device(device)
    if (target := _TARGETS.get(device.type)) is not None:
        return target.arch
    if device.type != "cuda":
        return DEFAULT_ARCH if device.type == "cpu" else None
    major, minor = torch.cuda.get_device_capability(device)
    try:
        return Arch(f"sm_{major}{minor}")
    except ValueError:
        return None


def multiprocessors(device: Any, arch: Arch) -> int:
    """Multiprocessors of the device at hand, or the table's hint where there is no GPU."""
    import torch

    device = torch.device(device)
    if (target := _TARGETS.get(device.type)) is not None:
        return target.multiprocessors
    if device.type != "cuda":
        return arch.spec.multiprocessors
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def native_mx(arch: Arch) -> bool:
    """Return whether this Triton emits native block-scaled MMA for `arch`.

    The compiler decides, not its version, because builds are patched: one 16×16×64 product is compiled (about a second,
    once per process) and its PTX searched. In the interpreter nothing is compiled and the table's value is returned.
    """
    targets = (target.native_mx for target in _TARGETS.values() if target.arch is arch)
    known = next((answer for answer in targets if answer is not None), None)
    return _compiles_mx(arch) if known is None else known


@functools.cache
def _compiles_mx(arch: Arch) -> bool:
    import os

    if arch.spec.mx_since is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    import triton
    from triton.backends.compiler import GPUTarget

    from dsv4_kernels.device import mx_probe_kernel

    source = triton.compiler.ASTSource(mx_probe_kernel, {"a": "*u8", "b": "*u8", "c": "*fp32"}, constexprs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch.spec.capability, 32), options={"num_warps": 1})
    return "kind::mxf8f6f4" in compiled.asm["ptx"]


ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Row(Generic[ConfigT]):
    """One line of a table: `when` maps a shape name to its inclusive range (None: open end)."""

    when: Mapping[str, tuple[int, int | None]]
    config: ConfigT

    def holds(self, shape: Mapping[str, int]) -> bool:
        """Return whether every range of the row holds; a name that the shape lacks never holds."""
        return all(
            name in shape and low <= shape[name] and (high is None or shape[name] <= high)
            for name, (low, high) in self.when.items()
        )

    @property
    def label(self) -> str:
        """The ranges as one short word for tables and test names."""
        parts = [f"{name}{low}-{'' if high is None else high}" for name, (low, high) in self.when.items()]
        return ",".join(parts) or "any"


@dataclass(frozen=True)
class Table(Generic[ConfigT]):
    """The rows of one kernel on one architecture, with where they come from."""

    rows: tuple[Row[ConfigT], ...]
    provenance: Mapping[str, str]

    def select(self, **shape: int) -> ConfigT:
        """Return the first row's configuration that holds `shape`; LookupError names the shape if none does."""
        for row in self.rows:
            if row.holds(shape):
                return row.config
        raise LookupError(f"no configuration for {shape}: add a row to the tuning table")


@functools.cache
def load_table(folder: Path, arch: Arch, kernel: str, config: type[ConfigT]) -> Table[ConfigT]:
    """Read the rows of `kernel` from `folder`/tuning/`arch`.json into `config` dataclasses.

    sm_121 shares sm_120's file where it has none of its own: the same instructions and shared memory, fewer
    multiprocessors.
    """
    path = folder / "tuning" / f"{arch}.json"
    if not path.exists() and arch is Arch.SM_121:
        path = folder / "tuning" / f"{Arch.SM_120}.json"
    entry = json.loads(path.read_text())
    rows = tuple(
        Row({name: (low, high) for name, (low, high) in row["when"].items()}, config(**row["config"]))
        for row in entry["kernels"][kernel]
    )
    return Table(rows, entry["provenance"])
