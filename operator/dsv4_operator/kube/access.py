"""API server and account: the service account of the pod, or a context of a kubeconfig."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_operator.kube.resources import KubeError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_READ_SECONDS = 60.0
"""Limit for reading a kubeconfig, with its credential plugin or OIDC requests."""
_READER = Path(__file__).with_name("kubeconfig.py")


class AccessError(KubeError):
    """No API server is configured or readable; the text names the searched places and the remedy."""


@dataclass(frozen=True, slots=True)
class Credential:
    """Credential of the client; empty for anonymous access."""

    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    scheme: str = "Bearer"
    """Scheme of the token in the header `Authorization`."""
    expires: float | None = None
    """Unix time; None: unknown, or never."""


class _Context(ssl.SSLContext):
    """TLS context that expects `server_name` in the server's certificate instead of the name in the URL."""

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Start TLS; asyncio calls this for every connection."""
        name = self.server_name or server_hostname
        return super().wrap_bio(incoming, outgoing, server_side, name, session)


@dataclass(frozen=True, slots=True)
class Access:
    """One API server and one account."""

    server: str
    """URL without a slash at its end."""
    namespace: str = "default"
    authority: str | None = None
    """PEM of the accepted certificate authorities; None: those of the machine."""
    insecure: bool = False
    """Whether the server's certificate is not verified, as set in the kubeconfig."""
    server_name: str | None = None
    """Expected name in the server's certificate, if not that of the URL."""
    proxy: str | None = field(default=None, repr=False)
    """URL of the HTTP proxy."""
    credential: Credential = Credential()
    token_file: Path | None = None
    """Token file, whose content is replaced from time to time."""
    kubeconfig: tuple[tuple[Path, ...], str | None] | None = None
    """Files and context from which a changing credential is read again."""

    @property
    def changing(self) -> bool:
        """Return whether the credential can change."""
        return self.kubeconfig is not None or self.token_file is not None

    @property
    def in_cluster(self) -> bool:
        """Return whether this is the account of the pod of this process."""
        return self.token_file == SERVICE_ACCOUNT / "token"

    def credentials(self) -> Credential:
        """Return the present credential. Blocks: it may read a file or run a program (60 s at most).

        Raises:
            AccessError: the file or the program gave none.
        """
        if self.kubeconfig is not None:
            return _from_files(*self.kubeconfig).credential
        if self.token_file is not None:
            try:
                return Credential(token=self.token_file.read_text().strip())
            except OSError as error:
                raise AccessError(f"{self.token_file}: {error.strerror}; it should hold the account's token") from None
        return self.credential

    def tls(self, credential: Credential) -> ssl.SSLContext | None:
        """Return the TLS context with authority and client certificate; None for plain HTTP. Blocks: reads files.

        Raises:
            AccessError: the authority or the client certificate is invalid.
        """
        if not self.server.startswith("https:"):
            return None
        context = _Context(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        try:
            if self.authority:
                context.load_verify_locations(cadata=self.authority)
            else:
                context.load_default_certs()
        except (OSError, ValueError, TypeError) as error:
            raise AccessError(f"the certificate authority of {self.server} is no PEM certificate: {error}") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if credential.certificate and credential.key:
            # `ssl` loads certificates only from files.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:
                pair.write(f"{credential.certificate}\n{credential.key}")
                pair.flush()
                try:
                    # A password would be read from the terminal.
                    context.load_cert_chain(pair.name, password="")
                except (OSError, ValueError) as error:
                    raise AccessError(f"the client certificate or key for {self.server} is invalid: {error}") from None
        return context


def find_access(context: str | None = None, kubeconfig: Path | None = None) -> Access:
    """Return the access in the order of `kubectl`: `kubeconfig`, else `$KUBECONFIG`, else the service account of a pod,
    else `~/.kube/config`.

    Args:
        context: context of the kubeconfig; None: its current one.
        kubeconfig: the file; None: the order above.

    Raises:
        AccessError: there is none, or it cannot be read.
    """
    if kubeconfig is not None:
        return _from_files([kubeconfig], context)
    named = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    usual = Path.home() / ".kube" / "config"
    if named:
        return _from_files(named, context)
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if host and context is None and (SERVICE_ACCOUNT / "token").exists():
        return _of_pod(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    if usual.exists():
        return _from_files([usual], context)
    raise AccessError(f"no cluster to speak to: $KUBECONFIG is not set and {usual} does not exist; set one of them up")


def _of_pod(host: str, port: str) -> Access:
    try:
        return Access(
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            namespace=(SERVICE_ACCOUNT / "namespace").read_text().strip(),
            authority=(SERVICE_ACCOUNT / "ca.crt").read_text(),
            token_file=SERVICE_ACCOUNT / "token",
        )
    except OSError as error:
        raise AccessError(
            f"{error.filename}: {error.strerror}; does the pod mount its service account's token?"
        ) from None


def _from_files(files: Sequence[Path], context: str | None) -> Access:
    """Read kubeconfigs: the first file with an entry wins, as in `kubectl`."""
    found = _read(files, context)
    return Access(
        server=found["server"],
        namespace=found["namespace"],
        authority=found["authority"],
        insecure=found["insecure"],
        server_name=found["serverName"],
        proxy=found["proxy"],
        credential=Credential(
            token=found["token"],
            certificate=found["certificate"],
            key=found["key"],
            scheme=found["scheme"] or "Bearer",
            expires=found["expires"],
        ),
        kubeconfig=(tuple(files), context) if found["changing"] else None,
    )


def _read(files: Sequence[Path], context: str | None) -> dict[str, Any]:
    """Return the result of `kubeconfig.load`, which runs in a process of its own."""
    where = ", ".join(map(str, files))
    with tempfile.TemporaryDirectory(prefix="dsv4-kubeconfig-") as directory:
        # -P: its directory contains modules with common names.
        command = [sys.executable, "-P", str(_READER), directory, context or "", *map(str, files)]
        reader = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = reader.communicate(timeout=_READ_SECONDS)
        except subprocess.TimeoutExpired:
            raise AccessError(
                f"{where}: no credential within {_READ_SECONDS:.0f} s; does its plugin or its login wait for input?"
            ) from None
        finally:
            # Also the plugin.
            if reader.returncode is None:
                os.killpg(reader.pid, signal.SIGKILL)
                reader.communicate()
    if reader.returncode:
        # Before the message there may be warnings.
        message = errors.strip().rpartition("\n")[2]
        raise AccessError(message or f"{where} cannot be read: exit code {reader.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found
