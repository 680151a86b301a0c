"""Copies between the GPUs of one machine over PCIe: settings of their path in /sys, and a test with a time limit.

`python -m dsv4_runtime.util.peer_copies` copies between all pairs of GPUs without NVLink and prints the result as JSON;
the exit code is 1 if a copy hangs, fails or arrives with wrong bytes. It needs the driver's `libcuda.so.1` alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dsv4_runtime.util.files import SystemTree, replace_file


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


UNSAFE_COPIES = "dsv4.dev/unsafe-peer-copies"
"""Annotation of Kubernetes nodes: why copies between their GPUs are not safe."""


class Outcome(StrEnum):
    """Result of a test of copies."""

    PASSED = "passed"
    """Every copy arrived unchanged, or the GPUs have no copies over PCIe (NVLink, or the driver offers none)."""
    HUNG = "hung"
    WRONG = "wrong"
    FAILED = "failed"
    """The driver reported an error, or the process ended, during a copy."""
    SKIPPED = "skipped"
    """No copy was possible."""


@dataclass(frozen=True, slots=True)
class CopyTest:
    """Result of a test of the copies between the GPUs of this machine."""

    outcome: Outcome
    found: str
    """The first problem, the reason why no copy was tried, or the number of copies with their least rate."""
    seconds: float

    @property
    def problem(self) -> str:
        """Return why copies are not safe; empty if they are, or if none was tried."""
        return self.found if self.outcome in (Outcome.HUNG, Outcome.WRONG, Outcome.FAILED) else ""


STEP_SECONDS = 20.0
"""Limit of one step: the initialization of the driver, of a GPU, or one copy, which takes milliseconds."""
_ALL_SECONDS = 120.0
_MODULE = "dsv4_runtime.util.peer_copies"
_OUTPUT_BYTES = 1 << 20
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05


def try_copies(
    uuids: Sequence[str] = (),
    *,
    seconds: float = STEP_SECONDS,
    nvlink: bool = False,
    waited_for: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> CopyTest:
    """Copy between every two GPUs without NVLink, in a process that is killed if a step hangs.

    CUDA is not initialized in this process. Blocks for 2 minutes at most.

    Args:
        uuids: the GPUs; default: all visible ones.
        seconds: limit of each step.
        nvlink: whether pairs with NVLink are tested too.
        waited_for: excludes a process id from the collection of ended children in this process.
    """
    begun = time.monotonic()
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if uuids else {}
    # Unlike a pipe, a file can be read while a process that cannot be killed has it open.
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "--child", *(["--nvlink"] if nvlink else [])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            start_new_session=True,
        )
        stuck = ""
        with waited_for(child.pid):
            try:
                stuck = _watch(child, output.fileno(), begun, seconds)
            finally:
                if child.poll() is None:
                    child.kill()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(_END_SECONDS)
        lines = _lines(os.pread(output.fileno(), _OUTPUT_BYTES, 0))
    remains = f"; process {child.pid} cannot be killed, restart the machine" if child.returncode is None else ""
    outcome, found = _result(lines, stuck, child.returncode)
    return CopyTest(outcome, found + remains, round(time.monotonic() - begun, 3))


def unsafe_copies(uuids: Sequence[str], record: Path, root: Path = Path("/")) -> str:
    """Return why the copies between several GPUs of this machine are not safe, by their path or by a test; empty: they
    are, or nothing is known.

    A conclusive test is repeated after the next restart of the machine only.

    Args:
        uuids: the GPUs, which no engine uses.
        record: the file with the last result.
        root: directory with the machine's /sys and /proc.
    """
    if len(uuids) < 2:
        return ""
    if causes := redirected_copies(root):
        return causes
    key = {"boot": SystemTree(root).text("proc/sys/kernel/random/boot_id"), "gpus": sorted(uuids)}
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text())
        if isinstance(known, dict) and {name: known.get(name) for name in key} == key:
            return str(known.get("problem", ""))
    found = try_copies(uuids)
    if found.outcome is not Outcome.SKIPPED:
        # Without the file, the next start tests again.
        with suppress(OSError):
            replace_file(record, json.dumps({**key, "problem": found.problem}) + "\n")
    return found.problem


def _watch(child: subprocess.Popen[bytes], output: int, begun: float, seconds: float) -> str:
    """Wait for the end of the process; return why it should be killed, empty if it ended."""
    size, since = 0, begun
    while child.poll() is None:
        now = time.monotonic()
        if (grown := os.fstat(output).st_size) > size:
            size, since = grown, now
        if now - since > seconds:
            return f"within {seconds:g} s"
        if now - begun > _ALL_SECONDS:
            return f"within {_ALL_SECONDS:g} s together"
        time.sleep(_POLL_SECONDS)
    return ""


def _lines(output: bytes) -> list[Mapping[str, Any]]:
    found = []
    for line in output.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _result(lines: Sequence[Mapping[str, Any]], stuck: str, code: int | None) -> tuple[Outcome, str]:
    """Return the result from the output of the process, the reason to kill it, and its exit code."""
    last = lines[-1] if lines else {}
    step = str(last.get("begun", ""))
    copying = bool(last.get("copy"))
    if stuck:
        if copying:
            return Outcome.HUNG, f"{step} did not end {stuck}"
        return Outcome.SKIPPED, f"{step or 'the start of Python'} did not end {stuck}"
    if "outcome" in last:
        return Outcome(last["outcome"]), str(last["found"])
    ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    if copying:
        return Outcome.FAILED, f"{step} ended its process ({ended})"
    return Outcome.SKIPPED, f"{step or 'Python'} ended its process ({ended})"


_BYTES, _PAGE = 32 << 20, 4096
_FREE_SHARE = 0.8
"""Least free share of the memory of a GPU: on a busier one, an engine could lack the memory of the test."""
_PEER_ACCESS_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_NO_COMPILER = (218, 221, 222)  # CUDA_ERROR_INVALID_PTX, JIT_COMPILER_NOT_FOUND, UNSUPPORTED_PTX_VERSION
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, which NVLink has and PCIe has not

_COPY = b"""
.version 6.4
.target sm_70
.address_size 64
.visible .entry copy(.param .u64 into, .param .u64 source, .param .u32 words)
{
  .reg .pred %p1;
  .reg .b32 %r<8>;
  .reg .b64 %d<8>;
  ld.param.u64 %d1, [into];
  ld.param.u64 %d2, [source];
  ld.param.u32 %r1, [words];
  cvta.to.global.u64 %d1, %d1;
  cvta.to.global.u64 %d2, %d2;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  mov.u32 %r6, %nctaid.x;
  mul.lo.u32 %r6, %r6, %r3;
NEXT:
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra DONE;
  mul.wide.u32 %d3, %r5, 4;
  add.u64 %d4, %d1, %d3;
  add.u64 %d5, %d2, %d3;
  ld.volatile.global.u32 %r7, [%d5];
  st.volatile.global.u32 [%d4], %r7;
  add.u32 %r5, %r5, %r6;
  bra NEXT;
DONE:
  ret;
}
\0"""
"""Grid-stride copy of 32-bit words. NCCL and vLLM copy by loads and stores of kernels, not by the copy engine."""


class _CudaError(Exception):
    """An error of the driver."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code


