"""Debian's Chromium under Playwright, for tests of the status page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

from dsv4_testkit.waiting import PATIENCE_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
MISSING = "no Chromium; run as root: apt-get install chromium-headless-shell"


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Yield a browser whose tabs report the exact size of their heap."""
    from playwright.async_api import async_playwright

    # The sandbox does not run as root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    options += ["--enable-precise-memory-info", "--js-flags=--expose-gc"]
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield browser
        finally:
            await browser.close()


def network_changed(message: str) -> bool:
    """Return whether Chromium reports that the machine's interfaces changed, because other tests create namespaces.

    It then ends all requests, even on loopback.
    """
    return "ERR_NETWORK_CHANGED" in message


async def visit(tab: Any, url: str) -> Any:
    """Load a page, and return the response.

    It is loaded again while the machine's interfaces change (`network_changed`).
    """
    from playwright.async_api import Error

    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await tab.goto(url)
            except Error as error:
                if not network_changed(error.message):
                    raise
                await asyncio.sleep(0.2)


async def reload(tab: Any) -> None:
    """Reload the page. If the machine's interfaces change, the tab has lost it, and it is loaded like a new one."""
    from playwright.async_api import Error

    url = tab.url
    try:
        await tab.reload()
    except Error as error:
        if not network_changed(error.message):
            raise
        await visit(tab, url)


async def until(tab: Any, expression: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until an expression is true, by repeated evaluation.

    The page's security policy prevents Playwright's own waits, which evaluate text in the page.
    """
    async with asyncio.timeout(seconds):
        while not await tab.evaluate(expression):
            await asyncio.sleep(0.02)
