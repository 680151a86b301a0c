from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from dsv4_runtime.agent.context import run_in_daemon_thread

HUNG = """
import asyncio, threading
from dsv4_runtime.agent.context import run_in_daemon_thread

async def main():
    try:
        async with asyncio.timeout(0.2):
            await run_in_daemon_thread(threading.Event().wait)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""


async def test_its_result_and_its_error() -> None:
    assert await run_in_daemon_thread(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon_thread(lambda: 1 // 0)


async def test_the_loop_continues_and_abandoned_work_ends_without_an_error() -> None:
    begin, ended = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(60)
        ended.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await run_in_daemon_thread(work)
    begin.set()
    assert await run_in_daemon_thread(ended.wait, 60)
    await asyncio.sleep(0.05)


PAGE_CACHE = """
import asyncio, threading
from pathlib import Path
from dsv4_runtime.agent import staging

staging._GUARD_SECONDS = 0.0
staging.writer.keep_free = lambda folder: threading.Event().wait()

async def main():
    try:
        async with asyncio.timeout(0.2):
            await staging._keep_free(Path("."))
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [HUNG, PAGE_CACHE])
def test_work_that_never_ends_keeps_no_process(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given up\n", "")
