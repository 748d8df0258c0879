"""Limits of configuration files: each excess is refused with the limit, before it takes long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman.api.config_files import read_config

LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)
CHAIN = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 100))
TOO_MANY = "too many keys and values, expected at most 100,000."
TOO_DEEP = "values are nested too deeply, expected at most 64 levels."
TOO_LONG = "is too long, expected at most 100 digits."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("laughs.yaml", LAUGHS, TOO_MANY),
        ("merges.yaml", MERGES, TOO_MANY),
        ("chain.yaml", CHAIN, TOO_DEEP),
        ("self.yaml", "a: &a [*a]", "the alias stands for a value that contains it"),
        ("deep.json", "[" * 1_000_000, TOO_DEEP),
        ("deep.yaml", "- " * 500_000, TOO_DEEP),
        ("deep.toml", "a = " + "[" * 100_000, TOO_DEEP),
        ("tables.toml", "a" + ".a" * 500_000 + " = 1", TOO_DEEP),
        ("quoted.toml", '["a"' + ' . "b.c"' * 100 + "]", TOO_DEEP),
        ("wide.toml", "a = [" + "1," * 100_000 + "]", TOO_MANY),
        ("digits.yaml", "a: " + "9" * 101, TOO_LONG),
        ("hex.json", '{"a": 0x' + "f" * 500_000 + "}", TOO_LONG),
        ("base.yaml", "a: 1" + ":59" * 300_000, TOO_LONG),
        ("hex.toml", "a = 0x" + "f" * 500_000, TOO_LONG),
        (
            "large.yaml",
            "#" * (1 << 20) + "\n",
            "it is too large, expected at most 1 MiB. Shorten",
        ),
        ("date.yaml", "a: 2024-99-99", "ValueError: month must be in 1..12"),
        ("tag.yaml", "a: !!bool x", "KeyError: 'x'"),
        ("code.yaml", "!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("text.yaml", "a: \udcff", "the content is not UTF-8 text"),
    ],
)
def test_excess(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path)
    assert len(str(caught.value)) < 400


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="too large, expected at most 1 MiB"):
        read_config(path)


def test_pipes_and_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ValueError, match="it is a pipe or a device, expected a regular file"):
            read_config(path)
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        read_config(tmp_path)


def test_aliases_and_long_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"a: &a {{b: [1, 1e-6]}}\nc: [*a, *a]\nd: {{<<: *a, e: '{'9' * 1000}'}}\n")
    inner = {"b": [1, 1e-6]}
    expected = {"a": inner, "c": [inner, inner], "d": {**inner, "e": "9" * 1000}}
    assert read_config(path) == expected
