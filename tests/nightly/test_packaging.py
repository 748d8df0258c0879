"""Tests of the contents of the distributions, and of the installed wheel without the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that does not find our sources by its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _build(kind: str, source: Path, folder: Path) -> Path:
    """Build a distribution like pip, in the environment of the tests, and return its path."""
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    _run(sys.executable, "-c", program, str(folder), cwd=source)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Tracked files that exist."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so the tracked files are unknown")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def sdist(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean export of the tracked files."""
    export = tmp_path_factory.mktemp("export")
    for name in tracked:
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, export / name)
    return _build("sdist", export, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_sdist_has_tracked_files(sdist: Path, tracked: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    made = {
        name
        for name in names
        if name in ("PKG-INFO", "setup.cfg") or name.startswith("helmsman_rl.egg-info/")
    }
    hidden = {name for name in tracked if name.startswith(".")}  # files of the repository itself
    assert {"README.md", "Makefile", "tests/conftest.py", "helmsman/py.typed"} <= names
    assert names - made == tracked - hidden


def test_wheel_has_only_package(wheel: Path, tracked: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        names = {name for name in archive.namelist() if not name.startswith(info)}
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert "helmsman/py.typed" in names
    assert names == {name for name in tracked if name.startswith("helmsman/")}
    assert "Name: helmsman-rl\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)) == {
        "cloudpickle",
        "msgspec",
    }
    assert scripts.split() == ["[console_scripts]", "helmsman", "=", "helmsman.__main__:main"]


@pytest.mark.timeout(400)
def test_wheel_runs_readme_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment finds the other packages by a .pth file."""
    home, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", home, cwd=elsewhere)
    python = home / "bin" / "python"
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
    ]
    _run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=elsewhere)
    site = Path(
        _run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    found = _run(python, "-c", "import helmsman; print(helmsman.__file__)", cwd=elsewhere)
    assert Path(found.strip()).is_relative_to(home), "the installed package is imported"

    example = elsewhere / "example.py"
    example.write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    )
    assert _run(python, example, cwd=elsewhere)
    assert "plan" in _run(home / "bin" / "helmsman", "--help", cwd=elsewhere)
