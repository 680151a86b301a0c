"""Program for machines without dsv4: facts, installation of the software, its copy from another machine, and removal.

The client sends it over ssh to `python3 -c`, so it uses the standard library of Python 3.9 alone. The first argument is
the action. Results go to stdout, and progress to stderr with one line for each change.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import glob
import hashlib
import hmac
import io
import json
import os
import platform
import re
import select
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Union

COMPLETE = ".complete"
"""File in the directory of an environment that is installed completely."""
CLIENT = "client"
"""File of a loop with user and machine of the client that started it."""
INSTALLED = ".requirements"
"""File in it with the requirements of its packages, as they were installed."""
SYSTEM_CUDA = "/usr/local/cuda"
_SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Programs of units of systemd: the login of ssh may have others."""
_NVCC_SECONDS = 5.0
CONNECT_SECONDS = 20.0
SILENT_SECONDS = 60.0
_TOKEN_BYTES = 64
_LENGTH_BYTES = 8
_MOST_MANIFEST_BYTES = 1 << 28
_PROGRESS_SECONDS = 2.0
_INSTALL_SECONDS = 3600.0
"""Longest wait for another installation, which may copy 16 GB over a slow network."""
_REMOVE_SECONDS = 120.0
"""Longest wait of a removal for another program: it must not begin after its client has given up."""
_LOCK_SECONDS = 0.1
_ENDED = "the other machine ended the connection; is the copy still being served?"

_Stream = Union[IO[bytes], io.BufferedRWPair]  # noqa: UP007 - evaluated by Python 3.9


def main() -> None:
    """Run one action. Exit code 3: it failed, and stderr ends with the reason."""
    action, *arguments = sys.argv[1:]
    actions: dict[str, Callable[..., None]] = {
        "check": check,
        "receive": receive,
        "install": install,
        "serve": serve,
        "fetch": fetch,
        "remove": remove,
    }
    try:
        actions[action](*arguments)
    except (OSError, ValueError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"{getattr(error, 'strerror', None) or error}{_file(error)}", file=sys.stderr, flush=True)
        sys.exit(3)


def _file(error: Exception) -> str:
    name = getattr(error, "filename", None)
    return f" ({name})" if name else ""


