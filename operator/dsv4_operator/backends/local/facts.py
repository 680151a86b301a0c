"""Facts about this machine and about checkpoints for the planner.

Of a checkpoint, local or on a Hugging Face hub, `config.json` and the headers of its files are read, and no weights.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dsv4_operator.api import DSV4Deployment, ModelSpec, Variant
from dsv4_operator.backends.local import network
from dsv4_operator.planning.catalog import Model, UnknownCheckpoint, checkpoint_named, model_for
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint, model_from_files, model_of_config
from dsv4_operator.planning.facts import Facts, GpuFacts, NodeFacts

if TYPE_CHECKING:
    from dsv4_operator.backends.local.gpus import Card
    from dsv4_operator.backends.local.software import Software
    from dsv4_operator.backends.local.state import DeploymentState

_log = logging.getLogger(__name__)

_PUBLIC = "https://huggingface.co"
_REQUEST_SECONDS = 10.0
_ALL_SECONDS = 120.0
_REQUESTS = 8
_FIRST = 2**20
"""Bytes of the first request for a header; those of the released files have up to 0.5 MiB."""
_CHUNK = 2**16


def local_facts(
    deployment: DSV4Deployment,
    state: DeploymentState,
    *,
    isolated: bool = True,
    memory: int | None = None,
    cards: Sequence[Card] = (),
    software: Software | None = None,
    unsafe_copies: str = "",
    model: Model | None = None,
) -> Facts:
    """Return the stand-in nodes of all groups, which share this machine's processors and memory equally.

    Args:
        deployment: the specification.
        state: its files.
        isolated: whether members have their own networks.
        memory: bytes for all members together. Default: the free memory now. Memory of running members is free for
            their successors, so the caller passes the amount that was free without them.
        cards: the GPUs of the deployment, divided among the nodes; none on CPU.
        software: installed software for engines on them; none on CPU.
        unsafe_copies: as in `NodeFacts`.
        model: as in `Facts`.
    """
    count = deployment.spec.topology.nodes_per_group * max(deployment.spec.replicas, 1) if isolated else 1
    memory = (available_memory() if memory is None else memory) // count
    cpus = len(os.sched_getaffinity(0))
    nodes = tuple(
        NodeFacts(
            name=f"local-{place}",
            address=network.address(place) if isolated else network.LOOPBACK,
            interface=network.INTERFACE if isolated else "lo",
            cpus=max(1, cpus // count),
            memory_bytes=memory,
            # Without cards, members run vLLM's CPU build, regardless of GPUs in the machine.
            machine=cards[0].machine if cards else "cpu",
            gpus=tuple(map(_gpu, cards[place * len(cards) // count : (place + 1) * len(cards) // count])),
            unsafe_copies=unsafe_copies,
        )
        for place in range(count)
    )
    return Facts(
        nodes=nodes,
        isolated=isolated,
        state_root=str(state.directory),
        weights_root=str(state.weights),
        ray_token_file=str(state.token()),
        model=model,
        cache_root=str(state.weights.parent / "cache"),
        secrets_root=str(state.secrets),
        profile=software.profile if software else None,
        cuda_home=software.cuda_home if software else "",
        one_machine=True,
        group_directories=True,
        ray_links=str(state.ray_links),
    )


def _gpu(card: Card) -> GpuFacts:
    # Imports the library of the driver; without GPUs it is not needed.
    from dsv4_operator.backends.local.gpus import describe_holders

    return GpuFacts(card.uuid, card.title, card.memory_bytes, card.free_bytes, describe_holders(card))


def resident_memory(pids: Iterable[int]) -> int:
    """Return the proportional set size of the processes in bytes; processes that ended count as 0."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def available_memory() -> int:
    """Return the bytes that programs can allocate without swapping."""
    available = _meminfo().get("MemAvailable")
    if available is None:
        raise RuntimeError("/proc/meminfo has no MemAvailable; dsv4 needs Linux 3.14 or newer")
    return available


_OWNED = (
    *("MemFree", "Active(anon)", "Inactive(anon)", "Active(file)", "Inactive(file)", "Unevictable", "Hugetlb"),
    *("Slab", "KernelStack", "PageTables", "Percpu", "VmallocUsed"),
)


