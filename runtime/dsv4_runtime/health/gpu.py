"""NVIDIA accelerators through NVML, where there are any: power, utilisation, memory, and the driver's errors (XID).

GB10 shares its memory with the host and does not tell of it; every field is asked for by itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from dsv4_runtime.contract import GpuSignals
from dsv4_runtime.health.samples import FATAL_XIDS

try:
    import pynvml
except ImportError:
    pynvml = None

_SAMPLE_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Gpus:
    """The accelerators of this member; none if there is no driver."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._events: Any = None
        self._xids: dict[int, int] = {}
        if pynvml is None:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            _log.info("no accelerators to watch: %s", error)
            return
        with contextlib.suppress(pynvml.NVMLError):
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        with contextlib.suppress(pynvml.NVMLError):
            events = pynvml.nvmlEventSetCreate()
            for handle in self._handles:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    @property
    def there(self) -> bool:
        """Whether there are any."""
        return bool(self._handles)

    def sample(self) -> tuple[GpuSignals, ...]:
        """All accelerators now."""
        self._read_xids()
        return tuple(self._signals(index, handle) for index, handle in enumerate(self._handles))

    def forget(self) -> None:
        """Errors that were reported up to now were those of an engine that has ended."""
        self._read_xids()
        self._xids.clear()

    def close(self) -> None:
        """Let go of the driver."""
        if self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._handles = []

    def _signals(self, index: int, handle: Any) -> GpuSignals:
        power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        load = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuSignals(
            index=index,
            power_watts=None if power is None else power / 1000,
            utilization=None if load is None else load.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            xid=self._xids.get(index),
        )

    def _read_xids(self) -> None:
        """Events that have come since the last look; the driver keeps them."""
        if self._events is None:
            return
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                index = pynvml.nvmlDeviceGetIndex(event.device)
            except pynvml.NVMLError:
                return
            if self._xids.get(index) not in FATAL_XIDS:
                self._xids[index] = int(event.eventData)


class GpuWatch:
    """Asks for them in a thread of its own: the driver of a broken one answers late or never, and nobody may wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = 0
        self._seen: tuple[float, tuple[GpuSignals, ...]] = time.monotonic(), ()
        self._closed = threading.Event()
        # It may never end, and is no reason for the agent not to.
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def latest(self) -> tuple[tuple[GpuSignals, ...], float]:
        """The accelerators as they were last seen, and the seconds since; nothing, and 0, if none was ever seen."""
        seen, gpus = self._seen
        return gpus, time.monotonic() - seen if gpus else 0.0

    def forget(self) -> None:
        """Errors that were reported up to now were those of an engine that has ended."""
        with self._lock:
            self._life += 1
            seen, gpus = self._seen
            self._seen = seen, tuple(gpu.model_copy(update={"xid": None}) for gpu in gpus)

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _run(self) -> None:
        gpus, life = Gpus(), 0
        try:
            while gpus.there and not self._closed.is_set():
                if life != self._life:
                    life = self._life
                    gpus.forget()
                found = gpus.sample()
                with self._lock:
                    # What was asked before `forget` has errors in it that were to be forgotten.
                    if life == self._life:
                        self._seen = time.monotonic(), found
                self._closed.wait(_SAMPLE_SECONDS)
        finally:
            gpus.close()


def _ask(question: Any, handle: Any) -> Any:
    try:
        return question(handle)
    except pynvml.NVMLError:
        return None