def check(state_dir: str) -> None:
    """Print the facts about this machine as JSON."""
    include = sysconfig.get_paths("posix_prefix")["include"]
    root = Path(state_dir)
    existing = next(path for path in (root, *root.parents) if path.exists())
    software = glob.glob(f"{state_dir}/software/*/{COMPLETE}")
    facts = {
        "hostname": socket.gethostname(),
        "root": os.geteuid() == 0,
        "python": ".".join(map(str, sys.version_info[:3])),
        "interpreter": os.path.realpath(sys.executable),
        "headers": os.path.exists(os.path.join(include, "Python.h")),
        "architecture": platform.machine(),
        "system": sys.platform,
        "systemd": os.path.isdir("/run/systemd/system"),
        "writable": os.access(existing, os.W_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "time": time.time(),
        "addresses": addresses(),
        "nvidia": os.path.exists("/dev/nvidiactl"),
        "uv": shutil.which("uv"),
        "compilers": [name for name in ("gcc", "g++") if shutil.which(name)],
        "software": sorted(os.path.basename(os.path.dirname(path)) for path in software),
        "partial": _partial(f"{state_dir}/software"),
        "earlier": _contents(_earlier(f"{state_dir}/software")),
        "toolkits": [toolkit(home) for home in _toolkits()],
        "loops": _loops(state_dir),
    }
    print(json.dumps(facts))


def _partial(folder: str) -> dict[str, int]:
    """Return the bytes of each environment in `folder` whose installation was interrupted."""
    return {
        os.path.basename(path): _used(path)
        for path in glob.glob(f"{folder}/*")
        if not path.endswith((".input", ".part")) and not os.path.exists(os.path.join(path, COMPLETE))
    }


def _contents(directory: str) -> dict[str, object]:
    """Return the requirements of an environment, and the bytes of each package by its name; empty without one."""
    if not directory:
        return {}
    sizes: dict[str, int] = {}
    for record in glob.glob(os.path.join(directory, "lib", "python*", "site-packages", "*.dist-info", "RECORD")):
        name = os.path.basename(os.path.dirname(record))[: -len(".dist-info")].rpartition("-")[0]
        with contextlib.suppress(OSError, ValueError, csv.Error), open(record, newline="", encoding="utf-8") as file:
            sizes[name.lower().replace("_", "-")] = sum(int(size or 0) for _, _, size in csv.reader(file))
    try:
        requirements = Path(directory, INSTALLED).read_text()
    except (OSError, UnicodeDecodeError):
        requirements = ""
    return {"requirements": requirements, "sizes": sizes}


def _toolkits() -> list[str]:
    """Return the directories of CUDA toolkits that a service finds, and NVIDIA's own one in any case."""
    program = shutil.which("nvcc", path=_SERVICE_PATH)
    homes = [os.path.dirname(os.path.dirname(os.path.realpath(program)))] if program else []
    return list(dict.fromkeys([*homes, SYSTEM_CUDA, os.path.realpath(SYSTEM_CUDA)]))


def toolkit(home: str) -> dict[str, object]:
    """Return the releases of the CUDA compiler in `home` and of its headers, such as `[13, 0]`; None if unknown."""
    nvcc, found = os.path.join(home, "bin", "nvcc"), {"home": home, "there": False, "nvcc": None, "headers": None}
    if not os.path.isfile(nvcc):
        return found
    output = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [nvcc, "--version"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=_NVCC_SECONDS, check=False).stdout
    release, headers = re.search(r"release (\d+)\.(\d+)", output), None
    with contextlib.suppress(OSError):
        text = Path(home, "include", "cuda_runtime_api.h").read_text(errors="replace")
        headers = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return {
        **found,
        "there": True,
        "nvcc": [int(release[1]), int(release[2])] if release else None,
        "headers": [int(headers[1]) // 1000, int(headers[1]) % 1000 // 10] if headers else None,
    }


def _loops(state_dir: str) -> dict[str, dict[str, str]]:
    """Return for each deployment whose loop runs here a digest of its host key, and who started it."""
    found: dict[str, dict[str, str]] = {}
    for file in glob.glob(f"{state_dir}/*/host-key"):
        folder = os.path.dirname(file)
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(Path(file).read_bytes().strip()).hexdigest()
            if _runs(folder):
                found[os.path.basename(folder)] = {"key": digest, "who": started_by(folder)}
    return found


def _runs(folder: str) -> bool:
    """Return whether a process has the lock of the deployment with the files in `folder`."""
    with contextlib.suppress(OSError), open(f"{folder}/lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def started_by(folder: str) -> str:
    """Return which client started the loop with the files in `folder`, and when by the clock of this machine."""
    try:
        client, seconds = Path(folder, CLIENT).read_text().strip(), os.stat(os.path.join(folder, CLIENT)).st_mtime
    except (OSError, UnicodeDecodeError):
        return "another client started it"
    return f"{client} started it at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}"


def addresses() -> list[dict[str, object]]:
    """Return the IPv4 addresses of physical and virtual interfaces with their speed in Mbit/s, `up` if they have a
    link."""
    try:
        output = subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, timeout=10, check=True).stdout
        links = json.loads(output)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    found = []
    for link in links:
        name = link["ifname"]
        speed = 0
        with contextlib.suppress(OSError, ValueError):
            speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
        rdma = os.path.isdir(f"/sys/class/net/{name}/device/infiniband")
        up = "UP" in link.get("flags", ()) and "NO-CARRIER" not in link["flags"]
        kind = {"speed": speed, "rdma": rdma, "up": up}
        found += [
            {"interface": name, "address": one["local"], "prefix": one["prefixlen"], **kind}
            for one in link.get("addr_info", ())
            if one.get("scope") == "global"
        ]
    return found


@contextlib.contextmanager
def alone(folder: str, seconds: float = _INSTALL_SECONDS) -> Iterator[None]:
    """Wait until no other program changes `folder`: one that lost its client continues.

    Raises:
        TimeoutError: another one still does after `seconds`.
    """
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline, waits = time.monotonic() + seconds, False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    text = f"another dsv4 has worked in {folder} for {seconds:.0f} s; wait for its end, or end it"
                    raise TimeoutError(text) from None
                if not waits:
                    waits = True
                    _progress(f"waiting for another dsv4 in {folder}")
                time.sleep(_LOCK_SECONDS)
                continue
            except OSError:
                pass  # Some network file systems have no locks of directories.
            break
        yield
    finally:
        os.close(descriptor)


def receive(directory: str) -> None:
    """Write the files of a tar archive on stdin to `directory`."""
    with alone(os.path.dirname(directory)), tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        os.makedirs(directory, exist_ok=True)
        for entry in archive:
            _extract(archive, entry, directory)


def install(directory: str, uv: str, requirements: str, wheels: str) -> None:
    """Make a virtual environment in `directory`; a repeated call continues one that was interrupted."""
    python = os.path.join(directory, "bin", "python")
    installed, wanted = Path(directory, INSTALLED), Path(requirements).read_bytes()
    environment = {**os.environ, "UV_LINK_MODE": "copy", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}

    def run(*words: str) -> None:
        command = [uv, *words]
        output = b""
        deadline = time.monotonic() + _PROGRESS_SECONDS
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
            if process.stderr is None:
                raise ValueError("no pipe")
            while True:
                ready, _, _ = select.select([process.stderr], [], [], _PROGRESS_SECONDS)
                if ready:
                    part = os.read(process.stderr.fileno(), 65536)
                    output = (output + part)[-4000:]
                    if not part:
                        break
                if time.monotonic() > deadline:
                    deadline = time.monotonic() + _PROGRESS_SECONDS
                    _progress(f"{_used(directory) / 1e9:.1f} GB installed")
        if process.returncode:
            raise ValueError(f"`uv {' '.join(words)}` failed: {output.decode(errors='replace').strip()}")

    def build() -> str:
        if not os.path.exists(python):
            # The environment has a link to it, which copies on other machines have too: `python3` may differ there.
            run("venv", "--quiet", "--python", os.path.realpath(sys.executable), directory)
        # Often only the wheels differ from the earlier environment. These need no package index.
        if not (installed.exists() and installed.read_bytes() == wanted):
            run("pip", "sync", "--python", python, requirements)
            # Not written in place: it may be a link to the file of the earlier one.
            installed.unlink(missing_ok=True)
            installed.write_bytes(wanted)
        own = sorted(glob.glob(f"{wheels}/*.whl"))
        run("pip", "install", "--python", python, "--offline", "--no-deps", "--reinstall", *own)
        return _damaged(directory)

    with alone(os.path.dirname(directory)):
        if os.path.exists(os.path.join(directory, COMPLETE)):
            return
        _start_from_earlier(directory)
        if damaged := build():
            # After a power loss. The cache of the installer may be damaged too.
            _progress(f"{damaged} is damaged; all packages are installed again")
            shutil.rmtree(directory)
            environment["UV_NO_CACHE"] = "1"
            if damaged := build():
                raise ValueError(f"{damaged} is damaged after its installation; check the disk")
        _complete(directory)


def _damaged(directory: str) -> str:
    """Return a file of a package that is missing or has another size than in the package's list; empty if none is.

    Installers take a package for installed if its list is there, also when a power loss left its files empty.
    """
    # Several packages may have one file; the last one wrote it.
    sizes: dict[str, set[str]] = {}
    for record in glob.glob(os.path.join(directory, "lib", "python*", "site-packages", "*.dist-info", "RECORD")):
        packages = os.path.dirname(os.path.dirname(record))
        try:
            with open(record, newline="", encoding="utf-8") as file:
                rows = [(name, size) for name, _, size in csv.reader(file)]
        except (OSError, ValueError, csv.Error):
            return record
        if not rows:
            return record
        for name, size in rows:
            # Python replaces compiled files; the list has no size of its own.
            if size and not name.endswith((".pyc", "/RECORD")):
                sizes.setdefault(os.path.normpath(os.path.join(packages, name)), set()).add(size)
    for path, expected in sizes.items():
        if not os.path.exists(path) or str(os.path.getsize(path)) not in expected:
            return path
    return ""


def _start_from_earlier(directory: str) -> None:
    """Link the files of the latest complete environment beside `directory` into it, unless it exists: packages that
    both have are neither installed nor transferred again.

    Installers and `fetch` replace files and never write into them, so the earlier environment stays as it is.
    """
    earlier = _earlier(os.path.dirname(directory))
    if os.path.lexists(directory) or not earlier:
        return
    unfinished = f"{directory}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(
            earlier,
            unfinished,
            symlinks=True,
            copy_function=os.link,
            ignore=lambda _, names: {COMPLETE}.intersection(names),
        )
    except OSError as error:
        # A file system without links, for example: everything is installed then.
        _progress(f"the software in {earlier} is not used: {error}"[:400])
        shutil.rmtree(unfinished, ignore_errors=True)
        return
    # Programs name the Python of their environment.
    for path in glob.glob(f"{unfinished}/bin/*"):
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as program:
                content = program.read()
            if earlier.encode() in content:
                mode = os.stat(path).st_mode
                os.unlink(path)
                with open(path, "wb") as program:
                    program.write(content.replace(earlier.encode(), directory.encode()))
                os.chmod(path, mode)
    os.rename(unfinished, directory)


def _earlier(folder: str) -> str:
    """Return the latest complete environment in `folder`; empty if there is none, or it has another Python."""
    marks = glob.glob(os.path.join(folder, "*", COMPLETE))
    with contextlib.suppress(OSError, ValueError):
        latest = os.path.dirname(max(marks, key=os.path.getmtime))
        if ".".join(map(str, sys.version_info[:3])) in Path(latest, "pyvenv.cfg").read_text():
            return latest
    return ""


def _used(directory: str) -> int:
    sizes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                sizes += os.lstat(os.path.join(folder, name)).st_size
    return sizes


def _complete(directory: str) -> None:
    """Mark an environment as complete, after its files have reached the disk."""
    os.sync()
    with open(os.path.join(directory, COMPLETE), "w") as file:
        os.fsync(file.fileno())
    os.sync()


def serve(directory: str, address: str) -> None:
    """Send `directory` to every machine that presents the token, the first line of stdin, until stdin ends. Print the
    port."""
    token = sys.stdin.buffer.readline().strip()
    if len(token) != _TOKEN_BYTES:
        raise ValueError("the token has the wrong length")
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin.buffer], [], [])
            if sys.stdin.buffer in ready:
                return
            connection, _ = listener.accept()
            threading.Thread(target=_send, args=(connection, directory, token), daemon=True).start()


