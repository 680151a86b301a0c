"""Steps of image builds, run in the image.

`python3 image.py additions requirements.txt > additions.txt` writes the packages that `runtime/Dockerfile` adds to
its base. Those of the base stay as they are: its vLLM was built and tested with them. Only missing ones are installed,
each in the version, and with the content, that the requirements name.

`python3 image.py sbom NAME > sbom.cdx.json` writes the installed packages of the image NAME, including those of its
base, as a CycloneDX document; other software of the base belongs into the base's own document. Two builds with the same
packages give the same bytes.

`python3 image.py lock-memory TARGET`, as root, makes the program with which a member that is not root may lock memory.
RDMA pins its buffers, which needs the capability IPC_LOCK or a limit that no pod can set. A pod may have the
capability, but Linux drops it when a process that is not root executes a program, unless the program's file has it too.
So TARGET is a copy of util-linux' `setpriv` whose file permits IPC_LOCK alone, and the executed program keeps it. In a
pod without IPC_LOCK the file permits nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import struct
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==")
ENTRY = re.compile(r"\n(?=\S)")
MAIN = "dsv4"
_IPC_LOCK = 14  # CAP_IPC_LOCK of linux/capability.h
_REVISION_2 = 0x02000000  # VFS_CAP_REVISION_2 of the same, without the flag that makes it effective


def normal(name: str) -> str:
    """Return the one spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def additions(installed: Collection[str], requirements: str) -> str:
    """Return the entries of a requirements file, with their markers and hashes, whose packages are not installed.

    Args:
        installed: normal names.
        requirements: text of a pinned requirements file.
    """
    entries = ENTRY.split(requirements.strip())
    lacking = [one for one in entries if (found := PIN.match(one)) and normal(found[1]) not in installed]
    return "".join(f"{one}\n" for one in lacking)


def component(name: str, version: str, licence: str | None = None) -> dict[str, object]:
    """Return one package as CycloneDX has it.

    Args:
        name: of the distribution.
        version: of it.
        licence: an SPDX expression, where the package has one.
    """
    url = f"pkg:pypi/{normal(name)}@{version}"
    found: dict[str, object] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    return found | ({"licenses": [{"expression": licence}]} if licence else {})


def document(image: str, packages: Iterable[Mapping[str, str | None]]) -> dict[str, object]:
    """Return the CycloneDX document of `image`.

    Args:
        image: its name.
        packages: name, version and licence of each; dsv4's own among them.
    """
    unique = {(one["name"] or "", one["version"] or ""): one["license"] for one in packages}
    components = [component(name, version, licence) for (name, version), licence in sorted(unique.items())]
    version = next((version for name, version in unique if name == MAIN), "")
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([image, components]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{digest}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": image, "name": image, "version": version}},
        "components": components,
    }


def make_launcher(target: Path) -> None:
    """Make the program `target` that may lock memory.

    Raises:
        OSError: it cannot be written, or has no place for capabilities.
    """
    source = shutil.which("setpriv")
    if source is None:
        raise FileNotFoundError("setpriv of util-linux is not there; install util-linux")
    shutil.copy(source, target)
    target.chmod(0o755)
    os.setxattr(target, "security.capability", struct.pack("<IIIII", _REVISION_2, 1 << _IPC_LOCK, 0, 0, 0))


def main(command: str, argument: str) -> None:
    """Perform one step."""
    if command == "lock-memory":
        make_launcher(Path(argument))
        return
    packages = [found.metadata for found in importlib.metadata.distributions()]
    if command == "additions":
        sys.stdout.write(additions({normal(one["Name"]) for one in packages}, Path(argument).read_text()))
        return
    installed = [
        {"name": one["Name"], "version": one["Version"], "license": one.get("License-Expression")} for one in packages
    ]
    json.dump(document(argument, installed), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
