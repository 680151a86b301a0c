"""Every declared tensor of every operation: a wrong property gives one error that names the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.plan import Input, Inputs, Size, _end
from dsv4_kernels.registry import Operation, operations

Tensors = dict[str, torch.Tensor | None]
Wrong = tuple[str, str, torch.Tensor | None]


def checked(op: Operation, monkeypatch: pytest.MonkeyPatch) -> tuple[Inputs, Tensors, Any, dict[str, Any]]:
    """Run the largest case of the interpreter with few tokens; return its declaration, tensors, plan and inputs."""
    cases = [case for case in op.cases_with("cpu") if 0 < case.params.get("tokens", case.params.get("rows", 1)) < 32]
    params = max((case.params for case in cases if op.nbytes(case.params)), key=len)
    plan = op.plan(params, torch.device("cpu"), Arch.SM_120)
    inputs = op.make_inputs(params, torch.device("cpu"), 1)
    seen: list[tuple[Inputs, Tensors]] = []
    check = Inputs.check

    def recorded(self: Inputs, **tensors: torch.Tensor | None) -> None:
        seen.append((self, tensors))
        check(self, **tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Inputs, "check", recorded)
        plan.run(**inputs)
    [(declared, tensors)] = seen
    return declared, tensors, plan, inputs


def mutations(inputs: Inputs, tensors: Tensors) -> Iterator[Wrong]:
    """Yield the name of a tensor, its wrong property, and the wrong tensor."""
    sizes: dict[str, int] = {}
    for name, needed in inputs.declared.items():
        tensor = tensors[name]
        before = dict(sizes)
        if not needed.optional:
            yield name, "missing", None
        if tensor is None:
            continue
        assert needed.problem(tensor, inputs.device, sizes) is None
        yield name, "dtype", tensor.to(torch.complex64)
        yield name, "device", tensor.to("meta")
        yield name, "shape", tensor[None]
        if tensor.dim() > 1:
            yield name, "shape", tensor.flatten(0, 1)
        for position, need in enumerate(needed.shape):
            for size in wrong_sizes(need, before):
                shape = list(tensor.shape)
                shape[position] = size
                yield name, "shape", needed.zeros(inputs.device, shape)
        yield from ((name, "strides", wrong) for wrong in wrong_strides(needed, tensor))
        if needed.aligned and tensor.numel():
            yield name, "address", moved(tensor)


def wrong_sizes(need: Any, sizes: dict[str, int]) -> list[int]:
    """Return sizes of a dimension that do not fit; none if any size fits."""
    if isinstance(need, int):
        return [need - 1, need + 1] if need else [1]
    if isinstance(need, Size) and need.name in sizes:
        return [sizes[need.name] + 1]
    if isinstance(need, Size):
        low, high = _end(need.least, sizes), None if need.most is None else _end(need.most, sizes)
        return ([low - 1] if low else []) + ([] if high is None else [high + 1])
    if need is None or (need.isidentifier() and need not in sizes):
        return []
    return [_end(need, sizes) + 1]


def wrong_strides(needed: Input, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor with the stride of one dimension changed."""
    for position, size in enumerate(tensor.shape):
        stride = needed.strides[position] if needed.strides is not None else 1
        free = size == 1 and (needed.strides is None or (not position and stride is not None))
        if not tensor.numel() or free or (stride is None and needed.step == 1):
            continue
        strides = list(tensor.stride())
        strides[position] += 1
        room = 1 + sum((n - 1) * one for n, one in zip(tensor.shape, strides, strict=True))
        yield torch.zeros((room,), dtype=tensor.dtype).as_strided(tensor.shape, strides)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor one element later in memory."""
    room = 2 + sum((n - 1) * one for n, one in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.zeros((room,), dtype=tensor.dtype)[1:].as_strided(tensor.shape, tensor.stride(), 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("op", operations(), ids=lambda op: op.name)
def test_every_wrong_tensor_is_one_error_that_names_it(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, tensors, plan, given = checked(op, monkeypatch)
    kinds: dict[str, set[str]] = {}
    for name, what, wrong in mutations(inputs, tensors):
        if what != "device":
            # Correct tensors first: only these are compared with those of the next run.
            inputs.check(**tensors)
        text = f"{inputs.operation}: {name} {'is' if what == 'missing' else 'has'} {what}"
        with pytest.raises(ValueError, match=r"needs|missing") as caught:
            inputs.check(**{**tensors, name: wrong})
        assert str(caught.value).startswith(text), (str(caught.value), text)
        if name in given and what == "dtype":
            with pytest.raises(ValueError, match=f"{name} "):
                plan.run(**{**given, name: wrong})
        kinds.setdefault(name, set()).add(what)
    assert kinds.keys() == {name for name, tensor in tensors.items() if tensor is not None or name in kinds}
    assert all(found >= {"dtype", "shape", "device"} for name, found in kinds.items() if tensors[name] is not None)
    inputs.check(**tensors)


@pytest.mark.parametrize("op", operations(), ids=lambda op: op.name)
def test_every_tensor_of_a_run_is_declared(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors, _, given = checked(op, monkeypatch)
    assert {name for name, value in given.items() if isinstance(value, torch.Tensor)} <= tensors.keys()


def test_sizes_of_named_dimensions_are_compared() -> None:
    inputs = Inputs(
        "op", torch.device("cpu"), a=Input(torch.int32, (Size("rows", most=4),)), b=Input(torch.int32, ("rows*2",))
    )
    inputs.check(**inputs.zeros(rows=3))
    with pytest.raises(ValueError, match=r"^op: b has shape \(5,\), needs \[rows\*2 = 6\]$"):
        inputs.check(a=torch.zeros(3, dtype=torch.int32), b=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^op: a has shape \(5,\), needs \[rows ≤ 4\]$"):
        inputs.check(a=torch.zeros(5, dtype=torch.int32), b=torch.zeros(10, dtype=torch.int32))


def test_tensors_are_given_in_the_declared_order() -> None:
    inputs = Inputs("op", torch.device("cpu"), a=Input(torch.int32, ()), b=Input(torch.int32, ()))
    with pytest.raises(TypeError, match=r"op: got \('b', 'a'\), needs \('a', 'b'\)"):
        inputs.check(**dict(reversed(inputs.zeros().items())))
