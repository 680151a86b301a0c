"""State directory of `dsv4 up`: files that outlive a process, and evidence of incarnations that failed.

```
<root>/                     ~/.dsv4, or $DSV4_STATE_DIR, or --state-dir
  weights/                  checkpoints, shared by all deployments
  secrets/<name>/<key>      values of secretKeyRef fields; created by the user, mode 0600
  remote/<name>.json        machines of a deployment whose loop runs on another machine
  .r/<id>                   short links to directories of Ray whose paths are too long for its sockets
  software/<id>/            environments that `dsv4 up --hosts` installed on this machine
  <name>/                   of one deployment; no deployment may be called like a shared directory
    lock                    held (flock) by the running supervisor; contains its process id
    manifest.json           the deployment as the user gave it
    object.json             the same with its status, as `kubectl get -o json` would print it
    loop.log                log and events of the loop
    peer-copies.json        result of the test of copies between GPUs
    token                   token of the present incarnation for Ray, the agents and vLLM's port (mode 0600)
    token-key               key from which the tokens of all incarnations are derived, for the gateway (mode 0600)
    i<incarnation>/plan.json
    i<incarnation>/m<rank>/ agent.log, ray.log, vllm.log, ray/ (Ray's own session directory)
    evidence/<incarnation>-<time>/
    g<group>/               token, incarnations and evidence of every group but the first, which has them above
```
Every file is replaced as a whole, so a reader never sees a partial file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_operator.api import DSV4Deployment, SecretKeyRef
from dsv4_operator.api.deployment import NAME_PATTERN, STORED_VERSION
from dsv4_runtime.contract.plan import LONGEST_RAY_ROOT, RAY_LINKS
from dsv4_runtime.util.files import replace_file

if TYPE_CHECKING:
    from dsv4_operator.lifecycle.observed import ObservedMember

# The path of a Unix socket is limited to 107 characters. vLLM creates sockets with names of 41 below a member's
# directory (`tmp/` and a UUID); links to Ray's directories are 8 characters below the state directory.
MAX_MEMBER_PATH = 107 - 41
MAX_ROOT = LONGEST_RAY_ROOT - 8
_LOCK_TRIES, _LOCK_PAUSE = 10, 0.05

REMOTE = "remote"
"""Directory with the records of deployments whose loop runs on another machine."""
RESERVED = frozenset({"weights", "secrets", REMOTE, "software", "cache"})
"""Directories that all deployments of a state directory share."""

PEER_COPIES = "peer-copies.json"

NETWORK_ANNOTATION = "dsv4.dev/local-network"
"""Annotation with the network mode of the members, and its reason."""


class StateError(Exception):
    """A problem with the state directory that the user can solve; the text contains the remedy."""


class AlreadyRunning(StateError):
    """Another loop holds the lock of the deployment."""


def default_root() -> Path:
    """Return `$DSV4_STATE_DIR`, else `~/.dsv4`."""
    return Path(os.environ.get("DSV4_STATE_DIR") or Path.home() / ".dsv4")


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The files of one deployment."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        """Refuse a name whose directory is shared or contains other files.

        Raises:
            StateError: the name is reserved, or no valid name of a deployment.
        """
        if self.name in RESERVED:
            raise StateError(
                f"metadata.name: {self.name!r} is a directory of {self.root} that all deployments share; "
                "choose another name"
            )
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise StateError(f"metadata.name: {self.name!r} is not the name of a deployment")

    @property
    def directory(self) -> Path:
        """Return the directory of all files of this deployment."""
        return self.root / self.name

    @property
    def weights(self) -> Path:
        """Return the directory of the checkpoints, shared by all deployments of this root."""
        return self.root / "weights"

    @property
    def ray_links(self) -> Path:
        """Return the directory of the links to directories of Ray whose paths are too long for its sockets."""
        return self.root / RAY_LINKS

    @property
    def secrets(self) -> Path:
        """Return the directory of Secrets: a directory per Secret, a file per key."""
        return self.root / "secrets"

    def secret(self, ref: SecretKeyRef, field: str) -> str:
        """Return the value of `ref`, used in `field`.

        Raises:
            StateError: it is missing, empty, or readable by others.
        """
        file = self.secrets / ref.name / ref.key
        try:
            mode = file.stat().st_mode
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise StateError(f"{field}.secretKeyRef: {file} cannot be read ({reason}); put the secret there") from error
        if mode & 0o077:
            raise StateError(f"{field}.secretKeyRef: others may read {file}; run `chmod 600 {file}`")
        if not text.strip():
            raise StateError(f"{field}.secretKeyRef: {file} is empty; put the secret there")
        return text

    @property
    def log(self) -> Path:
        """Return the path of the loop's log."""
        return self.directory / "loop.log"

    def token(self, group: int = 0) -> Path:
        """Return the token file of a group's present incarnation, for Ray, the agents and vLLM's port."""
        return self.group(group) / "token"

    @property
    def token_key(self) -> Path:
        """Return the file of the key from which tokens are derived, for gateways."""
        return self.directory / "token-key"

    def save_token_key(self, key: str) -> None:
        """Write the key for the gateways and the next loop, unless the file has it.

        Raises:
            OSError: it cannot be written.
        """
        if not self.token_key.exists() or self.token_key.read_bytes() != key.encode():
            replace_file(self.token_key, key)

    def group(self, index: int) -> Path:
        """Return the directory of a group's incarnations and evidence."""
        return self.directory / f"g{index}" if index else self.directory

    def groups(self) -> list[int]:
        """Return the groups that may have files."""
        names = (re.fullmatch(r"g([1-9]\d*)", path.name) for path in self.directory.glob("g*"))
        return [0, *sorted(int(name[1]) for name in names if name)]

    def evidence(self, group: int = 0) -> Path:
        """Return the directory of a group's evidence, with one entry per failure."""
        return self.group(group) / "evidence"

    def incarnation(self, number: int, group: int = 0) -> Path:
        """Return the directory of an incarnation's files, except its evidence."""
        return self.group(group) / f"i{number}"

    def incarnations(self, group: int = 0) -> list[int]:
        """Return the incarnations of a group that still have files, oldest first."""
        names = (re.fullmatch(r"i(\d+)", path.name) for path in self.group(group).glob("i*"))
        return sorted(int(name[1]) for name in names if name)

    def member(self, incarnation: int, rank: int, group: int = 0) -> Path:
        """Return the directory of a member's files."""
        return self.incarnation(incarnation, group) / f"m{rank}"

    def prepare(self, groups: int = 1) -> None:
        """Create the directories of a deployment with that many groups.

        Raises:
            StateError: the path is too long for sockets, or cannot be written.
        """
        longest = max(len(str(self.member(999, 99, group))) for group in (0, max(groups - 1, 0)))
        excess = longest - MAX_MEMBER_PATH
        if longest + len("/ray") > LONGEST_RAY_ROOT:
            excess = max(excess, len(str(self.root)) - MAX_ROOT)
        if excess > 0:
            raise StateError(
                f"--state-dir {str(self.root)!r} is {excess} characters too long for sockets of Ray and vLLM below it "
                f"(with the name {self.name!r}); choose a shorter directory"
            )
        try:
            for group in range(max(groups, 1)):
                self.group(group).mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            self.weights.mkdir(exist_ok=True)
        except OSError as error:
            raise StateError(
                f"--state-dir {str(self.root)!r}: {error.strerror}; choose a directory that you can write to"
            ) from error

    def save_manifest(self, deployment: DSV4Deployment) -> None:
        """Save the manifest of the user, without a status."""
        replace_file(self.directory / "manifest.json", _stored(deployment))

    def save_object(self, deployment: DSV4Deployment) -> None:
        """Save the deployment with its status."""
        replace_file(self.directory / "object.json", _stored(deployment))

    def manifest(self) -> DSV4Deployment | None:
        """Return the manifest of the user; None if no deployment was started under this name."""
        return _read(self.directory / "manifest.json")

    def object_text(self) -> str | None:
        """Return the deployment with its latest status as JSON, of a running one from memory; None before the first."""
        if (pid := self.holder()) is not None:
            # With asyncio, so only when it is needed: `dsv4 plan` is fast.
            from dsv4_operator.backends.local.supervisor import read_kept_status

            if (kept := read_kept_status(pid)) is not None:
                return kept
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "object.json").read_text()
        return None

    def object(self) -> DSV4Deployment | None:
        """Return the deployment with its latest status, of a running one from memory; None before the first."""
        text = self.object_text()
        return None if text is None else DSV4Deployment.model_validate_json(text)

    @contextlib.contextmanager
    def lock(self, owner: int | None = None) -> Iterator[int]:
        """Hold the lock of the deployment; the kernel releases it with the last descriptor of the yielded file.

        `owner` is the process to name in it; None: this one.

        Raises:
            AlreadyRunning: another process has it.
        """
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _flock(descriptor):
                raise AlreadyRunning(
                    f"{self.name!r} is already running (process {self.holder()}); "
                    f"see `dsv4 status {self.name}`, or end it with `dsv4 down {self.name}`"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(owner or os.getpid()).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """Return the process id of the running supervisor; None if there is none."""
        try:
            descriptor = os.open(self.directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 20, 0).decode()
            return int(text) if text.isdigit() else None
        finally:
            os.close(descriptor)
        return None

    def purge(self) -> None:
        """Remove the directory with its content. Must be called with the lock held. After a kill it can be repeated.

        Raises:
            StateError: its manifest belongs to another deployment.
            OSError: it cannot be removed.
        """
        try:
            manifest = json.loads((self.directory / "manifest.json").read_bytes())
            named = manifest["metadata"]["name"]
        except (OSError, ValueError, TypeError, LookupError):
            named = None
        if named != self.name:
            raise StateError(
                f"{self.directory} is not removed, because its manifest.json is not of a deployment {self.name!r}; "
                "check its content, and remove it by hand"
            )
        # The manifest last, because without it no command finds the rest; the lock as late as possible.
        last = {"lock": 1, "manifest.json": 2}
        for entry in sorted(self.directory.iterdir(), key=lambda entry: last.get(entry.name, 0)):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self.directory.rmdir()

    def forget_incarnation(self, number: int, group: int = 0) -> None:
        """Remove an incarnation's files, except its evidence."""
        shutil.rmtree(self.incarnation(number, group), ignore_errors=True)

    def forget_incarnations(self) -> None:
        """Remove the files of every incarnation of every group, except their evidence."""
        for group in self.groups():
            for number in self.incarnations(group):
                self.forget_incarnation(number, group)


def deployments(root: Path) -> list[DeploymentState]:
    """Return every deployment below `root` that was started and not removed, by name."""
    found = []
    for path in sorted(root.glob("*/manifest.json")):
        # Skip other directories.
        with contextlib.suppress(StateError):
            found.append(DeploymentState(root, path.parent.name))
    return found


def _flock(descriptor: int) -> bool:
    """Take the lock; False if a loop holds it. Retries, because `holder` holds it for a moment too."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE)
    return False


def _stored(deployment: DSV4Deployment) -> str:
    """Return the document in the version that earlier releases read too."""
    return json.dumps({**deployment.to_dict(), "apiVersion": STORED_VERSION}, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> DSV4Deployment | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return DSV4Deployment.model_validate_json(text)


_TAIL_BYTES = 256 * 1024
_RAY_FILES = 60
# The same number as in the agent, which writes to the same directory.
_KEEP = 10
_NAME_TIME = re.compile(r"\d{8}T\d{6}Z")
# Tolerance for the clocks of file servers.
_CLOCK_SECONDS = 60.0


def collect_evidence(
    state: DeploymentState, group: int, incarnation: int, members: Iterable[ObservedMember], *, deadline: float
) -> Path | None:
    """Copy plan, statuses and the tails of all logs; None if the incarnation has no files.

    After `deadline`, a monotonic time, no further file is started; completed files are kept.
    """
    source = state.incarnation(incarnation, group)
    if not source.is_dir():
        return None
    return save_evidence(state, group, incarnation, members, read_logs(source, deadline=deadline))


def save_evidence(
    state: DeploymentState,
    group: int,
    incarnation: int,
    members: Iterable[ObservedMember],
    logs: Iterable[tuple[str, bytes]],
) -> Path:
    """Save plan, statuses and `logs` (relative path and content), and remove the oldest evidence; return the place.

    Raises:
        OSError: it cannot be written.
    """
    target = state.evidence(group) / f"{incarnation}-{_name_time(time.time())}"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(state.incarnation(incarnation, group) / "plan.json", target)
    for member in members:
        if member.incarnation == incarnation:
            text = json.dumps(member.summary(), indent=2) + "\n"
            (target / f"m{member.rank}-status.json").write_text(text)
    for name, content in logs:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
    _retain(target.parent, target)
    return target


def read_logs(source: Path, *, deadline: float) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and tail of all logs of the members in `source`, an incarnation's directory.

    After `deadline`, a monotonic time, no further file is read.
    """
    for directory in sorted(source.glob("m*")):
        logs = [(f"{directory.name}-{log.name}", log) for log in sorted(directory.glob("*.log"))]
        logs += [(f"{directory.name}-ray/{log.name}", log) for log in _ray_logs(directory / "ray")]
        for name, log in logs:
            if time.monotonic() > deadline:
                return
            # Ray and the agent may remove files meanwhile.
            try:
                tail = _tail(log)
            except OSError:
                continue
            yield name, tail


def _ray_logs(directory: Path) -> list[Path]:
    """Return the latest logs that are not empty, of all sessions; `session_latest` is a link to one of them."""
    found = []
    for path in directory.glob("session_*/logs/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if not path.parents[1].is_symlink() and stat.S_ISREG(status.st_mode) and status.st_size:
                found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:_RAY_FILES]]


def _tail(source: Path) -> bytes:
    with source.open("rb") as file:
        size = source.stat().st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
    if source.name == "vllm.log" or source.name.startswith("worker-"):
        # vLLM logs content of requests, which must not be saved. Its patterns take 20 ms to compile.
        from dsv4_runtime.util.log_lines import without_client_text

        lines = tail.decode(errors="replace").replace("\r\n", "\n").split("\n")
        tail = "".join(f"{line}\n" for line in without_client_text(lines) if line).encode()
    return tail


def _retain(directory: Path, new: Path) -> None:
    """Remove all but the newest entries, by the time in their names; `new` stays. A restart loop must not fill the
    disk.

    Modification times change when a backup is restored. A time in the future was written under a wrong clock and counts
    as the oldest.
    """
    now = _name_time(time.time() + _CLOCK_SECONDS)

    def age(path: Path) -> tuple[bool, str]:
        written = path.name.rpartition("-")[2]
        return path == new, written if _NAME_TIME.fullmatch(written) and written <= now else ""

    for old in sorted(directory.iterdir(), key=age)[:-_KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def _name_time(seconds: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(seconds))
