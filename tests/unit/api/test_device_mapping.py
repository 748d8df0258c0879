"""Test the forms of device mappings that configurations use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helmsman.api.device_mapping import parse_device_mapping
from helmsman.api.errors import InvalidSpecError


@pytest.mark.parametrize(
    ("mapping", "devices"),
    [
        ("0-3,6", [0, 1, 2, 3, 6]),
        ([3, 1], [3, 1]),
        (range(2), [0, 1]),
        ("list(range(0,4))", [0, 1, 2, 3]),
        (" list(range(2)) + list(range(14, 16))", [0, 1, 14, 15]),
        ("list([6,7,14,15])", [6, 7, 14, 15]),
        ("[6, 7]", [6, 7]),
        ("list(range(6, 0, -2))", [6, 4, 2]),
        ("range(0, 8, 4)", [0, 4]),
    ],
)
def test_device_mapping_parsed(mapping: str | Sequence[int], devices: list[int]) -> None:
    assert parse_device_mapping(mapping, "actor") == devices


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("list(range(0,8)", "'list(range(0, 8))': '(' was never closed"),
        ("open('/tmp/x')", """"open('/tmp/x')" is neither a list nor a range"""),
        ("[int('3')]", "malformed node"),
        ("[0.5]", "'0.5' is not a whole number"),
        ("[True]", "'True' is not a whole number"),
        ("[0] * 2", "'[0] * 2' is neither a list nor a range"),
        ("range(0, 8, 0)", "arg 3 must not be zero"),
        ("range(10**30)", "malformed node"),
        ("range(99999999999)", "range(99999999999) has 99999999999 devices"),
        ("[0, -1]", "device numbers of 0 or more"),
        ("[]", "at least one device"),
        ("[1] + [1]", "each device once; 1 is repeated"),
    ],
)
def test_device_mapping_refused(mapping: str, message: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_device_mapping(mapping, "actor")
    assert message in str(caught.value), caught.value
    assert "device_mapping" in str(caught.value) and "actor" in str(caught.value)
