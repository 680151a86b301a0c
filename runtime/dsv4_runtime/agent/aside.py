"""Blocking work beside the event loop, whose end nothing depends on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[..., T], *arguments: object) -> T:
    """Return what `work` returns or raises; whoever does not want to wait for ever puts a timeout around it.

    Unlike `asyncio.to_thread` the thread is no reason for the process not to end: a disk or a driver that never
    answers keeps nobody. Work that was given up goes on by itself.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    # Running: whoever gives it up does not take away where its result goes.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"aside-{work.__name__}", daemon=True).start()
    return await asyncio.wrap_future(future)
