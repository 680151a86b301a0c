"""Reads kubeconfigs with the official client, in a process of its own: `kubeconfig.py DIRECTORY CONTEXT FILE...`.

Prints one JSON object (`load`), or exits with a message. The official client costs memory and seconds to import, runs
credential plugins and OIDC requests without a time limit, and writes keys to temporary files. In a short-lived process,
none of these concern the operator: `access.py` bounds its time and removes its directory.

Differences between the official client and `kubectl` that are corrected here: of several files it takes the last
`current-context` and rejects empty ones; it resolves the paths of a user's files against the cluster's kubeconfig;
it prefers `token` to `tokenFile`; after a failed plugin it continues without a credential.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

_KINDS = ("contexts", "clusters", "users")
_FILES = {
    "clusters": ("certificate-authority",),
    "users": ("client-certificate", "client-key", "tokenFile"),
}
_TEXTS = {
    "context": ("namespace",),
    "cluster": ("certificate-authority", "certificate-authority-data", "tls-server-name", "proxy-url"),
    "user": (
        *("client-certificate", "client-certificate-data", "client-key", "client-key-data"),
        *("token", "tokenFile", "username", "password"),
    ),
}
_CHANGING = ("exec", "auth-provider", "tokenFile", "client-certificate")
"""Fields of a user whose credential can change."""


class KubeconfigError(Exception):
    """The kubeconfig is invalid or gives no credential; the text names field, value and remedy."""


def load(files: Sequence[Path], context: str | None, directory: Path) -> dict[str, Any]:
    """Return the API server and the credential of `context` (None: the current one) as JSON values.

    Files in `directory` may be in use until the process ends.

    Raises:
        KubeconfigError: see there.
    """
    where = ", ".join(map(str, files))
    documents = {file: found for file in files if (found := _read(file))}
    context = context or next((name for each in documents.values() if (name := each.get("current-context"))), None)
    if not context:
        raise KubeconfigError(f"{where}: no context is chosen; run `kubectl config use-context NAME`")
    contexts = _names(documents, "contexts")
    if context not in contexts:
        known = ", ".join(contexts)[:500] or "none"
        raise KubeconfigError(f"{where}: there is no context {_shown(context)}; there is: {known}")
    try:
        return _Loaded(documents, context, where, directory).values()
    except KubeconfigError:
        raise
    except Exception as error:
        # The official client raises errors of many types for invalid content.
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise KubeconfigError(f"{where}: context {context!r} cannot be used: {reason}") from error


def _read(file: Path) -> dict[str, Any] | None:
    """Return the content of a kubeconfig; None for a missing or empty one."""
    try:
        document = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise KubeconfigError(f"{file} cannot be read as a kubeconfig: {' '.join(str(error).split())}") from None
    if document is None:
        return None
    if not isinstance(document, dict):
        raise KubeconfigError(f"{file} is no kubeconfig: a {type(document).__name__} instead of an object")
    for kind in _KINDS:
        entries = document.get(kind) or []
        if not isinstance(entries, list) or not all(_valid(entry, kind[:-1]) for entry in entries):
            wanted = f"a list of objects with `name` and `{kind[:-1]}`"
            raise KubeconfigError(f"{file}: {kind}: is not {wanted}; correct it, or run `kubectl config`")
    return document


def _valid(entry: object, kind: str) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    return entry.get(kind) is None or isinstance(entry[kind], dict)


def _names(documents: Mapping[Path, Mapping[str, Any]], kind: str) -> list[str]:
    return list(dict.fromkeys(entry["name"] for each in documents.values() for entry in each.get(kind) or ()))


class _Loaded:
    """One context, loaded by the official client."""

    def __init__(self, documents: Mapping[Path, dict[str, Any]], context: str, where: str, directory: Path) -> None:
        # Imported here, so that a missing package is an error with a remedy.
        try:
            from kubernetes.client import Configuration
            from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
        except ImportError:
            raise KubeconfigError(
                f"{where}: kubeconfigs need the package kubernetes, which is not installed; install dsv4[kubeconfig]"
            ) from None
        self._where = where
        merger = KubeConfigMerger("")
        for file in documents:
            merger.load_config(str(file))
        merger.paths = list(map(str, documents))
        merger.config_saved = deepcopy(merger.config_files)
        merged = merger.config.value
        for kind in _KINDS:
            for node in merged[kind]:
                node.value = _complete(kind, node.value, Path(node.path).absolute().parent)
                # By default it contains the entry with its secrets, and is part of error messages.
                node.name = f"{kind}[{node.value['name']}]"
        chosen = self._entry(merged, "contexts", context)
        cluster = chosen.get("cluster")
        if cluster not in _names(documents, "clusters"):
            raise KubeconfigError(f"{where}: the cluster {_shown(cluster)} of context {context!r} is missing")
        self._chosen = chosen
        self._cluster = self._entry(merged, "clusters", cluster)
        self._user = self._entry(merged, "users", chosen.get("user"))
        self._check()
        self._loader = KubeConfigLoader(
            merger.config, context, config_persister=merger.save_changes, temp_file_path=str(directory)
        )
        self._configuration = Configuration()
        # The loader logs the failures of plugins instead of raising them.
        errors = StringIO()
        handler = logging.StreamHandler(errors)
        logging.getLogger().addHandler(handler)
        try:
            self._loader.load_and_set(self._configuration)
        finally:
            logging.getLogger().removeHandler(handler)
        self._check_credential(" ".join(errors.getvalue().split()))

    def values(self) -> dict[str, Any]:
        """Return the result of `load`."""
        found = self._configuration
        scheme, _, token = (found.api_key.get("BearerToken") or "").partition(" ")
        token = token.strip()
        if not token.isascii() or not all(letter.isprintable() and letter != " " for letter in token):
            raise KubeconfigError(f"{self._where}: the token of the user has characters that no HTTP header may have")
        expiry = getattr(self._loader, "expiry", None)
        return {
            "server": found.host,
            "namespace": self._chosen.get("namespace") or "default",
            "authority": _text(found.ssl_ca_cert),
            "insecure": not found.verify_ssl,
            "serverName": found.tls_server_name,
            "proxy": self._proxy(),
            "scheme": scheme,
            "token": token or None,
            "certificate": _text(found.cert_file),
            "key": _text(found.key_file),
            "expires": expiry.timestamp() if expiry is not None else None,
            "changing": any(self._user.get(name) for name in _CHANGING),
        }

    def _entry(self, merged: Mapping[str, Any], kind: str, name: object) -> dict[str, Any]:
        """Return the content of an entry; an empty object if there is none."""
        found: dict[str, Any] = next((node.value[kind[:-1]] for node in merged[kind] if node.value["name"] == name), {})
        return found

    def _check(self) -> None:
        """Check the fields that the official client passes on unchecked."""
        server = self._cluster.get("server")
        try:
            url = urlsplit(server if isinstance(server, str) else "")
            valid = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
        except ValueError:
            valid = False
        if not valid:
            raise KubeconfigError(
                f"{self._where}: clusters: server: {_shown(server)} is no URL; write https://HOST:PORT"
            )
        for kind, entry in (("context", self._chosen), ("cluster", self._cluster), ("user", self._user)):
            for field in _TEXTS[kind]:
                if not isinstance(entry.get(field, ""), str):
                    shown = f"a {type(entry[field]).__name__}"
                    raise KubeconfigError(f"{self._where}: {kind}s: {field}: {shown} is no text; quote it")

    def _check_credential(self, logged: str) -> None:
        plugin, provider = self._user.get("exec"), self._user.get("auth-provider")
        if plugin and logged:
            command = _shown(plugin.get("command") if isinstance(plugin, dict) else plugin)
            raise KubeconfigError(f"{self._where}: users: exec: {command} gave no credential: {logged[-500:]}")
        if provider and not self._configuration.api_key:
            name = _shown(provider.get("name") if isinstance(provider, dict) else None)
            remedy = "log in again, or use a credential plugin (exec)"
            raise KubeconfigError(f"{self._where}: users: auth-provider: {name} gave no token; {remedy}")

    def _proxy(self) -> str | None:
        """Return the proxy of the cluster, else that of the environment, as `kubectl` does."""
        from kubernetes.client.rest import should_bypass_proxies

        found = self._configuration
        proxy = self._cluster.get("proxy-url") or found.proxy
        if not proxy:
            return None
        if not self._cluster.get("proxy-url") and should_bypass_proxies(found.host, found.no_proxy or ""):
            return None
        if urlsplit(proxy).scheme != "http":
            raise KubeconfigError(f"{self._where}: proxy-url: {_shown(proxy)} is not supported; use an http:// proxy")
        return str(proxy)


def _complete(kind: str, entry: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return an entry with absolute paths. Its other values are the same objects, which an OIDC refresh changes."""
    content = dict(entry.get(kind[:-1]) or {})
    for field in _FILES.get(kind, ()):
        if content.get(field) and isinstance(content[field], str):
            content[field] = str(home / content[field])
    if content.get("tokenFile"):
        content.pop("token", None)
    # Null is the same as absent.
    return {**entry, kind[:-1]: {name: value for name, value in content.items() if value is not None}}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _text(file: str | None) -> str | None:
    return Path(file).read_text() if file else None


def main() -> None:
    """Print the result of `load`."""
    directory, context, *files = sys.argv[1:]
    try:
        print(json.dumps(load([Path(file) for file in files], context or None, Path(directory))))
    except KubeconfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
