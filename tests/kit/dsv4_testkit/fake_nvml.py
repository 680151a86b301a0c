"""The part of `pynvml` that dsv4 uses, over GPUs described by a test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class Gpu:
    """NVML's values of an idle H100 with driver 580.159.04."""

    uuid: str = "GPU-8a5c0e6f-0000-0000-0000-000000000000"
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total: int | None = 81559 * 2**20
    """None: not reported, as on GB10."""
    reserved: int = 600 * 2**20
    watts: float = 100.0
    utilization: int = 100
    limit: float = 700.0
    default_limit: float = 700.0
    clock: int | None = 1980
    """None: not reported."""
    max_clock: int = 1980
    celsius: int = 60
    slowed_by: int = 0
    """NVML's bits."""
    processes: dict[int, int] = field(default_factory=dict)
    """Bytes by process id."""
    lost: bool = False
    """The GPU has fallen off the bus."""


class FakeNvml:
    """Replaces the module `pynvml`."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16

    class NVMLError(Exception):
        def __init__(self, value: int, text: str) -> None:
            super().__init__(text)
            self.value = value

    def __init__(self, *gpus: Gpu, driver: str = "580.159.04", missing: str = "") -> None:
        self.gpus = list(gpus)
        self.driver = driver
        self.missing = missing
        """Error message of a missing driver."""
        self.errors: list[tuple[int, int]] = []
        """(index, XID) of errors that the driver reports next."""
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.blocked = 0
        """Callers that wait for `answers`."""
        self._lock = threading.Lock()
        self.shut = False

    def nvmlInit(self) -> None:
        self._answer()
        if self.missing:
            raise self.NVMLError(12, self.missing)

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._live(self.gpus[index])

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:
        return self.gpus.index(gpu)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return self._live(gpu).uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return self._live(gpu).name

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> list[int]:
        return list(self._live(gpu).capability)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        total = self._live(gpu).total
        if total is None:
            raise self.NVMLError(3, "Not Supported")
        used = gpu.reserved + sum(gpu.processes.values())
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self._live(gpu).processes.items()]

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        self.asked += 1
        self._answer()
        return round(self._live(gpu).watts * 1000)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=self._live(gpu).utilization)

    def nvmlDeviceGetPowerManagementLimit(self, gpu: Gpu) -> int:
        return round(self._live(gpu).limit * 1000)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: Gpu) -> int:
        return round(self._live(gpu).default_limit * 1000)

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        clock = self._live(gpu).clock
        if clock is None or kind != self.NVML_CLOCK_SM:
            raise self.NVMLError(3, "Not Supported")
        return clock

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, kind: int) -> int:
        return self._live(gpu).max_clock if kind == self.NVML_CLOCK_SM else 0

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        return self._live(gpu).celsius if sensor == self.NVML_TEMPERATURE_GPU else 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:
        return self._live(gpu).slowed_by

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, *_: object) -> None:
        return

    def nvmlEventSetWait_v2(self, *_: object) -> Any:
        if not self.errors:
            raise self.NVMLError(self.NVML_ERROR_TIMEOUT, "Timeout")
        index, xid = self.errors.pop(0)
        return SimpleNamespace(device=self.gpus[index], eventData=xid)

    def _answer(self) -> None:
        if self.answers.is_set():
            return
        with self._lock:
            self.blocked += 1
        self.answers.wait(300)
        with self._lock:
            self.blocked -= 1

    def _live(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST, "GPU is lost")
        return gpu
