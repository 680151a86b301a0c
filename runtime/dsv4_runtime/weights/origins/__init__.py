"""Origins of checkpoints: each lists its files as a manifest and opens them at any byte."""

from __future__ import annotations

from typing import Protocol

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights.fetch import Place
from dsv4_runtime.weights.manifest import CheckpointManifest


class Origin(Place, Protocol):
    """A place that also knows which files there are."""

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as the origin lists them now.

        Raises:
            WeightsError: it cannot be asked, or does not have the checkpoint; the text has the remedy.
        """
        ...


def origin(plan: WeightsPlan) -> Origin:
    """Return the origin that `plan` names. The client libraries are only loaded for the sources that need them."""
    if plan.source is WeightsSource.HUGGING_FACE:
        from dsv4_runtime.weights.origins.hugging_face import HuggingFace

        return HuggingFace(plan)
    if plan.source is WeightsSource.S3:
        from dsv4_runtime.weights.origins.s3 import S3

        return S3(plan)
    if plan.source is WeightsSource.HTTP:
        from dsv4_runtime.weights.origins.http import Http

        return Http(plan)
    if plan.source is WeightsSource.SHARED_PATH:
        from dsv4_runtime.weights.origins.shared_path import SharedPath

        return SharedPath(plan)
    raise ValueError(f"{plan.source} is not fetched from anywhere")
