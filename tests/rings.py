"""Runs the test rings (docs/development.md) that this machine supports, and prints the skipped ones with the reason.

`DSV4_TEST_REQUIRE=unit,engine` (or `all`) makes it a failure to skip such a ring, and builds the components of the
cluster ring. Arguments are passed on to pytest.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENGINE_BYTES = 8 * 2**30
KIT = HERE / "cluster"
"""Folder of the package `clusterkit`."""


@dataclass(frozen=True)
class Ring:
    name: str
    folder: str
    lacks: Callable[[], str | None]
    """Reason why this machine cannot run it; None if it can."""
    minutes: int
    """Usual duration on two processors (AMD EPYC, 2026-11-26)."""
    options: tuple[str, ...] = ()
    """Options of pytest."""


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

    # In a separate process, because it changes the namespaces of its process.
    code = f"from {network.__name__} import enter_private_network as enter; enter()"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


def cluster() -> str | None:
    if reason := engine():
        return reason
    from clusterkit import build, needs

    if reason := needs.lacks(nodes=True, images=True):
        return reason
    if "cluster" in required():
        # Built before its first test.
        return None
    # Without Prometheus or KubeRay only their tests are skipped.
    needed = {name: module for name, module in build.MODULES.items() if name not in ("kuberay", "prometheus")}
    if missing := [name for name, module in needed.items() if not build.folder(module).is_dir()]:
        return f"not built yet: {', '.join(missing)} (`make cluster-build`, ten minutes and more)"
    return None


def gpu() -> str | None:
    from needs import gpu as lacking

    return lacking()


RINGS = (
    # Tests wait half of the time for processes, bounds and clocks. Each worker runs whole files, so that their fixtures
    # are created once.
    Ring("unit", "unit", nothing, 10, options=("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")),
    Ring("kernels", "kernels", lambda: modules("torch", "triton"), 4, options=("-n", "2")),
    # `make engine-test` and `make cluster-test` also run the tests marked `long`.
    Ring("engine", "engine", engine, 14, options=("-m", "not long")),
    # Tests wait most of the time for the control plane.
    Ring("cluster", "cluster", cluster, 10, options=("-n", "2", "-m", "not long")),
    # Serves the Nano model on this machine's GPUs, with the vLLM that is installed for them.
    Ring("gpu", "gpu", gpu, 10, options=("-s",)),
)


def required() -> list[str]:
    """Return the names of the rings that must not be skipped."""
    named = os.environ.get("DSV4_TEST_REQUIRE", "")
    return [ring.name for ring in RINGS] if named == "all" else named.split(",")


def passes(ring: Ring) -> bool:
    print(f"ring {ring.name}: runs, about {ring.minutes} minutes on two processors", flush=True)
    begun, used = time.monotonic(), _processor_seconds()
    # A separate process per ring, because Triton selects its interpreter once per process.
    command = [sys.executable, "-m", "pytest", "-q", *ring.options, *sys.argv[1:], str(HERE / ring.folder)]
    code = subprocess.run(command, check=False).returncode
    times = f"{time.monotonic() - begun:.0f} s, with {_processor_seconds() - used:.0f} s of processor time"
    print(f"ring {ring.name}: {'failed' if code else 'passed'} after {times}", flush=True)
    return code == 0


def _processor_seconds() -> float:
    """Return the processor time of ended child processes, including the child processes that these waited for."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    sys.path[:0] = [str(KIT), str(HERE / "gpu")]
    chosen, left_out, failed = [], [], []

    def leave_out(ring: Ring, reason: str) -> None:
        left_out.append(ring.name)
        print(f"ring {ring.name}: left out, {reason}", flush=True)

    for ring in RINGS:
        if reason := ring.lacks():
            leave_out(ring, reason)
        else:
            chosen.append(ring)
    if len(chosen) > 1:
        print(
            f"{len(chosen)} rings, about {sum(ring.minutes for ring in chosen)} minutes on two processors", flush=True
        )
    for ring in chosen:
        if not passes(ring):
            failed.append(ring.name)
    if wanted := [name for name in required() if name in left_out]:
        print(
            f"DSV4_TEST_REQUIRE={os.environ['DSV4_TEST_REQUIRE']}, and left out: {', '.join(wanted)}", file=sys.stderr
        )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed or wanted))


if __name__ == "__main__":
    sys.exit(main())
