"""Secrets are recognized by name or format and refused; the refusal does not repeat them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from dsv4_operator.api import InvalidDeployment, parse
from dsv4_operator.api.crd import definition
from dsv4_operator.planning.images import profiles
from dsv4_operator.planning.images.surface import library
from dsv4_runtime.util.secrets import has_secret, is_secret_name

TOKEN = "hf_" + "aB3" * 12
SECRETS = [
    TOKEN,
    "AKIA" + "A1B2" * 4,
    "ghp_" + "x7" * 18,
    "nvapi-" + "q" * 40,
    "sk-" + "proj-" + "k" * 40,
    "-----BEGIN RSA " + "PRIVATE KEY-----",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.x",
    "x-eyJ.eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.x",
    "a=eyJeyJhbGciOiJIUzI1NiJ9.eyJ",
    "http://user:hunter2@proxy.example:3128",
    "http://user::@proxy.example:3128",
]
HARMLESS = [
    "1",
    "hf_transfer",
    "http://proxy.example:3128",
    "deepseek-ai/DeepSeek-V4-Flash",
    "task-list",
    "a:b@c",
    "eyJ.eyJ.eyJhbGciO.eyJ",
    "http://:@proxy.example:3128",
    "{}",
]
NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "VLLM_API_KEY",
    "db_password",
]


def refused(**engine: Any) -> InvalidDeployment:
    manifest = {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "flash"},
        "spec": {
            "model": {"variant": "Flash", "source": {"path": "/models/v4"}},
            "topology": {"hardware": "GB10"},
            "engine": engine,
        },
    }
    with pytest.raises(InvalidDeployment) as told:
        parse(manifest)
    return told.value


@pytest.mark.parametrize("secret", SECRETS)
def test_a_value_in_the_format_of_a_secret_is_refused_and_not_repeated(secret: str) -> None:
    for error, field in (
        (refused(env=[{"name": "MINE", "value": f"x={secret}"}]), "spec.engine.env[0].value"),
        (refused(extraArgs=["--seed", secret]), "spec.engine.extraArgs[1]"),
    ):
        found = error.findings[0]
        assert (found.field, found.value, found.reason) == (field, None, "Secret")
        assert secret[8:] not in f"{error} {found!r} {found.to_dict()}"


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_for_a_secret_is_refused_for_any_value(name: str) -> None:
    error = refused(env=[{"name": name, "value": "hunter2"}])
    found = error.findings[0]
    assert (found.field, found.value, found.reason) == ("spec.engine.env[0].name", name, "Secret")
    assert "hunter2" not in f"{error} {found!r} {found.to_dict()}"


@pytest.mark.parametrize("flag", ["--api-key", "--api_key", "--hf-token", "--hf-tok"])
def test_a_flag_for_a_secret_is_refused_without_its_value(flag: str) -> None:
    error = refused(extraArgs=[f"{flag}=hunter2"])
    found = error.findings[0]
    assert (found.field, found.value, found.reason) == ("spec.engine.extraArgs[0]", flag, "OwnedFlag")
    assert "hunter2" not in f"{error} {found!r} {found.to_dict()}"


def test_harmless_values_are_accepted() -> None:
    assert [text for text in HARMLESS if has_secret(text)] == []
    assert not any(map(is_secret_name, ("TOKENIZERS_PARALLELISM", "AWS_WEB_IDENTITY_TOKEN_FILE", "MAX_TOKENS", "KEY")))


def test_only_secrets_of_the_images_variables_are_recognised_as_secrets() -> None:
    known = {name for profile in profiles() for name in profile.surface.env}
    known |= {name for profile in profiles() for each in profile.libraries for name in library(each)[1]}
    found = {name for name in known if is_secret_name(name)}
    secrets = {"VLLM_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"}
    assert {name for name in found if not name.startswith("RAY_")} == secrets


def test_no_field_of_the_specification_names_a_file_with_credentials() -> None:
    assert "credentialsFile" not in str(definition())
    assert "apiKeysFile" not in str(definition())


@pytest.mark.parametrize("text", ["eyJ" * 2730, "://" + ":" * 8189, "-----BEGIN " * 744, "://a:" * 1638])
def test_long_values_are_searched_in_linear_time(text: str) -> None:
    began = time.thread_time()
    for _ in range(128):
        assert not has_secret(text)
    # 0.05 s measured; a quadratic search took 5 s and more.
    assert time.thread_time() - began < 1.0


def test_the_definition_refuses_the_names_of_secrets() -> None:
    """The rule is CEL, with the pattern of the models."""
    spec = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    name = spec["properties"]["engine"]["properties"]["env"]["items"]["properties"]["name"]
    rules = [rule["rule"] for rule in name["x-kubernetes-validations"]]
    (found,) = [rule for rule in rules if "upperAscii" in rule]
    pattern = json.loads(found.removeprefix("!self.upperAscii().matches(").removesuffix(")"))
    for variable in ("HF_TOKEN", "MY_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "DSV4_KERNELS", "NCCL_DEBUG"):
        assert bool(re.search(pattern, variable)) is is_secret_name(variable), variable
