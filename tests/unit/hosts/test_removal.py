"""Removal of a deployment from machines, also after an interruption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.hosts.documents import Host
from dsv4_operator.backends.hosts.ssh import SshError
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import hosts, machine
from dsv4_operator.cli.machine import Record, Settings, save_record
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_testkit.hosts_client import Killed, nano, record


@pytest.mark.parametrize("fails", ["stop-loop", "stop-host", None])
def test_nothing_is_removed_where_something_may_run(
    fails: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def check(self: object, target: str, state_dir: str) -> dict[str, object]:
        return {"software": ["abc"]}

    async def act(self: object, action: str, settings: Settings, seconds: float) -> None:
        done.append(f"{action} {settings.host}")
        if action == fails and settings.host == "spark-1":
            raise CommandError("spark-1: it runs on")

    monkeypatch.setattr(hosts._Client, "_check", check)
    monkeypatch.setattr(hosts._Client, "_machine", act)
    save_record(tmp_path, record())
    if fails is None:
        assert hosts.down(tmp_path, record(), uninstall=True) is ExitCode.OK
        assert done[-2:] == ["remove spark-1", "remove spark-2"]
        assert hosts.find(tmp_path, "nano") is None
        return
    with pytest.raises(CommandError, match="spark-1: it runs on\nnano may run on these machines"):
        hosts.down(tmp_path, record(), uninstall=True)
    assert done == ["stop-loop spark-1", "stop-host spark-1", "stop-host spark-2"]
    assert hosts.find(tmp_path, "nano") == record(), "the next attempt needs it"


def test_a_removal_leaves_other_deployments_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_COMMAND", tmp_path / "bin" / "dsv4")
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    keys = {"apiKeys": {"secretKeyRef": {"name": "keys", "key": "api"}}}
    for name in ("nano", "two"):
        state = inventory.members(name)
        state.directory.mkdir(parents=True)
        state.save_manifest(nano(name, **keys))
    for secret in ("keys/api", "keys/own", "keys/local"):
        (tmp_path / "secrets" / secret).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "secrets" / secret).touch()
    here = DeploymentState(tmp_path, "here")
    here.directory.mkdir()
    here.save_manifest(nano("here", apiKeys={"secretKeyRef": {"name": "keys", "key": "local"}}))
    elsewhere = record("elsewhere")
    save_record(tmp_path, elsewhere)
    (tmp_path / "software" / "abc").mkdir(parents=True)
    known = [
        record(name).model_copy(update={"inventory": inventory, "secrets": ("keys/api", "keys/own", "keys/local")})
        for name in ("nano", "two")
    ]
    for own in known:
        save_record(tmp_path, own)
    for own in known:
        name = own.name
        machine.remove(Settings(record=own, host="spark-2"))
        assert sorted(hosts._records(tmp_path)) == (["elsewhere", "two"] if name == "nano" else ["elsewhere"])
        assert (tmp_path / "secrets" / "keys" / "api").exists() is (name == "nano"), "the other one uses it"
        assert not (tmp_path / "secrets" / "keys" / "own").exists()
        assert (tmp_path / "secrets" / "keys" / "local").exists()
        assert (tmp_path / "software").exists()
        assert f"kept the software, for {'two, here' if name == 'nano' else 'here'}" in capsys.readouterr().out
    here.purge()
    machine.remove(Settings(record=known[0], host="spark-2"))
    assert not (tmp_path / "software").exists()
    assert hosts.find(tmp_path, "elsewhere") == elsewhere


def test_software_that_is_removed_in_part_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_COMMAND", tmp_path / "bin" / "dsv4")
    inventory = record().inventory.model_copy(update={"state_dir": str(tmp_path)})
    software = tmp_path / "software" / "abc"
    software.mkdir(parents=True)
    (software / bootstrap.COMPLETE).touch()
    # The machine loses power before the rest is removed.
    monkeypatch.setattr(machine.shutil, "rmtree", lambda *given, **more: None)
    machine.remove(Settings(record=record().model_copy(update={"inventory": inventory}), host="spark-2"))
    assert software.exists()
    assert not (software / bootstrap.COMPLETE).exists()


class Removal:
    """Stand-ins for `hosts.down` of one machine, whose actions run in this process on its files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(machine, "_COMMAND", folder / "bin" / "dsv4")
        self.client, self.root = folder / "client", folder / "machine"
        inventory = record().inventory
        changes = {"state_dir": str(self.root), "hosts": inventory.hosts[:1]}
        inventory = inventory.model_copy(update=changes)
        changes = {"inventory": inventory, "software": str(self.root / "software" / "abc")}
        self.record = record().model_copy(update=changes)
        save_record(self.client, self.record)
        for state in (inventory.members("nano"), DeploymentState(self.root, "nano")):
            state.directory.mkdir(parents=True)
            state.save_manifest(nano())
        for name in ("cache/triton", "software/aaa", "software/abc", "software/abc.input", "software/zzz"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "file").touch()
        for name in ("aaa", "abc", "zzz"):
            (self.root / "software" / name / bootstrap.COMPLETE).touch()
        self.left: int | None = None
        """Directories that the first attempt removes before its end; None: all."""
        remove_tree = shutil.rmtree

        async def check(client: object, target: str, state_dir: str) -> dict[str, object]:
            return {"software": [path.parent.name for path in self.root.glob(f"software/*/{bootstrap.COMPLETE}")]}

        async def act(client: object, action: str, given: Settings, seconds: float) -> None:
            if action == "remove":
                try:
                    with monkeypatch.context() as patch:
                        patch.setattr(shutil, "rmtree", remove)
                        machine.remove(given)
                except Killed:
                    raise SshError("spark-1: the connection was lost") from None

        async def start(client: object, known: Record, host: Host, words: list[str], *, seconds: float) -> None:
            assert words[0] == "remove"
            try:
                bootstrap.remove(*words[1:])
            except ValueError as error:
                raise CommandError(f"{host.name}: {error}") from None

        def remove(path: Path | str, ignore_errors: bool = False) -> None:
            if self.left == 0:
                self.left = None
                raise Killed
            self.left = None if self.left is None else self.left - 1
            remove_tree(path, ignore_errors=ignore_errors)

        for name, stand_in in {"_check": check, "_machine": act, "_bootstrap": start}.items():
            monkeypatch.setattr(hosts._Client, name, stand_in)

    def run(self) -> ExitCode:
        return hosts.down(self.client, self.record, uninstall=True)

    def known(self) -> bool:
        return hosts.find(self.client, "nano") is not None

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("left", range(13))
def test_an_interrupted_removal_is_completed(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removal = Removal(monkeypatch, tmp_path)
    removal.left = left
    with pytest.raises(CommandError, match="spark-1: the connection was lost"):
        removal.run()
    assert removal.known()
    own = f"software/abc/{bootstrap.COMPLETE}"
    if own not in removal.files():
        assert removal.files() in ([], ["software/abc/file"]), "it is removed last"
    assert removal.run() is ExitCode.OK
    assert not removal.files()
    assert not removal.known()


def test_the_rest_of_a_removal_by_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removal = Removal(monkeypatch, tmp_path)
    software = removal.root / "software"
    (software / "abc" / bootstrap.COMPLETE).unlink()
    state = DeploymentState(removal.root, "nano")
    with state.lock(), pytest.raises(CommandError, match=rf"spark-1: nano runs with the files in {state.directory}; "):
        removal.run()
    assert removal.known()
    assert "cache/triton/file" in removal.files()
    monkeypatch.setattr(bootstrap, "_REMOVE_SECONDS", 0.0)
    with bootstrap.alone(str(software)), pytest.raises(TimeoutError, match=f"another dsv4 has worked in {software} "):
        removal.run()
    (software / "abc" / bootstrap.COMPLETE).touch()
    with pytest.raises(ValueError, match="software/abc has been installed again; repeat the command"):
        bootstrap.remove(str(removal.root), "nano", "abc")
    (software / "abc" / bootstrap.COMPLETE).unlink()
    # The cache and other software may be in use.
    other = removal.record.inventory.members("other")
    other.directory.mkdir()
    other.save_manifest(nano("other"))
    assert removal.run() is ExitCode.OK
    shared = [
        "cache/triton/file",
        *(f"software/{name}/{file}" for name in ("aaa", "zzz") for file in (".complete", "file")),
    ]
    assert removal.files() == ["_m/other/manifest.json", *shared]
    # Nothing is left of this one: the machine is that of others now.
    other.purge()
    save_record(removal.client, removal.record)
    assert removal.run() is ExitCode.OK
    assert removal.files() == shared
    (software / "abc").mkdir()
    assert removal.run() is ExitCode.OK
    assert [path.name for path in removal.root.iterdir()] == []
