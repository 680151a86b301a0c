"""Scripts that run inside the installed vLLM, on dsv4's development platform, and print their results."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 1500
"""With the lowest priority beside other tests; below the timeout of the ring `code`."""
_ENVIRONMENT = {"DSV4_DEV_PLATFORM": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_IMPORTED = (
    "vllm.config",
    "vllm.models.deepseek_v4",
    "vllm.v1.worker.gpu.model_runner",
    "dsv4_runtime.vllm_plugin.kernels.attention",
)
"""Imports common to nearly every script; they take 7 s."""


def told_by(script: Path, **environment: str) -> dict[str, Any]:
    """Return the last line that `script` prints, a JSON object; `environment` is added to this process's.

    Raises:
        AssertionError: the script failed; the message is the end of its error output.
        subprocess.TimeoutExpired: it did not exit within `SECONDS`.
    """
    env = os.environ | _ENVIRONMENT | environment
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return _result(done.returncode, done.stdout, done.stderr)


def told_by_fork(script: Path, **environment: str) -> dict[str, Any]:
    """Return the same for a script that begins with `load_general_plugins` and needs Triton's interpreter.

    The script runs in a fork of a process that has loaded the plugins and imported vLLM. `environment` contains only
    variables that neither reads on import. The cache of torch.compile is a temporary directory of these processes.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        code = _importer().run({"script": str(script), "env": {**environment}, "out": str(out), "err": str(err)})
        return _result(code, out.read_text(), err.read_text())


def _result(code: int, out: str, err: str) -> dict[str, Any]:
    assert code == 0, err[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


class _Importer:
    """The process that has imported vLLM; it ends with this one."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory()
        env = os.environ | _ENVIRONMENT | {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": self._kept.name}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self.end)

    def run(self, order: Mapping[str, Any]) -> int:
        """Run a script and return its exit status."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            self.end()
            raise subprocess.TimeoutExpired(order["script"], SECONDS)
        line = self._process.stdout.readline()
        if not line:
            self.end()
            raise AssertionError("the process that imports vLLM has ended")
        return int(line)

    def end(self) -> None:
        """Kill the process and the script that it runs."""
        _importer.cache_clear()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._kept.cleanup()


@functools.cache
def _importer() -> _Importer:
    return _Importer()


def _run(order: Mapping[str, Any]) -> NoReturn:
    """Run the script in this process and exit."""
    code = 1
    try:
        for number, (name, flags) in enumerate(
            ((os.devnull, os.O_RDONLY), (order["out"], os.O_WRONLY), (order["err"], os.O_WRONLY))
        ):
            os.dup2(os.open(name, flags | os.O_CREAT), number)
        os.environ.update(order["env"])
        sys.path.insert(0, str(Path(order["script"]).parent))
        sys.argv = [order["script"]]
        runpy.run_path(order["script"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    """Run the scripts that are named on stdin sequentially; print the exit status of each."""
    # Python inserts the directory of this file there.
    del sys.path[0]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        if not (pid := os.fork()):
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
