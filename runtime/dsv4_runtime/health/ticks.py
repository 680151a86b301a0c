"""Times at which looks are taken: moments that all of them share.

To wake an idle process costs more than most of its looks do, 0.2 ms of processor time on a small virtual machine.
"""

from __future__ import annotations

import asyncio
import math
import time


async def tick(seconds: float) -> None:
    """Wait for the next multiple of `seconds` of the monotonic clock."""
    now = time.monotonic()
    await asyncio.sleep((math.floor(now / seconds) + 1) * seconds - now)
