"""Specifications made from the definition, with accepted, nearly accepted and unusual values for each field.

Two programs validate a specification: the API server by the definition, and Python by the models. Tests pass the same
objects to both.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from dsv4_operator.api.crd import definition

SPEC: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
TOKEN = "hf_" + "aB3" * 12
"""Has the form of a secret, but is none."""

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_SAMPLES: dict[str, Any] = {
    "name": "a", "key": "k", "value": "v", "repo": "a/b", "revision": _COMMIT, "bucket": "bucket",
    "url": "https://a.example/x",
    "endpoint": "https://a.example", "path": "/var/lib/dsv4/models/x", "sharedPath": "/var/lib/dsv4/models/x",
    "rank": 0,
    "variant": "Flash", "hardware": "GB10",
}  # fmt: skip
TEXTS = (
    "", "a", "A", "1", "-", "-a", "a-", "a b", " a", "a ", "\0", "a\0b", "\x1ca", "a\x1c", "\x7f", "\x85", "a\n",
    "a\nb", "\ta",
    "a\rb", "\u00a0a", "\u2028", "é", "名", "\U0001f600", "a.b", "a..b", ".a", "a.", "a/b", "a//b", "/a", "/a:b",
    "/a\0", "/",
    "//", "/../a", "a:b", "a=b", "a=b=c", "a_b", "a@b", "[a]", "{}", "null", "true", "0", "~", "*", "x" * 45,
    "x" * 46,
    "x" * 63, "x" * 64, "x" * 65, "x" * 253, "x" * 254, "x" * 317, "x" * 318, "x" * 1024, "x" * 1025, "é" * 63,
    "é" * 64,
    "https://a", "https://a.example/x", "http://a:1/x", "http://a:60000/x", "http://a:65535", "http://a:65536",
    "http://a:0",
    "http://a:080", "HTTP://a", "https://user:hunter2@a/x", "https://a/x?y", "https://a/x#y", "https://a b",
    "https://",
    "https://a..b/", "https://a./x", "ftp://a", "https://[::1]/x", "https://[2001:db8::1]:8443/x",
    "https://[fe80::1]/",
    "https://[::ffff:169.254.169.254]/", "https://[::ffff:a9fe:a9fe]/x", "https://[fd00:ec2::254]/",
    "http://169.254.169.254/x",
    "http://169.254.169.254", "http://169.254.169.254:80/x", "http://169.254.1.1./", "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0251.0376.0251.0376/", "http://0xa9.0xfe.0xa9.0xfe/", "http://169.16689662/", "http://169.254.43518/",
    "http://metadata.google.internal/x", "http://METADATA.google.internal./x", "http://metadata/",
    "http://100.100.100.200/x",
    "http://metadata.example.com/x", "http://10.0.0.1:9000/x", "http://169.253.1.1/x", "http://1.2.3.04/",
    "http://1.2.3.256/",
    "http://3par/x", "http://store-1.example/x", "http://u@169.254.169.254/x",
    "0s", "1ms", "90s", "1h30m", "1.5h", "0.0001h", "1.0001s", "8760h", "8761h", "8759h60m", "9999999999999999h",
    "9" * 60 + "h",
    "1d", "-1s", "+1s", "1", "1s ", "1µs", "1us", "1ns", "1e3s", "00001h", ".5s", "5.s",
    "0", "1", "1023", "1Ki", "64Ki", "65535", "1Mi", "1048575", "1Gi", "1.5Gi", "1.0Gi", ".5Gi", "1.1Gi", "1.50Gi",
    "1e3", "1E3",
    "1e18", "9e99", "1Ei", "1.1Ei", "2Ei", "10E", "1k", "1K", "1m", "1000m", "-1", "+1", "1.5", "1.001k", "1.0001k",
    "1.0001M",
    "512MiB", "8GB", "1 Gi", "9" * 30, "1073741825",
    "off", "auto", "fastest", "moe=bundled", "moe=bundled,mla_decode=stock", "moe=bundled, mla_decode=stock", "moe=",
    "moe",
    "moe=bundled,", "bad=stock", "moe=bundled_w4a8,moe=stock",
    "kubernetes.io/arch", "Example.com/x", "example.com/x", "-a/x", "a/" + "x" * 63, "a/" + "x" * 64,
    "a" * 253 + "/x",
    "a" * 254 + "/x", "rdma/hca_shared_devices_a", "nvidia.com/gpu", "kubernetes.io/x", "sub.kubernetes.io/x",
    "x.io/a-",
    "--seed", "--seed=1", "--model", "--model=x", "--mod", "--tensor_parallel_size=4", "-tp", "-tp=2", "-t", "-n2",
    "-r1", "-dpl",
    "-dpl=1", "-dpa", "-dcp", "-dc", "-q", "-O3", "--speculative-config.method=mtp", "--speculative_config.method",
    "--", "-1",
    "--hf-overrides.a=b", "--no-async-scheduling", "--data-parallel-address=x", "--x" + "y" * 8190,
    "HF_TOKEN", "hf_token", "PATH", "DSV4_X", "VLLM_PORT", "A1", "1A", "A-B",
    TOKEN, "/" + TOKEN, "https://" + TOKEN + ".example/x", "x" * 8192, "x" * 8193, "\x01" * 10,
)  # fmt: skip
_NUMBERS = (
    None, True, -1, 0, 1, 2, 3, 4, 15, 16, 17, 0.5, 1.0, 1.5, 2.0, 0.1, 0.09, 0.99, 0.995, 1e3, 1e30, 2**31 - 1,
    2**31, 2**53 + 1,
    2**63 - 1, 2**63, -(2**63), 2**64, "1", 8192, 8193, 65535, 65536, 4096.0, 2**60, 2**60 + 1,
)  # fmt: skip
_SHAPES: tuple[Any, ...] = (None, {}, [], "", "a", 0, 1, True, {"a": 1}, [{}], ["a"], [None], {"a": None}, [["a"]])


def fields(schema: dict[str, Any] = SPEC, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path below `spec` and schema of each field; `[]` stands for list entries, `{}` for map entries."""
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, part
        yield from fields(part, here)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield path + mark, schema[key]
            yield from fields(schema[key], path + mark)


