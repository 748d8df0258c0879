"""Programs on a file system that fails: a library, loaded by LD_PRELOAD, makes some calls fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.helpers import ROOT

SOURCE = Path(__file__).with_name("faulty_files.c")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def build(folder: Path) -> Path:
    """Compile the library into a folder, and return its path."""
    path = folder / "faulty_files.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return path


def run_faulty(library: Path, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a fault such as ``write:5:metrics.jsonl``; none when empty."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if fault:
        environ |= {"LD_PRELOAD": str(library), "FIELD_FAULT": fault}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
