"""Compare the launches of `Launcher` with those of Triton, in a process without the interpreter: `… ARCH`.

Prints a JSON object: "plans" and "kinds" list differences, "keys" calls that wrongly share a key, "refused" the errors
of tensors without memory, "triton" the number of repeated launches that Triton handled, "waits" whether a kernel was
hashed before and after its callees, and knows its constants.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from typing import Any

import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_kernel import calling_kernel, sum_kernel, twice
from triton.runtime.jit import JITFunction, compute_cache_key

from dsv4_kernels.arch import Arch
from dsv4_kernels.fp8.api import GemmPlan
from dsv4_kernels.plan import Launcher, hash_helpers
from dsv4_kernels.precompile import DEVICE, line, make_plan
from dsv4_testkit.launches import Launch, record_launches
from dsv4_testkit.plans import SMALL

arch = Arch(sys.argv[1])
made = record_launches(arch)
triton_launches = 0
triton_run = JITFunction.run


def run(self: Any, *args: Any, **kwargs: Any) -> Any:
    global triton_launches
    triton_launches += 1
    return triton_run(self, *args, **kwargs)


JITFunction.run = run


def shown(launch: Launch) -> tuple[Any, ...]:
    """Return the comparable properties of a launch: all but addresses."""
    arguments = [(one.dtype, one.shape) if isinstance(one, torch.Tensor) else one for one in launch.arguments]
    return launch.kernel, launch.grid, *map(str, arguments)


def plans() -> tuple[list[str], int]:
    """Warm each plan up twice; return those whose launches differ, and Triton's launches of the second warm-up."""
    differ, again = [], 0
    # The product has tensor descriptors on sm_90.
    for one in (*SMALL, line(GemmPlan, 48, 256, 512, None, DEVICE)):
        plan = make_plan(one, torch.device("cpu"))
        made.clear()
        plan.warmup()
        first = [shown(launch) for launch in made]
        made.clear()
        before = triton_launches
        plan.warmup()
        again += triton_launches - before
        if not first or [shown(launch) for launch in made] != first:
            differ.append(one)
    return differ, again


def kinds() -> list[str]:
    """Launch one kernel with arguments of all kinds, both ways; return those for which they differ."""
    memory = torch.zeros(64, dtype=torch.float32)
    pointers = (memory, memory[1:], memory.view(torch.int32), None)
    sizes = (0, 1, 2, 16, 17, 2**31 - 16, 2**31, -16)
    launcher, differ = Launcher(sum_kernel), []
    # Twice: the second time every kind is known.
    for x, y, n, scale, block in itertools.chain(
        *itertools.repeat(tuple(itertools.product(pointers[:3], pointers, sizes, (1.0, 2.0), (16, 32))), 2)
    ):
        arguments = {"x_ptr": x, "y_ptr": y, "n": n, "m": n, "scale": scale, "BLOCK": block, "num_warps": 1}
        made.clear()
        launcher[(3,)](**arguments)
        sum_kernel[(3,)](**arguments)
        ours, theirs = made
        if shown(ours) != shown(theirs):
            differ.append(repr(arguments))
    return differ


POINTERS = st.builds(
    lambda dtype, start: torch.zeros(64, dtype=torch.int32).view(dtype)[start:],
    st.sampled_from([torch.float32, torch.int32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn]),
    st.sampled_from([0, 0, 1]),
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 16, -16, 2**31 - 1, 2**31, -(2**31), 2**63, True, False, None]),
    st.sampled_from([0.0, -0.0, 1.0, 16.0, float("inf")]),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
)
CALLS = st.builds(
    lambda arguments, options: {**dict(zip(sum_kernel.arg_names, arguments, strict=True)), **dict(options)},
    st.tuples(POINTERS, POINTERS | NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.permutations([("num_warps", 1), ("num_stages", 2)]) | st.permutations([("num_warps", 2), ("num_stages", 1)])
    | st.just([("num_warps", 1)]) | st.just([("num_stages", 1)]),
)  # fmt: skip


def shared_keys() -> list[str]:
    """Return the calls that Triton specialises differently from another one with the same key."""
    *_, binder = sum_kernel.device_caches[0]
    launcher, differ = Launcher(sum_kernel), []
    specialised: dict[Any, tuple[str, str]] = {}

    @settings(max_examples=1000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(CALLS, CALLS)
    def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
        # Includes calls that differ in one argument or in the options only.
        kernel = {name: one[name] for name in sum_kernel.arg_names}
        options = {name: value for name, value in other.items() if name not in kernel}
        variants = ({**one, name: other[name]} for name in kernel)
        for arguments in (one, kernel | options, *variants):
            key = launcher._key(tuple(arguments.values()), tuple(arguments))
            if key is None:
                continue
            _, specialization, chosen = binder(**arguments, debug=False)
            triton_key = compute_cache_key({}, specialization, chosen)
            before, call = specialised.setdefault(key, (triton_key, repr(arguments)))
            if before != triton_key:
                differ.append(f"{call} and {arguments}")

    compare()
    return differ[:3] or ([] if len(specialised) > 500 else [f"only {len(specialised)} keys were seen"])


def refused() -> list[str]:
    """Launch with tensors that have no memory, before and after the kernel is known; return the errors."""
    memory, launcher, told = torch.zeros(64), Launcher(sum_kernel), []
    rest = {"n": 2, "m": 2, "scale": 1.0, "BLOCK": 16}
    for tensors in (
        {"x_ptr": memory.to("meta"), "y_ptr": memory},
        {"x_ptr": memory, "y_ptr": memory},
        {"x_ptr": memory, "y_ptr": memory.to("meta")},
    ):
        try:
            launcher[(1,)](**tensors, **rest)
        except ValueError as error:
            told.append(str(error))
    return told


def waits() -> list[bool]:
    """Hash a kernel while another thread hashes its callee; return whether it was done before and after that."""
    helper, done = twice, threading.Event()

    def hash_kernel() -> None:
        hash_helpers(calling_kernel)
        done.set()

    with helper._hash_lock:
        # The value that Triton sets meanwhile.
        helper.hash = "recursion:twice"
        thread = threading.Thread(target=hash_kernel)
        thread.start()
        before = done.wait(0.5)
        helper.hash = None
    thread.join(600)
    return [before, done.is_set(), "FACTOR" in str(calling_kernel.used_global_vals)]


if __name__ == "__main__":
    differ, again = plans()
    print(
        json.dumps(
            {
                "plans": differ,
                "triton": again,
                "kinds": kinds(),
                "keys": shared_keys(),
                "refused": refused(),
                "waits": waits(),
                "version": triton.__version__,
            }
        )
    )
