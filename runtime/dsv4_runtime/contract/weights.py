"""`WeightsPlan`: the checkpoint of the members, its source, and its handling."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from dsv4_runtime.contract.base import Document


class WeightsSource(StrEnum):
    """Source of a member's weights."""

    NANO = "Nano"
    """Generated from a seed (`dsv4_runtime.nano`)."""
    PATH = "Path"
    """Already in `WeightsPlan.path`."""
    HUGGING_FACE = "HuggingFace"
    """A repository of a Hugging Face hub, at one commit."""
    S3 = "S3"
    """A prefix in a bucket of an S3-compatible store."""
    HTTP = "HTTP"
    """A directory on a web server that has a `SHA256SUMS`."""
    SHARED_PATH = "SharedPath"
    """A directory of a shared file system, copied to `WeightsPlan.path`."""


class Verify(StrEnum):
    """Verification, at a start, of files that were verified when they were staged."""

    MARKER = "Marker"
    """Compares size and modification time with those of the staging; reads no content."""
    FULL = "Full"
    """Computes every SHA-256 again."""


class PageCache(StrEnum):
    """Handling of the page cache around a load."""

    WARM = "Warm"
    """Devices have memory of their own: files are read ahead, as far as free memory allows."""
    UNIFIED = "Unified"
    """Devices share the memory (GB10): files leave the page cache before the load, are read ahead only as far as they
    fit beside the loaded copy, and leave it again when free memory runs low."""


class WeightsPlan(Document):
    """The checkpoint that every member must have before the group forms."""

    source: WeightsSource
    path: str
    """Path of the checkpoint on every member."""
    seed: int | None = None
    """Of a `Nano` checkpoint."""
    precision: str | None = None
    """Of a `Nano` checkpoint: `bf16` or `fp8`."""
    drafts: str | None = None
    """Of a `Nano` checkpoint: its layers for speculative decoding, `mtp` or `dspark`. None: it has none."""
    origin: str | None = None
    """`OWNER/NAME` of a `HuggingFace` repository, `s3://BUCKET/PREFIX`, a URL, or the shared directory."""
    revision: str | None = None
    """Of a `HuggingFace` repository: the commit."""
    endpoint: str | None = None
    """URL of the hub or of the store. None: the public hub, AWS."""
    region: str | None = None
    """Of an `S3` store."""
    shared: str | None = None
    """Directory, on every member, with files by their SHA-256 that are read where they are and never written."""
    credentials_file: str | None = None
    """File, on every member, with the secret: a token (`HuggingFace`, `HTTP`), or an AWS credentials file (`S3`)."""
    streams: int = Field(default=8, ge=1, le=64)
    """Files that a member fetches at the same time."""
    bandwidth_bytes: int | None = Field(default=None, ge=1)
    """Rate at which a member may fetch from the origin and from other members, bytes a second. None: no limit."""
    from_members: bool = True
    """Whether members fetch files from other members that have them."""
    verify: Verify = Verify.MARKER
    prefetch: bool = True
    """Whether the files are read into the page cache while Ray forms."""
    page_cache: PageCache = PageCache.WARM
    pipeline_stages: int = Field(default=1, ge=1)
    """Stages that the layers are divided over; a member reads ahead only the files of its own."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        staged = self.source not in (WeightsSource.NANO, WeightsSource.PATH)
        if staged and not self.origin:
            raise ValueError(f"weights.origin: is missing; a {self.source} source needs one")
        return self

    @property
    def identity(self) -> str:
        """Return the identity of the checkpoint, equal on all members: staged files of another identity are not
        used."""
        return " ".join(filter(None, (self.source.value, self.endpoint, self.origin, self.revision)))
