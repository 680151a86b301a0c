"""Keeps torch's precompiled C++ header where its compiled kernels are kept, on the development platform only."""

import os
from pathlib import Path

from dsv4_runtime.vllm_plugin import platform
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, refuse

_MODULE = "torch._inductor.codecache"
_SYMBOL = "_HEADER_DIR"


def _apply() -> PatchOutcome:
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if platform.plugin() is None or not kept:
        return PatchOutcome.NOT_WANTED
    from torch._inductor import codecache

    reader = getattr(codecache, "_precompile_header", None)
    if not isinstance(getattr(codecache, _SYMBOL, None), str) or reader is None:
        raise refuse(f"{_MODULE}.{_SYMBOL}", "the module has no such directory, or nothing that precompiles a header")
    if not {_SYMBOL, "_HEADER_LOCK_DIR"} <= set(getattr(reader, "__wrapped__", reader).__code__.co_names):
        raise refuse(f"{_MODULE}.{_SYMBOL}", "_precompile_header does not read it, so headers are kept in another way")
    headers = Path(kept, "precompiled_headers")
    codecache._HEADER_DIR = str(headers)
    codecache._HEADER_LOCK_DIR = str(headers / "locks")
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "torch compiles a header before it looks at its first compiled kernel, and keeps it below /tmp whatever"
        " TORCHINDUCTOR_CACHE_DIR says: a new pod spent 8 s of its first token on it although all kernels were there"
    ),
    upstream="as intended there: the header shall outlive `fresh_cache`",
    versions="torch 2.13.0",
    obsolete_when="torch keeps the header in the cache directory, or asks for it only when it compiles",
    apply=_apply,
)