def unowned_memory() -> int:
    """Return the bytes that are neither free nor of programs, files or tables of the kernel: pages of drivers.

    On unified memory that of CUDA contexts is among them, so its growth over the ends of all engines is a leak.
    """
    found = _meminfo()
    return found["MemTotal"] - sum(found.get(name, 0) for name in _OWNED)


def _meminfo() -> dict[str, int]:
    """Return `/proc/meminfo` in bytes."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


HEADER_LIMIT = 100 * 2**20  # Limit of safetensors.


def model_here(spec: ModelSpec) -> Model | None:
    """Return the model at the path of a deployment, read from its files or its `config.json` alone.

    None if neither is on this machine, or if it is the checkpoint of the catalog that the deployment names.

    Raises:
        BadCheckpoint: a file cannot be parsed; the text contains its name.
    """
    place = spec.source.path or spec.source.shared_path
    if place is None:
        return None
    found = None if spec.source.path is None else read_checkpoint(Path(place), spec.variant)
    config = Path(place) / "config.json"
    unnamed = spec.variant is not Variant.NANO and spec.checkpoint is None and checkpoint_named(place) is None
    if found is None and unnamed and config.is_file():
        found = model_of_config(str(place), _json(config))
    if found is not None and found.variant != spec.variant:
        raise BadCheckpoint(
            f"spec.model.variant: {spec.variant} contradicts {config}, which is of {found.variant}; write that"
        )
    return None if found is not None and _is_released(found, spec) else found


def _is_released(found: Model, spec: ModelSpec) -> bool:
    try:
        known = model_for(spec.model_copy(update={"size": None}))
    except UnknownCheckpoint:
        return False
    return (found.checkpoint_bytes, found.compress_ratios) == (known.checkpoint_bytes, known.compress_ratios)


class CheckpointFiles:
    """The checkpoint of a deployment according to its files, which are read again after each change."""

    def __init__(self) -> None:
        self._read: object = None
        self._model: Model | None = None
        self._unreadable = False

    def model(self, spec: ModelSpec) -> Model | None:
        """Return `model_here`, or None if a file cannot be parsed: the catalog may know the checkpoint."""
        place = spec.source.path or spec.source.shared_path
        state = (spec, _stamp(Path(place)) if place else ())
        if state != self._read:
            try:
                self._model = model_here(spec)
                self._unreadable = False
            except BadCheckpoint as error:
                if not self._unreadable:
                    _log.warning("sizes of the checkpoint are those of the catalog: %s", error)
                self._model, self._unreadable = None, True
            self._read = state
        return self._model


def _stamp(folder: Path) -> object:
    """Return a value that changes with the files of a checkpoint."""
    try:
        with os.scandir(folder) as entries:
            return sorted(map(_stamp_file, filter(_is_read, entries)))
    except OSError as error:
        return error.errno


def _is_read(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith((".json", ".safetensors"))


def _stamp_file(entry: os.DirEntry[str]) -> tuple[str | int | None, ...]:
    try:
        found = entry.stat()
    except OSError as error:
        # A link into a cache may lead nowhere.
        return entry.name, error.errno
    return entry.name, found.st_ino, found.st_size, found.st_mtime_ns


def read_checkpoint(folder: Path, variant: str) -> Model | None:
    """Return the checkpoint in `folder`; None if files are missing.

    Raises:
        BadCheckpoint: a file cannot be parsed.
    """
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    if not config.is_file() or not index.is_file():
        return None
    files = shards(str(index), _json(index))
    if not all((folder / name).is_file() for name in files):
        return None
    return model_from_files(str(folder), variant, _json(config), {name: _header(folder / name) for name in files})


def shards(place: str, index: Mapping[str, Any]) -> list[str]:
    """Return the names of the safetensors files in an index, which was read from `place`.

    Raises:
        BadCheckpoint: it is no index, or a name is outside of its directory.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{place} has no weight_map; download the file again")
    files = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise BadCheckpoint(f"{place} names {outside[0]!r}, which is not in that directory; download the file again")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} holds no JSON object; download the file again")
    return found


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(8)
            data += file.read(min(int.from_bytes(data, "little"), HEADER_LIMIT))
        return read_header(str(path), data, path.stat().st_size)
    except OSError as error:
        raise BadCheckpoint(f"{path} is not a safetensors file ({error}); download it again") from None


