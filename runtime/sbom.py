"""The Python packages of an image as a CycloneDX document: `python sbom.py NAME > sbom.cdx.json`, run in the image.

NAME is the image's name. The list contains the installed packages, including those of the image's base; other software
of the base belongs into the base's own document. Two builds with the same packages give the same bytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Iterable, Mapping

MAIN = "dsv4"


def component(name: str, version: str, licence: str | None = None) -> dict[str, object]:
    """Return one package as CycloneDX has it.

    Args:
        name: of the distribution.
        version: of it.
        licence: an SPDX expression, where the package has one.
    """
    # Package URLs have PEP 503's spelling.
    url = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
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


if __name__ == "__main__":
    installed = [
        {"name": one.metadata["Name"], "version": one.version, "license": one.metadata.get("License-Expression")}
        for one in importlib.metadata.distributions()
    ]
    json.dump(document(sys.argv[1], installed), sys.stdout, indent=1)
    sys.stdout.write("\n")
