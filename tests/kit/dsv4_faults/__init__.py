"""Fault injection inside vLLM's workers: a plugin of vLLM, active only if `DSV4_FAULT_FILE` is set.

A hang, an exception or invalid logits inside a step cannot be caused from outside. Each worker checks for the file
before each step. The file contains one order, a JSON object with `kind`, `rank` and, depending on it, `seconds` or
`mebibytes`; the worker of that rank removes it and executes it once. An order with `prompt`, a list of token ids, stays
and is executed at the start of each request with exactly this prompt. So does an order with `"structured": true`, in
each step with a request for structured output:

| kind | effect in the worker |
|---|---|
| `raise` | an exception |
| `hang` | sleeps for `seconds` |
| `spin` | keeps the processor busy for `seconds`, like the compilation of a kernel |
| `nan` | from now on the worker's part of the logits is NaN |
| `astray` | on CUDA: a kernel writes to an unmapped address |
| `pace` | from now on every step takes `seconds` at least, so that the speed of the machine does not matter |
| `eat` | allocates and writes `mebibytes` of memory, like a leak, and fails if the process is not ended before |

Orders without `rank` are those of `dsv4_faults.defects`: wrong output for as long as they are in the file.

On a CPU build the plugin requires the development platform (`DSV4_DEV_PLATFORM=1`).
"""

import functools
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from dsv4_faults import defects
from dsv4_runtime.vllm_plugin.patch import after_import, expect_parameters, is_cpu_build

FILE_VARIABLE = "DSV4_FAULT_FILE"
_PLATFORM_VARIABLE = "DSV4_DEV_PLATFORM"
_WORKER = "vllm.v1.worker.gpu_worker"
_CHUNK = 16 * 2**20
_LOGGER = logging.getLogger("vllm.dsv4")


class InjectedError(RuntimeError):
    """Exception of an order of kind `raise`."""


def take(file: Path, rank: int, scheduled: Any) -> dict[str, Any] | None:
    """Return the order in `file` for this worker and step, or None; removes the file unless the order names requests.

    Args:
        file: may be missing.
        rank: of the worker.
        scheduled: vLLM's `SchedulerOutput`.

    Raises:
        ValueError: the file contains no order (write it elsewhere and move it into place).
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    order = json.loads(text)
    if not isinstance(order, dict) or order.get("rank") != rank:
        return None
    if order.get("structured"):
        return order if scheduled.has_structured_output_requests else None
    if "prompt" in order:
        begun = [request.prompt_token_ids for request in scheduled.scheduled_new_reqs]
        return order if order["prompt"] in begun else None
    file.unlink()
    return order


def obey(order: dict[str, Any], worker: Any) -> None:
    """Execute `order` in `worker`, an instance of vLLM's `Worker`.

    Raises:
        InjectedError: an order of kind `raise`.
        MemoryError: the memory was allocated, and the process was not ended.
        ValueError: unknown kind.
    """
    kind = order["kind"]
    _LOGGER.warning("Fault injected on rank %s: %s", order["rank"], kind)
    if kind == "raise":
        raise InjectedError("injected by the fault suite")
    if kind == "hang":
        time.sleep(order["seconds"])
    elif kind == "spin":
        until = time.monotonic() + order["seconds"]
        while time.monotonic() < until:
            pass
    elif kind == "pace":
        worker.pace = order["seconds"]
    elif kind == "nan":
        _poison(worker.model_runner.model)
    elif kind == "astray":
        from dsv4_faults import illegal_address

        illegal_address.launch()
    elif kind == "eat":
        # Not zeros: unwritten pages are not allocated.
        taken = [b"\x01" * _CHUNK for _ in range(order["mebibytes"] * 2**20 // _CHUNK)]
        raise MemoryError(f"{len(taken)} chunks of {_CHUNK} bytes taken, and the process still runs")
    else:
        raise ValueError(f"{FILE_VARIABLE}: unknown kind {kind!r}")


def _poison(model: Any) -> None:
    """Replace the hidden states from which `model` computes its part of the logits by NaN."""
    original = model.compute_logits

    def compute_logits(hidden: Any, *rest: Any, **more: Any) -> Any:
        return original(hidden * float("nan"), *rest, **more)

    model.compute_logits = compute_logits


@functools.cache  # vLLM may call a plugin several times per process
def register() -> None:
    """Patch vLLM after the import of its modules if fault injection is enabled."""
    file = os.environ.get(FILE_VARIABLE)
    if file and (os.environ.get(_PLATFORM_VARIABLE) == "1" or not is_cpu_build()):
        after_import(_WORKER, functools.partial(attach, Path(file)))
        defects.register(Path(file))


def attach(file: Path) -> None:
    """Check for an order in `file` before each step of vLLM's worker."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.execute_model
    expect_parameters("Worker.execute_model", original, ["self", "scheduler_output"])

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        defects.switch(self, file)
        if (order := take(file, self.rank, scheduler_output)) is not None:
            obey(order, self)
        if not (pace := getattr(self, "pace", 0.0)):
            return original(self, scheduler_output)
        until = time.monotonic() + pace
        output = original(self, scheduler_output)
        time.sleep(max(0.0, until - time.monotonic()))
        return output

    Worker.execute_model = execute_model
