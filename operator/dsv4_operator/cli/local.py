"""Deployments of this machine: what `dsv4 up` keeps in the state directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local.facts import available_memory, local_facts, resident_memory
from dsv4_operator.backends.local.state import DeploymentState, StateError, deployments
from dsv4_operator.cli import evidence, logs, words
from dsv4_operator.cli.choose import state_of, the_one
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input, explained
from dsv4_operator.cli.files import read_file
from dsv4_operator.cli.leftovers import processes
from dsv4_operator.cli.log_lines import LogOptions
from dsv4_operator.cli.look import DeploymentView, look
from dsv4_operator.cli.output import note
from dsv4_operator.cli.source import Api, Dashboard, Piece, first_key, not_serving
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_operator.planning.memory.runs import measured_of


class Local:
    """A `DeploymentSource` over a state directory."""

    pause = 1.0

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def place(self) -> str:
        """Return where the source looks."""
        return f"under {self.root}"

    def command(self, verb: str, name: str = "") -> str:
        """Return what to type for `verb`."""
        return " ".join(part for part in ("dsv4", verb, name) if part) + words.root_option(self.root)

    def names(self, *, seconds: float = 30.0) -> list[str]:
        """Return the name of every deployment."""
        return [state.name for state in deployments(self.root)]

    def one(self, name: str | None) -> DeploymentView:
        """Return the deployment called `name`; without a name the only one that runs, else the only one there is."""
        return look(the_one(self.root, name))

    def every(self, *, everywhere: bool = False) -> list[DeploymentView]:
        """Return every deployment of this state directory; warn of each that cannot be read."""
        found = []
        for state in deployments(self.root):
            try:
                found.append(look(state))
            except CommandError as error:
                for message in error.messages:
                    note(f"warning: {message}")
        return found

    def given(self, what: str) -> DSV4Deployment:
        """Return the deployment in the file `what`."""
        return read_file(what, here=True)

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return this machine for members on CPU; accelerators are elsewhere, and as the catalog knows them."""
        state = state_of(self.root, deployment.metadata.name)
        if not kind.sm:
            # As on a machine where members get networks of their own; `up` finds out whether that is so here.
            memory = available_memory() + resident_memory(processes(state))
            return local_facts(deployment, state, isolated=True, memory=memory)
        return catalog_facts(deployment, kind, state_root=str(state.directory), weights_root=str(state.weights))

    def measured(self, name: str) -> tuple[Measured, ...]:
        """Return what the kept status says; nothing where it cannot be read."""
        with suppress(OSError, ValueError, StateError):
            found = DeploymentState(self.root, name).object()
            return measured_of(found.status) if found else ()
        return ()

    @contextmanager
    def api(self, item: DeploymentView) -> Iterator[Api]:
        """Yield the address in the status, and the first key of the file that the specification names."""
        endpoint = item.status.endpoint
        if endpoint is None:
            raise not_serving(item, "")
        key = ""
        if keys := item.object.spec.gateway.api_keys:
            with explained("the keys cannot be read"):
                key = first_key(
                    DeploymentState(self.root, item.name).secret(keys.secret_key_ref, "spec.gateway.apiKeys")
                )
        yield Api(lambda: endpoint.rstrip("/"), key)

    @contextmanager
    def dashboard(self, item: DeploymentView, group: int) -> Iterator[Dashboard]:
        """Yield the address in the status, and the token beside it.

        Raises:
            CommandError: there is none now, or of another group than the first.
        """
        if group:
            raise bad_input(f"--group {group}: only the dashboard of group 0 has a port on this machine; write 0")
        url = item.status.ray_dashboard
        if not item.running or url is None or not item.status.groups:
            raise CommandError(f"{item.name} has no dashboard now: it is {item.phase}")
        try:
            token = DeploymentState(self.root, item.name).token().read_text().strip()
        except OSError as error:
            raise CommandError(f"the token of {item.name} cannot be read: {error.strerror}") from None
        yield Dashboard(lambda: url, token, lasts=True)

    def logs(self, name: str | None, request: LogOptions) -> ExitCode:
        """Print what is in the members' files."""
        return logs.show(the_one(self.root, name), request)

    def evidence(self, name: str | None) -> tuple[str, Iterator[Piece]]:
        """Return the deployment's own files."""
        state = the_one(self.root, name)
        return state.name, evidence.pieces(state)

    def restart(self, item: DeploymentView) -> str:
        """Refuse: `dsv4 up` reads its file once."""
        raise _only_anew(item)

    def suspend(self, item: DeploymentView, wanted: bool) -> str:
        """Refuse, as `restart` does."""
        raise _only_anew(item)


def _only_anew(item: DeploymentView) -> CommandError:
    return bad_input(f"on this machine `dsv4 down {item.name}` ends {item.name}, and `dsv4 up FILE` starts it anew")
