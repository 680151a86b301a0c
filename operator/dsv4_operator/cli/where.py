"""Whether a command means this machine or a cluster: the options that say so, the same for every command."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_operator.cli.errors import CommandError, bad_input

if TYPE_CHECKING:
    from dsv4_operator.cli.source import DeploymentSource

PLUGIN, COMPLETER = "kubectl-dsv4", "kubectl_complete-dsv4"
"""As which kubectl calls this program for `kubectl dsv4`: to do something, and to ask what the next word could be."""
_COMPLETION_SECONDS = 3.0


def program() -> str:
    """Return what the user typed: `dsv4`, or `kubectl dsv4`."""
    return "kubectl dsv4" if Path(sys.argv[0]).name in (PLUGIN, COMPLETER) else "dsv4"


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The options of one command line."""

    state_dir: Path | None = None
    cluster: bool = False
    context: str | None = None
    kubeconfig: Path | None = None
    namespace: str | None = None

    @property
    def kubernetes(self) -> bool:
        """Tell whether a cluster is meant: `kubectl dsv4` always does, `dsv4` when an option speaks of one."""
        return program() != "dsv4" or self._cluster_option is not None

    @property
    def _cluster_option(self) -> str | None:
        given = {
            "--cluster": self.cluster,
            "--context": self.context,
            "--kubeconfig": self.kubeconfig,
            "--namespace": self.namespace,
        }
        return next((option for option, value in given.items() if value), None)

    def source(self) -> DeploymentSource:
        """Return where the deployments are.

        Raises:
            CommandError: the options contradict each other.
        """
        if not self.kubernetes:
            from dsv4_operator.cli.local import Local

            return Local(self.root())
        if self.state_dir is not None:
            raise bad_input(
                f"--state-dir is about this machine, and {self._cluster_option or program()} about a cluster; "
                "give one of them"
            )
        from dsv4_operator.cli.cluster.source import ClusterSource

        return ClusterSource(self.context, self.kubeconfig, self.namespace)

    def root(self) -> Path:
        """Return the state directory, for what exists on this machine only."""
        from dsv4_operator.cli.choose import root_directory

        return root_directory(self.state_dir)

    def here(self, doing: str, instead: str) -> Path:
        """Return the state directory, for a command that works on this machine only.

        Args:
            doing: what the command does here.
            instead: what does the same on a cluster.

        Raises:
            CommandError: a cluster is meant.
        """
        if self.kubernetes:
            raise bad_input(f"this command {doing} on this machine; on a cluster: {instead}")
        return self.root()


_KIND = inspect.Parameter.KEYWORD_ONLY
_OPTIONS: dict[str, Any] = {
    "state_dir": Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Where this machine's deployments are kept [default: $DSV4_STATE_DIR, else ~/.dsv4].",
        ),
    ],
    "cluster": Annotated[
        bool, typer.Option("--cluster", help="A cluster's deployments, as the next three options and kubectl dsv4.")
    ],
    "context": Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="kubectl's context.", show_default=False)
    ],
    "kubeconfig": Annotated[
        Path | None, typer.Option("--kubeconfig", metavar="FILE", help="kubectl's configuration.", show_default=False)
    ],
    "namespace": Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="[default: the context's]", show_default=False),
    ],
}


def deployment_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names that a shell may offer: those of the place that the options so far mean; none if silent."""
    given = {name: value for name, value in ctx.params.items() if name in _OPTIONS}
    try:
        names = CommandTarget(**given).source().names(seconds=_COMPLETION_SECONDS)
    except CommandError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def placed(command: Callable[..., int], names: Sequence[str] = tuple(_OPTIONS)) -> Callable[..., int]:
    """Give `command`, whose first argument is `CommandTarget`, the options that make it, after its own."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> int:
        where = CommandTarget(**{name: given.pop(name) for name in names})
        return command(where, **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    common = [
        inspect.Parameter(name, _KIND, annotation=_OPTIONS[name], default=getattr(CommandTarget(), name))
        for name in names
    ]
    parameters = [*(each.replace(kind=_KIND) for each in own), *common]
    wrapper.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


def placed_here(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap as `placed` does, for a command that works on this machine only."""
    return placed(command, ("state_dir",))
