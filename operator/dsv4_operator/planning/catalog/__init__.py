"""Catalog of models and machines: data files with a source for every figure, and typed records over them."""

from __future__ import annotations

from dsv4_operator.planning.catalog.constants import (
    AGENT_PORT,
    API_PORT,
    DASHBOARD_PORT,
    GCS_PORT,
    GIB,
    MIB,
    NANO,
    NanoProfile,
)
from dsv4_operator.planning.catalog.machines import machine, machine_named, machines, product_machine
from dsv4_operator.planning.catalog.models import model, models
from dsv4_operator.planning.catalog.names import UnknownCheckpoint, checkpoint_named, model_for
from dsv4_operator.planning.catalog.records import (
    Build,
    Division,
    Machine,
    Model,
    Part,
    Range,
    Source,
    Speculative,
    WeightComponent,
)

__all__ = [
    "AGENT_PORT",
    "API_PORT",
    "DASHBOARD_PORT",
    "GCS_PORT",
    "GIB",
    "MIB",
    "NANO",
    "Build",
    "Division",
    "Machine",
    "Model",
    "NanoProfile",
    "Part",
    "Range",
    "Source",
    "Speculative",
    "UnknownCheckpoint",
    "WeightComponent",
    "checkpoint_named",
    "machine",
    "machine_named",
    "machines",
    "model",
    "model_for",
    "models",
    "product_machine",
]
