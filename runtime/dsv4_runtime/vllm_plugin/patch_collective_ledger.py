"""Counts the collective operations that a worker begins, so that a hang can be traced to the rank that did not come."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dsv4_runtime.health.ledger import Writer
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, refuse

_MODULE = "vllm.distributed.parallel_state"
_SYMBOL = "GroupCoordinator"
# What every rank of a group calls in the same order. The `_out_place` ones are also what compiled graphs call.
_METHODS = ("_all_reduce_out_place", "_all_gather_out_place", "_reduce_scatter_out_place", "gather", "broadcast")


@functools.cache  # the file is made by the first collective, in the process that begins it
def _ledger() -> Writer:
    return Writer()


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *rest: Any, **more: Any) -> Any:
        if self.world_size > 1:
            _ledger().begin()
        return original(self, *rest, **more)

    return method


def _apply() -> PatchOutcome:
    from vllm.distributed.parallel_state import GroupCoordinator

    for name in _METHODS:
        method = inspect.getattr_static(GroupCoordinator, name, None)
        if not inspect.isfunction(method) or next(iter(inspect.signature(method).parameters)) != "self":
            raise refuse(f"{_MODULE}.{_SYMBOL}.{name}", "there is no method of that name")
    for name in _METHODS:
        setattr(GroupCoordinator, name, _counted(getattr(GroupCoordinator, name)))
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "in a hang every rank but one waits inside a collective that the one has not begun; the count names it, "
        "and vLLM keeps none. Costs under a microsecond for each collective that Python begins"
    ),
    upstream="none; NCCL's flight recorder does the same for NCCL alone, and only writes when it times out",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM tells how far each worker has come",
    apply=_apply,
)
