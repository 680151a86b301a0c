"""Hooks on vLLM's modules in two phases: look up and check everything, then only assign.

A hook names every symbol of a module that it relies on. If one of them differs from what the hook knows, or if anything
else raises while the hook is prepared, nothing is changed and one warning names the reason. An operation is computed by
bundled kernels only if all of its hooks are attached: if one is not, the others are detached.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import KernelChoice, Op
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER
from dsv4_runtime.vllm_plugin.patch import after_import, vllm_version

Assignment = tuple[Any, Any, Any]
"""(object, name, new value): an attribute of the object, or an item of a dictionary."""
_ABSENT = object()


class HookMismatchError(Exception):
    """vLLM's symbol is not the one that the hook knows."""


@dataclass(frozen=True)
class Known:
    """Expectations of a function.

    Attributes:
        parameters: exactly these names, in this order; None: any.
        among: parameters that must be among its own.
        names: names that its body must refer to: what a replacement reads of the same objects.
        body: a function with the same parameters and the same code: the body that is replaced.
    """

    parameters: tuple[str, ...] | None = None
    among: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    body: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class Hook:
    """One attachment to one module of vLLM.

    Attributes:
        ops: the operations that need it. Empty: it belongs to the warm-up, and stands alone.
        module: the module's name.
        symbols: every symbol of the module that the hook relies on, with the parameters that it must have, or `Known`;
            None: it must be there.
        prepare: gets the module, checks what `symbols` cannot express and returns the assignments to make.
        bundled: whether a hook of the warm-up is made only where an operation may be bundled.
    """

    ops: tuple[Op, ...]
    module: str
    symbols: Mapping[str, tuple[str, ...] | Known | None]
    prepare: Callable[[ModuleType], Sequence[Assignment]]
    bundled: bool = False


class Attached:
    """The hooks of a process: which are installed, attached, or refused."""

    def __init__(self) -> None:
        self.installed: list[Hook] = []
        self.before: dict[Hook, list[Assignment]] = {}
        """Of every attached hook the values that its assignments replaced, in the order of attaching."""
        self.refused: dict[Op, str] = {}

    def install(self, hook: Hook) -> None:
        """Attach `hook` when its module is imported."""
        self.installed.append(hook)
        after_import(hook.module, functools.partial(self.run, hook))

    def run(self, hook: Hook) -> None:
        """Attach `hook` to its module, which has just been imported, or log in one line why not."""
        if self._is_off(hook):
            return
        try:
            self.before[hook] = apply(prepared(hook, sys.modules[hook.module]))
        except Exception as error:
            self._refuse(hook, error)

    def agreed(self, choice: KernelChoice) -> KernelChoice:
        """Return `choice` without the operations of which a hook is not attached; missing modules are imported."""
        for hook in tuple(self.installed):
            wanted = any(choice.bundled(op) and op not in self.refused for op in hook.ops)
            if not wanted or hook in self.before:
                continue
            try:
                importlib.import_module(hook.module)
            except Exception as error:
                self._refuse(hook, error)
                continue
            if hook not in self.before and not self._is_off(hook):
                self._refuse(hook, HookMismatchError("it was not attached when its module was imported"))
        return KernelChoice({op: provider for op, provider in choice.providers.items() if op not in self.refused})

    def _is_off(self, hook: Hook) -> bool:
        return bool(hook.ops) and all(op in self.refused for op in hook.ops)

    def _refuse(self, hook: Hook, error: Exception) -> None:
        why = str(error) if isinstance(error, HookMismatchError) else f"{type(error).__name__}: {error}"
        where = f"{hook.module} of {vllm_version()}: {why}"
        if not hook.ops:
            LOGGER.warning("dsv4 warm-up: stays as vLLM has it (%s)", where)
            return
        LOGGER.warning("dsv4 kernels: %s stays with vLLM's own kernels (%s)", ", ".join(hook.ops), where)
        for op in hook.ops:
            self.refused.setdefault(op, where)
        self._detach()

    def _detach(self) -> None:
        """Undo the hooks of refused operations; hooks of others on the same modules are prepared anew."""
        off = [hook for hook in self.before if self._is_off(hook)]
        for name in dict.fromkeys(hook.module for hook in off):
            there = [hook for hook in self.before if hook.module == name]
            for hook in reversed(there):
                undo(self.before.pop(hook))
            for hook in there:
                if hook not in off:
                    self.run(hook)


