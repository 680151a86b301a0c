"""Entry points `vllm.platform_plugins` and `vllm.general_plugins` of the CPU development build.

vLLM's own `CpuPlatform` names no Ray resource, so its Ray executor refuses to run. The development platform names
`GPU`; the Ray nodes of a development group announce one each (`ray start --num-gpus 1`), as nodes with GPUs do, so that
placement, ranks and failure handling are those of production. Both entry points are inactive on a CUDA build of vLLM,
the platform also without `DSV4_DEV_PLATFORM=1`.
"""

import functools
import os

from dsv4_runtime.vllm_plugin import patch

SWITCH = "DSV4_DEV_PLATFORM"


def platform() -> str | None:
    """Return the qualified name of the platform, or None: vLLM then detects its own."""
    if os.environ.get(SWITCH) != "1" or not patch.is_cpu_build():
        return None
    return "dsv4_runtime.vllm_cpu.platform.DevCpuPlatform"


@functools.cache  # vLLM may call a plugin several times per process
def register() -> None:
    """Register the patches of the CPU build; each is applied after its module's import.

    Raises:
        PatchRefusedError: a module is already imported and its symbol differs.
    """
    if patch.is_cpu_build():
        from dsv4_runtime.vllm_cpu.patches import PATCHES

        patch.apply_after_import(PATCHES)
