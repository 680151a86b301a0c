"""Writes to the API server: every object that the backend creates, changes or deletes passes through this module.

An object belongs to a deployment if its controller reference has the deployment's UID. A name is no proof: the object
may be a user's, of another deployment, or of an earlier deployment and not yet removed by the garbage collector.
Objects of other owners are never written or deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from dsv4_operator.api import KIND, Reason
from dsv4_operator.backends.base import BackendError
from dsv4_operator.builders import names
from dsv4_operator.builders.names import MANAGER, Manifest
from dsv4_operator.kube import (
    AlreadyExists,
    Client,
    Conflict,
    Invalid,
    NotFound,
    OwnedCache,
    Resource,
    apply_exactly,
    is_exact,
    resource_of,
)

_TRIES = 6
_RETRY_SECONDS = 2.0


class ForeignObject(BackendError):
    """An object with a needed name belongs to another owner; the text contains its name, its owner and the remedy."""

    reason = Reason.FOREIGN_OBJECT


class ObjectTerminating(BackendError):
    """An object with a needed name is about to be removed: it is being deleted, or its deployment is gone."""

    reason = Reason.OBJECT_TERMINATING
    retry_seconds = _RETRY_SECONDS


class OwnedObjects:
    """Creates, applies and deletes objects of deployments; see the module."""

    def __init__(self, kube: Client, cache: OwnedCache | None = None) -> None:
        """Args:
        kube: the API server.
        cache: the objects as watches show them; None: they are read before they are applied.
        """
        self._kube = kube
        self._cache = cache

    def may_exist(self, manifest: Manifest) -> bool:
        """Return whether an object of that kind and name, of any owner, is in the cache, or there is no cache."""
        return self._cache is None or self._cached(manifest) is not None

    def is_current(self, manifest: Manifest) -> bool:
        """Return whether the deployment's object is as in `manifest` by the cache, so that an apply changes nothing.

        A later change by another client reaches the cache too, and causes another reconcile.
        """
        known = self._cached(manifest)
        return known is not None and is_exact(manifest, known)

    def _cached(self, manifest: Manifest) -> Manifest | None:
        if self._cache is None:
            return None
        metadata = manifest["metadata"]
        return self._cache.find(resource_of(manifest), metadata["namespace"], metadata["name"])

    async def find(self, manifest: Manifest) -> Manifest | None:
        """Return the live object with kind, name and owner of `manifest`; None if there is none.

        Raises:
            ForeignObject: it belongs to another owner.
            ObjectTerminating: it is about to be removed.
            KubeError: it cannot be read.
        """
        resource, metadata = resource_of(manifest), manifest["metadata"]
        found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
        if found is not None:
            check(found, manifest)
        return found

    async def create(self, manifest: Manifest, *, strict: bool = False) -> bool:
        """Create the object; return False if the deployment already has one of that name, which is not changed.

        With `strict`, the API server refuses fields that its definition of the kind lacks, instead of dropping them.

        Raises:
            ForeignObject: an object of that name belongs to another owner.
            ObjectTerminating: it is about to be removed.
            KubeError: the API server refused the object.
        """
        for _ in range(_TRIES):
            try:
                await self._kube.create(manifest, strict=strict)
            except AlreadyExists:
                if await self.find(manifest) is not None:
                    return False
            else:
                return True
        raise Conflict(f"{_name(manifest)} is created and removed again and again")

    async def apply(self, manifest: Manifest) -> None:
        """Create the object, or apply it over the deployment's existing one unless that is the same.

        Raises:
            ForeignObject: an object of that name belongs to another owner.
            ObjectTerminating: it is about to be removed.
            KubeError: the API server refused the object.
        """
        if self.is_current(manifest):
            return
        # Without a search if the cache shows none: an object that it lacks yet prevents the creation.
        missing = not self.may_exist(manifest)
        for _ in range(_TRIES):
            live = None if missing else await self.find(manifest)
            missing = False
            try:
                # Apply would create a missing object too, but also adopt one that was created meanwhile.
                if live is None:
                    await self._kube.create(manifest)
                elif not is_exact(manifest, live):
                    await self._apply(live, manifest, {"uid": live["metadata"]["uid"]})
            except (AlreadyExists, Conflict, NotFound):
                # Another object has that name now.
                continue
            except Invalid:
                if live is None or not await self._replaced(live, manifest):
                    raise
                continue
            return
        raise Conflict(f"{_name(manifest)} was another object each time before it could be written")

    async def apply_over(self, live: Manifest, manifest: Manifest) -> None:
        """Apply `manifest` over exactly the version `live` of the object, which `find` returned, unless it is the same.

        Raises:
            ForeignObject: an object of another owner has its name now.
            ObjectTerminating: it is about to be removed.
            Conflict: it was changed since.
            KubeError: the API server refused the object.
        """
        if is_exact(manifest, live):
            return
        try:
            await self._apply(live, manifest, {name: live["metadata"][name] for name in ("uid", "resourceVersion")})
        except Invalid:
            if await self._replaced(live, manifest):
                raise Conflict(f"{_name(manifest)} is another object by now") from None
            raise

    async def delete(
        self, resource: Resource, live: Manifest, owner_uid: str, *, grace_seconds: int | None = None
    ) -> None:
        """Delete the object `live`, as the API server returned it, if its owner has `owner_uid`.

        Does nothing otherwise, or if another object has its name: the deployment's own is gone.
        """
        if not names.belongs(live, owner_uid):
            return
        metadata = live["metadata"]
        try:
            await self._kube.delete(
                resource, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace_seconds=grace_seconds
            )
        except Conflict:
            # Usually because of another UID.
            found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
            if found is not None and found["metadata"]["uid"] == metadata["uid"]:
                raise

    async def change(self, resource: Resource, live: Manifest, owner_uid: str, changes: Manifest) -> None:
        """Patch the object `live`, as the API server returned it, if its owner has `owner_uid`.

        Does nothing otherwise, or if another object has its name, or, with `resourceVersion` in the changes, if it was
        changed since.
        """
        if not names.belongs(live, owner_uid):
            return
        metadata = live["metadata"]
        patch = {**changes, "metadata": {"uid": metadata["uid"], **changes.get("metadata", {})}}
        try:
            await self._kube.patch(resource, metadata["namespace"], metadata["name"], patch)
        except (NotFound, Conflict):
            return
        except Invalid:
            found = await self._kube.get(resource, metadata["namespace"], metadata["name"])
            if found is not None and found["metadata"]["uid"] == metadata["uid"]:
                raise

    async def delete_named(self, resource: Resource, namespace: str, name: str, owner_uid: str) -> None:
        """Delete the object of that name, if there is one and its owner has `owner_uid`."""
        live = await self._kube.get(resource, namespace, name)
        if live is not None:
            await self.delete(resource, live, owner_uid)

    async def _replaced(self, live: Manifest, manifest: Manifest) -> bool:
        """Return whether another object has the name of `live`: API servers refuse its UID as `Invalid` then."""
        now = await self.find(manifest)
        return now is None or now["metadata"]["uid"] != live["metadata"]["uid"]

    async def _apply(self, live: Manifest, manifest: Manifest, precondition: Mapping[str, str]) -> None:
        about = dict(precondition)
        marked = await self._mark_applied(live, manifest)
        if "resourceVersion" in about:
            about["resourceVersion"] = marked["metadata"]["resourceVersion"]
        await apply_exactly(self._kube, {**manifest, "metadata": {**manifest["metadata"], **about}})

    async def _mark_applied(self, live: Manifest, manifest: Manifest) -> Manifest:
        """Mark the fields that the creation of `live` set as applied; return the resulting object."""
        fields = managed_by_apply(live)
        if fields is None:
            return live
        metadata = manifest["metadata"]
        change = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"], **fields}}
        return await self._kube.patch(resource_of(manifest), metadata["namespace"], metadata["name"], change)


async def gather_all(*work: Awaitable[object]) -> None:
    """Wait for all of `work`, also after a failure; raise the first error."""
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one


def check(live: Manifest, manifest: Manifest) -> None:
    """Compare the owner of an object with that of `manifest`, which has its kind and name.

    Raises:
        ForeignObject: it belongs to another owner.
        ObjectTerminating: it is being deleted, or belongs to an earlier deployment of the same name.
    """
    wanted, actual = names.controller_of(manifest), names.controller_of(live)
    if wanted is None or actual is None or wanted["uid"] != actual["uid"] or not wanted["uid"]:
        earlier = wanted and actual and (actual.get("kind"), actual.get("name")) == (KIND, wanted["name"])
        if earlier:
            raise ObjectTerminating(
                f"{_name(manifest)} belongs to an earlier {KIND} of this name and is not removed yet; this is tried "
                "again until Kubernetes has removed it; if it stays, delete it"
            )
        raise ForeignObject(f"{_name(manifest)} belongs to {_owner(live)}; rename one of them, or delete it")
    if live["metadata"].get("deletionTimestamp"):
        raise ObjectTerminating(f"{_name(manifest)} is being deleted; it is created again once it is gone")


def managed_by_apply(live: Manifest) -> Manifest | None:
    """Return metadata that marks fields set at creation as applied; None: they are marked already.

    Server-side apply removes an obsolete field only if the applying manager alone owns it, and the API server treats a
    manager that creates and the same manager that applies as different ones.
    """
    entries: list[dict[str, Any]] = live["metadata"].get("managedFields") or []
    own = [one for one in entries if one.get("manager") == MANAGER and not one.get("subresource")]
    if all(one.get("operation") == "Apply" for one in own):
        return None
    merged: dict[str, Any] = {}
    for one in own:
        merged = _union(merged, one.get("fieldsV1") or {})
    applied = {**own[-1], "operation": "Apply", "fieldsV1": merged}
    return {"managedFields": [*(one for one in entries if one not in own), applied]}


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return one | {name: _union(one.get(name, {}), fields) for name, fields in other.items()}


def _name(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return f"{manifest['kind']} {metadata['namespace']}/{metadata['name']}"


def _owner(live: Manifest) -> str:
    references = live["metadata"].get("ownerReferences") or []
    owner = names.controller_of(live) or next(iter(references), None)
    return f"{owner.get('kind')} {owner.get('name')}" if owner else "another client (it has no owner)"
