"""Runs a function right after a module is imported, so that a patch costs nothing where its module is never used."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

AfterImport = Callable[[], None]


class _Loader(importlib.abc.Loader):
    """Loads with the module's own loader, then acts."""

    def __init__(self, inner: importlib.abc.Loader, actions: Sequence[AfterImport]) -> None:
        self._inner = inner
        self._actions = actions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for action in self._actions:
            action()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that somebody waits for, once each, and leaves all others to the next finder."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[AfterImport]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        actions = self.waiting.pop(name, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(name)  # popped above, so this asks the finders after this one
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, actions)
        return spec


_FINDER = _Finder()


def after_import(module: str, action: AfterImport) -> None:
    """Call `action` after `module` is first imported, or now if it was; an exception in it fails that import."""
    if module in sys.modules:
        action()
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(module, []).append(action)
