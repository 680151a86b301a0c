"""Retained weights, in host memory instead of GPU memory: descriptors, mappings and addresses are real."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_runtime.util import keeper as keeper_module
from dsv4_runtime.util.keeper import VARIABLE, Keeper, KeeperError, Kept
from dsv4_runtime.vllm_plugin import retained
from dsv4_runtime.vllm_plugin.retained import Pool, RetainedError, checksum, describe, restore

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
NONE, PLAIN, FIXED = 0, 3, 0x10
LARGE = 64 << 10


@dataclass
class HostMemory:
    """Memory files in place of `CudaMemory`."""

    kind: str = "cpu"
    granularity: int = 4096
    files: set[int] = field(default_factory=set)
    created: int = 0

    def create(self, size: int) -> int:
        file = os.memfd_create("part")
        os.ftruncate(file, size)
        self.files.add(file)
        self.created += size
        return file

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def adopt(self, descriptor: int) -> int:
        file = os.dup(descriptor)
        self.files.add(file)
        return file

    def reserve(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # without swap space
        return int(LIBC.mmap(None, size, NONE, flags, -1, 0))

    def map(self, address: int, size: int, handle: int) -> None:
        assert size == os.fstat(handle).st_size, "a mapping is of the whole memory"
        assert LIBC.mmap(address, size, PLAIN, mmap.MAP_SHARED | FIXED, handle, 0) == address

    def unmap(self, address: int, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        assert LIBC.mmap(address, size, NONE, flags, -1, 0) == address

    def release(self, handle: int) -> None:
        self.files.remove(handle)
        os.close(handle)

    def view(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    def __del__(self) -> None:
        for file in self.files:
            os.close(file)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "LARGE", LARGE)
    monkeypatch.setattr(retained, "_BLOCK", 32 << 10)
    monkeypatch.setattr(retained, "_SLACK", 32 << 10)
    monkeypatch.setattr(retained, "_CHUNK", 40 << 10)


class Allocator:
    """The relevant part of PyTorch's allocator: small storages share segments, large ones have their own."""

    def __init__(self, memory: HostMemory, *, hollow: bool, odd: int = 0) -> None:
        self.pool = Pool(memory, hollow=hollow)
        self.active: list[tuple[int, int]] = []
        self._odd = odd
        self._free: tuple[int, int] = (0, 0)

    def empty(self, size: int) -> torch.Tensor:
        rounded = -(-size // 512) * 512
        if size > LARGE:
            # A reused segment may be larger than necessary.
            address = self.pool.allocate(rounded + self._odd)
        else:
            if self._free[1] < rounded:
                self._free = self.pool.allocate(LARGE), LARGE
            address, left = self._free
            self._free = address + rounded, left - rounded
        assert address, self.pool.error
        self.active.append((address, rounded))
        return self.pool.memory.view(address, size)


@dataclass
class Scratch:
    """An object of a layer, such as a kernel's plan."""

    buffer: torch.Tensor
    table: tuple[torch.Tensor, ...]


Scratch.__module__ = "dsv4_kernels.test"


def build(allocate: Callable[[int], torch.Tensor], sizes: list[int], tied: bool, scratch: list[int]) -> torch.nn.Module:
    """Make a model; the same code for both engines, as in vLLM. Values derived from weights are garbage at first."""
    model = torch.nn.Module()
    for number, size in enumerate(sizes):
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(allocate(size), requires_grad=False)
        layer.register_buffer("scale", allocate(8).view(torch.float32), persistent=False)
        layer.part = layer.weight.data[size // 2 :]  # a view that a kernel keeps
        layer.width = size
        layer.limit = float("nan")
        model.add_module(f"layer{number}", layer)
    if tied:
        model.head = torch.nn.Module()
        model.head.weight = model.layer0.weight
    model.plans = [
        Scratch(allocate(size).fill_(3), (allocate(64).fill_(number),)) for number, size in enumerate(scratch)
    ]
    return model


def load(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        raw = tensor.data.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def content(model: torch.nn.Module) -> list[bytes]:
    found = [
        *model.parameters(),
        *model.buffers(),
        *(layer.part for layer in model.modules() if hasattr(layer, "part")),
    ]
    found += [tensor for plan in model.plans for tensor in plan.table]
    return [tensor.data.view(torch.uint8).numpy().tobytes() for tensor in found]


def first_engine(sizes: list[int], tied: bool, scratch: list[int], odd: int = 0) -> tuple[Any, ...]:
    memory = HostMemory()
    first = Allocator(memory, hollow=False, odd=odd)
    model = build(first.empty, sizes, tied, scratch)
    load(model, 1)
    first.pool.trim(first.active)
    about, descriptors = describe(model, first.pool, "key")
    return memory, first, model, Kept(about, descriptors)


@pytest.fixture
def closed() -> Iterator[list[Kept]]:
    sets: list[Kept] = []
    yield sets
    for one in sets:
        one.close()


SIZES = st.lists(st.sampled_from([8, 64, 4096, LARGE, LARGE + 8, 3 * LARGE, 200_000]), min_size=1, max_size=5)
SCRATCH = st.lists(st.sampled_from([16, 5000, LARGE + 512, 150_000]), max_size=3)
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@EXAMPLES
@given(sizes=SIZES, tied=st.booleans(), scratch=SCRATCH, odd=st.sampled_from([0, 4096, 20_480]), served=st.booleans())
def test_the_next_engine_has_the_same_weights_in_the_same_memory(
    sizes: list[int], tied: bool, scratch: list[int], odd: int, served: bool
) -> None:
    memory, _, model, kept = first_engine(sizes, tied, scratch, odd)
    expected = content(model)
    if served:
        for plan in model.plans:
            plan.buffer.fill_(99)  # a kernel wrote to it
    made = memory.created
    for _ in range(3):
        before = set(memory.files)
        second = Allocator(memory, hollow=True)
        model = build(second.empty, sizes, tied, scratch)
        load(model, 2)
        restore(model, second.pool, kept, second.active)
        assert content(model) == expected
        assert all(int(plan.buffer.min()) == int(plan.buffer.max()) == 3 for plan in model.plans)
        # The large weights have no second copy.
        large = sum(size for size in sizes if size > LARGE)
        assert memory.created - made < kept.about["bytes"] - large + 200_000 + 2 * LARGE
        second.pool.trim(second.active)
        about, descriptors = describe(model, second.pool, "key")
        # No common block remains.
        assert sum(os.fstat(file).st_size for file in memory.files - before) <= about["bytes"]
        assert about["storages"][0][3] == kept.about["storages"][0][3]
        kept.close()
        kept, made = Kept(about, descriptors), memory.created
    kept.close()


@EXAMPLES
@given(data=st.data(), sizes=SIZES, scratch=SCRATCH)
def test_one_changed_bit_of_a_weight_is_detected(data: st.DataObject, sizes: list[int], scratch: list[int]) -> None:
    memory, _, model, kept = first_engine(sizes, False, scratch)
    weights = [*model.parameters(), *model.buffers()]
    raw = weights[data.draw(st.integers(0, len(weights) - 1))].data.view(torch.uint8)
    last = raw.numel() - 1
    raw[data.draw(st.one_of(st.just(last), st.integers(0, last)))] ^= 1 << data.draw(st.integers(0, 7))
    second = Allocator(memory, hollow=True)
    changed = build(second.empty, sizes, False, scratch)
    with pytest.raises(RetainedError, match="changed since it was loaded"):
        restore(changed, second.pool, kept, second.active)
    kept.close()


def restored(change: Callable[[torch.nn.Module, Allocator], None], closed: list[Kept]) -> None:
    sizes = [100, 2 * LARGE, 100]
    memory, _, _, kept = first_engine(sizes, True, [200])
    closed.append(kept)
    second = Allocator(memory, hollow=True)
    model = build(second.empty, sizes, True, [200])
    change(model, second)
    restore(model, second.pool, kept, second.active)


def test_another_model_is_refused(closed: list[Kept]) -> None:
    def untied(model: torch.nn.Module, allocator: Allocator) -> None:
        model.head.weight = torch.nn.Parameter(allocator.empty(100), requires_grad=False)

    def tied_otherwise(model: torch.nn.Module, _: Allocator) -> None:
        model.head.weight = model.layer2.weight

    def added(model: torch.nn.Module, allocator: Allocator) -> None:
        model.layer0.bias = torch.nn.Parameter(allocator.empty(4), requires_grad=False)

    def transposed(model: torch.nn.Module, allocator: Allocator) -> None:
        model.layer1.weight.data = model.layer1.weight.data.view(2, -1).t()

    def value(model: torch.nn.Module, allocator: Allocator) -> None:
        model.layer0.width = 5

    def unnamed(model: torch.nn.Module, allocator: Allocator) -> None:
        allocator.empty(3 * LARGE)

    for change, reason in (
        (untied, "shares its storage|more tensors|share their"),
        (tied_otherwise, r"head\.weight shares its storage"),
        (added, "layer0.bias"),
        (transposed, "layer1.weight differs"),
        (value, r"layer0.width is 5, after the load it was 100"),
        (unnamed, "belong to no tensor"),
    ):
        with pytest.raises(RetainedError, match=reason):
            restored(change, closed)
    restored(lambda *_: None, closed)


def test_a_tensor_outside_of_the_pool_is_not_retained() -> None:
    memory = HostMemory()
    allocator = Allocator(memory, hollow=False)
    model = build(allocator.empty, [100], False, [])
    model.layer0.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(RetainedError, match=r"layer0\.bias \(16 bytes\) is outside"):
        describe(model, allocator.pool, "key")


def test_unused_segments_lose_their_memory() -> None:
    memory = HostMemory()
    allocator = Allocator(memory, hollow=False)
    kept, unused = allocator.empty(2 * LARGE), allocator.empty(3 * LARGE)
    kept.fill_(1)
    before = len(memory.files)
    allocator.pool.trim([(address, size) for address, size in allocator.active if address != unused.data_ptr()])
    assert len(memory.files) == before - 1
    assert int(kept.sum()) == 2 * LARGE


@given(data=st.binary(min_size=1, max_size=100_000), place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_checksums_depend_on_every_bit_and_on_the_order(data: bytes, place: int, bit: int) -> None:
    plain = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    changed = plain.clone()
    changed[place % len(data)] ^= 1 << bit
    assert checksum(plain) == checksum(plain.clone())
    assert checksum(changed)[0] != checksum(plain)[0]
    if len(data) >= 16 and data[:8] != data[8:16]:
        swapped = torch.cat([plain[8:16], plain[:8], plain[16:]])
        assert checksum(swapped) != checksum(plain)


class Worker:
    """The part of vLLM's worker that matters: it counts outside memory, then loads; each one is a new process."""

    def __init__(self, memory: HostMemory, patch: pytest.MonkeyPatch, *, rank: int = 0, key: str = "key") -> None:
        allocators: list[Allocator] = []

        @contextlib.contextmanager
        def used(pool: Pool) -> Iterator[None]:
            allocator = Allocator(memory, hollow=False)
            allocator.pool = pool
            allocators.append(allocator)
            yield

        class Loader:
            read = False

            def get_external_weight_memory(self, _: object) -> int:
                return 0

            def load_model(self, _: object, __: object, prefix: str) -> torch.nn.Module:
                allocate = allocators[-1].empty if allocators else HostLoads().empty
                model = build(allocate, [100, 2 * LARGE], False, [])
                for name, tensor in self.get_all_weights(None, model):
                    Loader.read = True
                    dict(model.named_parameters())[name].data.copy_(tensor)
                return model

            def get_all_weights(self, _: object, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
                for name, weight in model.named_parameters():
                    yield name, torch.arange(weight.numel()).to(torch.uint8)

        class HostLoads:
            def empty(self, size: int) -> torch.Tensor:
                return torch.empty(size, dtype=torch.uint8)

        patch.setattr(retained, "_COUNT", {})
        patch.setattr(retained, "_outside", {})
        patch.setattr(retained, "CudaMemory", lambda _: memory)
        patch.setattr(retained.torch.cuda, "current_device", lambda: 0)
        patch.setattr(retained, "key_of", lambda *_: key)
        patch.setattr(retained, "active_blocks", lambda: allocators[-1].active)
        patch.setattr(Pool, "used", used)
        parallel = SimpleNamespace(rank=rank, data_parallel_rank=0)
        self._config = SimpleNamespace(model_config=None, load_config=None, parallel_config=parallel)
        self._kind = Loader
        self._loader = retained.retaining(Loader)()

    def count(self) -> int:
        return int(self._loader.get_external_weight_memory(self._config))

    def load(self) -> bool:
        """Load a model; return whether that read weights."""
        model = self._loader.load_model(self._config, None)
        for weight in model.parameters():
            assert torch.equal(weight.data, torch.arange(weight.numel()).to(torch.uint8))
        return self._kind.read


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    kept = Keeper(tmp_path / "weights.sock")
    monkeypatch.setenv(VARIABLE, str(kept.path))
    yield kept
    kept.close()


def test_workers_load_once_and_map_from_then_on(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    sizes = []
    for reads in (True, False, False):
        worker = Worker(memory, monkeypatch)
        sizes.append(worker.count())
        assert worker.load() is reads
    assert sizes[0] == 0
    assert sizes[1] == sizes[2] == keeper.held() > 2 * LARGE


def test_a_worker_that_cannot_map_what_it_counted_ends(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would load a second copy, with the memory of the first one missing in its budget."""
    memory = HostMemory()
    assert Worker(memory, monkeypatch).load()
    worker = Worker(memory, monkeypatch)
    assert worker.count() == keeper.held()
    keeper.drop("a test")
    with pytest.raises(RetainedError, match="the next start loads from disk: they are no longer there"):
        worker.load()
    assert Worker(memory, monkeypatch).load()
    other = Worker(memory, monkeypatch, key="another checkpoint")
    assert other.count() == keeper.held()
    with pytest.raises(RetainedError, match="another configuration, version or checkpoint"):
        other.load()
    assert keeper.held() == 0
    last = Worker(memory, monkeypatch)
    assert last.count() == 0
    assert last.load()
    worker = Worker(memory, monkeypatch)
    assert worker.count() > 0
    keeper.close()
    with pytest.raises(RetainedError, match=r"weights\.sock"):
        worker.load()


def test_a_loaded_model_serves_even_if_it_cannot_be_retained(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    worker = Worker(memory, monkeypatch)

    for error in (torch.OutOfMemoryError("CUDA out of memory"), TypeError("not serializable")):

        def failing(_: torch.Tensor, error: Exception = error) -> list[int]:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(retained, "checksum", failing)
            assert worker.load()
        assert keeper.held() == 0
        worker = Worker(memory, monkeypatch)
    keeper.close()
    worker = Worker(memory, monkeypatch)
    assert worker.count() == 0
    assert worker.load()


def test_weights_that_were_not_counted_are_not_mapped(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would give their memory to the KV cache."""
    memory = HostMemory()
    assert Worker(memory, monkeypatch).load()
    worker = Worker(memory, monkeypatch)

    def no_answer(*_: object) -> dict[str, int]:
        raise KeeperError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(retained.Client, "sizes", no_answer)
        assert worker.count() == 0
    with pytest.raises(RetainedError, match="loads from disk: the keeper did not answer when they were to be counted"):
        worker.load()
    assert keeper.held() == 0
    worker = Worker(memory, monkeypatch)
    assert worker.count() == 0
    assert worker.load()


def test_no_second_copy_is_loaded_while_the_agent_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket accepts connections and does not answer."""
    monkeypatch.setattr(keeper_module, "_SECONDS", 0.1)
    path = tmp_path / "weights.sock"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
        listener.listen()
        with pytest.raises(RetainedError, match=r"whether there are retained weights is unknown: .*weights\.sock"):
            Worker(HostMemory(), monkeypatch).count()
    # It ended: the memory is free.
    worker = Worker(HostMemory(), monkeypatch)
    assert worker.count() == 0
    assert worker.load()


@pytest.mark.parametrize("counted", [False, True])
def test_a_model_without_a_key_is_loaded_as_without_a_keeper(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """vLLM raises `TypeError` for a configuration that it cannot hash."""
    memory = HostMemory()
    if counted:
        assert Worker(memory, monkeypatch).load()

    def no_hash(*_: object) -> str:
        raise TypeError("unsupported type 'function'")

    worker = Worker(memory, monkeypatch)
    monkeypatch.setattr(retained, "key_of", no_hash)
    if counted:
        assert worker.count() > 0
        with pytest.raises(RetainedError, match="loads from disk: TypeError: unsupported type"):
            worker.load()
    else:
        assert worker.load()
    assert keeper.held() == 0


@pytest.mark.parametrize("getter", [True, False])
def test_segments_are_whole_in_the_pool_only(getter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, given = torch._C._accelerator_getAllocatorSettings(), "expandable_segments:True,max_split_size_mb:20"
    if not getter:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")

    def settings() -> tuple[bool, int]:
        found = torch.cuda.memory._snapshot()["allocator_settings"]
        return found["expandable_segments"], found["max_split_size"]

    try:
        torch._C._accelerator_setAllocatorSettings(given)
        with retained.whole_segments():
            assert settings() == (False, 20 << 20)
        assert settings() == (True, 20 << 20)
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_a_constant_is_found_without_a_copy_of_the_content() -> None:
    content = torch.full((200_000,), 7, dtype=torch.uint8)
    assert retained.constant(content) == 7
    content[-1] = 8
    assert retained.constant(content) is None
