"""Providers of the operations of a layer, put together from what the ranks of one engine generation logged."""

from __future__ import annotations

import logging

from dsv4_runtime.contract import KernelStatus
from dsv4_runtime.contract.kernels import STOCK

_log = logging.getLogger(__name__)


class Kernels:
    """The choice of the lowest rank that was heard; what others chose otherwise is a warning and a note.

    Ray leaves out lines of other workers that differ in numbers only, so rank 0's may be among those that are missing;
    a line that names another provider is never left out.
    """

    def __init__(self) -> None:
        self._choices: dict[str, dict[int, KernelStatus]] = {}
        self._refused: dict[str, str] = {}

    def chosen(self, rank: int, choice: KernelStatus) -> None:
        """Keep what a rank says: who computes an operation there."""
        known = self._choices.setdefault(choice.op, {})
        if rank not in known and known and (first := known[min(known)]).provider != choice.provider:
            _log.warning(
                "kernels: rank %d computes %s by %s, rank %d by %s: their machines differ, or kept different "
                "evidence; name the provider in spec.engine.kernels to have one",
                rank, choice.op, choice.provider, min(known), first.provider,
            )  # fmt: skip
        known[rank] = choice

    def not_attached(self, ops: tuple[str, ...], why: str) -> None:
        """Keep what a process says: that vLLM computes these operations, whatever was chosen."""
        self._refused |= dict.fromkeys(ops, why)

    def status(self) -> tuple[KernelStatus, ...]:
        """Return who computes each operation that a rank spoke of, in the order in which they did."""
        return tuple(self._status(op, known) for op, known in self._choices.items())

    def _status(self, op: str, known: dict[int, KernelStatus]) -> KernelStatus:
        choice = known[min(known)]
        if op in self._refused and choice.provider != STOCK:
            return choice.model_copy(
                update={"provider": STOCK, "note": f"{choice.provider} was chosen; {self._refused[op]}"}
            )
        others = [f"rank {rank}: {one.provider}" for rank, one in known.items() if one.provider != choice.provider]
        return choice.model_copy(update={"note": ", ".join(others)}) if others else choice
