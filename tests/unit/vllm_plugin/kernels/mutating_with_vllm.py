"""Child process of `test_hooks.py`: every symbol of a hook, changed in the installed vLLM's own modules.

Prints one JSON object. For each change, all hooks of the symbol's operations run again; afterwards every attribute of
the hook's module, of its classes and of its dictionaries must have its original value.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from dsv4_runtime.vllm_plugin.kernels import hooks, v033
from dsv4_runtime.vllm_plugin.kernels.choice import LOGGER
from dsv4_runtime.vllm_plugin.kernels.hooks import Attached, Known

LINES: list[str] = []
ABSENT = object()


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


LOGGER.addHandler(Kept())
LOGGER.propagate = False


def state(module: ModuleType) -> dict[str, Any]:
    """Return the attributes of the module and of its own classes, and the entries of its dictionaries."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        found[name] = value
        if isinstance(value, type) and (value.__module__ or "").startswith("vllm"):
            found |= {f"{name}.{key}": one for key, one in vars(value).items() if not key.startswith("_abc")}
        if isinstance(value, dict) and not name.startswith("__"):
            found |= {f"{name}[{key}]": list(one) if isinstance(one, list) else one for key, one in value.items()}
    return found


def differs(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if _differ(before.get(name, ABSENT), after.get(name, ABSENT))]


def _differ(one: Any, other: Any) -> bool:
    return one != other if isinstance(one, list) and isinstance(other, list) else one is not other


def owner(module: Any, symbol: str) -> tuple[Any, str]:
    *path, last = symbol.split(".")
    for name in path:
        module = getattr(module, name)
    return module, last


def function_of(names: Sequence[str]) -> Any:
    """Return a function with the parameters `names` that does nothing."""
    made: dict[str, Any] = {}
    exec(f"def f({', '.join(names)}):\n    return None", made)
    return made["f"]


def mutations(target: Any, known: tuple[str, ...] | Known | None) -> Iterator[tuple[str, Callable[[Any, str], Any]]]:
    """Yield the name of each change, and a function that applies it to a symbol's owner and name."""
    yield "deleted", lambda place, name: delattr(place, name)
    yield "renamed", lambda place, name: (setattr(place, f"{name}_v2", getattr(place, name)), delattr(place, name))
    yield "nothing", lambda place, name: setattr(place, name, None)
    function = inspect.unwrap(target) if callable(target) else None
    if isinstance(function, FunctionType):
        names = isinstance(known, Known) and (known.names or known.body)
        if isinstance(known, tuple) or (isinstance(known, Known) and (known.parameters is not None or known.body)):
            yield (
                "another parameter",
                lambda place, name: setattr(place, name, function_of([*hooks.parameters(target), "another"])),
            )
        if names:
            yield "another body", lambda place, name: setattr(place, name, function_of(hooks.parameters(target)))
        if known is not None:
            yield "no function", lambda place, name: setattr(place, name, 3)


@contextlib.contextmanager
def mutated(module: Any, symbol: str, change: Callable[[Any, str], Any]) -> Iterator[None]:
    place, name = owner(module, symbol)
    before = dict(vars(place))
    change(place, name)
    try:
        yield
    finally:
        for key in vars(place).keys() - before.keys():
            delattr(place, key)
        for key, value in before.items():
            if vars(place).get(key) is not value:
                setattr(place, key, value)


refused = set()
for hook in v033.HOOKS:
    module = importlib.import_module(hook.module)
    try:
        hooks.prepared(hook, module)
    except hooks.HookMismatchError:
        refused |= set(hook.ops)
        # Substitute functions with the parameters that another release has.
        for symbol, expected in hook.symbols.items():
            if isinstance(expected, tuple):
                place, name = owner(module, symbol)
                if hooks.parameters(getattr(place, name, lambda: None)) != expected:
                    setattr(place, name, function_of(expected))
        hooks.prepared(hook, module)

changed, silent, count = [], [], 0
for hook in v033.HOOKS:
    module = importlib.import_module(hook.module)
    # The hooks that are only valid together with it; the hook itself comes last, so that earlier ones are undone.
    group = [one for one in v033.HOOKS if set(one.ops) & set(hook.ops) and one is not hook]
    modules = {one.module: importlib.import_module(one.module) for one in (*group, hook)}
    for symbol, expected in hook.symbols.items():
        for what, change in mutations(hooks.look_up(module, symbol), expected):
            with contextlib.suppress(AttributeError), mutated(module, symbol, change):
                with contextlib.suppress(hooks.HookMismatchError):
                    hooks.look_up(module, symbol)
                    if what in ("deleted", "renamed"):
                        continue  # A base class has it too.
                before = {name: state(one) for name, one in modules.items()}
                LINES.clear()
                attached = Attached()
                for one in (*group, hook):
                    attached.run(one)
                # The remaining hooks are also required by another operation.
                for one in reversed(list(attached.before)):
                    if one.ops and not set(one.ops) <= set(attached.refused):
                        hooks.undo(attached.before[one])
                count += 1
                label = f"{hook.module}:{symbol} {what}"
                for name, one in modules.items():
                    if found := differs(before[name], state(one)):
                        changed.append(f"{label}: {name} {found[:5]}")
                if len(LINES) != 1:
                    silent.append(f"{label}: {LINES}")
                    for one in reversed(list(attached.before)):
                        hooks.undo(attached.before[one])

print(
    json.dumps(
        {
            "hooks": len(v033.HOOKS),
            "refused": sorted(refused),
            "mutations": count,
            "changed": changed,
            "silent": silent,
        }
    )
)
