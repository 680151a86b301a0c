"""Imported by each new worker process of Ray (`RAY_preload_python_modules`): imports vLLM in future engine workers.

Ray's own idle processes have no runtime environment and never become engine workers, so they import nothing.
"""

import importlib
import sys
from collections.abc import Sequence

from dsv4_runtime.vllm_plugin.warm_pool import import_modules, slow_imports

_HASH = "--runtime-env-hash="


def has_environment(arguments: Sequence[str]) -> bool:
    """Return whether the command line of a worker process names a runtime environment."""
    hashes = [one.removeprefix(_HASH) for one in arguments if one.startswith(_HASH)]
    return any(found not in ("", "0") for found in hashes)


if has_environment(sys.argv):
    with slow_imports():
        # The module that unpickling of the worker's class imports first: patches see the usual order of imports.
        from dsv4_runtime.vllm_plugin.kernels import v033
        from dsv4_runtime.vllm_plugin.patch import is_cpu_build

        importlib.import_module(v033.RAY_EXECUTOR)
        if not is_cpu_build():
            # An initialized driver holds no memory, and this process is not forked.
            import_modules(v033.QUANTIZATION_MODULES + v033.WORKER_MODULES)
