"""Fixtures of several areas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4_testkit.supervised import Supervised


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    found = Supervised()
    yield found
    found.close()