class _Cuda:
    """Calls of the driver API (`cuda.h`)."""

    def __init__(self) -> None:
        """Load and initialize it.

        Raises:
            OSError: there is no driver.
            _CudaError: it does not start.
        """
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; the addresses of memory and 64-bit sizes are given as `c_uint64` and `c_size_t`.

        Raises:
            _CudaError: it returns an error.
        """
        if code := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise _CudaError(name, code, (text.value or str(code).encode()).decode(errors="replace"))

    def number(self, name: str, *arguments: Any) -> int:
        """Return the int that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the handle that a function writes to its first argument."""
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value


@dataclass(slots=True)
class _Gpu:
    """A GPU with a context, a filled and an empty buffer, and the kernel."""

    cuda: _Cuda
    device: int
    address: str
    context: ctypes.c_void_p
    filled: ctypes.c_uint64
    empty: ctypes.c_uint64
    kernel: ctypes.c_void_p | None
    """None: the driver cannot compile it."""

    def enter(self) -> None:
        """Make its context the current one."""
        self.cuda.call("cuCtxSetCurrent", self.context)

    def clear(self) -> None:
        """Set the empty buffer to zeros."""
        self.enter()
        self.cuda.call("cuMemsetD8_v2", self.empty, ctypes.c_ubyte(0), ctypes.c_size_t(_BYTES))
        self.cuda.call("cuCtxSynchronize")

    def launch(self, into: ctypes.c_uint64, source: ctypes.c_uint64) -> None:
        """Copy with the kernel on this GPU, and wait."""
        self.enter()
        words = ctypes.c_uint32(_BYTES // 4)
        values = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in (into, source, words)))
        self.cuda.call("cuLaunchKernel", self.kernel, 64, 1, 1, 256, 1, 1, 0, None, values, None)
        self.cuda.call("cuCtxSynchronize")


class _Skipped(Exception):
    """No copy is possible; the text has the reason."""


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def _child(*, nvlink: bool) -> None:
    """Test the copies in this process; print a line before each step, and one with the result."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        outcome, found = _copy_all(nvlink)
    except _Skipped as reason:
        outcome, found = Outcome.SKIPPED, str(reason)
    except OSError as error:
        outcome, found = Outcome.SKIPPED, f"there is no CUDA driver ({error})"
    except AttributeError as error:
        outcome, found = Outcome.SKIPPED, f"the CUDA driver is too old ({error})"
    except _CudaError as error:
        outcome, found = Outcome.SKIPPED, f"CUDA does not start ({error})"
    _say(outcome=outcome, found=found)