ATTACHED = Attached()


def run(hook: Hook) -> None:
    """Attach `hook` to its module, which has just been imported, or log in one line why not."""
    ATTACHED.run(hook)


def prepared(hook: Hook, module: ModuleType) -> list[Assignment]:
    """Check everything that `hook` relies on and return its assignments; nothing is changed.

    Raises:
        HookMismatchError: a symbol is gone or another one.
        Exception: whatever the hook's own preparation raises.
    """
    for symbol, known in hook.symbols.items():
        _check(symbol, look_up(module, symbol), known)
    return list(hook.prepare(module))


def apply(assignments: Iterable[Assignment]) -> list[Assignment]:
    """Make the assignments, all or none, and return those that undo them."""
    done: list[Assignment] = []
    try:
        for place, name, value in assignments:
            held = place if isinstance(place, dict) else vars(place)
            before = held.get(name, _ABSENT)
            _assign(place, name, value)
            done.append((place, name, before))
    except BaseException:
        undo(done)
        raise
    return done


def undo(done: Sequence[Assignment]) -> None:
    """Put back what `apply` replaced, as it returned it."""
    for place, name, value in reversed(done):
        _assign(place, name, value)


def _assign(place: Any, name: Any, value: Any) -> None:
    if isinstance(place, dict):
        if value is _ABSENT:
            place.pop(name, None)
        else:
            place[name] = value
    elif value is _ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, value)


def look_up(module: Any, symbol: str) -> Any:
    """Return the object that the dotted name `symbol` has in `module`.

    Raises:
        HookMismatchError: it is gone.
    """
    target = module
    for name in symbol.split("."):
        target = getattr(target, name, None)
        if target is None:
            raise HookMismatchError(f"{symbol} is gone")
    return target


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters of `function`."""
    return tuple(inspect.signature(function).parameters)


def _check(symbol: str, target: Any, known: tuple[str, ...] | Known | None) -> None:
    if known is None:
        return
    known = known if isinstance(known, Known) else Known(parameters=known)
    expected = known.parameters if known.body is None else parameters(known.body)
    if expected is not None and parameters(target) != expected:
        raise HookMismatchError(f"parameters of {symbol} are {parameters(target)}, expected {expected}")
    if known.among and (missing := sorted(known.among - set(parameters(target)))):
        raise HookMismatchError(f"{symbol} has no parameter {missing[0]}")
    if known.names and (missing := sorted(known.names - set(_names(inspect.unwrap(target).__code__)))):
        raise HookMismatchError(f"{symbol} does not refer to {', '.join(missing)}")
    if known.body is not None and _code(inspect.unwrap(target)) != _code(known.body):
        raise HookMismatchError(f"{symbol} has another body")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code(function: Any) -> tuple[Any, ...]:
    """Return what the body of `function` does, without its names of lines and files."""
    code: CodeType = function.__code__
    constants = tuple(one for one in code.co_consts if one != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants


def check_overrides(kind: type, base: type, names: Iterable[str]) -> None:
    """Check that `base` has the methods `names`, which `kind` replaces, with the same parameters.

    A method of `kind` that takes whatever comes (`*args`, `**kwargs`) must have the first parameters in common.

    Raises:
        HookMismatchError: a method is gone or has other parameters, or `base` requires one that `kind` lacks.
    """
    for name in names:
        theirs = parameters(look_up(base, name))
        own = inspect.signature(getattr(kind, name)).parameters.values()
        named = tuple(one.name for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
        if (theirs[: len(named)] if len(named) < len(own) else theirs) != named:
            raise HookMismatchError(f"parameters of {base.__name__}.{name} are {theirs}, expected {named}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise HookMismatchError(f"{base.__name__} requires {', '.join(missing)}")
