"""Weights that outlive an engine: the next worker maps the memory in which the last one had them, after processing.

A worker allocates its model in a memory pool of PyTorch whose segments come from CUDA's virtual memory management, and
gives their descriptors to the agent's keeper (`dsv4_runtime.util.keeper`). In the next worker vLLM makes and
processes the same model with the same code, but reads no file, and the pool's large segments are addresses without
memory of their own: one block, mapped again and again. After that the kept memory is mapped at these addresses. So
nothing depends on quantization, layout or kernels, objects that refer to weights need no change, and two copies never
exist: small segments are copied one by one, and then given to the keeper in place of the earlier ones.

A set is used only if its key (versions, model, parallel layout, kernels, files of the checkpoint) is the same, if both
models have the same tensors, and if a checksum of each storage over its present content is the one that was computed
after the load. Otherwise the keeper releases everything, and the worker ends with the reason: the next start loads
from disk.

Storages larger than 20 MiB have a segment of their own, because vLLM loads with `max_split_size_mb:20`
(`v1/worker/gpu_worker.py`, vLLM 0.32 and 0.33).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4_runtime.util.keeper import Client, KeeperError, KeeperSilentError, Kept
from dsv4_runtime.vllm_plugin.kernels.v033 import LAYERS

LOGGER = logging.getLogger("vllm.dsv4")
LARGE = 20 << 20
"""Segments of more bytes contain one storage (`kLargeBuffer` of PyTorch's allocator)."""
_BLOCK = 64 << 20
"""Size of the block that stands for memory while a model is made that will get kept memory."""
_SLACK = 64 << 20
"""Addresses reserved beyond a segment: the kept one may be up to 20 MiB larger."""
_ROW = 1024
_CHUNK = 64 << 20
_DEPTH = 6
_PLAIN = (bool, int, float, str, type(None))
_COMMON = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""
_FORMAT = 1
_EXPANDABLE = "expandable_segments"


class RetainedError(RuntimeError):
    """Retained weights cannot be used; the text is the reason."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaMemory:
    """Physical memory and addresses of a CUDA device, by the driver's functions (`cuda.h`, CUDA 11.2 and later)."""

    kind = "cuda"
    """Of PyTorch's device."""
    _PINNED, _DEVICE, _DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
    _MANAGEMENT, _EXPORT = 102, 103  # attributes of a device

    def __init__(self, device: int) -> None:
        """Args:
            device: index among the visible devices; its primary context must be current.

        Raises:
            RetainedError: the driver or the device has no such memory.
        """
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RetainedError(f"no CUDA driver: {error}") from error
        for attribute in (self._MANAGEMENT, self._EXPORT):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, ctypes.c_int(device))
            if not value.value:
                raise RetainedError("the device cannot export memory as a file descriptor")
        location = _Location(self._DEVICE, device)
        self._device = device
        self._properties = _Properties(self._PINNED, self._DESCRIPTOR, location)
        self._access = _Access(location, self._READ_WRITE)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), 0)
        self.granularity = size.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RetainedError(f"{name}: {(text.value or b'error').decode()} ({code})")

    def create(self, size: int) -> int:
        """Allocate `size` bytes; return a handle."""
        handle = ctypes.c_ulonglong()
        size_, none = ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), size_, ctypes.byref(self._properties), none)
        return handle.value

    def export(self, handle: int) -> int:
        """Return a file descriptor of the memory."""
        found = ctypes.c_int()
        handle_, none = ctypes.c_ulonglong(handle), ctypes.c_ulonglong(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(found), handle_, self._DESCRIPTOR, none)
        return found.value

    def adopt(self, descriptor: int) -> int:
        """Return a handle of the memory of a descriptor."""
        handle, given = ctypes.c_ulonglong(), ctypes.c_void_p(descriptor)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), given, self._DESCRIPTOR)
        return handle.value

    def reserve(self, size: int) -> int:
        """Return the begin of `size` unused addresses."""
        found, size_, none = ctypes.c_ulonglong(), ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(found), size_, ctypes.c_size_t(0), none, none)
        return found.value

    def map(self, address: int, size: int, handle: int) -> None:
        """Map a handle's whole memory of `size` bytes at an address."""
        address_, size_ = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        self._call("cuMemMap", address_, size_, ctypes.c_size_t(0), ctypes.c_ulonglong(handle), ctypes.c_ulonglong(0))
        self._call("cuMemSetAccess", address_, size_, ctypes.byref(self._access), ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`."""
        self._call("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(size))

    def release(self, handle: int) -> None:
        """Give the handle up; memory that is mapped or exported stays."""
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def view(self, address: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor over mapped memory."""

        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012  (protocol of the CUDA Array Interface, version 3)
                "shape": (size,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
            }

        return torch.as_tensor(Memory(), device=f"cuda:{self._device}")

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def whole_segments() -> Iterator[None]:
    """Have PyTorch split no segment of a large storage, as vLLM's own memory pool does (`device_allocator/cumem.py`).

    With expandable segments it splits every segment, whatever `max_split_size_mb` is and also in pools that have none
    (`should_split` in `CUDACachingAllocator.cpp`): storages of other sizes would then be copied instead of mapped.
    """
    # As vLLM, for versions of PyTorch without the getter.
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    before = str(read() if read else torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])
    others = [part for part in before.split(",") if part and not part.strip().startswith(_EXPANDABLE)]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_EXPANDABLE}:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@dataclass
class Segment:
    """Memory that the allocator of PyTorch asked for."""

    address: int
    size: int
    """Bytes, a multiple of the granularity."""
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """Mappings: offset, size, and the handle."""
    own: bool = True
    """Whether it has memory of its own; else the common block."""
    descriptor: int | None = None
    """Of kept memory: the driver exports only what this process created."""


class Pool:
    """Allocator of segments, for a memory pool of PyTorch."""

    def __init__(self, memory: CudaMemory, *, hollow: bool) -> None:
        """Args:
        memory: of the device.
        hollow: large segments have no memory of their own.
        """
        self.memory = memory
        self.segments: dict[int, Segment] = {}
        self.error: Exception | None = None
        """The first error; PyTorch reports it as lack of memory."""
        self._hollow = hollow
        self._blocks: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """Return the address of a new segment of at least `size` bytes; 0 after an error."""
        try:
            size = -(-size // self.memory.granularity) * self.memory.granularity
            segment = Segment(self.memory.reserve(size + _SLACK), size, own=not (self._hollow and size > LARGE))
            if segment.own:
                self._fill(segment)
            else:
                offset = 0
                for step in (_BLOCK, self.memory.granularity):
                    while size - offset >= step:
                        segment.pieces.append((offset, step, self._block(step)))
                        self.memory.map(segment.address + offset, step, self._block(step))
                        offset += step
        except Exception as error:  # nothing may pass the boundary to C
            self.error = self.error or error
            return 0
        self.segments[segment.address] = segment
        return segment.address

    def free(self, address: int) -> None:
        """Release a segment."""
        try:
            self.empty(self.segments.pop(address))
        except Exception as error:
            self.error = self.error or error

    def _block(self, size: int) -> int:
        if size not in self._blocks:
            self._blocks[size] = self.memory.create(size)
        return self._blocks[size]

    def _fill(self, segment: Segment) -> None:
        handle = self.memory.create(segment.size)
        segment.pieces = [(0, segment.size, handle)]
        self.memory.map(segment.address, segment.size, handle)

    def empty(self, segment: Segment) -> None:
        """Remove the memory of a segment; its addresses stay reserved."""
        for offset, size, handle in segment.pieces:
            self.memory.unmap(segment.address + offset, size)
            if segment.own:
                self.memory.release(handle)
        segment.pieces = []

    def fill(self, segment: Segment) -> None:
        """Give a hollow segment memory of its own."""
        self.empty(segment)
        segment.own = True
        self._fill(segment)

    def attach(self, segment: Segment, size: int, handle: int, descriptor: int) -> None:
        """Give a hollow segment the kept memory of a handle and its descriptor, `size` bytes.

        Raises:
            RetainedError: it is larger than the segment's addresses.
        """
        if size > segment.size + _SLACK:
            raise RetainedError(f"{size} bytes of kept memory do not fit a segment of {segment.size} bytes")
        self.empty(segment)
        segment.own, segment.size, segment.descriptor = True, size, descriptor
        segment.pieces = [(0, size, handle)]
        self.memory.map(segment.address, size, handle)

    def find(self, address: int) -> Segment | None:
        """Return the segment that contains an address."""
        begins = sorted(self.segments)
        place = bisect.bisect_right(begins, address) - 1
        segment = self.segments[begins[place]] if place >= 0 else None
        return segment if segment and address < segment.address + segment.size else None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have this thread's allocations on the device come from this pool."""
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        functions = allocate(lambda size, *_: self.allocate(size)), free(lambda address, *_: self.free(address))
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        allocator = torch._C._cuda_customAllocator(*addresses)
        pool = torch.cuda.MemPool(allocator)
        # They must outlive every tensor, and the interpreter: the process ends with its memory.
        for one in (functions, allocator, pool, self):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        with whole_segments(), torch.cuda.use_mem_pool(pool):
            yield

    def trim(self, active: Sequence[tuple[int, int]]) -> None:
        """Remove the memory of segments without an allocated byte.

        Args:
            active: address and size of each block that PyTorch has allocated.
        """
        used = {found.address for address, _ in active if (found := self.find(address)) is not None}
        for segment in self.segments.values():
            if segment.address not in used and segment.pieces:
                self.empty(segment)
        if all(segment.own or not segment.pieces for segment in self.segments.values()):
            for handle in self._blocks.values():
                self.memory.release(handle)
            self._blocks = {}


def active_blocks() -> list[tuple[int, int]]:
    """Return address and size of every block that PyTorch has allocated on any device."""
    return [
        (block["address"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]


class Place(NamedTuple):
    """A tensor of a model, by its path, within its storage."""

    path: str
    storage: int
    """Index."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements."""
    weight: bool
    """Whether it is a parameter or a buffer."""


@dataclass
class Inventory:
    """Tensors of a model on the device, and plain values beside them."""

    places: list[Place]
    storages: list[tuple[int, int]]
    """Address and bytes, by index."""
    values: dict[str, Any]
    """Numbers and strings of modules, by path."""


class _Walk:
    """Collects the tensors of objects, each under its path."""

    def __init__(self, kind: str) -> None:
        self.places: list[Place] = []
        self.storages: dict[tuple[int, int], int] = {}
        self._kind = kind
        self._seen: dict[int, object] = {}

    def tensor(self, path: str, tensor: torch.Tensor, *, weight: bool) -> None:
        """Add a tensor on the device."""
        if tensor.device.type != self._kind or not tensor.untyped_storage().nbytes():
            return
        storage = tensor.untyped_storage()
        index = self.storages.setdefault((storage.data_ptr(), storage.nbytes()), len(self.storages))
        where = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        self.places.append(Place(path, index, str(tensor.dtype), *where, weight))

    def object(self, path: str, found: object, depth: int = 0) -> None:
        """Add the tensors of containers, and of objects of vLLM's layers and of dsv4; not those of modules."""
        if isinstance(found, torch.Tensor):
            self.tensor(path, found, weight=False)
            return
        if isinstance(found, (*_PLAIN, torch.nn.Module, type)) or depth > _DEPTH or id(found) in self._seen:
            return
        # Kept, so that no identity is used twice.
        self._seen[id(found)] = found
        if isinstance(found, dict):
            inside = [(f"[{name!r}]", value) for name, value in found.items()]
        elif isinstance(found, (list, tuple)):
            inside = [(f"[{number}]", value) for number, value in enumerate(found)]
        elif type(found).__module__.startswith((*LAYERS, "dsv4_")):
            slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
            own = {**getattr(found, "__dict__", {}), **{name: getattr(found, name, None) for name in slots}}
            inside = [(f".{name}", value) for name, value in own.items()]
        else:
            return
        for name, value in inside:
            self.object(path + name, value, depth + 1)


def inventory(model: torch.nn.Module, pool: Pool) -> Inventory:
    """List the tensors of `model`: parameters, buffers, attributes of modules and of their objects, and plans.

    Plans of kernels that were made for another model, and so are outside of the pool, do not count.
    """
    from dsv4_runtime.vllm_plugin.kernels.plans import shared_plans

    walk = _Walk(pool.memory.kind)
    values: dict[str, Any] = {}
    for name, module in model.named_modules():
        options = {"recurse": False, "remove_duplicate": False}
        for key, tensor in [*module.named_parameters(**options), *module.named_buffers(**options)]:
            walk.tensor(f"{name}.{key}", tensor, weight=True)
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                values[f"{name}.{key}"] = value
            elif key not in _COMMON:
                walk.object(f"{name}.{key}", value)
    shared = _Walk(pool.memory.kind)
    shared.object("plans", shared_plans())
    known = list(shared.storages)
    for place in shared.places:
        storage = known[place.storage]
        if pool.find(storage[0]) is not None:
            index = walk.storages.setdefault(storage, len(walk.storages))
            walk.places.append(place._replace(storage=index))
    return Inventory(walk.places, list(walk.storages), values)


def checksum(content: torch.Tensor) -> list[int]:
    """Return two sums over a uint8 tensor, of which the second depends on the positions.

    A changed bit always changes the first one. Reads the memory once.
    """
    plain, placed, mask = 0, 0, 2**64 - 1
    weights: torch.Tensor | None = None
    for begin in range(0, content.numel(), _CHUNK):
        chunk = content[begin : begin + _CHUNK]
        if rest := -chunk.numel() % (8 * _ROW):
            chunk = torch.nn.functional.pad(chunk, (0, rest))
        columns = chunk.view(torch.int64).view(-1, _ROW).sum(0)
        if weights is None:
            weights = torch.arange(1, 2 * _ROW, 2, dtype=torch.int64, device=content.device)
        first, second = torch.stack([columns.sum(), (columns * weights).sum()]).tolist()
        plain, placed = (plain + first) & mask, (placed * 31 + second) & mask
    return [plain, placed]


def constant(content: torch.Tensor) -> int | None:
    """Return the value that all bytes have, if they are equal."""
    first = content[:1]
    # In parts: a comparison needs as much memory as its operand.
    same = all(bool((part == first).all()) for part in content.split(_CHUNK))
    return int(first) if same else None


def describe(model: torch.nn.Module, pool: Pool, key: str) -> tuple[dict[str, Any], list[int]]:
    """Return the document about a loaded model and the descriptors of its memory, in the order of its segments.

    Raises:
        RetainedError: a tensor of the model is outside of the pool.
    """
    found = inventory(model, pool)
    segments: dict[int, int] = {}
    storages = []
    for index, (address, size) in enumerate(found.storages):
        segment = pool.find(address)
        if segment is None:
            paths = [place.path for place in found.places if place.storage == index]
            raise RetainedError(f"{paths[0]} ({size} bytes) is outside of the pool")
        number = segments.setdefault(segment.address, len(segments))
        content = pool.memory.view(address, size)
        storages.append([number, address - segment.address, size, checksum(content), constant(content)])
    used = [pool.segments[address] for address in segments]
    about = {
        "format": _FORMAT,
        "key": key,
        "bytes": sum(segment.size for segment in used),
        "segments": [segment.size for segment in used],
        "storages": storages,
        "places": [list(place) for place in found.places],
        "values": {name: value for name, value in found.values.items() if isinstance(value, _PLAIN)},
    }
    descriptors = []
    try:
        for segment in used:
            ((_, _, handle),) = segment.pieces
            known = segment.descriptor
            descriptors.append(pool.memory.export(handle) if known is None else os.dup(known))
    except BaseException:
        for one in descriptors:
            os.close(one)
        raise
    return about, descriptors


def restore(model: torch.nn.Module, pool: Pool, kept: Kept, active: Sequence[tuple[int, int]]) -> None:
    """Give the storages of `model`, made in a hollow pool, the content of `kept`.

    Args:
        model: made and processed without reading weights.
        pool: in which it was made.
        kept: its descriptors stay open.
        active: as in `Pool.trim`.

    Raises:
        RetainedError: the models differ, or the content does.
    """
    about, memory = kept.about, pool.memory
    found = inventory(model, pool)
    _compare(about, found)
    handles = [memory.adopt(descriptor) for descriptor in kept.descriptors]
    weights = {place.storage for place in found.places if place.weight}
    paths = {place.storage: place.path for place in reversed(found.places)}
    memory.synchronize()
    for number, size in enumerate(about["segments"]):
        there = memory.reserve(size)
        memory.map(there, size, handles[number])
        inside = [index for index, one in enumerate(about["storages"]) if one[0] == number]
        moved = False
        for index in inside:
            _, offset, length, expected, fill = about["storages"][index]
            address, _ = found.storages[index]
            target = pool.find(address)
            if target is None:
                raise RetainedError(f"{paths[index]} is outside of the pool")
            content = memory.view(there + offset, length)
            same = checksum(content) == expected
            if not same and index in weights:
                raise RetainedError(f"the content of {paths[index]} changed since it was loaded")
            whole = not target.own and len(inside) == 1 and offset == 0 and address == target.address
            if same and whole:
                memory.synchronize()
                pool.attach(target, size, handles[number], kept.descriptors[number])
                moved = True
            else:
                if not target.own:
                    memory.synchronize()
                    pool.fill(target)
                own = memory.view(address, length)
                own.copy_(content) if same else own.fill_(fill or 0)
        memory.synchronize()
        memory.unmap(there, size)
        if not moved:
            memory.release(handles[number])
    for address, size in active:
        segment = pool.find(address)
        if segment is not None and not segment.own:
            raise RetainedError(f"{size} bytes of the model belong to no tensor that is known by name")


def _compare(about: dict[str, Any], found: Inventory) -> None:
    """Raise `RetainedError` if the tensors of two models differ."""
    before: dict[str, Place] = {}
    for path, storage, dtype, shape, stride, offset, weight in about["places"]:
        before[path] = Place(path, storage, dtype, tuple(shape), tuple(stride), offset, weight)
    now = {place.path: place for place in found.places}
    if odd := sorted(before.keys() ^ now.keys()):
        raise RetainedError(f"{odd[0]} and {len(odd) - 1} more tensors exist in one of the models only")
    pairs: dict[int, int] = {}
    for path, place in now.items():
        earlier = before[path]
        if earlier._replace(storage=0) != place._replace(storage=0):
            raise RetainedError(f"{path} differs: {earlier} before, {place} now")
        if pairs.setdefault(earlier.storage, place.storage) != place.storage:
            raise RetainedError(f"{path} shares its storage with other tensors than before")
    if len(set(pairs.values())) != len(pairs) or len(pairs) != len(found.storages):
        raise RetainedError("the tensors share their storages in another way than before")
    # By the order of the earlier model's storages from here on.
    order = [pairs[index] for index in range(len(pairs))]
    rank = {old: new for new, old in enumerate(order)}
    found.storages = [found.storages[index] for index in order]
    found.places = [place._replace(storage=rank[place.storage]) for place in found.places]
    for (address, size), one in zip(found.storages, about["storages"], strict=True):
        if size != one[2]:
            raise RetainedError(f"the storage at {address:#x} has {size} bytes, before {one[2]}")
    for path, value in about["values"].items():
        # As JSON: NaN differs from itself.
        if path in found.values and json.dumps(found.values[path]) != json.dumps(value):
            raise RetainedError(f"{path} is {found.values[path]!r}, after the load it was {value!r}")


def key_of(vllm_config: Any, model_config: Any, prefix: str) -> str:
    """Return the identity of a worker's loaded model: two equal ones have equal tensors."""
    from dsv4_runtime.vllm_plugin.kernels.choice import choice_key
    from dsv4_runtime.vllm_plugin.kernels.trial import sources

    model = Path(model_config.model)
    files = sorted(model.iterdir()) if model.is_dir() else []
    parallel = vllm_config.parallel_config
    facts = {
        "versions": [torch.__version__, str(torch.version.cuda), sources()],
        "config": vllm_config.compute_hash(),
        "model": [str(model_config.model), str(model_config.revision), model_config.compute_hash(), prefix],
        "files": [[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in files if one.is_file()],
        "rank": [parallel.rank, parallel.world_size, parallel.data_parallel_rank],
        "device": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
        "kernels": choice_key(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _require_key(kept: Kept, key: str) -> None:
    if (kept.about.get("format"), kept.about.get("key")) != (_FORMAT, key):
        raise RetainedError("they were loaded with another configuration, version or checkpoint")


def unsupported(vllm_config: Any) -> str | None:
    """Return the reason why an engine of this configuration retains nothing, or None."""
    from dsv4_runtime.vllm_plugin.kernels.choice import first_reason

    return first_reason(
        (getattr(vllm_config.model_config, "enable_cumem_allocator", False), "sleep mode has a pool of its own"),
        (getattr(vllm_config.parallel_config, "enable_eplb", False), "experts move while the engine serves"),
        (getattr(vllm_config, "lora_config", None) is not None, "adapters change the model after its load"),
        (getattr(vllm_config, "weight_transfer_config", None) is not None, "weights are replaced at run time"),
        (getattr(vllm_config.load_config, "load_format", "") in ("dummy", "ipc_cache"), "of the load format"),
        (getattr(vllm_config.load_config, "device", None) not in (None, "cuda"), "weights load on another device"),
    )


_COUNT: dict[str, int] = {}
"""Rank to the models that its worker has begun to load in this process."""
_outside: dict[str, int] = {}
"""Slot to the bytes that vLLM counted as memory outside of this engine."""


def retaining(default: type) -> type:
    """Return `default`, a loader of vLLM, that takes weights from the keeper and gives them to it.

    Without a keeper it is `default`.
    """

    def get_external_weight_memory(self: Any, vllm_config: Any) -> int:
        client = Client.here()
        if client is None:
            return int(default.get_external_weight_memory(self, vllm_config))  # type: ignore[attr-defined]
        _outside.clear()
        try:
            _outside.update(client.sizes(_rank_of(vllm_config)))
        except KeeperSilentError as error:
            # A second copy beside weights that it holds may not fit, and on unified memory stops the machine.
            raise RetainedError(f"whether there are retained weights is unknown: {error}") from error
        except KeeperError as error:
            LOGGER.warning("dsv4 retained weights: %s", error)
        return sum(_outside.values())

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        client = Client.here()
        reason = unsupported(vllm_config) if client is not None else None
        if reason is not None:
            LOGGER.warning("dsv4 retained weights: none, because %s", reason)
        if client is None or reason is not None:
            return default.load_model(self, vllm_config, model_config, prefix)  # type: ignore[attr-defined]
        return _load(default, self, client, vllm_config, model_config, prefix)

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        if getattr(self, "dsv4_restores", False):
            self.counter_before_loading_weights = time.perf_counter()
            return iter(())
        return default.get_all_weights(self, model_config, model)  # type: ignore[attr-defined, no-any-return]

    def track_weights_loading(self: Any, *args: Any, **options: Any) -> None:
        # Of unquantized models vLLM requires that files have every parameter.
        if not getattr(self, "dsv4_restores", False):
            default.track_weights_loading(self, *args, **options)  # type: ignore[attr-defined]

    methods = {
        "get_external_weight_memory": get_external_weight_memory,
        "load_model": load_model,
        "get_all_weights": get_all_weights,
        "track_weights_loading": track_weights_loading,
    }
    return type(f"Retaining{default.__name__}", (default,), methods)


def _rank_of(vllm_config: Any) -> str:
    parallel = vllm_config.parallel_config
    return f"{parallel.data_parallel_rank}.{parallel.rank}"


def _reason(error: Exception) -> str:
    known = isinstance(error, (RetainedError, KeeperError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _load(default: Any, loader: Any, client: Client, vllm_config: Any, model_config: Any, prefix: str) -> Any:
    """Load a model with or without kept memory, and give its memory to the keeper."""
    begun = time.monotonic()
    rank = _rank_of(vllm_config)
    slot = f"{rank}-{_COUNT.get(rank, 0)}"
    _COUNT[rank] = _COUNT.get(rank, 0) + 1
    kept, lacking = None, ""
    try:
        key = key_of(vllm_config, model_config, prefix)
        memory = CudaMemory(torch.cuda.current_device())
        kept = client.take(slot)
    except Exception as error:
        # Also vLLM's: a configuration without a hash, or a file of the checkpoint that is removed meanwhile.
        lacking = _reason(error)
    if kept is not None and slot not in _outside:
        # vLLM would take their bytes for free memory of its own: the KV cache would not fit.
        kept.close()
        kept, lacking = None, "the keeper did not answer when they were to be counted"
        _outside[slot] = 0
    if kept is None and slot in _outside:
        # Their bytes are missing in the budget of this engine, and the memory may still be in use.
        with contextlib.suppress(KeeperError):
            client.drop(f"{slot} was not mapped", slot)
        reason = lacking or "they are no longer there"
        raise RetainedError(f"retained weights were released, the next start loads from disk: {reason}")
    if lacking:
        LOGGER.warning("dsv4 retained weights: none: %s", lacking)
        return default.load_model(loader, vllm_config, model_config, prefix)
    pool = Pool(memory, hollow=kept is not None)
    try:
        if kept is not None:
            _require_key(kept, key)
        loader.dsv4_restores = kept is not None
        with pool.used():
            model = default.load_model(loader, vllm_config, model_config, prefix)
        made = time.monotonic()
        if kept is not None:
            restore(model, pool, kept, active_blocks())
    except BaseException as error:
        if kept is None:
            raise
        error = pool.error or error
        kept.close()
        with contextlib.suppress(KeeperError):
            client.drop(str(error), slot)
        raise RetainedError(f"retained weights were released, the next start loads from disk: {error}") from error
    restored = time.monotonic()
    try:
        pool.trim(active_blocks())
        about, descriptors = describe(model, pool, key)
        try:
            client.offer(slot, about, descriptors)
        finally:
            for one in descriptors:
                os.close(one)
            if kept is not None:
                kept.close()
    except Exception as error:
        # The model itself is loaded.
        LOGGER.warning("dsv4 retained weights: the next start loads from disk: %s", _reason(error))
        return model
    LOGGER.info(
        "dsv4 retained weights: %.2f GiB in %d segments %s, made in %.1f s, mapped in %.2f s, offered in %.2f s",
        about["bytes"] / 2**30,
        len(descriptors),
        "mapped" if kept is not None else "loaded",
        made - begun,
        restored - made,
        time.monotonic() - restored,
    )
    return model
