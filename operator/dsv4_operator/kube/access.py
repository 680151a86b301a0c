"""API server and account: the service account of the pod, or a context of a kubeconfig."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dsv4_operator.kube.resources import KubeError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_SECONDS = 60.0


class AccessError(KubeError):
    """No API server is configured or readable; the text names the searched places and the remedy."""


@dataclass(frozen=True, slots=True)
class Credential:
    """Credential of the client; empty for anonymous access."""

    token: str | None = None
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)


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
    credential: Credential = Credential()
    token_file: Path | None = None
    """Token file, whose content is replaced from time to time."""
    plugin: Mapping[str, Any] | None = None
    """The kubeconfig's `exec`: a program that prints a credential."""

    @property
    def changing(self) -> bool:
        """Return whether the credential can change."""
        return self.plugin is not None or self.token_file is not None

    @property
    def in_cluster(self) -> bool:
        """Return whether this is the account of the pod of this process."""
        return self.token_file == SERVICE_ACCOUNT / "token"

    def credentials(self) -> Credential:
        """Return the present credential. Blocks: it may read a file or run a program (60 s at most).

        Raises:
            AccessError: the file or the program gave none.
        """
        if self.plugin is not None:
            return _run_plugin(self.plugin, self.server)
        if self.token_file is not None:
            try:
                return Credential(token=self.token_file.read_text().strip())
            except OSError as error:
                raise AccessError(f"{self.token_file}: {error.strerror}; it should hold the account's token") from None
        return self.credential

    def tls(self, credential: Credential) -> ssl.SSLContext | None:
        """Return the TLS context with authority and client certificate; None for plain HTTP. Blocks: reads files."""
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cadata=self.authority)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if credential.certificate and credential.key:
            # `ssl` loads certificates only from files.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:
                pair.write(f"{credential.certificate}\n{credential.key}")
                pair.flush()
                context.load_cert_chain(pair.name)
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


def _from_files(files: list[Path], context: str | None) -> Access:
    """Merge `files`: the first file with an entry wins, as in `kubectl`."""
    found: dict[str, dict[str, Any]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = context
    for file in files:
        try:
            document = yaml.safe_load(file.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise AccessError(f"{file} cannot be read as a kubeconfig: {' '.join(str(error).split())}") from None
        if not isinstance(document, dict):
            continue
        current = current or document.get("current-context")
        for kind, entries in found.items():
            for entry in document.get(kind) or ():
                entries.setdefault(entry["name"], (entry.get(kind[:-1]) or {}, file.parent))
    where = ", ".join(map(str, files))
    if not current:
        raise AccessError(f"{where}: no context is chosen; run `kubectl config use-context NAME` or give --context")
    if current not in found["contexts"]:
        known = ", ".join(sorted(found["contexts"])) or "none"
        raise AccessError(f"{where}: there is no context {current!r}; there is: {known}")
    chosen, _ = found["contexts"][current]
    try:
        cluster, cluster_home = found["clusters"][chosen.get("cluster")]
    except KeyError:
        raise AccessError(f"{where}: the cluster {chosen.get('cluster')!r} of context {current!r} is missing") from None
    user, user_home = found["users"].get(chosen.get("user"), ({}, Path()))
    token_file = user.get("tokenFile")
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        namespace=chosen.get("namespace") or "default",
        authority=_pem(cluster, "certificate-authority", cluster_home),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name"),
        credential=Credential(
            user.get("token"),
            _pem(user, "client-certificate", user_home),
            _pem(user, "client-key", user_home),
        ),
        token_file=user_home / token_file if token_file else None,
        plugin=user.get("exec"),
    )


def _pem(entry: Mapping[str, Any], name: str, home: Path) -> str | None:
    """Return PEM from `NAME-data`, else from the file `NAME`, which is relative to its kubeconfig."""
    data, file = entry.get(f"{name}-data"), entry.get(name)
    try:
        if data:
            return base64.b64decode(data).decode()
        return (home / file).read_text() if file else None
    except (OSError, ValueError) as error:
        raise AccessError(f"{name} of the kubeconfig cannot be read: {error}") from None


def _run_plugin(plugin: Mapping[str, Any], server: str) -> Credential:
    """Run a credential plugin (client-go's ExecCredential)."""
    command = [plugin["command"], *(plugin.get("args") or ())]
    version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
    request = {
        "apiVersion": version,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": server}},
    }
    settings = {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
    environment = {**os.environ, **settings, "KUBERNETES_EXEC_INFO": json.dumps(request)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PLUGIN_SECONDS, check=True
        )
        status = json.loads(done.stdout)["status"]
    except subprocess.CalledProcessError as error:
        raise AccessError(f"{command[0]} of the kubeconfig failed: {error.stderr.strip()[-500:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AccessError(f"{command[0]} of the kubeconfig cannot be run: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise AccessError(f"{command[0]} of the kubeconfig printed no ExecCredential with a status") from None
    return Credential(status.get("token"), status.get("clientCertificateData"), status.get("clientKeyData"))
