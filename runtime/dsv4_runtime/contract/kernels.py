"""Choice of the provider for each operation of a layer, in the syntax of `spec.engine.kernels` and `DSV4_KERNELS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dsv4_runtime.contract.base import Report

VARIABLE = "DSV4_KERNELS"
"""Environment variable of the engine's processes."""


class Op(StrEnum):
    """Operations of a DeepSeek-V4 layer that dsv4 can compute in vLLM's place."""

    MOE = "moe"
    FP8_LINEAR = "fp8_linear"
    MLA_DECODE = "mla_decode"
    MLA_PREFILL = "mla_prefill"
    FRONT = "front"
    O_PROJ = "o_proj"
    MHC = "mhc"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    ROUTER = "router"
    TOPK = "topk"


BUNDLED = "bundled"
BUNDLED_W4A8 = "bundled_w4a8"
STOCK = "stock"
"""The kernel that vLLM itself picks."""
B12X = "b12x"
ON_REQUEST = (B12X,)
"""Kernels that vLLM takes only where its options name them (`--linear-backend b12x`, `--moe-backend b12x`)."""

PROVIDERS: Mapping[Op, tuple[str, ...]] = {
    Op.MOE: (STOCK, BUNDLED, BUNDLED_W4A8, B12X),
    Op.FP8_LINEAR: (STOCK, BUNDLED, B12X),
    Op.MLA_DECODE: (STOCK, BUNDLED),
    Op.MLA_PREFILL: (STOCK, BUNDLED),
    Op.FRONT: (STOCK, BUNDLED),
    Op.O_PROJ: (STOCK, BUNDLED),
    Op.MHC: (STOCK, BUNDLED),
    Op.COMPRESSOR: (STOCK, BUNDLED),
    Op.INDEXER: (STOCK, BUNDLED),
    Op.ROUTER: (STOCK, BUNDLED),
    Op.TOPK: (STOCK, BUNDLED),
}


_BUNDLED = frozenset({BUNDLED, BUNDLED_W4A8})


class ProviderStatus(Report):
    """Standing in an operation of one of the providers that were tried."""

    provider: str
    """`bundled`, `bundled_w4a8`, or one of vLLM's own kernels, such as `marlin`."""
    slowness: float | None = None
    """Its time over that of the fastest right provider, the mean over the deployment's shapes; absent if excluded."""
    excluded: str | None = None
    """Observation that excludes it; absent if there was none."""


class KernelStatus(Report):
    """Provider of an operation of a layer in a running engine."""

    op: str
    """The operation, as `spec.engine.kernels` calls it."""
    provider: str
    """Provider that computes it; `stock` is vLLM's own pick."""
    note: str | None = None
    """Difference from the choice: why a bundled kernel was not put in place, or ranks that chose otherwise."""
    standings: tuple[ProviderStatus, ...] = ()
    """Of the providers that were tried; empty where nothing was, because the specification names the provider."""

    def against_next(self) -> tuple[str, float] | None:
        """Return the fastest provider of the other side, and its time over this side's.

        The sides are the bundled kernels and vLLM's own: which of its own vLLM picks is not known. None where either
        side has none that is right.
        """
        right = {s.provider: s.slowness for s in self.standings if s.slowness is not None}
        bundled = self.provider in _BUNDLED
        mine = {self.provider} & right.keys() if bundled else right.keys() - _BUNDLED - set(ON_REQUEST)
        others = right.keys() - _BUNDLED if bundled else right.keys() & _BUNDLED
        if not mine or not others:
            return None
        best = min(others, key=lambda provider: right[provider])
        return best, right[best] / min(right[provider] for provider in mine)

    def faster_on_request(self) -> tuple[str, float] | None:
        """Return the right provider that vLLM takes on request only and that is faster than the chosen side, with the
        time of that side over its own; None if there is none."""
        right = {s.provider: s.slowness for s in self.standings if s.slowness is not None}
        bundled = self.provider in _BUNDLED
        mine = {self.provider} & right.keys() if bundled else right.keys() - _BUNDLED - set(ON_REQUEST)
        asked = right.keys() & set(ON_REQUEST)
        if self.provider in ON_REQUEST or not mine or not asked:
            return None
        best = min(asked, key=lambda provider: right[provider])
        least = min(right[provider] for provider in mine)
        return (best, least / right[best]) if right[best] < least else None


class KernelChoiceError(ValueError):
    """A choice names something that is not there."""


@dataclass(frozen=True)
class KernelChoice:
    """A provider for each operation; operations that are not listed are vLLM's."""

    providers: Mapping[Op, str] = field(default_factory=dict)

    def provider(self, op: Op) -> str:
        return self.providers.get(op, STOCK)

    def bundled(self, op: Op) -> bool:
        return self.provider(op) in _BUNDLED

    def __str__(self) -> str:
        """Return the choice as `DSV4_KERNELS` writes it."""
        return ",".join(f"{op}={self.provider(op)}" for op in Op) or "off"


OFF = KernelChoice()
ALL_BUNDLED = KernelChoice(dict.fromkeys(Op, BUNDLED))


def needs_evidence(text: str | None) -> bool:
    """Return whether `text` leaves an operation open, so that its provider is chosen by evidence."""
    named = {part.partition("=")[0].strip() for part in (text or "").split(",")}
    return (text or "").strip() not in ("", "off") and not set(Op) <= named


def parse_kernel_choice(text: str | None, auto: KernelChoice = ALL_BUNDLED) -> KernelChoice:
    """Return the choice in `text`: `auto`, `off`, or `op=provider,…` (other operations are as in `auto`).

    Args:
        text: the value of `DSV4_KERNELS`; None or empty means `off`: without a request no engine changes.
        auto: the choice made by evidence.

    Raises:
        KernelChoiceError: an operation or a provider that is not there.
    """
    wanted = (text or "").strip() or "off"
    if wanted == "auto":
        return auto
    if wanted == "off":
        return OFF
    providers = dict(auto.providers)
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        name, equals, provider = part.partition("=")
        if name not in set(Op) or not equals:
            raise KernelChoiceError(f"{part!r} is not OPERATION=PROVIDER; operations: {', '.join(Op)} (or auto, off)")
        if provider not in PROVIDERS[Op(name)]:
            raise KernelChoiceError(f"{name} has no provider {provider!r}; there are: {', '.join(PROVIDERS[Op(name)])}")
        providers[Op(name)] = provider
    return KernelChoice(providers)
