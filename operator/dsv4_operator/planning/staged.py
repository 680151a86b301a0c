"""Weights that are fetched: from a source in the specification to the plan of every member."""

from __future__ import annotations

import hashlib
import re

from dsv4_operator.api import DSV4Deployment, Hardware, ModelSource, SecretKeyRef
from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource


def staged_weights(
    deployment: DSV4Deployment, weights_root: str, secrets_root: str, shared: str | None = None
) -> WeightsPlan:
    """Return the plan for weights that come from outside, or are in a directory already.

    Checkpoints from different places, or of different commits, lie in different directories below `weights_root`. The
    secret is a file below `secrets_root`; the plan has its path alone. `shared` is `Facts.shared_weights`.
    """
    spec = deployment.spec
    plan = _source(spec.model.source)
    staging = spec.model.staging
    unified = spec.topology.hardware is Hardware.GB10
    return plan.model_copy(
        update={
            "path": plan.path or f"{weights_root}/{_directory(plan)}",
            "credentials_file": secret_file(spec.model.source.secret_key_ref, secrets_root),
            "shared": shared if spec.model.source.path is None else None,
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
    """Return where a member finds what `ref` names."""
    return f"{secrets_root}/{ref.name}/{ref.key}" if ref is not None else None


def _source(source: ModelSource) -> WeightsPlan:
    if source.path is not None:
        return WeightsPlan(source=WeightsSource.PATH, path=source.path)
    if source.shared_path is not None:
        return WeightsPlan(source=WeightsSource.SHARED_PATH, path="", origin=source.shared_path)
    if source.http is not None:
        return WeightsPlan(
            source=WeightsSource.HTTP,
            path="",
            origin=source.http.url.rstrip("/"),
        )
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
    """Return a readable name, and enough of a digest that no two checkpoints share it."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", (plan.origin or "").removeprefix("s3://").split("://")[-1]).strip("-.")
    digest = hashlib.sha256(plan.identity.encode()).hexdigest()[:12]
    return f"{readable[-80:].strip('-.')}-{(plan.revision or digest)[:12]}"
