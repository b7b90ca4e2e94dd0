"""Which requirements the running environment does not meet, from installed metadata alone: no network.

`missing.py "torch==2.13.0"` prints the unmet ones; `missing.py --package dev` asks the same of this
repository's package with its extra `dev`, which also is unmet when setup.py changed after the last
`missing.py --stamp`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # a fresh venv has nothing but pip, which carries its own copy
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

PACKAGE = "torchserve-openvino"
SETUP = Path(__file__).resolve().parents[2] / "setup.py"
STAMP = Path(sys.prefix) / ".torchserve-openvino.setup"


def is_met(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def needs_of_package(extras: list[str]) -> list[str]:
    """Unmet requirements of the installed package with these extras; the package itself if absent or outdated."""
    try:
        declared = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return [PACKAGE]
    if not STAMP.exists() or STAMP.read_text() != setup_hash():
        return [PACKAGE]
    packages = []
    for text in declared:
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ["", *extras]
        )
        if applies and not is_met(requirement):
            packages.append(text)
    return packages


def setup_hash() -> str:
    return hashlib.sha256(SETUP.read_bytes() + str(SETUP).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", metavar="EXTRAS", help="also ask for this package with these extras: a,b")
    parser.add_argument("--stamp", action="store_true", help="note that setup.py as it is now was installed")
    parser.add_argument("requirements", nargs="*")
    arguments = parser.parse_args()
    if arguments.stamp:
        STAMP.write_text(setup_hash())
        return 0
    unmet = [text for text in arguments.requirements if not is_met(Requirement(text))]
    if arguments.package is not None:
        unmet += needs_of_package([extra for extra in arguments.package.split(",") if extra])
    print(*unmet, sep="\n", end="\n" if unmet else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
