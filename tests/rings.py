"""Runs the test rings (docs/development.md) that this machine supports, and prints the skipped ones with the reason.

`DSV4_TEST_REQUIRE=unit,engine` (or `all`) makes it a failure to skip such a ring, and builds the components of the
cluster ring. Arguments are passed on to pytest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
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
    paths: tuple[str, ...]
    """Its files and folders."""
    lacks: Callable[[], str | None]
    """Reason why this machine cannot run it; None if it can."""
    minutes: int
    """Usual duration on two processors (AMD EPYC, 2026-11-28)."""
    options: tuple[str, ...] = ()
    """Options of pytest."""
    computes: bool = False
    """Its tests only compute: it runs beside the other rings, with the processor time that they leave."""


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
    if missing := build.unbuilt(*build.REQUIRED):
        return f"not built yet: {', '.join(missing)} (`make cluster-build`, ten minutes and more)"
    return None


def gpu() -> str | None:
    from needs import gpu as lacking

    return lacking()


VLLM = "unit/vllm_plugin"
CODE = (
    *(f"unit/{name}" for name in ("api", "builders", "lifecycle", "nano", "planning")),
    *(f"{VLLM}/test_{name}.py" for name in ("faults", "prefill", "reserve", "retained", "with_vllm")),
    *(f"{VLLM}/kernels/test_{name}.py" for name in ("cache_ahead", "decoding", "expert_sum", "hooks", "padding")),
    *(f"{VLLM}/kernels/test_{name}.py" for name in ("projections", "reloading", "routing", "sm12x")),
)
"""Tests in the folder of the unit ring that only compute, in pure code or in the installed vLLM, with bounds of several
minutes."""

RINGS = (
    # Tests wait two thirds of the time for processes, bounds and clocks. Each worker runs whole files, so that their
    # fixtures are created once.
    Ring(
        "unit",
        ("unit",),
        nothing,
        8,
        options=(
            *("-n", "5", "--dist", "loadfile", "--no-loadscope-reorder"),
            *(f"--ignore={HERE / path}" for path in CODE),
        ),
    ),
    # In one process, so that one process imports vLLM for all tests that need a fork of it.
    Ring("code", CODE, nothing, 5, options=("--timeout=1800",), computes=True),
    Ring(
        "kernels",
        ("kernels",),
        lambda: modules("torch", "triton"),
        4,
        options=("-n", "2", "-m", "not long"),
        computes=True,
    ),
    # `make engine-test`, `make cluster-test` and `make release-check` also run the tests marked `long`.
    Ring("engine", ("engine",), engine, 13, options=("-m", "not long")),
    # Tests wait most of the time for the control plane.
    Ring("cluster", ("cluster",), cluster, 10, options=("-n", "2", "-m", "not long")),
    # Serves the Nano model on this machine's GPUs, with the vLLM that is installed for them.
    Ring("gpu", ("gpu",), gpu, 10, options=("-s",)),
)


def required() -> list[str]:
    """Return the names of the rings that must not be skipped."""
    named = os.environ.get("DSV4_TEST_REQUIRE", "")
    return [ring.name for ring in RINGS] if named == "all" else named.split(",")


class Run:
    """Pytest with the tests of one ring, in a separate process because Triton selects its interpreter once."""

    def __init__(self, ring: Ring, *, beside: bool = False) -> None:
        """Start it; `beside` other rings with the lowest priority, and its output is printed at its end."""
        self.ring, self._begun = ring, time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", *ring.options, *sys.argv[1:]]
        command += [str(HERE / path) for path in ring.paths]
        if beside:
            print(f"ring {ring.name}: runs beside the others", flush=True)
            command = ["nice", "-n", "19", *command]
        else:
            print(f"ring {ring.name}: runs, about {ring.minutes} minutes on two processors", flush=True)
        self._output = tempfile.TemporaryFile() if beside else None  # noqa: SIM115 (open until `passed`)
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output and subprocess.STDOUT)
        if beside:
            # Ray's waiting workers import with nice 15 and must not compete with it; refused in some sandboxes.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))

    def passed(self) -> bool:
        """Wait for its end, and return whether all tests passed."""
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        if self._output is not None:
            self._output.seek(0)
            print(self._output.read().decode(errors="replace"), end="", flush=True)
        seconds = time.monotonic() - self._begun
        # With the time of ended child processes, including the child processes that these waited for.
        times = f"{seconds:.0f} s, with {used.ru_utime + used.ru_stime:.0f} s of processor time"
        print(f"ring {self.ring.name}: {'failed' if code else 'passed'} after {times}", flush=True)
        return code == 0

    def end(self) -> None:
        """Interrupt it if it runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()


def main() -> int:
    sys.path[:0] = [str(KIT), str(HERE / "gpu")]
    # Container images often set it. Without kept bytecode each process of a test compiles dsv4 again, and each pytest
    # the tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    chosen, left_out, failed = [], [], []

    def leave_out(ring: Ring, reason: str) -> None:
        left_out.append(ring.name)
        print(f"ring {ring.name}: left out, {reason}", flush=True)

    for ring in RINGS:
        if reason := ring.lacks():
            leave_out(ring, reason)
        else:
            chosen.append(ring)
    # With a GPU, kernels are tested on it, and would disturb the times of the ring of GPUs.
    beside = [] if any(ring.name == "gpu" for ring in chosen) else [ring for ring in chosen if ring.computes]
    alone = [ring for ring in chosen if ring not in beside]
    if len(chosen) > 1:
        print(f"{len(chosen)} rings, about {sum(ring.minutes for ring in alone)} minutes on two processors", flush=True)
    aside = [Run(ring, beside=True) for ring in beside]
    try:
        failed += [ring.name for ring in alone if not Run(ring).passed()]
        failed += [run.ring.name for run in aside if not run.passed()]
    finally:
        for run in aside:
            run.end()
    if wanted := [name for name in required() if name in left_out]:
        print(
            f"DSV4_TEST_REQUIRE={os.environ['DSV4_TEST_REQUIRE']}, and left out: {', '.join(wanted)}", file=sys.stderr
        )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed or wanted))


if __name__ == "__main__":
    sys.exit(main())
