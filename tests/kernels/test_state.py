"""Buffers of plans contain nothing that a later run needs: their memory may be lost between two runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_kernels import registry
from dsv4_kernels.arch import Arch
from dsv4_kernels.device import AT_REST, is_last
from dsv4_kernels.registry import Case, Operation, as_outputs, case, operations

REST = AT_REST.value
SPLIT = {
    "fp8_gemm": case("split", "cpu", tokens=2, n=144, k=1536),
    "wo_a_einsum": case("split", "cpu", tokens=2, n=144, k=1024, groups=2),
    "wo_a_einsum_o8": case("split", "cpu", tokens=2, n=128, k=1024, groups=2),
    "compressor_store": case("split", "cpu", tokens=3, head=512, ratio=128, page=2, dense=True),
    "moe_w4a16": case("split", "cpu", tokens=1, hidden=256, inter=128, experts=16, topk=6),
}
"""A shape of each operation whose programs count their arrivals."""


def chosen() -> Iterator[Any]:
    """Yield the smallest shape of every operation, and those with counters."""
    for op in operations():
        cases = [c for c in op.cases_with("cpu") if c.params.get("tokens", c.params.get("rows", 1))]
        smallest = min(cases, key=lambda c: op.nbytes(c.params) + op.flops(c.params))
        for one in filter(None, (smallest, SPLIT.get(op.name))):
            yield pytest.param(op, one, id=f"{op.name}-{one.name}")


def buffers(thing: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that `thing`, a plan or a part of one, keeps."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from buffers(tuple(thing.values()))
    elif isinstance(thing, (tuple, list)):
        for one in thing:
            yield from buffers(one)
    elif type(thing).__module__.startswith("dsv4_kernels") and hasattr(thing, "__dict__"):
        yield from buffers(vars(thing))


def lose(plan: Any, byte: int | None) -> int:
    """Overwrite all buffers of `plan` with `byte`, or random bytes (None); return their number."""
    found = list(buffers(plan))
    for one in found:
        raw = torch.empty((0,), dtype=torch.uint8, device=one.device).set_(one.untyped_storage())
        raw.random_(0, 256) if byte is None else raw.fill_(byte)
    return len(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), list(chosen()))
def test_lost_buffers_change_no_result(op: Operation, case: Case, device: torch.device, arch: Arch | None) -> None:
    """As after sleep of an engine, every buffer of the plan contains arbitrary bytes."""
    first, second = (op.make_inputs(case.params, device, seed) for seed in (1, 2))
    plan = op.plan(case.params, device, arch)
    expected = as_outputs(op.reference(**registry.fresh(op, second), exact=True))
    plan.run(**registry.fresh(op, first))
    for byte in (0xFF, 0, 1, None):
        lose(plan, byte)
        results = tuple(out.clone() for out in as_outputs(plan.run(**registry.fresh(op, second))))
        registry.compare(op, results, expected)


@pytest.mark.parametrize("op", [op for op in operations() if op.name in SPLIT], ids=lambda op: op.name)
def test_these_shapes_have_counters(op: Operation, device: torch.device) -> None:
    plan = op.plan(SPLIT[op.name].params, device, Arch.SM_90)
    assert any(one.dtype == torch.int32 and one.numel() and bool((one == REST).all()) for one in buffers(plan))


class Counter:
    """A counter in memory whose operations wait for their turn: `turn` returns the index of the next thread."""

    def __init__(self, value: int, programs: int, turn: Callable[[list[int]], int]) -> None:
        self.value, self.turn = value, turn
        self.waiting: dict[int, threading.Event] = {}
        self.alive = set(range(programs))
        self.lock = threading.Lock()

    def step(self, change: Callable[[int], int]) -> int:
        """Make one atomic change at this thread's turn, and return the previous value."""
        me = int(threading.current_thread().name)
        event = threading.Event()
        with self.lock:
            self.waiting[me] = event
            self._next()
        assert event.wait(600)
        before = self.value
        self.value = change(before)
        return before

    def done(self, me: int) -> None:
        """Record the end of a thread."""
        with self.lock:
            self.alive.discard(me)
            self._next()

    def _next(self) -> None:
        if self.alive and self.waiting.keys() == self.alive:
            self.waiting.pop(self.turn(sorted(self.waiting))).set()

    def language(self) -> SimpleNamespace:
        """Return the part of Triton's language that `is_last` uses, for this counter."""

        def wrapped(value: int) -> int:
            return (value + 2**31) % 2**32 - 2**31

        return SimpleNamespace(
            debug_barrier=lambda: None,
            atomic_add=lambda _, more, sem: self.step(lambda now: wrapped(now + more)),
            atomic_cas=lambda _, old, new, sem: self.step(lambda now: new if now == old else now),
            store=lambda _, new: self.step(lambda _: new),
            where=lambda condition, yes, no: yes if condition else no,
        )


GARBAGE = st.integers(-(2**31), 2**31 - 1).filter(lambda value: not REST - 8 <= value <= REST + 8)


@pytest.mark.interpreter
@settings(deadline=None, max_examples=60)
@given(start=st.just(REST) | GARBAGE, programs=st.integers(1, 5), order=st.lists(st.integers(0, 119), min_size=1))
@example(start=0, programs=4, order=[0])
@example(start=-1, programs=4, order=[0, 1])
@example(start=2**31 - 1, programs=3, order=[2, 1, 0])
def test_one_program_is_the_last_in_every_order(start: int, programs: int, order: list[int]) -> None:
    """Also for a counter whose memory was lost; the last program is the one that arrives after all others."""
    turns = itertools.cycle(order)

    def turn(waiting: list[int]) -> int:
        return waiting[next(turns) % len(waiting)]

    counter = Counter(start, programs, turn)
    code = is_last.fn.__code__
    run = FunctionType(code, {"tl": counter.language(), "AT_REST": REST})
    verdicts: dict[int, bool] = {}

    def arrive(me: int) -> None:
        try:
            verdicts[me] = run(None, programs)
        finally:
            counter.done(me)

    threads = [threading.Thread(target=arrive, args=(me,), name=str(me)) for me in range(programs)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(600)
    assert sorted(verdicts.values()) == [False] * (programs - 1) + [True]
    assert counter.value == REST
