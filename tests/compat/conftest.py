"""Rewrite the assertions of the suites, so that failures show values."""

import pytest

pytest.register_assert_rewrite("tests.compat.areal.suite", "tests.compat.roll.suite")
