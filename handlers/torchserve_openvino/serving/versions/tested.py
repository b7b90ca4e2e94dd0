"""The tested versions of the packages whose internals this one relies on."""

from collections.abc import Mapping
from importlib import metadata

from packaging.version import Version

# By major and minor version, as CI runs them; tests/contract says what is relied on.
TESTED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.13", "2.15"),
    "openvino": ("2026.4",),
    "torchserve": ("0.12",),
    "transformers": ("5.24",),
}


def installed() -> dict[str, str]:
    """Returns the versions of these packages; those that are not installed are left out."""
    versions = {}
    for name in TESTED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def untested() -> dict[str, str]:
    """Returns the versions that are not among the tested ones."""
    return {name: version for name, version in installed().items() if minor(version) not in TESTED[name]}


def minor(version: str) -> str:
    """Returns a version's first two parts: 2.13 of 2.13.0+cpu."""
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor}"


def described(versions: Mapping[str, str]) -> str:
    """Names versions beside the tested ones."""
    return "; ".join(f"{name} {version} (tested: {', '.join(TESTED[name])})" for name, version in versions.items())
