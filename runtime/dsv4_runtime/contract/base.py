"""The base of every document that dsv4 writes: camelCase on the wire, frozen in memory, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Document(BaseModel):
    """A JSON document or a part of one.

    Reading accepts the camelCase names of the wire and the Python names; writing (`to_json`, `to_dict`) uses camelCase.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
    )

    def to_dict(self) -> dict[str, object]:
        """Return the document as JSON values, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the document as JSON text, without unset fields."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=indent)


class Report(Document):
    """A document that a possibly newer peer wrote: keys that this version does not know are passed over."""

    model_config = ConfigDict(extra="ignore")
