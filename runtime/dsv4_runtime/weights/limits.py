"""Rate at which bytes come, and the limit on it."""

from __future__ import annotations

import threading
import time
from collections import deque

_WINDOW_SECONDS = 5.0


class Limiter:
    """Keeps all streams together to `rate` bytes a second; None: no limit."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` bytes more are allowed."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() - 0.1) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Meter:
    """Counts bytes; the rate is that of the last seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self.total = 0
        """Bytes that came over the network, or from the shared directory."""

    def add(self, count: int) -> None:
        """Add `count` bytes that came."""
        with self._lock:
            self.total += count

    def rate(self) -> float:
        """Return the bytes a second."""
        now = time.monotonic()
        with self._lock:
            self._marks.append((now, self.total))
            while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
                self._marks.popleft()
            then, before = self._marks[0]
            return (self.total - before) / max(now - then, 1e-3)


def human(count: float) -> str:
    """Return bytes as people write them: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
