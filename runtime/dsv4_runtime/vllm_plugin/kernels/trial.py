"""Try all providers side by side within a bound, keep what was seen, and say what to use.

    python -m dsv4_runtime.vllm_plugin.kernels.trial CONFIG.JSON --tensor-parallel 2

Each provider of each operation runs in a process of its own (`child`). One that ends by itself, or that is not done and
is killed when the time is up, is excluded by what was seen of it. What was seen is kept by card, driver, versions
and shapes, and is not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsv4_runtime.contract.kernels import KernelChoice, Op
from dsv4_runtime.vllm_plugin.kernels import providers
from dsv4_runtime.vllm_plugin.kernels.evidence import Seen, Standing, Trial, choose, standings, trials

SECONDS = 20.0
"""Bound of all trials together, without what is kept."""
CHILD = (sys.executable, "-m", "dsv4_runtime.vllm_plugin.kernels.child")
DIRECTORY = "DSV4_KERNELS_CACHE"
"""Variable: where what was seen is kept; default `~/.cache/dsv4/kernels`."""


@dataclass(frozen=True)
class Evidence:
    """Observations on `machine` (card, driver, versions), the providers' standings, and the choice that follows."""

    machine: Mapping[str, str]
    seen: tuple[Seen, ...]
    standings: tuple[Standing, ...]
    choice: KernelChoice
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "machine": dict(self.machine),
            "choice": {str(op): self.choice.provider(op) for op in Op},
            "seconds": round(self.seconds, 1),
            "standings": [
                {"op": s.op, "provider": s.provider, "slowness": s.slowness, "excluded": s.excluded}
                for s in self.standings
            ],
            "seen": [one.to_dict() for one in self.seen],
        }


def machine() -> dict[str, str]:
    """Return what the result of a trial depends on besides the shapes: card, driver, versions."""
    import torch

    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {"gpu": card.name, "capability": f"{card.major}.{card.minor}", "cuda": str(torch.version.cuda)}
    with contextlib.suppress(OSError):
        found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    for package in ("torch", "triton", "vllm", "flashinfer-python", "b12x", "dsv4", "dsv4-kernels"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def evidence(config: Mapping[str, Any], tensor_parallel: int, seconds: float = SECONDS) -> Evidence:
    """Return the evidence for a rank of the model of `config`, kept from before or gathered now.

    Processes that ask at once (the ranks of one machine) wait for the first.
    """
    tried, here = trials(config, tensor_parallel), machine()
    key = json.dumps([here, [(t.op, t.name, dict(t.params)) for t in tried]], sort_keys=True)
    folder = Path(os.environ.get(DIRECTORY) or Path.home() / ".cache" / "dsv4" / "kernels")
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _kept(place)
        begun = time.monotonic()
        seen = kept if kept is not None else gather(tried, seconds)
        if kept is None:
            fresh = place.with_suffix(".new")
            fresh.write_text(json.dumps([one.to_dict() for one in seen]))
            fresh.rename(place)
    found = standings(seen, tried)
    eight = float(here["capability"]) >= 10
    return Evidence(here, seen, found, choose(found, eight_bit_activations=eight), time.monotonic() - begun)


def _kept(place: Path) -> tuple[Seen, ...] | None:
    try:
        return tuple(Seen(**{**one, "op": Op(one["op"])}) for one in json.loads(place.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def output(folder: Path, op: Op, name: str) -> Path:
    """Return where the process of a provider writes; its exit status goes beside it, with the suffix `.ended`."""
    return folder / f"{op}-{name}"


def gather(tried: Sequence[Trial], seconds: float, child: Sequence[str] = CHILD) -> tuple[Seen, ...]:
    """Run every provider of every operation that has trials; end what is not done after `seconds`.

    `child` is the command that gets a folder for the results as argument and the providers with their trials as JSON.
    """
    jobs = [
        (op, name, [trial for trial in tried if trial.op is op])
        for op in Op
        if any(trial.op is op for trial in tried)
        for name in providers.names(op)
    ]
    with tempfile.TemporaryDirectory(prefix="dsv4-kernels-") as place:
        folder = Path(place)
        ended = _run_all(jobs, seconds, child, folder)
        seen: list[Seen] = []
        for op, name, trials_of in jobs:
            written = output(folder, op, name)
            status = written.with_suffix(".ended")
            own = int(status.read_text()) if status.exists() else ended or None
            text = written.read_text() if written.exists() else ""
            seen += _results(op, name, text, trials_of, own, seconds)
    return tuple(seen)


def _run_all(
    jobs: Sequence[tuple[Op, str, Sequence[Trial]]], seconds: float, child: Sequence[str], folder: Path
) -> int | None:
    """Run the providers for `seconds` at most; return how the process that starts them ended, None if it had not."""
    wanted = folder / "jobs.json"
    wanted.write_text(
        json.dumps(
            [
                {
                    "op": op,
                    "provider": name,
                    "trials": [{"name": t.name, "operation": t.operation, "params": dict(t.params)} for t in trials_of],
                }
                for op, name, trials_of in jobs
            ]
        )
    )
    with wanted.open() as given:
        process = subprocess.Popen(
            [*child, str(folder)],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    ended = process.poll()
    # With all that it started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return ended


def _results(op: Op, name: str, text: str, tried: Sequence[Trial], ended: int | None, seconds: float) -> list[Seen]:
    """Return what a child printed, and for trials that it did not get to, why."""
    seen = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            one = json.loads(line)
            seen.append(Seen(**{**one, "op": Op(one["op"])}))
    if ended is None:
        fault = f"not done after {seconds:.0f} s"
    elif ended < 0:
        fault = f"its process was ended by {signal.Signals(-ended).name}"
    else:
        fault = f"its process ended with {ended}"
    done = {one.trial for one in seen}
    return seen + [Seen(op, trial.name, name, fault=fault) for trial in tried if trial.name not in done]


def main() -> None:
    """Print the evidence for a model's configuration as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="the model's config.json")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    found = evidence(json.loads(options.config.read_text()), options.tensor_parallel, options.seconds)
    print(json.dumps(found.to_dict(), indent=1))


if __name__ == "__main__":
    main()
