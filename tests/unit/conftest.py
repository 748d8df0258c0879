"""Check that unit tests import neither torch nor Ray: each costs seconds in every process."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Generator, Iterator, Sequence
from types import ModuleType

import pytest

HEAVY = {"ray", "torch"}


class ImportRecorder(importlib.abc.MetaPathFinder):
    """Records imports of heavy packages and leaves the import to the next finder."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in HEAVY:
            self._found.append(fullname)
        return None

    def take(self) -> str:
        """Return the names imported since the last call, "" for none.

        Packages that only look whether torch is installed do not import it.
        """
        found, self._found = self._found, []
        return ", ".join(sorted({name for name in found if name in sys.modules}))


RECORDER = ImportRecorder()
sys.meta_path.insert(0, RECORDER)


def refusal(where: str, packages: str) -> str:
    return (
        f"unit test imports a heavy package ({where}): {packages}, expected none of "
        f"{', '.join(sorted(HEAVY))}. Move the test out of tests/unit, or import less."
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a file that imports a heavy package."""
    RECORDER.take()
    report = yield
    if packages := RECORDER.take():
        report.outcome = "failed"
        report.longrepr = refusal(collector.nodeid, packages)
    return report


@pytest.fixture(autouse=True)
def no_heavy_import(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that imports a heavy package."""
    RECORDER.take()
    yield
    if packages := RECORDER.take():
        pytest.fail(refusal(request.node.nodeid, packages), pytrace=False)
