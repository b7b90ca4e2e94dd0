"""Parses OpenVINO's device names, and checks them against the devices of this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from torchserve_openvino.config.problems import KeyPath, Problems
from torchserve_openvino.config.spelling import listed, nearest, shown
from torchserve_openvino.errors import DeviceNotFoundError

HARDWARE = ("CPU", "GPU", "NPU")
VIRTUAL = ("AUTO", "HETERO", "MULTI")
# A minus excludes a device from AUTO; a number in parentheses is MULTI's count of requests for a device.
_MEMBER = re.compile(r"(?P<minus>-?)(?P<name>[A-Z]\w*(?:\.\w+)*)(?P<count>(?:\(\d+\))?)")


class DeviceCatalog(Protocol):
    """The devices and properties that a configuration is checked against."""

    def available(self) -> tuple[str, ...] | None:
        """Returns the devices of this machine; None if presence is not to be checked."""

    def properties(self, device: str) -> Mapping[str, str] | None:
        """Returns the access mode (``RO``, ``RW``, ``WO``) of each property; None if the device can't be queried."""

    def refusal(self, device: str, name: str, value: Any) -> str | None:
        """Returns OpenVINO's message if the device refuses a value for a property that it lists; else None."""


class SystemCatalog:
    """The devices that OpenVINO sees on this machine. OpenVINO is imported on first use."""

    def available(self) -> tuple[str, ...]:
        """Returns ``Core().available_devices``."""
        return tuple(_core().available_devices)

    def properties(self, device: str) -> Mapping[str, str] | None:
        """Returns ``SUPPORTED_PROPERTIES`` of a device; None if its plugin does not load."""
        try:
            return dict(_core().get_property(device, "SUPPORTED_PROPERTIES"))
        except RuntimeError:
            return None

    def refusal(self, device: str, name: str, value: Any) -> str | None:
        """Sets the property on a temporary Core, where the loaded plugin checks the value (about 3 ms on CPU)."""
        import openvino

        core = openvino.Core()
        try:
            core.get_property(device, "SUPPORTED_PROPERTIES")
            core.set_property(device, {name: value})
        except (RuntimeError, TypeError) as error:
            return str(error).strip().splitlines()[-1]
        return None


class UncheckedCatalog:
    """A catalog for machines without the target's devices: only checks names against OpenVINO's documented ones."""

    def available(self) -> None:
        """Returns None: presence is not checked."""

    def properties(self, device: str) -> None:
        """Returns None: no device is queried."""

    def refusal(self, device: str, name: str, value: Any) -> None:
        """Returns None: no value is refused."""


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device name.

    Attributes:
        name: Canonical spelling, e.g. ``AUTO:GPU,CPU``.
        virtual: ``AUTO``, ``HETERO`` or ``MULTI``; empty for a hardware device.
        members: Hardware devices that the name lists; empty for a bare ``AUTO``.
        excluded: Devices that ``AUTO:-GPU`` leaves out.
    """

    name: str
    virtual: str = ""
    members: tuple[str, ...] = ()
    excluded: tuple[str, ...] = field(default=())

    def hardware(self, catalog: DeviceCatalog) -> tuple[str, ...]:
        """Returns the devices that the model may run on; AUTO without members may use all that are present."""
        if self.members:
            return self.members
        present = catalog.available() or ("CPU",)
        return tuple(device for device in present if not any(_matches(out, device) for out in self.excluded))


def family(device: str) -> str:
    """Drops the device index: returns ``GPU`` for ``GPU.0``."""
    return device.split(".", maxsplit=1)[0]


def _matches(device: str, present: str) -> bool:
    # "GPU" matches "GPU.0" and the like; a single device that is listed as "GPU" also matches "GPU.0".
    return device == present or present.startswith(f"{device}.") or (device == f"{present}.0" and present != "CPU")


def parse_device(value: Any, problems: Problems, keys: KeyPath = ("device",)) -> DeviceSpec | None:
    """Parses a device name, ignoring case and whitespace.

    Args:
        value: ``cpu``, ``GPU.0``, ``auto:gpu, cpu``, ``AUTO:-GPU``, ``HETERO:GPU,CPU``,
            ``MULTI:GPU(4),CPU(2)``, ...
        problems: Collects what is wrong.
        keys: Path of the option.

    Returns:
        The parsed name; None if it is not valid.
    """
    if not isinstance(value, str) or not value.strip():
        problems.add(keys, f"must be a device name such as CPU, GPU.0 or AUTO:GPU,CPU, not {shown(value)}.")
        return None
    text = re.sub(r"\s+", "", value).upper()
    head, colon, tail = text.partition(":")
    if head not in VIRTUAL:
        if colon:
            message = f"{shown(value)} is not a device: only {listed(VIRTUAL)} take a list of devices."
            problems.add(keys, message, suggestion=nearest(head, VIRTUAL))
            return None
        if not re.fullmatch(r"[A-Z]\w*(\.\w+)*", text):
            problems.add(keys, f"{shown(value)} is not a device name.", suggestion="CPU")
            return None
        return DeviceSpec(text, members=(text,))
    if not colon:
        if head != "AUTO":
            problems.add(keys, f"{head} needs a list of devices.", suggestion=f"{head}:GPU,CPU")
            return None
        return DeviceSpec(text, virtual=head)
    return _parse_members(value, head, tail, problems, keys)


def _parse_members(value: str, head: str, tail: str, problems: Problems, keys: KeyPath) -> DeviceSpec | None:
    members: list[str] = []
    excluded: list[str] = []
    for part in tail.split(","):
        match = _MEMBER.fullmatch(part)
        if match is None or (match["minus"] and head != "AUTO") or match["name"] in VIRTUAL:
            problems.add(keys, f"{shown(value)}: {shown(part)} is not a device that {head} accepts.")
            return None
        (excluded if match["minus"] else members).append(match["name"])
    return DeviceSpec(f"{head}:{tail}", virtual=head, members=tuple(members), excluded=tuple(excluded))


def check_present(spec: DeviceSpec, catalog: DeviceCatalog, problems: Problems, keys: KeyPath = ("device",)) -> None:
    """Adds a `DeviceNotFoundError` for each named device that this machine lacks.

    Without a list of devices (`UncheckedCatalog`) only the family is checked: CPU, GPU or NPU.
    """
    present = catalog.available()
    for member in spec.members:
        if present is None:
            if family(member) not in HARDWARE:
                message = f"{member!r} is not an OpenVINO device; valid devices: {listed(HARDWARE + VIRTUAL)}."
                hint = nearest(member, HARDWARE + VIRTUAL)
                problems.add(keys, message, suggestion=hint, kind=DeviceNotFoundError)
        elif not any(_matches(member, device) for device in present):
            message = f"OpenVINO sees no device {member!r} on this machine; available: {listed(present)}."
            hint = nearest(member, (*present, *VIRTUAL))
            problems.add(keys, message, suggestion=hint, kind=DeviceNotFoundError)
    if spec.virtual and not spec.members and present is not None and not spec.hardware(catalog):
        message = f"{spec.name!r} leaves no device; available: {listed(present)}."
        problems.add(keys, message, kind=DeviceNotFoundError)
