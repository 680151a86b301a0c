"""Error responses, by the reaction of the caller."""

from __future__ import annotations

import pytest

from dsv4_operator.kube import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    Unavailable,
    resource_of,
)
from dsv4_operator.kube.resources import DSV4_DEPLOYMENTS, NODES, PODS, Gone, error_of


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (403, "Forbidden", Forbidden),
        (401, "Unauthorized", Forbidden),
        (422, "Invalid", Invalid),
        (410, "Expired", Gone),
        (429, "TooManyRequests", Unavailable),
        (503, "", Unavailable),
        (405, "MethodNotAllowed", KubeError),
    ],
)
def test_a_status_becomes_its_error(status: int, reason: str, kind: type[KubeError]) -> None:
    error = error_of("GET /api/v1/pods", status, reason, "what the server said")
    assert type(error) is kind
    assert (error.status, error.reason) == (status, reason)
    assert str(error) == f"GET /api/v1/pods: {status} what the server said"


def test_paths_are_those_of_the_api() -> None:
    assert PODS.path("a", "b") == "/api/v1/namespaces/a/pods/b"
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path("ignored", "n") == "/api/v1/nodes/n"
    path = "/apis/dsv4.dev/v1alpha1/namespaces/a/dsv4deployments/b/status"
    assert DSV4_DEPLOYMENTS.path("a", "b", "status") == path
    assert resource_of({"apiVersion": "v1", "kind": "Pod"}) is PODS
