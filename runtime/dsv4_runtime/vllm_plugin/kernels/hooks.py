"""Hooks on vLLM's modules in two phases: verify all symbols, then only assign.

A hook lists every symbol of a module that it depends on. If a symbol differs from the expectation, or the preparation
raises, nothing is changed and one warning contains the reason. Bundled kernels compute an operation only if all of its
hooks are attached: if one is refused, the others are detached.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import KernelChoice, Op
from dsv4_runtime.vllm_plugin.patch import after_import, vllm_version

LOGGER = logging.getLogger("vllm.dsv4")
Assignment = tuple[Any, Any, Any]
"""(object, name, new value): an attribute of the object, or an item of a dictionary."""
Preparation = Callable[[ModuleType], Sequence[Assignment]]
_ABSENT = object()


class HookMismatchError(Exception):
    """A symbol of vLLM differs from the expectation of the hook."""


@dataclass(frozen=True)
class Known:
    """Expectations of a function.

    Attributes:
        parameters: exact names in order; None: any.
        among: required parameters.
        names: names that the body must reference; a replacement reads the same attributes.
        body: a function with the same parameters and code, for a replaced body.
    """

    parameters: tuple[str, ...] | None = None
    among: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    body: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class Hook:
    """One attachment to one module of vLLM. References have the form `module:name` within this package.

    Attributes:
        ops: operations that require the hook; empty for hooks of the warm-up, which are independent.
        module: name of the module.
        symbols: all symbols of the module that the hook depends on, with the required parameters, or `Known`; None: the
            symbol must exist.
        wrap: symbols that are replaced by the result of a function of the original, by reference.
        each: classes for whose new objects a function is called, by reference. The function is imported with the first
            object: vLLM may still import the package at the time of attaching.
        prepare: function or reference; gets the module, performs checks beyond `symbols` and returns assignments.
        bundled: attach a warm-up hook only if an operation may be bundled.
    """

    ops: tuple[Op, ...]
    module: str
    symbols: Mapping[str, tuple[str, ...] | Known | None]
    prepare: Preparation | str | None = None
    bundled: bool = False
    wrap: Mapping[str, str] = field(default_factory=dict)
    each: Mapping[str, str] = field(default_factory=dict)


class Attached:
    """The hooks of a process: installed, attached and refused ones."""

    def __init__(self) -> None:
        self.installed: list[Hook] = []
        self.before: dict[Hook, list[Assignment]] = {}
        """Replaced values of every attached hook, in the order of attachment."""
        self.refused: dict[Op, str] = {}

    def install(self, hook: Hook) -> None:
        """Attach `hook` after the import of its module."""
        self.installed.append(hook)
        after_import(hook.module, functools.partial(self.run, hook))

    def run(self, hook: Hook) -> None:
        """Attach `hook` to its imported module, or log the reason of the refusal in one line."""
        if self._is_off(hook):
            return
        try:
            self.before[hook] = apply(prepared(hook, sys.modules[hook.module]))
        except Exception as error:
            self._refuse(hook, error)

    def agreed(self, choice: KernelChoice) -> KernelChoice:
        """Return `choice` without operations that have an unattached hook; missing modules are imported."""
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
        """Undo the hooks of refused operations; other hooks on the same modules are prepared again."""
        off = [hook for hook in self.before if self._is_off(hook)]
        for name in dict.fromkeys(hook.module for hook in off):
            there = [hook for hook in self.before if hook.module == name]
            for hook in reversed(there):
                undo(self.before.pop(hook))
            for hook in there:
                if hook not in off:
                    self.run(hook)


ATTACHED = Attached()


def prepared(hook: Hook, module: ModuleType) -> list[Assignment]:
    """Verify the dependencies of `hook` and return its assignments; nothing is changed.

    Raises:
        HookMismatchError: a symbol is missing or differs.
        Exception: raised by the preparation.
    """
    for symbol, known in hook.symbols.items():
        _check(symbol, look_up(module, symbol), known)
    return assignments(hook, module)


def assignments(hook: Hook, module: ModuleType) -> list[Assignment]:
    """Return the assignments of `hook` without verification of its symbols."""
    found: list[Assignment] = []
    for symbol, reference in hook.wrap.items():
        owner, _, name = symbol.rpartition(".")
        found.append((look_up(module, owner) if owner else module, name, load(reference)(look_up(module, symbol))))
    for symbol, reference in hook.each.items():
        found.append(_calling_with_each(look_up(module, symbol), reference))
    if hook.prepare is not None:
        found += (load(hook.prepare) if isinstance(hook.prepare, str) else hook.prepare)(module)
    return found


def load(reference: str) -> Any:
    """Import and return the object `module:name` of this package."""
    module, _, name = reference.partition(":")
    return look_up(importlib.import_module(f"{__package__}.{module}"), name)


def _calling_with_each(kind: type, reference: str) -> Assignment:
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        load(reference)(self)

    return kind, "__init__", make


def apply(assignments: Iterable[Assignment]) -> list[Assignment]:
    """Make all assignments or none; return the assignments that undo them."""
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
    """Restore the values returned by `apply`."""
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
    """Return the object with the dotted name `symbol` in `module`.

    Raises:
        HookMismatchError: it does not exist.
    """
    target = module
    for name in symbol.split("."):
        target = getattr(target, name, None)
        if target is None:
            raise HookMismatchError(f"{symbol} is gone")
    return target


def parameters(function: Any) -> tuple[str, ...]:
    """Return the parameter names of `function`."""
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
    """Return the code of `function` without line numbers and file names."""
    code: CodeType = function.__code__
    constants = tuple(one for one in code.co_consts if one != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants


def check_overrides(kind: type, base: type, names: Iterable[str]) -> None:
    """Verify that `base` has the methods `names`, which `kind` replaces, with the same parameters.

    For a method of `kind` with `*args` or `**kwargs` the leading parameters must be equal.

    Raises:
        HookMismatchError: a method is missing or has other parameters, or `kind` lacks an abstract method of `base`.
    """
    for name in names:
        theirs = parameters(look_up(base, name))
        own = inspect.signature(getattr(kind, name)).parameters.values()
        named = tuple(one.name for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
        if (theirs[: len(named)] if len(named) < len(own) else theirs) != named:
            raise HookMismatchError(f"parameters of {base.__name__}.{name} are {theirs}, expected {named}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise HookMismatchError(f"{base.__name__} requires {', '.join(missing)}")
