"""Try providers of operations, each in a process of its own, since a wrong kernel may end it or never return.

    python -m dsv4_runtime.vllm_plugin.kernels.child FOLDER < jobs.json

This process imports torch, Triton and the operations once, and forks one for each provider. What only some need, they
import themselves: vLLM's modules take 15 s on a machine where torch takes 3. Each writes a line of JSON
(`evidence.Seen`) to a file in FOLDER for each trial as soon as it is over. First everything is compiled, run once and
compared, beside other providers; what was right is then timed while holding FOLDER/lock, so that no two are timed at
once.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsv4_kernels.registry import as_outputs
from dsv4_kernels.testing.harness import compare, fresh
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.forking import end_with_parent
from dsv4_runtime.vllm_plugin.kernels.evidence import ABSENT, WRONG, Seen, Trial
from dsv4_runtime.vllm_plugin.kernels.providers import find
from dsv4_runtime.vllm_plugin.kernels.trial import output

ROUNDS = 15
_FLUSH_BYTES = 256 << 20


def try_one(op: Op, name: str, trial: Trial, device: torch.device) -> tuple[Seen, Callable[[], Any] | None]:
    """Return what the provider's result was like, and a call to time if it was right, or is known to be rough."""
    compared = False
    try:
        row, provider = find(trial.operation, name)
        reason = provider.missing()
        if reason is not None:
            return Seen(op, trial.name, name, fault=f"{ABSENT}: {reason}"), None
        inputs = row.make_inputs(trial.params, device, 0)
        expected = as_outputs(row.reference(**fresh(row, inputs), exact=True))
        run = provider.make(trial.params, device)
        found = as_outputs(run(**fresh(row, inputs)))
        results = tuple(None if out is None else out.clone() for out in found)
        torch.cuda.synchronize()
        compared = True
        errors = compare(row, results, expected)
    except Exception as error:
        # A provider's own assertions are no comparison.
        if compared and isinstance(error, AssertionError):
            why = f"it {provider.rough}: {error}" if provider.rough else str(error)
            rough = (lambda: run(**inputs)) if provider.rough else None
            return Seen(op, trial.name, name, fault=f"{WRONG}{why}"[:300]), rough
        return Seen(op, trial.name, name, fault=f"{type(error).__name__}: {error}".splitlines()[0][:300]), None
    return Seen(op, trial.name, name, error=max(e.rms for e in errors.values())), lambda: run(**inputs)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replay of `call` as a CUDA graph, as an engine runs it; `call` itself if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return lambda: graph.replay()


def time_cold(call: Callable[[], Any]) -> float:
    """Return the median microseconds of `call` with nothing of its inputs in the L2 cache."""
    run = captured(call)
    flush = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    marks = []
    for _ in range(ROUNDS + 2):
        # Reading empties the cache; writing would leave lines to write back inside of the timed span.
        torch.sum(flush, dim=0, out=total)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in marks[2:]))


def try_provider(op: Op, name: str, tried: Sequence[Trial], lock: Path) -> None:
    """Print what was seen of the provider in each trial: whether it is right, then how fast, alone on the card."""
    device = torch.device("cuda", torch.cuda.current_device())
    right = []
    for trial in tried:
        seen, call = try_one(op, name, trial, device)
        if call is None:
            print(json.dumps(seen.to_dict()), flush=True)
        else:
            right.append((seen, call))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for seen, call in right:
            print(json.dumps({**seen.to_dict(), "microseconds": time_cold(call)}), flush=True)


def _fork(job: Mapping[str, Any], folder: Path) -> int:
    """Start the process of one provider, its output in `folder`; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        end_with_parent()
        op, name = Op(job["op"]), job["provider"]
        sys.stdout = output(folder, op, name).open("w")
        tried = [Trial(op, trial["name"], trial["operation"], trial["params"]) for trial in job["trials"]]
        try_provider(op, name, tried, folder / "lock")
        sys.stdout.flush()
        status = 0
    finally:
        # Without the parent's own clean-up.
        os._exit(status)


def main() -> None:
    """Try the providers that standard input names, side by side, each in a process forked from this one."""
    end_with_parent()
    jobs, folder = json.load(sys.stdin), Path(sys.argv[1])
    if torch.cuda.is_initialized():
        raise SystemExit("an import initialised CUDA, which does not live through a fork")
    running = {_fork(job, folder): output(folder, Op(job["op"]), job["provider"]) for job in jobs}
    while running:
        pid, status = os.wait()
        if (place := running.pop(pid, None)) is not None:
            place.with_suffix(".ended").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
