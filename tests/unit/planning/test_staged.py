"""Sources of weights become the plan of every member."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, parse
from dsv4_operator.planning.setup import weights_plan
from dsv4_runtime.contract import PageCache, Verify, WeightsPlan, WeightsSource

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def plan(source: dict[str, Any], hardware: str = "RTXPRO6000", **staging: Any) -> WeightsPlan:
    document = {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "flash"},
        "spec": {
            "model": {"variant": "Flash", "source": source, "staging": staging},
            "topology": {"hardware": hardware, "nodesPerGroup": 2},
        },
    }
    return weights_plan(DSV4Deployment.model_validate(document), "/weights", "/secrets")


def test_a_hub() -> None:
    found = plan({"huggingFace": {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": COMMIT}})
    assert (found.source, found.origin, found.revision) == (
        WeightsSource.HUGGING_FACE,
        "deepseek-ai/DeepSeek-V4-Flash",
        COMMIT,
    )
    assert found.path == "/weights/deepseek-ai-DeepSeek-V4-Flash-0123456789ab"
    assert (found.page_cache, found.verify, found.prefetch, found.from_members) == (
        PageCache.WARM,
        Verify.MARKER,
        True,
        True,
    )


def test_a_store() -> None:
    found = plan(
        {"s3": {"bucket": "models", "prefix": "/v4/flash/", "endpoint": "https://s3.example.org", "region": "eu-1"}},
        bandwidthLimit="500M",
        streams=8,
        verify="Full",
    )
    assert (found.origin, found.endpoint, found.region) == ("s3://models/v4/flash", "https://s3.example.org", "eu-1")
    assert (found.bandwidth_bytes, found.streams, found.verify) == (500_000_000, 8, Verify.FULL)
    assert found.path.startswith("/weights/models-v4-flash-")


def test_different_places_lie_in_different_directories() -> None:
    paths = [
        plan(source).path
        for source in (
            {"http": {"url": "https://a.example.org/v4"}},
            {"http": {"url": "https://a.example.org/v4/"}},
            {"http": {"url": "https://b.example.org/v4"}},
            {"s3": {"bucket": "models", "prefix": "v4"}},
            {"s3": {"bucket": "models", "prefix": "v4", "endpoint": "https://s3.example.org"}},
            {"sharedPath": "/models/v4"},
        )
    ]
    assert paths[0] == paths[1]
    assert len(set(paths)) == 5
    assert all("/" not in path.removeprefix("/weights/") for path in paths)


def test_devices_that_share_the_memory() -> None:
    source = {"path": "/models/v4"}
    assert plan(source, "GB10").page_cache is PageCache.UNIFIED
    assert plan(source, "GB10", pageCache="Warm").page_cache is PageCache.WARM
    assert plan(source).path == "/models/v4"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"http": {"url": "ftp://a/b"}}, "is not a URL"),
        ({"http": {"url": "https://user:hunter2@a/b"}}, "put secrets into a Secret and name it in secretKeyRef"),
        ({"http": {"url": "https://a/b?token=hunter2"}}, "put secrets into a Secret and name it in secretKeyRef"),
        ({"http": {"url": "https://a/b", "credentialsFile": "/etc/token"}}, "credentialsFile"),
        ({"s3": {"bucket": "s3://models"}}, "is not a bucket"),
        ({"sharedPath": "models"}, "is not an absolute path"),
    ],
)
def test_invalid_sources_are_refused(source: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(source)


@pytest.mark.parametrize("secret", ["https://user:hunter2@a/b", "https://a/b?token=hunter2"])
def test_a_secret_in_a_url_is_not_repeated_in_its_refusal(secret: str) -> None:
    document = {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "flash"},
        "spec": {
            "model": {"variant": "Flash", "source": {"http": {"url": secret}}},
            "topology": {"hardware": "GB10"},
        },
    }
    with pytest.raises(InvalidDeployment) as said:
        parse(document)
    assert "hunter2" not in str(said.value)


def test_a_plan_has_the_place_of_a_secret_alone() -> None:
    ref = {"secretKeyRef": {"name": "hub", "key": "token"}}
    for source in (
        {"huggingFace": {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": COMMIT, **ref}},
        {"s3": {"bucket": "models", **ref}},
        {"http": {"url": "https://a.example.org/v4", **ref}},
    ):
        assert plan(source).credentials_file == "/secrets/hub/token"
    assert plan({"s3": {"bucket": "models"}}).credentials_file is None
