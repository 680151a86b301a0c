"""Certificates for servers that a test starts on this machine."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "webhook"
LOOPBACK = ipaddress.IPv4Address("127.0.0.1")


def certificate(folder: Path, name: str, *, loopback: bool = False, hours: int = 1) -> Path:
    """Write a self-signed `tls.crt` that is valid for `HOST`, and `tls.key`; return the path of the first.

    Args:
        folder: an existing directory.
        name: the subject's; different names have different keys.
        loopback: whether it is valid for `LOOPBACK` too.
        hours: time until it expires.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.DNSName(HOST), *([x509.IPAddress(LOOPBACK)] if loopback else [])]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=hours))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / "tls.key").write_bytes(private)
    (folder / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return folder / "tls.crt"
