"""The definition and the models accept the same specifications, where the schema decides without an API server.

`tests/cluster/test_api.py` compares the same objects on an API server, which evaluates all of the schema.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_operator.api import API_VERSION, STORED_VERSION, DSV4Deployment, Finding, InvalidDeployment, parse
from dsv4_operator.api.deployment import API_VERSIONS
from dsv4_operator.api.security import is_link_local
from dsv4_testkit import planspecs, specifications
from dsv4_testkit.specifications import SPEC, TOKEN, fields, placed, values

MATCHES = re.compile(r'(!?)(self|key)\.matches\(("(?:[^"\\\\]|\\\\.)*")\)')
WORDS = re.compile(r"self in (\[.*\])")
KINDS: dict[str, Any] = {
    "string": str,
    "object": dict,
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def breaks(schema: dict[str, Any], value: Any) -> bool:
    """Return whether `value` violates a structural schema or one of the CEL rules that this evaluator supports."""
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, bool) or not isinstance(value, int | str) or _too_long(schema, value)
    kind = KINDS[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return True
    if schema["type"] in ("integer", "number"):
        return not schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return _too_long(schema, value) or any(_inside(schema, value)) or any(_broken(one, value) for one in rules(schema))


def _too_long(schema: dict[str, Any], value: Any) -> bool:
    size = len(value) if isinstance(value, str | list | dict) else 0
    bounds = [schema.get(name, 10**9) for name in ("maxLength", "maxItems", "maxProperties")]
    return size > min(bounds) or (isinstance(value, list) and size < schema.get("minItems", 0))


def _inside(schema: dict[str, Any], value: Any) -> Iterator[bool]:
    if isinstance(value, dict):
        given = {name: part for name, part in value.items() if part is not None}
        yield any(name not in given for name in schema.get("required", ()))
        for name, part in given.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield inner is None or breaks(inner, part)
        yield any(name not in schema["properties"] for name in value if "properties" in schema)
    if isinstance(value, list):
        yield any(part is None or breaks(schema["items"], part) for part in value)
        keys = schema.get("x-kubernetes-list-map-keys", [])
        if schema["x-kubernetes-list-type"] != "atomic" and all(isinstance(part, dict) or not keys for part in value):
            known = [json.dumps([part.get(key) for key in keys] if keys else part) for part in value]
            yield len(set(known)) < len(known)


def rules(schema: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in schema.get("x-kubernetes-validations", ())]


def _broken(rule: str, value: Any) -> bool:
    if rule.startswith("self.all(key, ") and (found := MATCHES.fullmatch(rule[14:-1])):
        return any(bool(re.search(json.loads(found[3]), key, re.ASCII)) == bool(found[1]) for key in value)
    if found := MATCHES.fullmatch(rule):
        # On the API server `$` matches only the end of the text; in Python it also matches before a final line break.
        pattern = re.sub(r"\$(?=\)|\Z)", r"\\Z", json.loads(found[3]))
        return bool(re.search(pattern, value, re.ASCII)) == bool(found[1])
    if found := WORDS.fullmatch(rule):
        return value not in json.loads(found[1])
    return False


def refusals(schema: dict[str, Any]) -> list[str]:
    """Return the refusals of a field that this evaluator supports."""
    known = [one["message"] for one in schema.get("x-kubernetes-validations", ()) if simple(one["rule"])]
    return [
        *known,
        "characters; the maximum is",
        "the minimum is",
        "is out of range; the maximum is",
        "is not a whole number",
        "is not text",
    ]


def simple(rule: str) -> bool:
    return bool(MATCHES.fullmatch(rule) or WORDS.fullmatch(rule) or rule == "self == int(self)")


def refused(manifest: dict[str, Any]) -> tuple[Finding, ...]:
    """Return the findings of `parse` for an object, and assert that they contain none of its secrets."""
    found: tuple[Finding, ...] = ()
    try:
        parse(json.loads(json.dumps(manifest)))
    except InvalidDeployment as error:
        found = error.findings
    told = " ".join(map(str, found))
    assert TOKEN[8:] not in told
    assert "hunter2" not in told
    return found


@pytest.mark.parametrize(("path", "schema"), list(fields()), ids=[path for path, _ in fields()])
def test_schema_and_models_refuse_the_same_values(path: str, schema: dict[str, Any]) -> None:
    listed = {json.dumps(value): value for value in values(schema, path)}
    here = "spec." + path.replace("[]", "[0]").replace("{}", ".key")
    for value in listed.values():
        manifest = placed(path, value)
        found = refused(manifest)
        if breaks(SPEC, manifest["spec"]):
            assert found, f"the definition refuses {value!r:.200}"
        elif schema.get("type") != "number" and not is_link_local(str(value)):
            # The definition recognizes only the common notations of link-local addresses in text for the engine.
            said = [str(one) for one in found if one.field == here]
            assert not any(word in one for one in said for word in refusals(schema)), (
                f"the models refuse {value!r:.200}"
            )


@pytest.mark.parametrize("seed", range(3))
def test_every_version_is_read_as_the_same_deployment(seed: int) -> None:
    """All plans are functions of the deployment, so they are equal too."""
    chance = random.Random(seed)
    made = [manifest for _, manifest in specifications.drawn(100, seed)]
    made += [planspecs.manifest(chance.choice) for _ in range(100)]
    taken = 0
    for manifest in made:
        first, second = (_read({**manifest, "apiVersion": version}) for version in API_VERSIONS)
        assert first == second
        taken += isinstance(first, DSV4Deployment)
        if isinstance(first, DSV4Deployment):
            assert first.to_dict()["apiVersion"] == API_VERSION
            assert DSV4Deployment.model_validate({**first.to_dict(), "apiVersion": STORED_VERSION}) == first
    assert 50 < taken < len(made) - 50


def _read(manifest: dict[str, Any]) -> DSV4Deployment | tuple[Finding, ...]:
    try:
        return parse(manifest)
    except InvalidDeployment as error:
        return error.findings


@pytest.mark.parametrize("seed", range(3))
def test_no_object_of_any_kind_makes_the_models_fail(seed: int) -> None:
    taken = 0
    for _, manifest in specifications.drawn(300, seed):
        taken += not refused(manifest)
    assert taken > 50


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("topology.nodeSelector", {"bad key!": "x"}),
        ("topology.nodeSelector", {"Example.com/x": "y"}),
        ("topology.nodeSelector", {"a": "x y"}),
        ("topology.nodes", ["a", "b", "a"]),
        ("topology.tolerations[].value", "a b!"),
        ("topology.tolerations[].key", "a b"),
        ("engine.kernels", "fastest"),
        ("engine.env[].value", "\0"),
        ("engine.env[].value", "a\x1bb"),
        ("engine.env", [{"name": f"A{number}", "value": "x" * 8192} for number in range(128)]),
        ("engine.extraArgs", ["--seed=" + "x" * 8000] * 64),
        ("engine.imagePullSecrets", [{"name": "a..b"}]),
        ("engine.imagePullSecrets", [{"name": "a"}, {"name": "a"}]),
        ("engine.timeouts.drain", "99999999999999999h"),
        ("engine.timeouts.formation", "8761h"),
        ("engine.kvCacheMemory", "2Ei"),
        ("gateway.drain", "9" * 60 + "h"),
        ("gateway.drain", "9999999999999999h"),
        ("gateway.holdTimeout", "99999999999999h"),
        ("gateway.maxHeldBytes", "9e99"),
        ("gateway.apiKeys", {"secretKeyRef": {"name": "a..b", "key": "k"}}),
        ("model.servedNames", ["\x1cfoo"]),
        ("model.servedNames", ["a\x00b"]),
        ("model.source.path", "/var/lib/dsv4/models/a:b"),
        ("network.fabric.members", [{"rank": 0}, {"rank": 0}]),
        ("network.rdmaResource", "nvidia.com/gpu"),
        ("network.rdmaResource", "kubernetes.io/x"),
        ("recovery.backoff.base", "100000000000000000000h"),
        ("recovery.nodeLoss.after", "8761h"),
        ("replicas", 1.0),
    ],
)
def test_values_that_definition_or_models_once_accepted_alone_are_refused(path: str, value: Any) -> None:
    assert refused(placed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("topology.nodeSelector", {"a": ""}),
        ("topology.nodes", ["b", "a"]),
        ("engine.kernels", "moe=bundled,mla_decode=stock"),
        ("engine.env[].value", "line\n\tline"),
        ("gateway.holdTimeout", "0s"),
        ("gateway.drain", "8760h"),
        ("gateway.maxHeldBytes", 0),
        ("gateway.maxHeldBytes", "1Ei"),
        ("model.source.http.url", "http://store:60000/x"),
        ("model.source.http.url", "http://store:65535/x"),
        ("model.source.http.url", "https://[2001:db8::1]:8443/x"),
        ("model.servedNames", ["模型", "a b"]),
        ("engine", None),
        ("engine.image", None),
        ("network.rdmaResource", "example.com/hca"),
    ],
)
def test_definition_and_models_accept_the_same_values(path: str, value: Any) -> None:
    assert refused(placed(path, value)) == ()


@pytest.mark.parametrize("namespace", ["a" * 63, "2024-models", "team-" + "a" * 41])
def test_every_namespace_of_kubernetes_is_one(namespace: str) -> None:
    manifest = specifications.manifest()
    manifest["metadata"]["namespace"] = namespace
    assert refused(manifest) == ()


@pytest.mark.parametrize("namespace", ["a" * 64, "A", "a.b", "-a", "a_b", ""])
def test_no_other_text_is_a_namespace(namespace: str) -> None:
    manifest = specifications.manifest()
    manifest["metadata"]["namespace"] = namespace
    assert [one.field for one in refused(manifest)] == ["metadata.namespace"]
