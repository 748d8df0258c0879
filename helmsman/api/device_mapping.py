"""Device mappings: parses the list of devices that a configuration gives to a worker group."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
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
    try:
        devices = _parsed(mapping) if isinstance(mapping, str) else [*map(operator.index, mapping)]
    except (SyntaxError, TypeError, ValueError) as error:
        expected = f"whole numbers such as '0-7,16', or 'list(range(0, 8))': {error}"
        raise wrong_mapping(role, mapping, expected) from None
    if not devices:
        raise wrong_mapping(role, mapping, "at least one device, or None for no devices")
    if min(devices) < 0:
        raise wrong_mapping(role, mapping, "device numbers of 0 or more")
    if twice := [str(device) for device, times in Counter(devices).items() if times > 1]:
        raise wrong_mapping(role, mapping, f"each device once; {', '.join(twice[:8])} is repeated")
    return devices


def _parsed(mapping: str) -> list[int]:
    if "[" in mapping or "(" in mapping:
        return _listed(ast.parse(mapping.strip(), mode="eval").body)
    return [device for part in mapping.split(",") for device in _range_of(part.strip())]


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
            return _devices(range(*map(_number, arguments)), ast.unparse(node))
    raise ValueError(f"{ast.unparse(node)!r} is neither a list nor a range")


def _number(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"{ast.unparse(node)!r} is not a whole number")
    return value


def _range_of(part: str) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
    if match is None:
        raise ValueError(f"{part!r} is neither a number nor a range")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"expected ascending ranges; {part!r} descends")
    return _devices(range(first, last + 1), part)


def _devices(numbers: range, text: str) -> list[int]:
    if len(numbers) > _MOST_DEVICES:
        raise ValueError(f"{text} has {len(numbers)} devices")
    return list(numbers)


def wrong_mapping(role: str, mapping: str | Sequence[int], expected: str) -> InvalidSpecError:
    """Return the error of a mapping."""
    return InvalidSpecError(role=role, field="device_mapping", value=mapping, expected=expected)
