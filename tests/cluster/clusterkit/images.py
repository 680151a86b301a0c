"""Images without a registry: a base of Debian packages, and the project's own Dockerfiles built on it.

buildah runs as root with a separate store below the cache; the nodes get archives (`Cluster.load`).
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from clusterkit import needs
from clusterkit.build import CACHE
from clusterkit.layout import alone
from clusterkit.nodes import environment
from clusterkit.processes import run
from clusterkit.waiting import say

REPOSITORY = Path(__file__).parents[3]
SUITE = "bookworm"
# Stand-in for the base images of a user's build. The operator needs a Python with venv; members also need the libraries
# of vLLM for CPU and of a Python built from source, and a compiler for torch's generated code. Both share one base,
# which nodes unpack only once.
PACKAGES = (
    "ca-certificates", "python3", "python3-venv", "libnuma1", "libgomp1", "libffi8", "libssl3", "libsqlite3-0",
    "liblzma5", "libbz2-1.0", "libreadline8", "zlib1g", "libncursesw6", "iproute2", "procps", "g++",
)  # fmt: skip
BASE_SECONDS = 900.0
BUILD_SECONDS = 1800.0
BASE = "localhost/dsv4-test-base"
OPERATOR = "dsv4.test/operator:1"
RUNTIME = "dsv4.test/runtime:1"


def _buildah(*arguments: str | Path, seconds: float = 300.0) -> str:
    store = CACHE / "buildah"
    environment = {"BUILDAH_ISOLATION": "chroot"}
    command = ("buildah", "--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay")
    return run(*command, *arguments, seconds=seconds, env=environment)


def base() -> str:
    """Return a base image with `PACKAGES` by its digest; it is built once."""
    needs.provide(nodes=False, images=True)
    key = hashlib.sha256(repr((SUITE, PACKAGES)).encode()).hexdigest()[:16]
    image = f"{BASE}:{key}"
    with alone("base image", patience=BASE_SECONDS):
        if image not in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            _make_base(image)
    return _by_digest(image)


def _by_digest(image: str) -> str:
    """Return the name that the Dockerfiles refer to."""
    listed = _buildah("images", "--format", "{{.Name}}:{{.Tag}} {{.Name}}@{{.Digest}}").splitlines()
    return dict(line.split() for line in listed)[image]


def _make_base(image: str) -> None:
    say("making a base image from Debian's packages (once, about a minute)")
    container = _buildah("from", "scratch").strip()
    try:
        root = _buildah("mount", container).strip()
        include = f"--include={','.join(PACKAGES)}"
        run("debootstrap", "--variant=minbase", include, SUITE, root, seconds=BASE_SECONDS)
        _buildah("umount", container)
        _buildah("commit", container, image, seconds=BUILD_SECONDS)
    finally:
        _buildah("rm", container)


@cache
def operator() -> Path:
    """Return an archive with the operator's image, `OPERATOR`, for `Cluster.load`."""
    return built(REPOSITORY / "operator" / "Dockerfile", OPERATOR, BASE=base())


@cache
def runtime() -> Path:
    """Return an archive with the CPU image of members and gateways, `RUNTIME`; vLLM is mounted (nodes.environment)."""
    return built(REPOSITORY / "runtime" / "Dockerfile.cpu", RUNTIME, BASE=base(), ENVIRONMENT=sys.prefix)


def built(dockerfile: Path, image: str, **arguments: str) -> Path:
    """Return an archive with the image that a Dockerfile of the project builds from the repository."""
    # A second caller finds all layers built.
    with alone(image.partition("/")[2], patience=BUILD_SECONDS):
        return _built(dockerfile, image, **arguments)


@contextmanager
def over_vllm() -> Iterator[Callable[..., str]]:
    """Yield a function that runs a command in `runtime/Dockerfile`'s image, over a stand-in for the image of vLLM.

    The stand-in has a `python3` with pip in which vLLM, Ray and their dependencies are installed: those of this
    environment, which is mounted during the block.
    """
    packages = sysconfig.get_path("purelib")
    stand_in = (
        f"FROM {base()}\n"
        # The Python of this environment may be below root's home.
        "RUN chmod 755 /root\n"
        # The setuptools of a new venv would hide the version that torch needs.
        f"RUN {sys.executable} -m venv /opt/base && /opt/base/bin/python -m pip uninstall --yes setuptools \\\n"
        f" && echo {packages} > $(echo /opt/base/lib/python3*/site-packages)/vllm.pth\n"
        "ENV PATH=/opt/base/bin:$PATH\n"
    )
    mounted = tuple(environment())
    with alone("image over vllm", patience=BUILD_SECONDS), tempfile.TemporaryDirectory() as place:
        file = Path(place) / "Dockerfile"
        file.write_text(stand_in)
        _build(file, "localhost/dsv4-test-vllm:1", mounted)
        image = "localhost/dsv4-test-gpu:1"
        _build(REPOSITORY / "runtime" / "Dockerfile", image, mounted, BASE=_by_digest("localhost/dsv4-test-vllm:1"))
        container = _buildah("from", "--pull-never", image).strip()
        try:
            volumes = [f"--volume={path}:{path}:ro" for path in mounted]
            output = Path(_buildah("mount", container).strip()) / "tmp/output"

            def inside(*command: str) -> str:
                # `buildah run` with chroot isolation may end before it has copied the standard output.
                _buildah("run", *volumes, container, "--", "sh", "-c", '"$@" > /tmp/output', "sh", *command)
                return output.read_text()

            yield inside
        finally:
            _buildah("rm", container)


def _built(dockerfile: Path, image: str, **arguments: str) -> Path:
    _build(dockerfile, image, **arguments)
    archive = CACHE / f"{image.replace('/', '-').replace(':', '-')}.tar"
    # The second worker of a run finds the archive of the first one.
    record = archive.with_suffix(".id")
    identity = _buildah("images", "--no-trunc", "--format", "{{.ID}}", image).strip()
    if archive.exists() and record.exists() and record.read_text() == f"{identity} {archive.stat().st_mtime_ns}":
        return archive
    # Another session may be loading the existing archive.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".draft-") as place:
        draft = Path(place) / archive.name
        _buildah("push", image, f"docker-archive:{draft}:{image}", seconds=BUILD_SECONDS)
        draft.rename(archive)
    record.write_text(f"{identity} {archive.stat().st_mtime_ns}")
    return archive


def _build(dockerfile: Path, image: str, mounted: tuple[str, ...] = (), **arguments: str) -> None:
    say(f"building {image} from {dockerfile}")
    # The build uses the package index and the certificates of this machine.
    shared = [path for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
    _buildah(
        "build", "--layers", "--file", dockerfile, "--tag", image,
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *(f"--volume={path}:{path}:ro" for path in (*shared, *mounted)),
        REPOSITORY,
        seconds=BUILD_SECONDS,
    )  # fmt: skip
