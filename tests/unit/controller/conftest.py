"""Fixture of a reconciler with an in-memory backend."""

import pytest

from dsv4_operator.controller.reconcile import Reconciler
from dsv4_testkit.reconcile_world import ENDPOINTS, Clock, Members, Saved


@pytest.fixture
def world() -> tuple[Members, Reconciler, Saved, Clock]:
    members, saved, clock = Members(), Saved(), Clock()
    return members, Reconciler(members, ENDPOINTS, save=saved.save, clock=clock), saved, clock
