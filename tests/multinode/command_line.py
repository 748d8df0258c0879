"""A fixture that runs the command line on a live cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.contract.helpers import ROOT
from tests.multinode.conftest import Nodes

Helmsman = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helmsman(nodes: Nodes) -> Helmsman:
    """Run the command line in a process of its own, which finds the cluster by RAY_ADDRESS."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "helmsman", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": nodes.address},
        )

    return run
