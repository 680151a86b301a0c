"""Runs the test rings (docs/development.md) that this machine can run, and says which ones it left out and why.

The cluster ring is not among them: it builds Kubernetes first. `make cluster-test` runs it.

`DSV4_TEST_REQUIRE=all` makes a ring that is left out a failure. Arguments go on to pytest.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENGINE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Ring:
    name: str
    folder: str
    lacks: Callable[[], str | None]
    """Why this machine cannot run it; None if it can."""


def nothing() -> str | None:
    return None


def modules(*names: str) -> str | None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def engine() -> str | None:
    if reason := modules("ray", "vllm"):
        return reason
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < ENGINE_BYTES:
        return f"it needs {ENGINE_BYTES / 2**30:.0f} GiB of memory, this machine has {memory / 2**30:.1f}"
    from dsv4_operator.backends.local import network

    # Tried in a process of its own: it changes the process that tries.
    code = f"from {network.__name__} import enter_private_network as enter; enter()"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


RINGS = (
    Ring("unit", "unit", nothing),
    Ring("kernels", "kernels", lambda: modules("torch", "triton")),
    Ring("engine", "engine", engine),
)


def main() -> int:
    required = os.environ.get("DSV4_TEST_REQUIRE") == "all"
    chosen, left_out = [], []
    for ring in RINGS:
        if reason := ring.lacks():
            left_out.append(ring.name)
            print(f"ring {ring.name}: left out, {reason}", flush=True)
        elif (HERE / ring.folder).is_dir():
            chosen.append(ring)
    if left_out and required:
        print(f"DSV4_TEST_REQUIRE=all, and left out: {', '.join(left_out)}", file=sys.stderr)
        return 1
    failed = []
    for ring in chosen:
        # A session each: Triton decides for or against its interpreter once for a whole process.
        print(f"ring {ring.name}: runs", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *sys.argv[1:], str(HERE / ring.folder)]
        if subprocess.run(command, check=False).returncode:
            failed.append(ring.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
