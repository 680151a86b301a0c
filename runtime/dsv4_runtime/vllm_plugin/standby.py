"""`python -m dsv4_runtime.vllm_plugin.standby MODEL`: vLLM's API server, imported before it is needed.

To import vLLM takes a quarter of a restart of the nano model. This process has done so, and waits for one line of its
input: the `Order` to become the server. It ends with its input. Before it waits it has vLLM inspect the model's class,
which vLLM keeps for later starts on this machine.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from dsv4_runtime.vllm_plugin import brake, patch_model_inspection

SERVER = "vllm.entrypoints.openai.api_server"


class Order(TypedDict):
    """Description of what a process in waiting is to become."""

    args: Sequence[str]
    """Arguments after the server's name."""
    env: Mapping[str, str]
    """Its environment."""
    log: str
    """The file that both outputs are appended to."""


def main() -> None:
    """Import, wait, serve."""
    with brake.slow_imports():
        importlib.import_module(SERVER)
        inspect(Path(sys.argv[1]))
    torch = sys.modules.get("torch")
    told = select.select([sys.stdin], [], [], 0.0)[0]
    if torch is not None and torch.cuda.is_initialized() and not told:
        raise SystemExit("importing vLLM took a device: with one, nothing may wait")
    line = sys.stdin.readline()
    if not line:
        return
    order: Order = json.loads(line)
    _take_environment(order["env"])
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *[(order["log"], os.O_WRONLY | os.O_APPEND)] * 2]
    ):
        try:
            opened = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            # An engine without a log is better than none.
            print(f"{path} cannot be written: {error}", file=sys.stderr)
            opened = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [SERVER, *order["args"]]
    warnings.filterwarnings("ignore", message=f".*{SERVER}.*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def inspect(model: Path) -> None:
    """Have vLLM keep what it asks of the class of the model at `model`; what does not work costs time only.

    A checkpoint that is not there yet is one of V4, most likely. vLLM 0.32 and 0.33 keep it in their cache
    (`model_executor/models/registry.py`).
    """
    try:
        names = json.loads((model / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        names = ["DeepseekV4ForCausalLM"]
    try:
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        patch_model_inspection.apply()
        for name in names:
            registry.models[name].inspect_model_cls()
    except Exception as error:
        said = str(error).partition("\n")[0]
        print(f"the model's class was not inspected: {type(error).__name__}: {said}", file=sys.stderr)


def _take_environment(env: Mapping[str, str]) -> None:
    """Have exactly `env`. What is right stays as it is: process titles are written where the environment lies."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


if __name__ == "__main__":
    main()
