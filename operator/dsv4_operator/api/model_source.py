"""Source of the weights, and their staging on the machines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool

from dsv4_operator.api.cluster import SecretKeyRef
from dsv4_operator.api.endpoints import Url
from dsv4_operator.api.engine import SpeculativeMethod
from dsv4_operator.api.parts import Count, SpecPart
from dsv4_operator.api.values import TEXT, AbsolutePath, Between, BoundedQuantity, Matches
from dsv4_runtime.contract import PageCache, Verify

_REPO = Matches(r"[\w.-]+/[\w.-]+", "is not a repository; write OWNER/NAME, for example deepseek-ai/DeepSeek-V4-Flash")
_COMMIT = Matches(
    r"[0-9a-f]{40}", "is not a commit; write all 40 hex digits, so that the weights cannot change", longest=40
)
# The rules that all S3-compatible stores share; the names that AWS gave out before 2018 may differ.
_BUCKET = Matches(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "is not a bucket; write its name alone, 3 to 63 of a-z, 0-9, - and .", 63
)


class Precision(StrEnum):
    """Number formats of a made checkpoint."""

    BF16 = "bf16"
    FP8 = "fp8"


class NanoSource(SpecPart):
    """A checkpoint made on the spot: the same fields give the same bytes on every machine."""

    seed: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the random weights."""
    precision: Precision = Precision.BF16
    """`bf16`, or `fp8` for the formats of the real checkpoints (not on CPU)."""
    drafts: SpeculativeMethod = SpeculativeMethod.NONE
    """Layers for speculative decoding that it brings; `spec.engine.speculative.method` uses them."""


class HuggingFaceSource(SpecPart):
    """A repository on a Hugging Face hub."""

    repo: Annotated[str, _REPO]
    """`OWNER/NAME`."""
    revision: Annotated[str, _COMMIT]
    """The commit, 40 hex digits: a branch name would let the weights change under a running deployment."""
    endpoint: Url | None = None
    """URL of a mirror. Default: `HF_ENDPOINT` of the machine's environment, or the public hub."""
    secret_key_ref: SecretKeyRef | None = None
    """An access token. Default: none; with `dsv4 up` what the hub's own client finds, such as `HF_TOKEN`."""


class S3Source(SpecPart):
    """A prefix in a bucket of an S3-compatible store, best with a `SHA256SUMS` beside the files."""

    bucket: Annotated[str, _BUCKET]
    """Its name."""
    prefix: Annotated[str, Matches(TEXT, "has a control character; remove it", 512)] = ""
    """Prefix of the checkpoint in the bucket, without a leading `/`."""
    endpoint: Url | None = None
    """URL of the store. Default: AWS."""
    region: (
        Annotated[str, Matches(r"[\w.-]*", "is not the name of a region; write for example us-east-1", 64)] | None
    ) = None
    """Region of the bucket. Default: `AWS_REGION`, else `us-east-1`."""
    secret_key_ref: SecretKeyRef | None = None
    """An AWS credentials file, of which the section `[default]` counts. Default: what AWS programs find; without any,
    the requests are not signed."""


class HttpSource(SpecPart):
    """A directory on a web server, with a `SHA256SUMS` in it."""

    url: Url
    """The directory's URL."""
    secret_key_ref: SecretKeyRef | None = None
    """A token, sent as `Authorization: Bearer`."""


class ModelSource(SpecPart):
    """Source of the weights: exactly one of the fields."""

    nano: NanoSource | None = None
    """Made on the spot; only for the variant `Nano`."""
    path: AbsolutePath | None = None
    """A directory that has the checkpoint, on every machine; used where it is. On a cluster: below a directory that
    the cluster's administrator allows, as `sharedPath`."""
    hugging_face: HuggingFaceSource | None = None
    """A Hugging Face repository, staged on every machine."""
    s3: S3Source | None = None
    """An S3-compatible store, staged on every machine."""
    http: HttpSource | None = None
    """A web server, staged on every machine."""
    shared_path: AbsolutePath | None = None
    """A directory of a shared file system that every machine has mounted; its files are copied to every machine."""

    @property
    def secret_key_ref(self) -> SecretKeyRef | None:
        """Return the `secretKeyRef` of whichever source it is."""
        remote = self.hugging_face or self.s3 or self.http
        return remote.secret_key_ref if remote is not None else None


class StagingSpec(SpecPart):
    """Staging of weights: how they come to the machines and are kept there."""

    streams: Annotated[Count, Field(ge=1, le=64)] = 8
    """Files that a machine fetches at the same time."""
    bandwidth_limit: Annotated[BoundedQuantity, Between("64Ki", "1Ei")] | None = None
    """The most that a machine fetches in a second, for example `500M`. Default: no limit."""
    from_members: StrictBool = True
    """Machines fetch from each other what one of them already has, so that the source is asked once."""
    verify: Verify = Verify.MARKER
    """Check at a start of files that were verified before: `Marker` compares size and time, `Full` reads them."""
    prefetch: StrictBool = True
    """Read the files into the page cache while the group forms."""
    page_cache: PageCache | None = None
    """`Warm`, or `Unified` for machines whose devices share the memory. Default: by `topology.hardware`."""
