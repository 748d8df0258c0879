"""What `import helmsman` offers. A change here is a change for users: make it on purpose."""

from __future__ import annotations

import subprocess
import sys

import pytest

import helmsman

PUBLIC: list[str] = []


def test_public_names_are_these() -> None:
    assert sorted(getattr(helmsman, "__all__", [])) == sorted(PUBLIC)


def test_dir_lists_every_public_name() -> None:
    assert set(PUBLIC) <= set(dir(helmsman))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves_and_has_a_docstring(name: str) -> None:
    value = getattr(helmsman, name)
    assert value is getattr(helmsman, name)
    if callable(value):
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = helmsman.no_such_name  # type: ignore[attr-defined]


def test_star_import_works_in_a_fresh_interpreter() -> None:
    code = "from helmsman import *; import helmsman; assert all(n in globals() for n in getattr(helmsman, '__all__', []))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
