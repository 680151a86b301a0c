"""Imported by each new worker process of Ray (`RAY_preload_python_modules`): vLLM, where vLLM's workers will be.

Ray's own idle processes have no runtime environment and never become one of vLLM's, so they import nothing.
"""

import sys
from collections.abc import Sequence

from dsv4_runtime.vllm_plugin.brake import slow_imports

_HASH = "--runtime-env-hash="


def has_environment(arguments: Sequence[str]) -> bool:
    """Tell whether a worker process with this command line was started for a runtime environment."""
    hashes = [one.removeprefix(_HASH) for one in arguments if one.startswith(_HASH)]
    return any(found not in ("", "0") for found in hashes)


if has_environment(sys.argv):
    with slow_imports():
        # What unpickling the worker's class imports first; nothing of vLLM before it, so that patches meet the modules
        # as ever.
        import vllm.v1.executor.ray_executor_v2  # noqa: F401
