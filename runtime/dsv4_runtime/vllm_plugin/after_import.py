"""Runs a function right after a module is imported, so that a patch costs nothing where its module is never used."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

AfterImport = Callable[[], None]


class _Loader(importlib.abc.Loader):
    """Loads with the module's own loader, then runs the actions that wait for the module."""

    def __init__(self, inner: importlib.abc.Loader, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # Of a specification that is only looked at: `get_source`, `get_code`, `get_resource_reader` and others.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        # A module that is executed outside of the import system is not the one that others import.
        if self._name in sys.modules:
            _FINDER.run(self._name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that actions wait for, and leaves all others to the other finders.

    An action stays until an import of its module has succeeded: a specification that is only looked at
    (`importlib.util.find_spec`) and an import that fails change nothing.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[AfterImport]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, _Loader):
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None

    def run(self, name: str) -> None:
        """Run the actions for the module `name`; if one raises, all of them wait for the next import."""
        for action in self.waiting.get(name, ()):
            action()
        self.waiting.pop(name, None)


_FINDER = _Finder()


def after_import(module: str, action: AfterImport) -> None:
    """Call `action` after `module` is first imported, or now if it was; an exception in it fails that import."""
    loaded = sys.modules.get(module)
    # One that is just being imported runs its actions at the end.
    importing = module in _FINDER.waiting and getattr(getattr(loaded, "__spec__", None), "_initializing", False)
    if loaded is not None and not importing:
        action()
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(module, []).append(action)
