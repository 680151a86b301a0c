"""A web server's directory. Its `SHA256SUMS` says which files there are; servers list directories each in their way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from urllib.parse import quote, urlsplit

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.weights.errors import WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import MAKE_SUMS, SUMS, CheckpointManifest, ManifestFile
from dsv4_runtime.weights.origins import common
from dsv4_runtime.weights.transfer import Web, patiently


class Http:
    """`plan.origin` is the directory's URL."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._base = (plan.origin or "").rstrip("/")
        self._web = Web()
        token = common.secret(plan)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def name(self) -> str:
        """Return its name for people."""
        return urlsplit(self._base).hostname or self._base

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as they are there now."""
        url = f"{self._base}/{SUMS}"
        try:
            text = patiently(lambda: self._web.get(url, self._headers))
        except WeightsError as error:
            raise WeightsError(f"{error}; the directory needs a {SUMS}: `{MAKE_SUMS}`") from None
        return common.manifest(self._plan, self._base, self._rows(common.sums(text, url)))

    def _rows(self, sums: dict[str, str]) -> Iterator[dict[str, object]]:
        for name, digest in sums.items():
            url = self._url(name)
            size = patiently(lambda url=url: self._web.size(url, self._headers))  # type: ignore[misc]
            yield {"name": name, "size": size, "sha256": digest}

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        """Open `file` from byte `start` on."""
        return self._web.range(self._url(file.name), self._headers, start)

    def _url(self, name: str) -> str:
        return f"{self._base}/{quote(name)}"
