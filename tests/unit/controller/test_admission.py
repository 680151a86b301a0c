"""The admission webhook says what the reconciler would say, before anything is stored."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dsv4_operator.api import ClusterPolicy
from dsv4_operator.api.findings import InvalidDeployment
from dsv4_operator.api.load import parse
from dsv4_operator.controller.admission import PATH, AdmissionResult, AdmissionServer, judge, review
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.facts import catalog_facts
from dsv4_testkit.waiting import free_port

EXAMPLES = Path(__file__).parents[3] / "examples"
SPARKS = ClusterPolicy(host_network_namespaces=("default",))
"""Of a cluster whose sparks may be used from the namespace `default`."""


def manifest(name: str, **engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    found["spec"].setdefault("engine", {}).update(engine)
    return found


def asked(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    request: dict[str, Any] = {"uid": "1-2-3", "object": new} | ({"oldObject": old} if old is not None else {})
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


# On a cluster `hardware` is required: no machine is there to tell it.
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.yaml")} - {"nano-gpu"}))
def test_every_example_is_taken(name: str) -> None:
    assert judge(manifest(name), policy=SPARKS).refusal is None


def test_a_manifest_that_breaks_a_rule_of_its_form_is_refused_in_the_words_of_the_parser() -> None:
    bad = manifest("flash-2x-spark", maxModelLne=4096)
    with pytest.raises(InvalidDeployment) as said:
        parse(bad)
    assert judge(bad) == AdmissionResult(str(said.value))
    assert "did you mean maxModelLen?" in str(said.value)


def test_one_that_no_machine_can_run_is_refused_in_the_words_of_the_planner() -> None:
    bad = manifest("flash-2x-spark", extraArgs=["--max-model-length", "4096"])
    deployment = parse(bad)
    facts = catalog_facts(deployment, machine(deployment.spec.topology.hardware), state_root="/a", weights_root="/b")
    with pytest.raises(PlanRefused) as said:
        plan_group(deployment, facts, group=0, incarnation=1)
    assert judge(bad, policy=SPARKS) == AdmissionResult(said.value.message)


def test_what_the_nodes_decide_is_a_warning() -> None:
    found = judge(manifest("pro-8x-rtx-pro-6000"), policy=SPARKS)
    assert found.refusal is None
    assert len(found.warnings) == 1
    assert "the weights take" in found.warnings[0]


def test_the_planners_warnings_are_told() -> None:
    found = judge(manifest("pro-8x-spark"), policy=SPARKS)
    assert found.refusal is None
    assert any("gpuMemoryUtilization" in warning for warning in found.warnings)


def test_whoever_changes_something_else_or_stops_it_is_not_refused() -> None:
    bad = manifest("flash-2x-spark", extraArgs=["--max-model-length", "4096"])
    labelled = {**bad, "metadata": {**bad["metadata"], "labels": {"team": "a"}}}
    assert judge(labelled, bad) == AdmissionResult()
    assert judge(labelled, manifest("flash-2x-spark")).refusal is not None
    for stopped in ({"suspend": True}, {"replicas": 0}):
        assert judge({**bad, "spec": {**bad["spec"], **stopped}}, bad) == AdmissionResult()


def test_a_name_that_the_server_is_yet_to_make() -> None:
    unnamed = {**manifest("nano"), "metadata": {"generateName": "try-", "namespace": "a"}}
    assert judge(unnamed).refusal is None


def test_a_review_has_the_form_that_the_server_reads() -> None:
    good = review(asked(manifest("nano")))
    assert good == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "1-2-3", "allowed": True},
    }
    bad = review(asked(manifest("nano", maxModelLen=-1)))["response"]
    assert (bad["allowed"], bad["status"]["code"]) == (False, 422)
    assert "spec.engine.maxModelLen" in bad["status"]["message"]


def certificate(folder: Path, name: str) -> Path:
    """`tls.crt` and `tls.key` that sign themselves, for 127.0.0.1; the first is what a client trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("webhook")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / "tls.key").write_bytes(private)
    (folder / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return folder / "tls.crt"


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[AdmissionServer, str]]:
    port = free_port()
    server = AdmissionServer(port, folder, SPARKS, "")
    await server.start()
    try:
        yield server, f"https://127.0.0.1:{port}{PATH}"
    finally:
        await server.close()


async def post(url: str, trusted: str, body: bytes) -> tuple[int, str]:
    context = ssl.create_default_context(cadata=trusted)
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout) as client,
        client.post(url, data=body, ssl=context, server_hostname="webhook") as answer,
    ):
        return answer.status, await answer.text()


async def test_it_answers_over_tls_and_takes_a_renewed_certificate_over(tmp_path: Path) -> None:
    first = certificate(tmp_path, "first").read_text()
    body = json.dumps(asked(manifest("nano"))).encode()
    async with serving(tmp_path) as (server, url):
        status, text = await post(url, first, body)
        assert (status, json.loads(text)["response"]["allowed"]) == (200, True)
        assert (await post(url, first, b"{}"))[0] == 400
        assert (await post(url, first, b"no JSON"))[0] == 400

        second = certificate(tmp_path, "second").read_text()
        os.utime(tmp_path / "tls.key", ns=(1, 1))
        server.renew()
        assert (await post(url, second, body))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(url, first, body)

        # Half a renewal changes nothing.
        (tmp_path / "tls.crt").write_text("")
        server.renew()
        assert (await post(url, second, body))[0] == 200


def test_a_certificate_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AdmissionServer(1, tmp_path, SPARKS, "")
