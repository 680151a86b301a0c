"""Deployments of a cluster, read and changed through `kubectl`."""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, parse
from dsv4_operator.api.deployment import NAME_PATTERN, PAUSED, RESTART_AT, is_paused
from dsv4_operator.api.values import format_time, parse_time
from dsv4_operator.builders import paths
from dsv4_operator.builders.names import head_name, incarnation_name, mounted_name
from dsv4_operator.cli.cluster import evidence, logs
from dsv4_operator.cli.cluster.forward import Forward
from dsv4_operator.cli.cluster.kubectl import CALL_SECONDS, Kubectl, KubectlError
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.files import read_file
from dsv4_operator.cli.log_lines import LogOptions
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import note
from dsv4_operator.cli.source import Api, Dashboard, Piece, first_key
from dsv4_operator.cli.where import program
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_operator.planning.memory.measured import measured_of

RESOURCE = "dsv4deployments.dsv4.dev"
_RUNS = "status.phase!=Succeeded,status.phase!=Failed"


class ClusterSource:
    """A `DeploymentSource` over the API server that `kubectl` speaks to."""

    pause = 2.0

    def __init__(self, context: str | None, kubeconfig: Path | None, namespace: str | None) -> None:
        self._kubectl = Kubectl(context, kubeconfig, namespace)
        self._given_namespace = namespace

    @cached_property
    def namespace(self) -> str:
        """Return the one that is meant."""
        if self._given_namespace:
            return self._given_namespace
        return self._kubectl.run("config", "view", "--minify", "--output=jsonpath={..namespace}") or "default"

    @property
    def place(self) -> str:
        """Return where the source looks."""
        return f"in namespace {self.namespace}"

    def command(self, verb: str, name: str = "") -> str:
        """Return what to type for `verb`."""
        options = self._kubectl.options or (" --cluster" if program() == "dsv4" else "")
        return " ".join(part for part in (program(), verb, name) if part) + options

    def names(self, *, seconds: float = CALL_SECONDS) -> list[str]:
        """Return the name of every deployment of the namespace."""
        text = self._kubectl.run("get", RESOURCE, "--output=name", seconds=seconds)
        return [line.rpartition("/")[2] for line in text.split()]

    def one(self, name: str | None) -> DeploymentView:
        """Return the deployment called `name`; without a name the only one of the namespace."""
        if name is not None:
            return _shown(self._document(name))
        found = self.every()
        if len(found) == 1:
            return found[0]
        if not found:
            raise bad_input(f"there is no deployment {self.place}; make one with `kubectl apply -f FILE`")
        raise bad_input(f"which deployment? Give its name{_known([item.name for item in found])}")

    def every(self, *, everywhere: bool = False) -> list[DeploymentView]:
        """Return every deployment of the namespace, or of all; warn of each that this version cannot read."""
        found = []
        for document in self._kubectl.items(RESOURCE, *(["--all-namespaces"] if everywhere else [])):
            try:
                found.append(_shown(document))
            except CommandError as error:
                for message in error.messages:
                    note(f"warning: {message}")
        return found

    def given(self, what: str) -> DSV4Deployment:
        """Return the deployment called `what`, or in the file `what` if that cannot be a name."""
        return self.one(what).object if re.fullmatch(NAME_PATTERN, what) else read_file(what)

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return the cluster's nodes, as the operator sees them; machines of the catalog if they may not be listed."""
        from dsv4_operator.backends.pods.scheduling import Snapshot, facts

        if not chosen:
            try:
                nodes = self._kubectl.items("nodes")
                pods = self._kubectl.items("pods", "--all-namespaces", f"--field-selector={_RUNS}")
                return facts(deployment, Snapshot.of_pods(nodes, pods))
            except KubectlError as error:
                note(f"warning: planned for machines as the catalog knows them, not for the cluster's: {error.reason}")
        metadata = deployment.metadata
        folder = paths.own_folder(deployment.spec.storage.path, metadata.namespace, metadata.name)
        return catalog_facts(deployment, kind, state_root=paths.STATE, weights_root=f"{folder}/weights")

    def measured(self, name: str) -> tuple[Measured, ...]:
        """Return what the status of a deployment of that name says."""
        try:
            return measured_of(self.one(name).object.status)
        except CommandError:
            return ()

    @contextmanager
    def api(self, item: DeploymentView) -> Iterator[Api]:
        """Reach the API through the Service that users reach."""
        key = ""
        if keys := item.object.spec.gateway.api_keys:
            ref = keys.secret_key_ref
            key = first_key(self._secret(ref.name, ref.key, "requests need a key that is"))
        with Forward(self._kubectl, item.name, paths.GATEWAY_PORT) as forward:
            yield Api(lambda: f"{forward.url()}/v1", key)

    @contextmanager
    def dashboard(self, item: DeploymentView, group: int) -> Iterator[Dashboard]:
        """Reach the dashboard through the Service of the group's head."""
        found = next((each for each in item.status.groups if each.index == group and each.members), None)
        if found is None:
            raise CommandError(f"group {group} of {item.name} has no dashboard now: {item.name} is {item.phase}")
        secret = mounted_name(item.name, item.object.metadata.uid, group, found.incarnation)
        if not self._has_secret(secret):
            # An incarnation that was formed before names contained the UID.
            earlier = incarnation_name(item.name, group, found.incarnation)
            secret = earlier if self._has_secret(earlier) else secret
        token = self._secret(secret, paths.TOKEN_ENTRY, "the page asks for a token, which is")
        with Forward(self._kubectl, head_name(item.name, group), paths.HEAD_PORTS["dashboard"][0]) as forward:
            yield Dashboard(forward.url, token, lasts=False)

    def logs(self, name: str | None, request: LogOptions) -> ExitCode:
        """Print what the members' pods have."""
        return logs.show(self._kubectl, self.one(name), request, self)

    def evidence(self, name: str | None) -> tuple[str, Iterator[Piece]]:
        """Return the object, its events, pods, plans and logs, and what was kept of earlier deaths."""
        item = self.one(name)
        return item.name, evidence.Collection(self._kubectl, item).pieces()

    def restart(self, item: DeploymentView) -> str:
        """Change the annotation that asks for new incarnations."""
        if item.object.spec.suspend:
            raise bad_input(f"{item.name} is suspended; `{self.command('resume', item.name)}` starts it")
        now = format_time(int(time.time()))
        self._patch(item, {"metadata": {"annotations": {RESTART_AT: now}}})
        return self._asked(item, "is being formed anew")

    def suspend(self, item: DeploymentView, wanted: bool) -> str:
        """Set `spec.suspend`."""
        if item.object.spec.suspend is wanted:
            return f"{item.name} is {'suspended already' if wanted else 'not suspended'}"
        self._patch(item, {"spec": {"suspend": wanted}})
        return self._asked(item, "is stopping; its weights stay" if wanted else "is starting")

    def _asked(self, item: DeploymentView, doing: str) -> str:
        if is_paused(item.object):
            return f"{item.name} {doing} as soon as its annotation {PAUSED} is removed"
        return f"{item.name} {doing}; see `{self.command('status', item.name)} --watch`"

    def _document(self, name: str) -> dict[str, Any]:
        # What is no name could be an option, or another kind of object, to kubectl.
        valid = re.fullmatch(NAME_PATTERN, name)
        found = self._kubectl.document("get", RESOURCE, name, "--ignore-not-found") if valid else None
        if found is None:
            raise bad_input(f"there is no deployment {name!r} {self.place}{_known(self.names())}")
        document: dict[str, Any] = found
        return document

    def _patch(self, item: DeploymentView, change: dict[str, Any]) -> None:
        self._kubectl.run("patch", RESOURCE, item.name, "--type=merge", f"--patch={json.dumps(change)}")

    def _has_secret(self, name: str) -> bool:
        """Tell whether there is a Secret of that name that the user may read."""
        try:
            return self._kubectl.document("get", "secret", name, "--ignore-not-found") is not None
        except KubectlError:
            return False

    def _secret(self, name: str, key: str, why: str) -> str:
        """Return a text in a Secret; empty, with a remark, if there is none or the user may not read it."""
        try:
            data = self._kubectl.document("get", "secret", name)["data"][key]
            return base64.b64decode(data, validate=True).decode().strip()
        except KubectlError as error:
            note(f"warning: {why} in Secret {name}; it cannot be read: {error.reason}")
        except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
            note(f"warning: {why} in Secret {name}; it has no text under {key!r}")
        return ""


def _shown(document: dict[str, Any]) -> DeploymentView:
    metadata = document["metadata"]
    try:
        found = parse(document)
    except InvalidDeployment as error:
        name = f"{metadata.get('namespace')}/{metadata.get('name')}"
        raise bad_input(
            *(f"{name} cannot be read by this version of dsv4: {finding}" for finding in error.findings)
        ) from None
    created = parse_time(metadata["creationTimestamp"])
    return DeploymentView(found, running=True, created=created, kept=document)


def _known(found: list[str]) -> str:
    return f"; there is {', '.join(found)}" if found else ""
