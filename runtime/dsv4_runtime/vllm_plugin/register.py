"""Registry of the patches for every build, and the entry point `vllm.general_plugins`.

vLLM calls `register` in the API server, the engine core and every worker. The patches for the CPU build are in
`dsv4_runtime.vllm_cpu.patches`.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from dsv4_runtime.util.files import LedgerWriter
from dsv4_runtime.vllm_plugin import forking, loading
from dsv4_runtime.vllm_plugin.kernels import choice
from dsv4_runtime.vllm_plugin.kernels.v033 import COLLECTIVES, MODEL_LOADER, PARALLEL_STATE
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, after_import, apply_after_import, is_cpu_build, refuse

_LOGGER = logging.getLogger("vllm.dsv4")


@functools.cache  # the first collective of a process creates the file
def _ledger() -> LedgerWriter | None:
    try:
        return LedgerWriter()
    except OSError as error:
        _LOGGER.warning("collectives are not counted, so a hang will have no culprit: %s", error)
        return None


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *rest: Any, **more: Any) -> Any:
        if self.world_size > 1 and (ledger := _ledger()) is not None:
            ledger.begin()
        return original(self, *rest, **more)

    return method


def _count_collectives() -> PatchOutcome:
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import GroupCoordinator

    for name in COLLECTIVES:
        method = inspect.getattr_static(GroupCoordinator, name, None)
        if not inspect.isfunction(method) or next(iter(inspect.signature(method).parameters)) != "self":
            raise refuse(f"{PARALLEL_STATE}.GroupCoordinator.{name}", "there is no method of that name")
    for name in COLLECTIVES:
        setattr(GroupCoordinator, name, _counted(getattr(GroupCoordinator, name)))
    return PatchOutcome.APPLIED


COLLECTIVE_LEDGER = Patch(
    module=PARALLEL_STATE,
    symbol="GroupCoordinator",
    why=(
        "in a hang every rank but one waits inside a collective that this rank has not entered; the count identifies"
        " it, and vLLM keeps none. Costs less than a microsecond per collective started from Python"
    ),
    upstream="none; NCCL's flight recorder does the same for NCCL only, and writes only on a timeout",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM reports the progress of each worker",
    apply=_count_collectives,
)

PATCHES: tuple[Patch, ...] = (COLLECTIVE_LEDGER, forking.MODEL_INSPECTION, forking.FORKED_ENGINE)


@functools.cache  # vLLM may call a plugin several times per process
def register() -> None:
    """Register the patches, the loader and, on CUDA builds, the kernel hooks.

    Each is applied after the import of its module. Imports no module of vLLM.

    Raises:
        PatchRefusedError: a module is already imported and its symbol differs.
        KernelChoiceError: `DSV4_KERNELS` contains an unknown name.
    """
    apply_after_import(PATCHES)
    after_import(MODEL_LOADER, loading.attach)
    if not is_cpu_build():
        loading.install_reserve()
        choice.install()
