"""NVIDIA GPUs through NVML, if there are any: power, clock, temperature, memory and its holders, driver errors (XID).

GB10 shares its memory with the host and does not report it, so every field is read separately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_runtime.contract import GpuProcess, GpuSignals
from dsv4_runtime.health.samples import FATAL_XIDS
from dsv4_runtime.util.procfs import entry

try:
    import pynvml
except ImportError:
    pynvml = None

_SAMPLE_SECONDS = 0.5
_ANCESTORS = 64
_THROTTLING = {
    0x2: "clock setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's bits of `nvmlDeviceGetCurrentClocksEventReasons`."""

_log = logging.getLogger(__name__)


class Gpus:
    """The GPUs of this member."""

    def __init__(self, uuids: tuple[str, ...] | None = None) -> None:
        """Open the GPUs with these UUIDs; None: all that the driver shows."""
        self._handles: dict[int, Any] = {}
        self._events: Any = None
        self._xids: dict[int, int] = {}
        self.problem = ""
        """Reason for the lack of GPUs."""
        self.silent: dict[str, str] = {}
        """GPUs that the driver counts but that do not answer, to the driver's error."""
        if pynvml is None:
            self.problem = "the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.problem = f"no NVIDIA driver answers ({error})"
            _log.info("no GPUs to watch: %s", error)
            return
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if uuids is None or pynvml.nvmlDeviceGetUUID(handle) in uuids:
                    self._handles[index] = handle
            except pynvml.NVMLError as error:
                self.silent[f"GPU {index}"] = str(error)
        with contextlib.suppress(pynvml.NVMLError):
            events = pynvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    @property
    def there(self) -> bool:
        """Return whether there are any."""
        return bool(self._handles)

    def sample(self) -> tuple[GpuSignals, ...]:
        """Return the signals of all GPUs."""
        self._read_xids()
        return tuple(self._signals(index, handle) for index, handle in self._handles.items())

    def forget(self) -> None:
        """Drop the errors reported up to now: they belong to an ended engine."""
        self._read_xids()
        self._xids.clear()

    def close(self) -> None:
        """Release the driver."""
        if self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._handles = {}

    def _signals(self, index: int, handle: Any) -> GpuSignals:
        power = _query(pynvml.nvmlDeviceGetPowerUsage, handle)
        load = _query(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
        limit, default = (
            _query(call, handle)
            for call in (pynvml.nvmlDeviceGetPowerManagementLimit, pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
        )
        reasons = _query(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        return GpuSignals(
            index=index,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            power_default_watts=None if default is None else default / 1000,
            sm_mhz=_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            sm_max_mhz=_query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            celsius=_query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            slowed_by=tuple(text for bit, text in _THROTTLING.items() if reasons & bit),
            utilization=None if load is None else load.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            processes=tuple(map(_process, _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ())),
            xid=self._xids.get(index),
        )

    def _read_xids(self) -> None:
        """Read the events since the last call; the driver queues them."""
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
    """Samples the GPUs in a thread of its own, because the driver of a broken GPU answers late or never."""

    def __init__(self, uuids: tuple[str, ...] | None = None) -> None:
        """Sample the GPUs with these UUIDs, as in `Gpus`."""
        self._uuids = uuids
        self._lock = threading.Lock()
        self._life = 0
        self._seen: tuple[float, tuple[GpuSignals, ...]] = time.monotonic(), ()
        self._closed = threading.Event()
        # A daemon, because it may never end.
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def latest(self) -> tuple[tuple[GpuSignals, ...], float]:
        """Return the latest sample and its age in seconds; nothing and 0 before the first one."""
        seen, gpus = self._seen
        return gpus, time.monotonic() - seen if gpus else 0.0

    def forget(self) -> None:
        """Drop the errors reported up to now: they belong to an ended engine."""
        with self._lock:
            self._life += 1
            seen, gpus = self._seen
            self._seen = seen, tuple(gpu.model_copy(update={"xid": None}) for gpu in gpus)

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()

    def _run(self) -> None:
        gpus, life = Gpus(self._uuids), 0
        try:
            while gpus.there and not self._closed.is_set():
                if life != self._life:
                    life = self._life
                    gpus.forget()
                try:
                    found = gpus.sample()
                except OSError as error:
                    # Without a file descriptor, this process cannot tell which processes are its own.
                    _log.warning("the GPUs cannot be sampled, which is tried again: %s", error)
                    self._closed.wait(_SAMPLE_SECONDS)
                    continue
                with self._lock:
                    # A sample begun before `forget` contains the errors that were to be dropped.
                    if life == self._life:
                        self._seen = time.monotonic(), found
                self._closed.wait(_SAMPLE_SECONDS)
        finally:
            gpus.close()


LOADED = 0.5
"""Utilisation from which on a low clock is not that of an idle GPU."""
SUSTAINED_SECONDS = 60.0
"""Time for which a condition holds, or not, before a warning begins or ends."""
_LOW_CLOCK, _GOOD_CLOCK = 0.5, 0.6
"""Shares of the maximum clock."""
_HOT, _COOL = 90, 85
_CAPPED = 0.8
"""Share of the default power limit."""


@dataclass(slots=True)
class _Held:
    since: float | None = None
    """Since when the opposite of the warning's present state has held."""
    text: str = ""
    """The warning as it began, so that a status does not change with each sample; empty: none."""


@dataclass(slots=True)
class Throttling:
    """Warnings of slow GPUs, from samples of the signals."""

    held: dict[tuple[int, str], _Held] = field(default_factory=dict)

    def update(self, gpus: Iterable[GpuSignals], now: float) -> tuple[str, ...]:
        """Return the warnings after a fresh sample at `now`; conditions without a value change nothing."""
        for gpu in gpus:
            for kind, holds, text in _conditions(gpu):
                held = self.held.setdefault((gpu.index, kind), _Held())
                if holds is None or holds is bool(held.text):
                    held.since = None
                    continue
                held.since = now if held.since is None else held.since
                if now - held.since >= SUSTAINED_SECONDS:
                    held.text, held.since = text if holds else "", None
        return tuple(held.text for held in self.held.values() if held.text)


def _conditions(gpu: GpuSignals) -> Iterator[tuple[str, bool | None, str]]:
    """Yield (kind, whether it holds, warning); None: between both limits, or the GPU has no load, or not reported."""
    loaded = gpu.utilization is not None and gpu.utilization >= LOADED
    watts = f", {gpu.power_watts:.0f} W" if gpu.power_watts is not None else ""
    degrees = f", {gpu.celsius} °C" if gpu.celsius is not None else ""
    reasons = f" ({', '.join(gpu.slowed_by)})" if gpu.slowed_by else ""
    if gpu.sm_mhz and gpu.sm_max_mhz:
        share = gpu.sm_mhz / gpu.sm_max_mhz
        low = True if share < _LOW_CLOCK else False if share >= _GOOD_CLOCK else None
        text = f"GPU {gpu.index} runs at {gpu.sm_mhz} of {gpu.sm_max_mhz} MHz under load{watts}{degrees}{reasons}"
        advice = "" if reasons else "; if that stays, disconnect the machine's power supply for a minute"
        yield "clock", low if loaded else None, text + advice
    if gpu.celsius is not None:
        hot = True if gpu.celsius >= _HOT else False if gpu.celsius < _COOL else None
        yield "temperature", hot, f"GPU {gpu.index} has {gpu.celsius} °C{watts}{reasons}; check its cooling"
    if gpu.power_limit_watts and gpu.power_default_watts:
        capped = "power cap" in gpu.slowed_by and gpu.power_limit_watts < _CAPPED * gpu.power_default_watts
        limits = f"{gpu.power_limit_watts:.0f} of {gpu.power_default_watts:.0f} W"
        text = f"GPU {gpu.index} is slowed by its power limit of {limits} (nvidia-smi --power-limit)"
        yield "power", capped if loaded else None, text


def _process(found: Any) -> GpuProcess:
    pid = int(found.pid)
    try:
        # Any bytes; the kernel cuts it after 15, also within a character.
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        # Process of another namespace, or ended.
        name = ""
    return GpuProcess(pid=pid, name=name, memory=int(found.usedGpuMemory or 0), own=_is_own(pid))


def _is_own(pid: int) -> bool:
    """Return whether process `pid` is a descendant of this one."""
    for _ in range(_ANCESTORS):
        if pid == os.getpid():
            return True
        found = entry(pid)
        if found is None:
            return False
        pid = found.parent
    return False


def _query(function: Any, handle: Any, *arguments: Any) -> Any:
    try:
        return function(handle, *arguments)
    except pynvml.NVMLError:
        return None
