"""Checks of errors by their parts (field, value, remedy) instead of their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Kind = TypeVar("Kind", bound=BaseException)


@contextmanager
def raises_naming(kind: type[Kind], *parts: str) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Expect an error whose text has all `parts`, in any order: the field, the value and the remedy."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{text!r} lacks {missing}"
