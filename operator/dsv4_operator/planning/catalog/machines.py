"""The machines of `machines.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from dsv4_operator.api import Hardware
from dsv4_operator.planning.catalog.records import Machine, Source


def machine(hardware: Hardware) -> Machine:
    """Return a kind's usual machine: a DGX Spark with 128 GB, the Workstation edition of RTX PRO 6000, or this CPU."""
    return next(found for found in machines() if found.hardware == hardware)


def machine_named(name: str) -> Machine:
    """Return the machine whose id is `name`.

    Raises:
        KeyError: there is none; the text names all.
    """
    for found in machines():
        if found.id == name:
            return found
    raise KeyError(f"the catalog has no machine {name!r}; it has {', '.join(found.id for found in machines())}")


_PRODUCTS = (
    ("GB10", "gb10"),
    ("RTX-PRO-6000-BLACKWELL-MAX-Q", "rtx-pro-6000-max-q"),
    ("RTX-PRO-6000-BLACKWELL-SERVER", "rtx-pro-6000-server"),
    ("RTX-PRO-6000-BLACKWELL", "rtx-pro-6000-workstation"),
    ("RTX-5090", "rtx-5090"),
    ("H100", "h100"),
    ("H200", "h200"),
)
"""Parts of products' names, to the machine's id; the first that fits."""


def product_machine(product: str) -> str | None:
    """Return the id of the machine with the accelerator `product`; None if the catalog has none.

    Args:
        product: as NVML (`NVIDIA H100 80GB HBM3`) or the label `nvidia.com/gpu.product` has it.
    """
    label = product.upper().replace(" ", "-")
    return next((machine for text, machine in _PRODUCTS if text in label), None)


@cache
def machines() -> tuple[Machine, ...]:
    """Return all machines of the catalog, the usual one of each kind before its variants."""
    text = resources.files("dsv4_operator.planning.catalog").joinpath("machines.toml").read_text("utf-8")
    rows: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(text)["machine"]:
        base = rows.get(row.pop("base", ""), {})
        sources = {**base.get("sources", {}), **row.get("sources", {})}
        rows[row["id"]] = {**base, **row, "sources": sources}
    return tuple(_read(row) for row in rows.values())


def _read(row: dict[str, Any]) -> Machine:
    return Machine(
        **{
            **row,
            "nics": tuple(row.get("nics", ())),
            "interfaces": tuple(row.get("interfaces", ())),
            "sources": {name: Source(**value) for name, value in row["sources"].items()},
        }
    )
