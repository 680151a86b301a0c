"""Catalog of models and machines: data files with a source for every figure, and typed records."""

from dsv4_operator.planning.catalog.records import API_PORT, DASHBOARD_PORT, GIB, NANO, Machine, Model
from dsv4_operator.planning.catalog.tables import (
    UnknownCheckpoint,
    checkpoint_named,
    machine,
    machine_named,
    machines,
    model,
    model_for,
    models,
    product_machine,
)

__all__ = [
    "API_PORT",
    "DASHBOARD_PORT",
    "GIB",
    "NANO",
    "Machine",
    "Model",
    "UnknownCheckpoint",
    "checkpoint_named",
    "machine",
    "machine_named",
    "machines",
    "model",
    "model_for",
    "models",
    "product_machine",
]
