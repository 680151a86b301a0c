"""Requests of the operator to an API server, and the documents that it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dsv4_operator.builders.names import MANAGER, Manifest
from dsv4_operator.kube.resources import Resource

Manifests = list[Manifest]


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection as it was at one moment."""

    items: Manifests
    """Without `apiVersion` and `kind`, as the server lists them."""
    resource_version: str
    """Version to begin to watch from."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`; of a bookmark only the resource version has a meaning."""
    object: Manifest

    @property
    def resource_version(self) -> str:
        """Return the resource version to go on to watch from."""
        return str(self.object["metadata"]["resourceVersion"])


class KubeReader(Protocol):
    """The API server, to read from. Every method raises `KubeError` or a child of it, and nothing else, and is bounded
    in time.
    """

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return the object, live; None if there is none."""
        ...

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Manifests:
        """Return all objects, live. `namespace` None: of all namespaces; `labels` and `fields` are selectors."""
        ...

    async def listing(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Listing:
        """Return what `list` does, with the resource version to watch from."""
        ...

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        resource_version: str,
    ) -> AsyncIterator[WatchEvent]:
        """Yield changes since `resource_version`, until the server ends the stream (5 min); `Gone`: list again."""
        ...


class Kube(KubeReader, Protocol):
    """The API server, to read from and to write to; see `KubeReader`."""

    async def apply(self, manifest: Manifest, *, manager: str = MANAGER) -> Manifest:
        """Apply on the server's side as field manager `manager`, over others' fields too; create what is not there.

        With `metadata.uid`: only that very object; `Invalid` if there is another one of its name, `Conflict` without
        one. With `metadata.resourceVersion`: only that version; `Conflict` if there is another one.
        """
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """Create the object; `AlreadyExists` if there is one."""
        ...

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        changes: Mapping[str, Any],
        *,
        subresource: str | None = None,
    ) -> Manifest:
        """Apply a JSON merge patch: None removes a field, lists are replaced.

        With `metadata.uid` in it: only that very object; `Conflict` or `Invalid` if there is another one of its name.
        """
        ...

    async def replace(self, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        """Replace with PUT; `Conflict` if `metadata.resourceVersion` is not the present one.

        To the subresource `status` the server takes over nothing but the status, so the rest may be left out.
        """
        ...

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Delete the object, and in the background what it owns. One that is gone is fine.

        With `uid`: only that very object; `Conflict` if there is another one of its name.
        """
        ...

    async def evict(self, namespace: str, name: str, *, uid: str) -> None:
        """Evict that very pod; `Unavailable` if a PodDisruptionBudget does not allow it now."""
        ...
