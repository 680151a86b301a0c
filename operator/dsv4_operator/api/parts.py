"""Base class and number types of the parts of the specification."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from dsv4_runtime.contract import Document

Count = Annotated[int, Field(strict=True)]
"""A whole number; text and fractions are refused instead of converted."""

PortNumber = Annotated[Count, Field(ge=1024, le=65535)]


class SpecPart(Document):
    """A part of the specification."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Take a known field that is null for one that is not there, as API servers do."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {field.alias for field in cls.model_fields.values()} | set(cls.model_fields)
        return {name: value for name, value in data.items() if value is not None or name not in known}