def manifest(path: str = "") -> dict[str, Any]:
    """Return a valid deployment into which a value at `path` can be inserted."""
    nano = path.startswith("model.source.nano")
    source: dict[str, Any] = {"nano": {}} if nano else {"path": "/var/lib/dsv4/models/x"}
    topology: dict[str, Any] = {"hardware": "CPU" if nano else "GB10"}
    return {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": "x", "namespace": "default"},
        "spec": {"model": {"variant": "Nano" if nano else "Flash", "source": source}, "topology": topology},
    }


def values(schema: dict[str, Any], path: str) -> Iterator[Any]:
    """Yield the values tried for a field."""
    if schema.get("type") == "array":
        entry = sample(schema["items"], path)
        yield from ([entry], [entry, entry], [entry] * (schema["maxItems"] + 1), [entry, None])
    if schema.get("type") == "object":
        filled = sample(schema, path)
        yield from (filled, {**filled, "odd": 1}, {**filled, "odd": None})
        yield from ({**filled, name: None} for name in schema.get("properties", ()))
    if "additionalProperties" in schema:
        yield from ({text: "v"} for text in TEXTS)
        yield {f"k{number}": "v" for number in range(33)}
    if schema.get("type") in ("integer", "number") or schema.get("x-kubernetes-int-or-string"):
        yield from _NUMBERS
        for bound in (schema.get("minimum"), schema.get("maximum")):
            if bound is not None:
                yield from (bound - 1, bound, bound + 1)
    if schema.get("type") == "string" or schema.get("x-kubernetes-int-or-string"):
        yield from TEXTS
        longest = schema.get("maxLength", 0)
        yield from ("x" * longest, "x" * (longest + 1), "é" * longest, "/" + "x" * (longest - 1), "/" + "x" * longest)
        yield from _words(schema)
    yield from _SHAPES


def _words(schema: dict[str, Any]) -> Iterator[str]:
    for one in schema.get("x-kubernetes-validations", ()):
        if one["rule"].startswith("self in ["):
            words = one["rule"].removeprefix("self in [").removesuffix("]").replace('"', "").split(", ")
            yield from (word for listed in words for word in (listed, listed.lower(), listed + "x"))


def sample(schema: dict[str, Any], path: str) -> Any:
    """Return a value that is valid according to the schema."""
    name = path.replace("[]", "").replace("{}", "").rpartition(".")[2]
    if schema.get("type") == "object":
        return {key: sample(schema["properties"][key], f"{path}.{key}") for key in schema.get("required", ())}
    if schema.get("type") == "array":
        return [sample(schema["items"], path)]
    if schema.get("type") in ("integer", "number"):
        return _SAMPLES.get(name, schema.get("minimum", 1))
    if schema.get("type") == "boolean":
        return True
    return _SAMPLES.get(name, next(_words(schema), "a"))


def placed(path: str, value: Any) -> dict[str, Any]:
    """Return a deployment with `value` at `path` and the fields required next to it."""
    found = manifest(path)
    steps = path.replace("[]", ".[]").replace("{}", ".{}").split(".")
    if path.startswith("model.source."):
        found["spec"]["model"]["source"] = {}
    place, schema, here = found["spec"], SPEC, ""
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        here += step if step in ("[]", "{}") else f".{step}"
        schema = (
            schema["items"]
            if step == "[]"
            else schema.get("additionalProperties")
            if step == "{}"
            else schema["properties"][step]
        )
        if step == "[]":
            place[0:] = [value if last else sample(schema, here)]
            place = place[0]
        elif step == "{}":
            place["key"] = value
        elif last:
            place[step] = value
        else:
            empty: Any = [] if schema.get("type") == "array" else {}
            filled = sample(schema, here) if schema.get("type") == "object" else empty
            place[step] = {**filled, **place[step]} if isinstance(place.get(step), dict) else filled
            place = place[step]
    return copy.deepcopy(found)


