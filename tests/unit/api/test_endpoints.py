"""No URL of a specification leads to a link-local address or to the metadata service of a cloud."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.api import InvalidDeployment, parse
from dsv4_operator.api.security import ENDPOINT_VARIABLES, is_link_local
from dsv4_testkit.specifications import placed

FIELDS = ("model.source.http.url", "model.source.s3.endpoint", "model.source.huggingFace.endpoint", *ENDPOINT_VARIABLES)
HOSTS = [
    "169.254.169.254", "169.254.0.1", "169.254.169.254.", "2852039166", "0xa9fea9fe", "0xA9FEA9FE",
    "0xa9.0xfe.0xa9.0xfe",
    "0251.0376.0251.0376", "025177524776", "0000251.0376.0251.0376", "169.16689662", "169.254.43518",
    "169.0376.169.254",
    "0xa9.254.169.254", "169.0xfea9fe", "[fe80::1]", "[fe80::a9fe:a9fe%25eth0]", "[FEBF::1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]", "[0:0:0:0:0:ffff:a9fe:a9fe]", "[::169.254.169.254]", "[::a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]", "[fd00:ec2::254]", "[fd00:0ec2::254]", "metadata.google.internal",
    "metadata.google.internal.",
    "METADATA.Google.Internal", "metadata", "metadata.", "metadata.goog", "metadata.azure.internal", "instance-data",
    "instance-data.ec2.internal", "100.100.100.200", "168.63.129.16", "192.0.0.192", "user@169.254.169.254",
    "user:pass@169.254.169.254", "a@b@169.254.169.254",
]  # fmt: skip
OTHERS = [
    "store", "store.example", "10.0.0.1", "192.168.1.2", "169.253.1.1", "169.255.0.1", "metadata.example.com",
    "my-metadata",
    "huggingface.co", "[2001:db8::1]", "[fd12:3456::1]", "[::1]", "127.0.0.1", "3par.example", "a_b.svc",
    "0x.example",
    "minio.models.svc.cluster.local",
]  # fmt: skip


def manifest(field: str, url: str) -> dict[str, Any]:
    if field in ENDPOINT_VARIABLES:
        return placed("engine.env", [{"name": field, "value": url}])
    return placed(field, url)


def told(field: str, url: str) -> str:
    try:
        parse(manifest(field, url))
    except InvalidDeployment as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", FIELDS)
def test_a_link_local_host_is_refused(field: str) -> None:
    for url in (
        url.format(host) for host in HOSTS for url in ("http://{}", "https://{}/latest/meta-data", "http://{}:80/")
    ):
        refusal = told(field, url)
        where = "spec.engine.env[0].value" if field in ENDPOINT_VARIABLES else f"spec.{field}"
        assert any(line.startswith(f"{where}: ") for line in refusal.splitlines()), url


@pytest.mark.parametrize("host", HOSTS)
def test_a_link_local_host_is_refused_wherever_there_is_a_url(host: str) -> None:
    for text in (f"http://{host}/x", f'{{"url": "http://{host}"}}', f"a,https://{host}:80"):
        assert is_link_local(text), text
        assert "link-local" in told("engine.env[].value", text)
        assert "link-local" in str(told("engine.extraArgs", ["--seed", text]))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", FIELDS)
def test_other_hosts_are_taken(field: str) -> None:
    for host in OTHERS:
        for url in (f"http://{host}", f"https://{host}/a/b", f"http://{host}:65535"):
            assert told(field, url) == ""


@pytest.mark.parametrize("field", FIELDS)
def test_urls_other_than_a_host_and_a_path_are_refused(field: str) -> None:
    """Numbers in other notations are not accepted as hosts, because programs interpret them as different addresses."""
    for url in (
        "", "mirror.example", "ftp://mirror.example", "https://user:pass@mirror.example", "https://mirror.example/x?token=y",
        "https://mirror.example/#x", "https:// mirror.example", "https://", "http://a..b", "http://a:0", "http://a:65536",
        "http://0177.0.0.1/", "http://0x7f.1/", "http://10.1/", "http://1.2.3.04/", "http://1.2.3.256/", "http://1.2.3.4.5/",
        "http://[1::2::3", "http://a\\@b", "http://a%2e", "http://ａ.example/",
    ):  # fmt: skip
        assert told(field, url), url


def forms(address: int) -> list[str]:
    """Return notations of an IPv4 address that programs accept."""
    a, b, c, d = address.to_bytes(4, "big")
    return [
        f"{a}.{b}.{c}.{d}", f"{address}", f"0x{address:x}", f"0{address:o}", f"{a}.{address & 0xFFFFFF}",
        f"{a}.{b}.{address & 0xFFFF}",
        f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"{a}.0x{b:x}.{c}.0{d:o}",
        f"[::ffff:{a}.{b}.{c}.{d}]",
        f"[::ffff:{address >> 16:x}:{address & 0xFFFF:x}]", f"0x{a:x}.{address & 0xFFFFFF}", f"{a}.{b}.{c}.{d}.",
    ]  # fmt: skip


@settings(deadline=None)
@given(st.integers(int(ipaddress.IPv4Address("169.254.0.0")), int(ipaddress.IPv4Address("169.254.255.255"))))
def test_every_way_to_write_a_link_local_address_is_refused(address: int) -> None:
    for host in forms(address):
        for field in FIELDS[:1] + ENDPOINT_VARIABLES[:1]:
            assert told(field, f"http://{host}/x"), host
        assert is_link_local(f"http://{host}/x"), host


@settings(deadline=None)
@given(st.integers(2**24, 2**32 - 1))
def test_an_ordinary_address_is_taken(address: int) -> None:
    url = f"http://{ipaddress.IPv4Address(address)}:9000/x"
    special = url.startswith(
        ("http://169.254.", "http://168.63.129.16:", "http://100.100.100.200:", "http://192.0.0.192:")
    )
    assert bool(told("model.source.http.url", url)) == special
