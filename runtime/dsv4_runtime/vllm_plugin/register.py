"""Entry point `vllm.general_plugins`: called by vLLM in the API server, the engine core and every worker."""

import functools

from dsv4_runtime.vllm_plugin import loading, patch, reserve
from dsv4_runtime.vllm_plugin.kernels import attachments
from dsv4_runtime.vllm_plugin.patches import PATCHES


@functools.cache  # vLLM may call a plugin several times per process
def register() -> None:
    """Register the patches, the loader and, on CUDA builds, the kernel hooks.

    Each is applied after the import of its module. Imports no module of vLLM.

    Raises:
        PatchRefusedError: a module is already imported and its symbol differs.
        KernelChoiceError: `DSV4_KERNELS` contains an unknown name.
    """
    patch.apply_after_import(PATCHES)
    patch.after_import(loading.MODULE, loading.attach)
    if not patch.is_cpu_build():
        reserve.install()
        attachments.install()