def read_header(place: str, data: bytes, length: int) -> dict[str, Any]:
    """Return the header of a safetensors file: 8 bytes of length, little-endian, then JSON.

    Args:
        place: path or URL of the file.
        data: its beginning.
        length: its size.

    Raises:
        BadCheckpoint: it is no such file, or not complete.
    """
    try:
        (size,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + size])
        ends = [tensor["data_offsets"][1] for name, tensor in found.items() if name != "__metadata__"]
        whole = 8 + size + max(ends, default=0)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{place} is not a safetensors file ({error}); download it again") from None
    if length != whole:
        raise BadCheckpoint(f"{place} has {length} bytes, and its header says {whole}; download it again")
    return dict(found)


def hub_model(spec: ModelSpec) -> Model:
    """Return the checkpoint of `spec.model.source.huggingFace` at its revision.

    Raises:
        BadCheckpoint: the hub cannot be read, or has no complete DeepSeek-V4 checkpoint there.
    """
    source = spec.source.hugging_face
    if source is None:
        raise BadCheckpoint("spec.model.source: --hub reads a repository; write huggingFace with repo and revision")
    endpoint = (source.endpoint or os.environ.get("HF_ENDPOINT") or _PUBLIC).rstrip("/")
    base = f"{endpoint}/{source.repo}/resolve/{source.revision}"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise _unreadable(base, "HF_HUB_OFFLINE forbids it")
    hub = _Hub(base, os.environ.get("HF_TOKEN", ""), time.monotonic() + _ALL_SECONDS)
    names = shards(hub.url("model.safetensors.index.json"), hub.document("model.safetensors.index.json"))
    config = hub.document("config.json")
    with ThreadPoolExecutor(_REQUESTS) as pool:
        headers = dict(zip(names, pool.map(hub.header, names), strict=True))
    return model_from_files(f"{source.repo}@{source.revision[:12]}", spec.variant, config, headers)


def _unreadable(url: str, reason: object) -> BadCheckpoint:
    return BadCheckpoint(
        f"{url} cannot be read ({reason}); plan without the hub: write spec.model.checkpoint and spec.model.size, or "
        "name a copy in spec.model.source.path"
    )


@dataclass(frozen=True, slots=True)
class _Hub:
    base: str
    token: str
    deadline: float

    def url(self, name: str) -> str:
        return f"{self.base}/{quote(name)}"

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON object."""
        data, length = self._begin(name, HEADER_LIMIT)
        try:
            found = json.loads(data)
        except ValueError as error:
            raise _unreadable(self.url(name), error) from None
        if not isinstance(found, dict) or len(data) != length:
            raise _unreadable(self.url(name), "it is no JSON object")
        return found

    def header(self, name: str) -> dict[str, Any]:
        """Return the header of a safetensors file."""
        data, length = self._begin(name, _FIRST)
        if len(data) >= 8 and (needed := 8 + struct.unpack("<Q", data[:8])[0]) > len(data):
            data, length = self._begin(name, min(needed, 8 + HEADER_LIMIT))
        return read_header(self.url(name), data, length)

    def _begin(self, name: str, limit: int) -> tuple[bytes, int]:
        """Return at most `limit` bytes from the beginning of a file, and the length of the file."""
        # Slow to load, and few plans read a hub.
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        url = self.url(name)
        request = Request(url, headers={"Range": f"bytes=0-{limit - 1}", "User-Agent": "dsv4"})  # noqa: S310  (`Url` is HTTP)
        if self.token:
            # Not for the store to which the hub redirects.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        found = bytearray()
        try:
            with urlopen(request, timeout=_REQUEST_SECONDS) as answer:  # noqa: S310
                whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
                length = int(whole if answer.status == 206 else answer.headers["Content-Length"])
                while len(found) < limit and (data := answer.read(min(_CHUNK, limit - len(found)))):
                    found += data
                    if time.monotonic() > self.deadline:
                        raise TimeoutError(f"no complete answer within {_ALL_SECONDS:g} s")
        except HTTPError as error:
            reason = "; a gated repository needs HF_TOKEN" if error.code in (401, 403) else ""
            raise _unreadable(url, f"HTTP {error.code}{reason}") from None
        except (OSError, ValueError, TypeError) as error:
            raise _unreadable(url, getattr(error, "reason", None) or error) from None
        return bytes(found), length
