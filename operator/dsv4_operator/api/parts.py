"""Base class and number types of the parts of the specification."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, model_validator

from dsv4_runtime.contract import Document

_LARGEST_EXACT = 2**53

Count = Annotated[int, Field(strict=True)]
"""A whole number; text and fractions are refused instead of converted."""

PortNumber = Annotated[Count, Field(ge=1024, le=65535)]


class SpecPart(Document):
    """A part of the specification."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _as_api_servers_read(cls, data: Any) -> Any:
        """Take a known field that is null for one that is not there, and 2.0 for 2."""
        if not isinstance(data, dict) or not any(value is None or isinstance(value, float) for value in data.values()):
            return data
        fields = {name: field for key, field in cls.model_fields.items() for name in (key, field.alias or key)}
        return {
            name: _whole(value) if name in fields and int in _types(fields[name].annotation) else value
            for name, value in data.items()
            if value is not None or name not in fields
        }


def _types(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *(part for argument in get_args(annotation) for part in _types(argument)))


def _whole(value: Any) -> Any:
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT
    return int(value) if whole else value
