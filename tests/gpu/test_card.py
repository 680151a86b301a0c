"""The values that NVML and torch report for the GPUs, compared with the catalog."""

from __future__ import annotations

import pytest
from page import Page

from dsv4_operator.backends.local.gpus import GpuInventory
from dsv4_operator.planning.catalog import machine_named
from dsv4_runtime.health.gpu import Gpus

COLUMNS = ("GPU", "what", "catalog", "here")


def test_the_catalog_agrees_with_the_gpus(found: GpuInventory, page: Page) -> None:
    torch = pytest.importorskip("torch")
    wrong = []
    for number, card in enumerate(card for card in found.cards if card.machine):
        known = machine_named(card.machine or "")
        told = torch.cuda.get_device_properties(number)
        figures = {
            "compute capability": (known.sm, 10 * card.capability[0] + card.capability[1]),
            "multiprocessors": (known.multiprocessors, told.multi_processor_count),
            "shared memory of a block": (known.shared_memory_bytes, told.shared_memory_per_block_optin),
        }
        if not known.unified_memory:
            figures["memory, MiB"] = (known.memory_bytes >> 20, told.total_memory >> 20)
        for what, (planned, here) in figures.items():
            page.row("Catalog", COLUMNS, card.index, what, planned, here)
            # Drivers reserve varying amounts of the memory.
            if abs(planned - here) > (planned / 100 if "memory," in what else 0):
                wrong.append(f"{card.title}: {what} is {here}, the catalog ({known.id}) says {planned}")
    assert wrong == []


def test_the_driver_reports_the_values_that_the_rules_need(found: GpuInventory, page: Page) -> None:
    gpus = Gpus(tuple(card.uuid for card in found.cards))
    try:
        for gpu in gpus.sample():
            assert (gpu.power_watts, gpu.utilization) != (None, None)
            memory = "not told" if gpu.memory_used is None else f"{gpu.memory_used / 2**30:.2f} GiB"
            cells = (f"{gpu.power_watts} W", gpu.utilization, memory, len(gpu.processes), gpu.xid or "none")
            page.row("Idle", ("GPU", "power", "utilisation", "used", "processes", "XID"), gpu.index, *cells)
            assert gpu.xid is None, "an error of the driver before anything ran"
    finally:
        gpus.close()
