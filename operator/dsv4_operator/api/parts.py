"""Base class and number types of the parts of the specification."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from dsv4_runtime.contract import Document

Count = Annotated[int, Field(strict=True)]
"""A whole number; text and floats are refused instead of converted."""

PortNumber = Annotated[Count, Field(ge=1024, le=65535)]


class SpecPart(Document):
    """A part of the specification."""

    model_config = ConfigDict(use_attribute_docstrings=True)
