"""Lets the tests hurt an engine from the inside, on the development platform or on CUDA, and only where asked to.

A hang, an exception or garbage inside a step cannot be caused from outside. With `DSV4_FAULT_FILE` set, each worker
looks for that file before each step. The file holds one order, a JSON object with `kind`, `rank` and, where it applies,
`seconds` or `mebibytes`; the worker of that rank removes it and obeys once. An order with `prompt`, a list of token
ids, stays, and is obeyed whenever a request with just this prompt begins:

| kind | what happens in the worker |
|---|---|
| `raise` | an exception |
| `hang` | nothing for `seconds`, without using the processor |
| `spin` | the processor is busy for `seconds`, as a kernel's compilation would keep it |
| `nan` | from now on the worker's part of the logits is not a number |
| `astray` | on CUDA: a kernel writes to an address that is nobody's |
| `eat` | it allocates and writes `mebibytes` of memory, as a leak would, and fails if nobody ends it before |
"""

import functools
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from dsv4_runtime.vllm_plugin import platform
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

FILE_VARIABLE = "DSV4_FAULT_FILE"
_SYMBOL = "Worker.execute_model"
_CHUNK = 16 * 2**20
_LOGGER = logging.getLogger("vllm.dsv4")


class InjectedError(RuntimeError):
    """Exception that an order of kind `raise` raises."""


def take(file: Path, rank: int, scheduled: Any) -> dict[str, Any] | None:
    """Return the order in `file` if there is one for this worker and step; it is removed unless it is for a prompt.

    Args:
        file: may not be there.
        rank: of the worker.
        scheduled: vLLM's `SchedulerOutput`.

    Raises:
        ValueError: the file holds no order (it must be written elsewhere and moved there as a whole).
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    order = json.loads(text)
    if not isinstance(order, dict) or order.get("rank") != rank:
        return None
    if "prompt" in order:
        begun = [request.prompt_token_ids for request in scheduled.scheduled_new_reqs]
        return order if order["prompt"] in begun else None
    file.unlink()
    return order


def obey(order: dict[str, Any], worker: Any) -> None:
    """Do what `order` says to `worker`, an instance of vLLM's `Worker`.

    Raises:
        InjectedError: this is what was ordered.
        MemoryError: all the memory was taken, and nobody ended the process.
        ValueError: no such kind.
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
    elif kind == "nan":
        _poison(worker.model_runner.model)
    elif kind == "astray":
        from dsv4_runtime.vllm_plugin import illegal_address

        illegal_address.launch()
    elif kind == "eat":
        # Not zeros: pages that nobody writes are not taken.
        taken = [b"\x01" * _CHUNK for _ in range(order["mebibytes"] * 2**20 // _CHUNK)]
        raise MemoryError(f"{len(taken)} chunks of {_CHUNK} bytes taken, and the process still runs")
    else:
        raise ValueError(f"{FILE_VARIABLE}: unknown kind {kind!r}")


def _poison(model: Any) -> None:
    """Have `model` compute its part of the logits from hidden states that are not numbers."""
    original = model.compute_logits

    def compute_logits(hidden: Any, *rest: Any, **more: Any) -> Any:
        return original(hidden * float("nan"), *rest, **more)

    model.compute_logits = compute_logits


def _apply() -> PatchOutcome:
    file = os.environ.get(FILE_VARIABLE)
    if not file or (platform.is_cpu_build() and platform.plugin() is None):
        return PatchOutcome.NOT_WANTED
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.execute_model
    expect_parameters(_SYMBOL, original, ["self", "scheduler_output"])
    place = Path(file)

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if (order := take(place, self.rank, scheduler_output)) is not None:
            obey(order, self)
        return original(self, scheduler_output)

    Worker.execute_model = execute_model
    return PatchOutcome.APPLIED


PATCH = Patch(
    module="vllm.v1.worker.gpu_worker",
    symbol=_SYMBOL,
    why=(
        "the fault suite needs hangs, exceptions and garbage inside a step; done only on the development platform or on"
        f" CUDA, and only if `{FILE_VARIABLE}` names a file"
    ),
    upstream="none: it is a test's hook",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM can inject faults into a step by itself",
    apply=_apply,
)
