"""Weights plan of the members, from the source in the specification."""

from __future__ import annotations

import hashlib
import re

from dsv4_operator.api import DSV4Deployment, Hardware, ModelSource, NanoSource, SecretKeyRef, SpeculativeMethod
from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource


def weights_plan(
    deployment: DSV4Deployment, weights_root: str, secrets_root: str, shared: str | None = None
) -> WeightsPlan:
    """Return the plan for the checkpoint that every member must have.

    Checkpoints from different sources, or of different commits, have different directories below `weights_root`. A
    secret is a file below `secrets_root`; the plan contains its path only. `shared` is `Facts.shared_weights`.
    """
    spec = deployment.spec
    source = spec.model.source
    if source.nano is not None:
        return _nano(source.nano, weights_root)
    plan = _origin(source)
    staging = spec.model.staging
    unified = spec.topology.hardware is Hardware.GB10
    return plan.model_copy(
        update={
            "path": plan.path or f"{weights_root}/{_directory(plan)}",
            "credentials_file": secret_file(source.secret_key_ref, secrets_root),
            "shared": shared if source.path is None else None,
            "streams": staging.streams,
            "bandwidth_bytes": staging.bandwidth_limit,
            "from_members": staging.from_members,
            "verify": staging.verify,
            "prefetch": staging.prefetch,
            "page_cache": staging.page_cache or (PageCache.UNIFIED if unified else PageCache.WARM),
            "pipeline_stages": spec.topology.pipeline_parallel_size,
        }
    )


def secret_file(ref: SecretKeyRef | None, secrets_root: str) -> str | None:
    """Return the path of the referenced secret on a member."""
    return f"{secrets_root}/{ref.name}/{ref.key}" if ref is not None else None


def _nano(source: NanoSource, weights_root: str) -> WeightsPlan:
    drafts = None if source.drafts is SpeculativeMethod.NONE else source.drafts.lower()
    name = "-".join(filter(None, (f"nano-s{source.seed}-{source.precision}", drafts)))
    return WeightsPlan(
        source=WeightsSource.NANO,
        path=f"{weights_root}/{name}",
        seed=source.seed,
        precision=source.precision,
        drafts=drafts,
    )


def _origin(source: ModelSource) -> WeightsPlan:
    if source.path is not None:
        return WeightsPlan(source=WeightsSource.PATH, path=source.path)
    if source.shared_path is not None:
        return WeightsPlan(source=WeightsSource.SHARED_PATH, path="", origin=source.shared_path)
    if source.http is not None:
        return WeightsPlan(source=WeightsSource.HTTP, path="", origin=source.http.url.rstrip("/"))
    if source.s3 is not None:
        return WeightsPlan(
            source=WeightsSource.S3,
            path="",
            origin=f"s3://{source.s3.bucket}/{source.s3.prefix.strip('/')}".rstrip("/"),
            endpoint=source.s3.endpoint,
            region=source.s3.region,
        )
    if source.hugging_face is None:
        raise ValueError("a nano checkpoint is made, not staged")
    return WeightsPlan(
        source=WeightsSource.HUGGING_FACE,
        path="",
        origin=source.hugging_face.repo,
        revision=source.hugging_face.revision,
        endpoint=source.hugging_face.endpoint,
    )


def _directory(plan: WeightsPlan) -> str:
    """Return a readable name with enough of a digest to be unique to the checkpoint."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", (plan.origin or "").removeprefix("s3://").split("://")[-1]).strip("-.")
    digest = hashlib.sha256(plan.identity.encode()).hexdigest()[:12]
    return f"{readable[-80:].strip('-.')}-{(plan.revision or digest)[:12]}"
