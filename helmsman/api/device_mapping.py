"""Device mappings: which devices a worker group uses, as configurations write it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence

from helmsman.api.errors import InvalidSpecError

_MOST_DEVICES = 1 << 20


def parse_device_mapping(mapping: str | Sequence[int], role: str) -> list[int]:
    """Parse device indices, in order and without duplicates.

    A string holds numbers and ranges that include both ends, separated by commas: '0-7,16'. Or it
    is a Python expression of lists, ``range``, ``list`` and ``+``, which is read and not evaluated:
    'list(range(0,8)) + [16]'.

    Raises:
        InvalidSpecError: The mapping is empty or malformed, or repeats a device.
    """
    if isinstance(mapping, str):
        devices = _parsed(mapping, role)
    else:
        try:
            devices = [operator.index(device) for device in mapping]
        except TypeError:
            raise wrong_mapping(
                role, mapping, "whole numbers, or a text such as '0-7,16'"
            ) from None
    if not devices:
        raise wrong_mapping(role, mapping, "at least one device, or None for no devices")
    if min(devices) < 0:
        raise wrong_mapping(role, mapping, "device numbers of 0 or more")
    if len(set(devices)) < len(devices):
        twice = sorted({device for device in devices if devices.count(device) > 1})
        raise wrong_mapping(
            role, mapping, f"each device once; {', '.join(map(str, twice[:8]))} is repeated"
        )
    return devices


def _parsed(mapping: str, role: str) -> list[int]:
    if "[" in mapping or "(" in mapping:
        try:
            return _listed(ast.parse(mapping.strip(), mode="eval").body)
        except (SyntaxError, ValueError) as error:
            raise wrong_mapping(
                role, mapping, f"numbers such as '0-7,16', or 'list(range(0, 8))': {error}"
            ) from None
    return [device for part in mapping.split(",") for device in _devices_of(part, mapping, role)]


def _listed(node: ast.expr) -> list[int]:
    """Return the numbers of an expression of lists, range, list and +."""
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_number(each) for each in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.Call(func=ast.Name(id="list"), args=[argument], keywords=[]):
            return _listed(argument)
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]) if (
            1 <= len(arguments) <= 3
        ):
            numbers = range(*map(_number, arguments))
            if len(numbers) > _MOST_DEVICES:
                raise ValueError(f"{ast.unparse(node)} has {len(numbers)} devices")
            return list(numbers)
    raise ValueError(f"{ast.unparse(node)!r} is neither a list nor a range")


def _number(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"{ast.unparse(node)!r} is not a whole number")
    return value


def _devices_of(part: str, mapping: str, role: str) -> Sequence[int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
    if match is None:
        expected = (
            f"numbers and ranges separated by commas, such as '0-7,16'; {part.strip()!r} is neither"
        )
        raise wrong_mapping(role, mapping, expected)
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise wrong_mapping(role, mapping, f"ascending ranges; {part.strip()!r} descends")
    return range(first, last + 1)


def wrong_mapping(role: str, mapping: str | Sequence[int], expected: str) -> InvalidSpecError:
    """Return the error of a mapping."""
    return InvalidSpecError(role=role, field="device_mapping", value=mapping, expected=expected)
