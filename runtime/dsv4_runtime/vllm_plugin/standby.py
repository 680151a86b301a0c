"""`python -m dsv4_runtime.vllm_plugin.standby`: vLLM's API server, imported before it is needed.

To import vLLM takes a quarter of a restart of the nano model. This process has done so, and waits for one line of its
input: the `Order` to become the server. It never forks, and ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TypedDict

SERVER = "vllm.entrypoints.openai.api_server"


class Order(TypedDict):
    """What a process in waiting is to become."""

    args: Sequence[str]
    """What follows the server's name."""
    env: Mapping[str, str]
    """Its environment."""
    log: str
    """The file that both outputs are appended to."""


def main() -> None:
    """Import, wait, serve."""
    importlib.import_module(SERVER)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SystemExit("importing vLLM took a device: with one, nothing may wait")
    line = sys.stdin.readline()
    if not line:
        return
    order: Order = json.loads(line)
    _take_environment(order["env"])
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *[(order["log"], os.O_WRONLY | os.O_APPEND)] * 2]
    ):
        opened = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [SERVER, *order["args"]]
    warnings.filterwarnings("ignore", message=f".*{SERVER}.*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def _take_environment(env: Mapping[str, str]) -> None:
    """Have exactly `env`. What is right stays as it is: process titles are written where the environment lies."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


if __name__ == "__main__":
    main()