def _send(connection: socket.socket, directory: str, token: bytes) -> None:
    connection.settimeout(SILENT_SECONDS)
    with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
        if not hmac.compare_digest(stream.read(_TOKEN_BYTES), token):
            return
        present = _read_document(stream)
        files = _files(directory)
        _write_document(stream, files)
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for name, size_and_time in files.items():
                if present.get(name) != size_and_time:
                    archive.add(os.path.join(directory, name), arcname=name, recursive=False)
        stream.flush()


def fetch(directory: str, address: str, port: str) -> None:
    """Copy the directory of another machine; files that are there already are not transferred. The token is on
    stdin."""
    token = sys.stdin.buffer.readline().strip()
    with alone(os.path.dirname(directory)):
        if os.path.exists(os.path.join(directory, COMPLETE)):
            return
        _start_from_earlier(directory)
        os.makedirs(directory, exist_ok=True)
        try:
            wanted = _receive_missing(directory, address, port, token)
        except (BrokenPipeError, ConnectionResetError):
            raise ValueError(_ENDED) from None
        present = _files(directory)
        if lacking := [name for name in wanted if present.get(name) != wanted[name]]:
            raise ValueError(f"{len(lacking)} files were not transferred, such as {lacking[0]}")
        for name in present.keys() - wanted.keys():
            os.unlink(os.path.join(directory, name))
        _complete(directory)


