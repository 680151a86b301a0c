"""Entry point `vllm.general_plugins`: called by vLLM in the API server, the engine core and every worker."""

import functools
import logging

from dsv4_runtime.vllm_plugin import loading, platform, reserve
from dsv4_runtime.vllm_plugin.after_import import after_import
from dsv4_runtime.vllm_plugin.kernels import attachments
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, vllm_version
from dsv4_runtime.vllm_plugin.patches import PATCHES

_LOGGER = logging.getLogger("vllm.dsv4")  # under vLLM's logger, so it is shown as vLLM's own lines are


def _apply(patch: Patch) -> None:
    outcome = patch.apply()
    if outcome is PatchOutcome.NOT_NEEDED:
        _LOGGER.info("Patch of %s can be deleted: %s does it itself", patch.symbol, vllm_version())
    else:
        _LOGGER.debug("Patch of %s: %s", patch.symbol, outcome)


@functools.cache  # vLLM may call a plugin more than once in one process
def register() -> None:
    """Arrange for every patch, the loader, and on CUDA builds every kernel hook, to be applied to vLLM's modules.

    Each when vLLM imports the module that it is for.

    Imports nothing of vLLM now.

    Raises:
        PatchRefusedError: a module is already imported and its symbol is not the one that the patch knows.
        KernelChoiceError: `DSV4_KERNELS` names something that is not there.
    """
    for patch in PATCHES:
        after_import(patch.module, functools.partial(_apply, patch))
    after_import(loading.MODULE, loading.attach)
    if not platform.is_cpu_build():
        reserve.install()
        attachments.install()
