"""Imported by each new worker process of Ray (`RAY_preload_python_modules`): imports vLLM in future engine workers.

Ray's own idle processes have no runtime environment and never become engine workers, so they import nothing.
"""

import importlib
import sys
from collections.abc import Sequence

from dsv4_runtime.vllm_plugin.warm_pool import slow_imports

_HASH = "--runtime-env-hash="


def has_environment(arguments: Sequence[str]) -> bool:
    """Return whether the command line of a worker process names a runtime environment."""
    hashes = [one.removeprefix(_HASH) for one in arguments if one.startswith(_HASH)]
    return any(found not in ("", "0") for found in hashes)


if has_environment(sys.argv):
    with slow_imports():
        # The module that unpickling of the worker's class imports first: patches see the usual order of imports.
        from dsv4_runtime.vllm_plugin.kernels.v033 import RAY_EXECUTOR

        importlib.import_module(RAY_EXECUTOR)