def remove(state_dir: str, name: str, identity: str) -> None:
    """Remove what an interrupted removal left of the deployment `name` and of its software, which is not complete;
    without other deployments also caches and other software.

    Raises:
        TimeoutError: another program changes them.
        ValueError: the deployment runs, or its software has been installed again.
    """
    folders, software = [f"{state_dir}/{name}", f"{state_dir}/_m/{name}"], f"{state_dir}/software"
    own = [*folders, f"{software}/{identity}.input", f"{software}/{identity}"]
    if not any(os.path.isdir(path) for path in own):
        return
    with alone(state_dir, _REMOVE_SECONDS), alone(software, _REMOVE_SECONDS):
        if os.path.exists(f"{software}/{identity}/{COMPLETE}"):
            raise ValueError(f"{software}/{identity} has been installed again; repeat the command")
        for folder in folders:
            if _runs(folder):
                raise ValueError(f"{name} runs with the files in {folder}; end its processes, and repeat the command")
        shared: list[str] = []
        manifests = [*glob.glob(f"{state_dir}/*/manifest.json"), *glob.glob(f"{state_dir}/_m/*/manifest.json")]
        if all(os.path.dirname(path) in folders for path in manifests):
            for mark in glob.glob(f"{software}/*/{COMPLETE}"):
                os.unlink(mark)
            os.sync()
            shared = [f"{state_dir}/cache", *(path for path in glob.glob(f"{software}/*") if path not in own)]
        # Last what a repeated call looks for.
        for path in (*shared, *own):
            if os.path.isdir(path):
                shutil.rmtree(path)
        for folder in (software, f"{state_dir}/_m"):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _receive_missing(directory: str, address: str, port: str, token: bytes) -> dict[str, list[int]]:
    """Receive the files that `directory` lacks; return those of the other machine."""
    try:
        connection = socket.create_connection((address, int(port)), CONNECT_SECONDS)
    except OSError as error:
        reason = f"{address}:{port} cannot be reached ({error.strerror or error})"
        raise ValueError(f"{reason}; check the link and the firewalls of both machines") from None
    with connection:
        connection.settimeout(SILENT_SECONDS)
        with connection.makefile("rwb") as stream:
            stream.write(token)
            present = _files(directory)
            _write_document(stream, present)
            wanted = _read_document(stream)
            missing = [name for name in wanted if present.get(name) != wanted[name]]
            total = sum(wanted[name][0] for name in missing)
            done, deadline = 0, time.monotonic() + _PROGRESS_SECONDS
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for entry in archive:
                    _extract(archive, entry, directory)
                    done += entry.size
                    if time.monotonic() > deadline:
                        deadline = time.monotonic() + _PROGRESS_SECONDS
                        _progress(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB copied")
    return wanted


def _files(directory: str) -> dict[str, list[int]]:
    """Return size and time of all files below `directory` except the mark, of links a checksum of the target."""
    found = {}
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            relative = os.path.relpath(path, directory)
            if relative != COMPLETE and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                link = stat.S_ISLNK(status.st_mode)
                second = zlib.crc32(os.fsencode(os.readlink(path))) if link else int(status.st_mtime)
                found[relative] = [status.st_size, second]
    return found


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, directory: str) -> None:
    parts = Path(entry.name).parts
    if Path(entry.name).is_absolute() or ".." in parts or not (entry.isreg() or entry.issym() or entry.islnk()):
        raise ValueError(f"the archive has an invalid entry {entry.name!r}")
    # Other kinds of files of an earlier environment are replaced, and its links not followed.
    for parent in Path(entry.name).parents[-2::-1]:
        path = os.path.join(directory, parent)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            os.unlink(path)
    target = os.path.join(directory, entry.name)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    elif os.path.lexists(target):
        os.unlink(target)
    entry.uid, entry.gid, entry.uname, entry.gname = os.geteuid(), os.getegid(), "", ""
    entry.mtime = int(entry.mtime)
    # Links to the interpreter are absolute, which Python 3.14 refuses by default.
    archive.extraction_filter = lambda member, _: member
    archive.extract(entry, directory)


def _write_document(stream: _Stream, document: object) -> None:
    data = json.dumps(document).encode()
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def _read_document(stream: _Stream) -> dict[str, list[int]]:
    length = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "big")
    if length > _MOST_MANIFEST_BYTES:
        raise ValueError("the list of files is too long")
    found: dict[str, list[int]] = json.loads(_exactly(stream, length))
    return found


def _exactly(stream: _Stream, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(_ENDED)
    return data


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