def _copy_all(nvlink: bool) -> tuple[Outcome, str]:
    _say(begun="the start of the CUDA driver")
    cuda = _Cuda()
    count = cuda.number("cuDeviceGetCount")
    if count < 2:
        raise _Skipped(f"{count} GPU is visible; copies need two" if count else "no GPU is visible")
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    offered = [pair for pair in pairs if cuda.number("cuDeviceCanAccessPeer", *pair)]
    if not offered:
        return Outcome.PASSED, "the driver offers no copies between these GPUs; NCCL uses the host's memory"
    chosen = [pair for pair in offered if nvlink or not cuda.number("cuDeviceGetP2PAttribute", _ATOMICS, *pair)]
    if not chosen:
        return Outcome.PASSED, "the GPUs are connected by NVLink"
    pattern = random.Random(0).randbytes(_BYTES)  # noqa: S311  (no secret)
    opened = {device: _open(cuda, device, pattern) for device in sorted({each for pair in chosen for each in pair})}
    rates: list[float] = []
    for one, other in chosen:
        if (problem := _copy_pair(opened[one], opened[other], pattern, rates)) is not None:
            return problem
    ways = "by copy engine, loads and stores" if all(gpu.kernel for gpu in opened.values()) else "by copy engine"
    return Outcome.PASSED, (
        f"copies of {_BYTES >> 20} MiB {ways} between {len(opened)} GPUs arrive in all {len(chosen)} directions, "
        f"{min(rates):.1f} GB/s at least"
    )


