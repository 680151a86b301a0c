"""Sources of deployments, and the options that select one. A source is imported when it is used."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_operator.cli.output import CommandError, DocumentFormat, bad_input, program_name

if TYPE_CHECKING:
    from dsv4_operator.cli.machine import Record
    from dsv4_operator.cli.sources.base import DeploymentSource

_COMPLETION_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """Options that select the deployments of this machine or of a cluster."""

    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="State directory of this machine [default: $DSV4_STATE_DIR, else ~/.dsv4].",
        ),
    ] = None
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Use the deployments of a cluster; implied by the next three options and kubectl dsv4."
        ),
    ] = False
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig file.")
    ] = None
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Path of the kubeconfig file.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="[default: the context's]")
    ] = None

    @property
    def is_cluster(self) -> bool:
        """Return whether a cluster is selected: always for `kubectl dsv4`, for `dsv4` by any cluster option."""
        return program_name() != "dsv4" or self._cluster_option is not None

    @property
    def _cluster_option(self) -> str | None:
        names = ("cluster", "context", "kubeconfig", "namespace")
        return next((f"--{name}" for name in names if getattr(self, name)), None)

    def source(self) -> DeploymentSource:
        """Return the source of deployments.

        Raises:
            CommandError: the options contradict each other.
        """
        if not self.is_cluster:
            from dsv4_operator.cli.sources.local import LocalSource

            return LocalSource(self.state_root())
        if self.state_dir is not None:
            raise bad_input(
                f"--state-dir selects this machine and {self._cluster_option or program_name()} selects a cluster; "
                "use one of them"
            )
        from dsv4_operator.cli.sources.cluster import ClusterSource

        return ClusterSource(self.context, self.kubeconfig, self.namespace)

    def state_root(self) -> Path:
        """Return the state directory of this machine.

        The path is absolute, because the reconcile loop runs in another working directory.
        """
        from dsv4_operator.backends.local.state import default_root

        return Path((self.state_dir or default_root()).expanduser()).absolute()

    def elsewhere(self, name: str | None, *, uncertain: bool = False) -> Record | None:
        """Return the deployment that a command is for, if its loop is on another machine; `uncertain` as for
        `hosts.find`.

        Raises:
            CommandError: a record cannot be read.
        """
        root = self.state_root()
        # Checked first: the import takes longer than the command.
        if self.is_cluster or not (root / "remote").is_dir():
            return None
        from dsv4_operator.cli import hosts

        record = hosts.find(root, name, uncertain=uncertain)
        return record if record and not hosts.is_here(root, record) else None

    def local_root(self, action: str, alternative: str) -> Path:
        """Return the state directory, for a command that is not available for clusters.

        Raises:
            CommandError: a cluster is selected.
        """
        if self.is_cluster:
            raise bad_input(f"this command {action} on this machine; on a cluster: {alternative}")
        return self.state_root()


_FORWARDED = frozenset(
    {"status", "chat", "dashboard", "logs", "why", "kernels", "evidence", "report", "bench_recovery"}
)
"""Commands that run on the machine of the loop if the deployment is on other machines."""


def _without_state_dir(arguments: Sequence[str]) -> list[str]:
    """Return a command line without `--state-dir`, which selects a directory of this machine."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--state-dir":
            next(words, None)
        elif not word.startswith("--state-dir="):
            kept.append(word)
    return kept


_TARGET_OPTIONS = inspect.signature(CommandTarget, eval_str=True).parameters


def with_target_options(
    command: Callable[..., int], names: Sequence[str] = tuple(_TARGET_OPTIONS)
) -> Callable[..., int]:
    """Append the target options to `command` and pass them as its first argument, a `CommandTarget`."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> int:
        target = CommandTarget(**{name: given.pop(name) for name in names})
        # `why --log` reads files of this machine, and no deployment.
        if command.__name__ in _FORWARDED and not given.get("log"):
            # The only argument of `chat` may be the prompt, and that of `logs` the rank.
            alone = given.get("prompt", "") is None or given.get("rank", "") is None
            if record := target.elsewhere(given.get("name") or given.get("name_or_rank"), uncertain=alone):
                from dsv4_operator.cli import hosts

                return hosts.forward(record, _without_state_dir(sys.argv[1:]))
        return command(target, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [each.replace(kind=keyword) for each in (*own, *(_TARGET_OPTIONS[name] for name in names))]
    wrapper.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


with_state_dir_option = functools.partial(with_target_options, names=("state_dir",))
"""Append the option `--state-dir` alone, for a command that is not available for clusters."""


def deployment_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the completions of a deployment name for the target options given so far; none on errors."""
    given = {name: value for name, value in ctx.params.items() if name in _TARGET_OPTIONS}
    try:
        names = CommandTarget(**given).source().names(seconds=_COMPLETION_SECONDS)
    except CommandError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def name_argument(remark: str = "") -> Any:
    """Return the argument NAME with completion."""
    text = f"The deployment; may be left out when there is only one.{remark}"
    return typer.Argument(metavar="NAME", help=text, autocompletion=deployment_names)


NameArgument = Annotated[str | None, name_argument()]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A DSV4Deployment as YAML or JSON; - is stdin.")]
FormatOption = Annotated[
    DocumentFormat | None,
    typer.Option("--output", "-o", metavar="json|yaml", help="Print a document instead of text."),
]
