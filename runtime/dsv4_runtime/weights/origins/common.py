"""Common parts of the origins: secrets and lists of sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights.errors import WeightsError
from dsv4_runtime.weights.manifest import CheckpointManifest, ManifestFile, is_wanted, parse_sums


def secret(plan: WeightsPlan) -> str | None:
    """Return the token in the plan's credentials file; None if the plan names no file."""
    if plan.credentials_file is None:
        return None
    try:
        token = Path(plan.credentials_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"the file of secretKeyRef, {plan.credentials_file}, cannot be read: {error}") from error
    if not token or not token.isprintable():
        raise WeightsError(
            f"the file of secretKeyRef, {plan.credentials_file}, has no token; put it there, on one line"
        )
    return token


def sums(text: bytes, where: str) -> dict[str, str]:
    """Return the entries of a `SHA256SUMS` that belong to the checkpoint."""
    try:
        return {name: digest for name, digest in parse_sums(text.decode()).items() if is_wanted(name)}
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from error


def manifest(plan: WeightsPlan, where: str, rows: Iterable[Mapping[str, object]]) -> CheckpointManifest:
    """Return a manifest of `rows`, the fields of `ManifestFile`.

    Raises:
        WeightsError: there is no checkpoint among them, or a name that must not be written.
    """
    try:
        files = tuple(sorted((ManifestFile.model_validate(row) for row in rows), key=lambda file: file.name))
    except ValidationError as error:
        raise WeightsError(f"{where} lists a file that cannot be used: {error.errors()[0]['msg']}") from error
    if not any(file.name == "config.json" for file in files):
        raise WeightsError(f"{where} has no config.json; point spec.model.source at the directory of a checkpoint")
    return CheckpointManifest(identity=plan.identity, files=files)
