"""The API server in memory lies beside the tests of `kube`."""

import sys
from pathlib import Path

import pytest

from dsv4_operator.controller.reconcile import Reconciler
from dsv4_testkit.reconcile_world import ENDPOINTS, Clock, Members, Saved

sys.path.insert(0, str(Path(__file__).parents[1] / "kube"))


@pytest.fixture
def world() -> tuple[Members, Reconciler, Saved, Clock]:
    members, saved, clock = Members(), Saved(), Clock()
    return members, Reconciler(members, ENDPOINTS, save=saved.save, clock=clock), saved, clock