def _open(cuda: _Cuda, device: int, pattern: bytes) -> _Gpu:
    """Return a GPU with its buffers.

    Raises:
        _Skipped: it is in use.
        _CudaError: it cannot be used.
    """
    name = ctypes.create_string_buffer(32)
    cuda.call("cuDeviceGetPCIBusId", name, 32, device)
    address = name.value.decode(errors="replace").lower()
    _say(begun=f"the start of GPU {address}")
    context = cuda.pointer("cuDevicePrimaryCtxRetain", device)
    cuda.call("cuCtxSetCurrent", context)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    if free.value < _FREE_SHARE * total.value:
        raise _Skipped(f"GPU {address} is in use ({free.value >> 20} of {total.value >> 20} MiB are free)")
    filled, empty = ctypes.c_uint64(), ctypes.c_uint64()
    for buffer in (filled, empty):
        cuda.call("cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(_BYTES))
    cuda.call("cuMemcpyHtoD_v2", filled, pattern, ctypes.c_size_t(_BYTES))
    kernel = None
    try:
        kernel = cuda.pointer("cuModuleGetFunction", cuda.pointer("cuModuleLoadData", _COPY), b"copy")
    except _CudaError as error:
        if error.code not in _NO_COMPILER:
            raise
    return _Gpu(cuda, device, address, context, filled, empty, kernel)


def _copy_pair(one: _Gpu, other: _Gpu, pattern: bytes, rates: list[float]) -> tuple[Outcome, str] | None:
    """Copy from `one` to `other` in each way; return the first problem, and append the rate in GB/s otherwise."""
    cuda = one.cuda

    def by_engine() -> None:
        one.enter()
        size = ctypes.c_size_t(_BYTES)
        cuda.call("cuMemcpyPeer", other.empty, other.context, one.filled, one.context, size)
        cuda.call("cuCtxSynchronize")
        other.enter()
        cuda.call("cuCtxSynchronize")

    ways: dict[str, Callable[[], None]] = {
        "copy engine": by_engine,
        "stores": lambda: one.launch(other.empty, one.filled),
        "loads": lambda: other.launch(other.empty, one.filled),
    }
    for way, copy in ways.items():
        if way != "copy engine" and not (one.kernel and other.kernel):
            continue
        step = f"a copy by {way} from GPU {one.address} to {other.address}"
        _say(begun=step, copy=True)
        try:
            _let_access(one, other)
            _let_access(other, one)
            other.clear()
            begun = time.perf_counter()
            copy()
            seconds = time.perf_counter() - begun
            other.enter()
            arrived = ctypes.create_string_buffer(_BYTES)
            cuda.call("cuMemcpyDtoH_v2", arrived, other.empty, ctypes.c_size_t(_BYTES))
        except _CudaError as error:
            return Outcome.FAILED, f"{step} fails ({error})"
        if (got := arrived.raw) != pattern:
            wrong = sum(got[at : at + _PAGE] != pattern[at : at + _PAGE] for at in range(0, _BYTES, _PAGE))
            return Outcome.WRONG, f"{step} arrives with wrong bytes ({wrong} of {_BYTES // _PAGE} pages)"
        if way == "copy engine":
            rates.append(_BYTES / seconds / 1e9)
    # A context can map the memory of 8 others over PCIe.
    with suppress(_CudaError):
        for gpu, peer in ((one, other), (other, one)):
            gpu.enter()
            cuda.call("cuCtxDisablePeerAccess", peer.context)
    return None


def _let_access(one: _Gpu, other: _Gpu) -> None:
    """Map the memory of `other` on `one`."""
    one.enter()
    try:
        one.cuda.call("cuCtxEnablePeerAccess", other.context, 0)
    except _CudaError as error:
        if error.code != _PEER_ACCESS_ENABLED:
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result as JSON; return 1 if copies are not safe, else 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description="Test copies between GPUs.")
    parser.add_argument("--nvlink", action="store_true", help="test pairs with NVLink too")
    parser.add_argument("--seconds", type=float, default=STEP_SECONDS, help="limit of each step")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        _child(nvlink=given.nvlink)
        return 0
    found = try_copies(seconds=given.seconds, nvlink=given.nvlink)
    print(json.dumps({**asdict(found), "redirected": redirected_copies()}))
    return 1 if found.problem else 0


if __name__ == "__main__":
    sys.exit(main())