def systematic() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each value at each field, with a short description."""
    for path, schema in fields():
        for value in values(schema, path):
            yield f"{path} = {value!r:.100}", placed(path, value)


def combined(chance: random.Random) -> dict[str, Any]:
    """Return a deployment in which several fields have matching or nearly matching values."""

    def some(**fields: tuple[Any, ...]) -> dict[str, Any]:
        return {name: chance.choice(given) for name, given in fields.items() if chance.random() < 0.4}

    found = manifest()
    variant, hardware = chance.choice(("Nano", "Flash", "Pro")), chance.choice(("CPU", "GB10", "RTXPRO6000", "H100"))
    sources: dict[str, Any] = {
        "nano": some(precision=("bf16", "fp8"), seed=(0, 1)),
        "path": "/var/lib/dsv4/models/x",
        "huggingFace": {"repo": "a/b", "revision": _COMMIT},
        "s3": {"bucket": "bucket"},
        "http": {"url": "https://a.example/x"},
    }
    names = chance.sample(list(sources), chance.choice((1, 1, 1, 1, 2)))
    found["spec"]["model"] = {"variant": variant, "source": {name: sources[name] for name in names}}
    found["spec"]["model"] |= some(servedNames=(["a"], ["a", "b"], ["a", "a"]))
    sizes = (1, 2, 3, 4, 8, 16)
    found["spec"]["topology"] = {"hardware": hardware} | some(
        nodesPerGroup=sizes, devicesPerNode=(1, 1, 2, 8), tensorParallelSize=sizes, pipelineParallelSize=(1, 1, 2, 3),
        nodes=(["a"], ["a", "b", "a"]), nodeSelector=({"a": ""}, {"a b": "c"}, {"example.com/x": "y"}),
        tolerations=([{}], [{"key": "nvidia.com/gpu"}], [{"operator": "Exists"}], [{"key": "nvidia.com/gpu",
        "operator": "Exists",
        "value": "x"}], [{"key": "nvidia.com/gpu", "value": "a b"}]),
    )  # fmt: skip
    found["spec"]["engine"] = some(
        gpuMemoryUtilization=(0.5, 0.99, 1, 2), kvCacheMemory=("1Gi", "1Mi", 1048575), maxModelLen=(8192, 8193, 128),
        maxNumSeqs=(1, 64, 65, 512), maxNumBatchedTokens=(64, 512), image=("registry.example/a:1", "a b"),
        extraArgs=(["--seed", "1"], ["seed"], [], ["--middleware=x"], ["--tokenizer-mode=x"], ["--trust_remote"],
        ["--no-enable-log-requests"], ["-tp2"], ["-cc.mode=3"]),
        env=([{"name": "OMP_NUM_THREADS", "value": "1"}] * 2, [{"name": "LD_AUDIT", "value": "x"}],
        [{"name": "VLLM_SERVER_DEV_MODE",
        "value": "1"}], [{"name": "HF_ENDPOINT", "value": "http://0xa9fea9fe/"}], [{"name": "HF_ENDPOINT",
        "value": "x"}]),
        imagePullSecrets=([{"name": "a"}], [{"name": "a"}, {"name": "a"}]),
    )  # fmt: skip
    found["spec"]["network"] = some(
        mode=("PodNetwork", "HostNetwork"), ports=({"api": 8000}, {"api": 8265}, {"api": 9000, "gcs": 9000}),
        fabric=({"members": [{"rank": 0}, {"rank": 0}]}, {"members": [{"rank": 0}, {"rank": 15,
        "gidIndex": "Auto"}]}),
    )  # fmt: skip
    found["spec"]["recovery"] = some(
        backoff=({"base": "20m"}, {"base": "10m", "max": "10m"}, {"max": "1s"}, {"max": "1m"})
    )
    return found | {"spec": found["spec"] | some(suspend=(True, False), replicas=(0, 1, 32, 33))}


def identified(chance: random.Random) -> dict[str, Any]:
    """Return a deployment with unusual name, labels and annotations."""
    found = manifest()
    words = [text for text in TEXTS if "\0" not in text]
    metadata: dict[str, Any] = {
        "name": chance.choice(words), "labels": {chance.choice(words): chance.choice(words)},
        "annotations": {chance.choice(words): chance.choice(words)},
    }  # fmt: skip
    wanted = chance.choice(list(metadata))
    found["metadata"][wanted] = chance.choice((metadata[wanted], metadata[wanted], None if wanted != "name" else "x"))
    return found


def drawn(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return `count` systematic specifications over all fields in turn, and `count` of each other kind."""
    chance = random.Random(seed)
    listed = list(fields())
    found = []
    for number in range(count):
        path, schema = listed[number % len(listed)]
        value = chance.choice(list(values(schema, path)))
        found.append((f"{path} = {value!r:.100}", placed(path, value)))
    for kind in (combined, identified):
        found += [(kind.__name__, kind(chance)) for _ in range(count)]
    return found
