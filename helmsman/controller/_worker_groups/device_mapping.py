"""Device mappings as users write them: [0, 1, 2], or '0-7,16'. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from helmsman.api.errors import InvalidSpecError

_FIELD = "device_mapping"


def parse_device_mapping(mapping: str | Sequence[int], role: str) -> list[int]:
    """The devices that a mapping names, in its order, each once.

    A text has numbers and ranges that include both ends, separated by commas.

    Raises: InvalidSpecError.
    """
    if isinstance(mapping, str):
        devices = [device for part in mapping.split(",") for device in _devices_of(part, mapping, role)]
    else:
        try:
            devices = [operator.index(device) for device in mapping]
        except TypeError:
            raise InvalidSpecError(
                role=role, field=_FIELD, value=mapping, expected="whole numbers, or a text such as '0-7,16'"
            ) from None
    if not devices:
        raise InvalidSpecError(role=role, field=_FIELD, value=mapping, expected="one device at least, or None for no devices")
    if min(devices) < 0:
        raise InvalidSpecError(role=role, field=_FIELD, value=mapping, expected="devices from 0 on")
    twice = sorted({device for device in devices if devices.count(device) > 1}) if len(set(devices)) < len(devices) else []
    if twice:
        shown = ", ".join(map(str, twice[:8]))
        raise InvalidSpecError(role=role, field=_FIELD, value=mapping, expected=f"each device once; {shown} is there twice")
    return devices


def _devices_of(part: str, mapping: str, role: str) -> Sequence[int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
    if match is None:
        raise InvalidSpecError(
            role=role,
            field=_FIELD,
            value=mapping,
            expected=f"numbers and ranges separated by commas, such as '0-7,16'; {part.strip()!r} is neither",
        )
    first = int(match.group(1))
    last = int(match.group(2) or first)
    if last < first:
        raise InvalidSpecError(role=role, field=_FIELD, value=mapping, expected=f"ranges that rise; {part.strip()!r} falls")
    return range(first, last + 1)


def show_devices(devices: Sequence[int]) -> str:
    """'0-3,6' for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
