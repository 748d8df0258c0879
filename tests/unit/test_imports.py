"""Test that rooms import only the rooms below them, and that `import helmsman` is cheap."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import helmsman

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "helmsman"
SHARED = {"api", "_base", "_wire", "_process"}
PUBLIC = {"api", ""}
ALLOWED = {
    "api": {"api"},
    "_base": {"_base", "api"},
    "_wire": {"_wire", "_base", "api"},
    "_process": SHARED,
    "rpc_server": {"rpc_server", *SHARED},
    "engines": {"engines", *SHARED},
    "controller": {"controller", "rpc_server", *SHARED},
    "_desk": {"_desk", "controller", "rpc_server", *SHARED},
    "_cluster": {"_cluster", "_desk", "controller", "rpc_server", *SHARED},
    "testing": {"testing", *PUBLIC},
    "agents": {"agents", *PUBLIC},
    "recipes": {"recipes", "agents", "engines", *PUBLIC},
    "compat": {"compat", *PUBLIC},
}
"""Room -> rooms that it may import: none that imports it. '' is the package itself with its public
names; it may import every room but `testing`.
"""

LAYERS = {
    "controller": [
        {"_placement"},
        {"_scheduler"},
        {"_groups"},
        {"_weights"},
        {"_rollout"},
        {"_training"},
    ],
    "rpc_server": [{"_host", "_ray_forks"}, {"_server"}],
    "engines": [
        {
            "_serving",
            "_models",
            "losses",
            "memory",
            "rollout_config",
            "shared_base",
            "train_config",
            "vllm_config",
        },
        {"_weights"},
        {"weight_transfer", "_train"},
        {"weights"},
        {"_hf", "_vllm"},
        {"_server"},
        {"classifier", "rollout", "server_engine", "train", "vllm_engine"},
    ],
}
"""The parts of each room from the bottom up. A part may import only parts of lower layers."""

LIGHT = {"msgspec", "cloudpickle"}
"""Third-party packages that the contracts may import at module level."""

HEAVY = {
    "torch",
    "ray",
    "numpy",
    "transformers",
    "safetensors",
    "matplotlib",
    "rich",
    "aiohttp",
}

NEEDS_TORCH = {"helmsman._wire.tensors"}
"""Modules outside of engines that import torch at module level; tensors cause their import."""

NEEDS_RAY = {
    "helmsman.controller._scheduler.ray.placement_groups",
    "helmsman.controller._scheduler.ray.cluster_state",
    "helmsman.controller._scheduler.ray.transport",
    "helmsman.controller._scheduler.ray.scheduler",
    "helmsman.rpc_server._server.ray_nodes",
    "helmsman.rpc_server._server.ray_server",
}
"""Modules that only RayScheduler imports."""

PUBLIC_FOR_RAY = {"RayScheduler", "get_placement_group_master_ip_and_port"}

MAX_MODULES = 20
"""Limit of the modules that `import helmsman` adds to those of a bare interpreter."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each import.

    `from a import b` gives a.b, since b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path, *, module_level: bool = False) -> list[tuple[int, str]]:
    """Return line and dotted name of each import of a module, or of those at its top level only."""
    tree = tree_of(path)
    if module_level:
        tree = ast.Module(
            [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)], []
        )
    return list(imported_names(tree, module_name(path), path.name == "__init__.py"))


def room_of(name: str) -> str | None:
    """Return a module's room, '' for the package itself, None for other libraries."""
    first, *rest = name.split(".")
    if first != "helmsman":
        return None
    return rest[0] if rest and (PACKAGE / rest[0]).is_dir() else ""


def test_rooms_have_rules() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED)


def imports_in(folder: Path, *, module_level: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each import in a folder, with its place."""
    for path in SOURCES:
        if path.is_relative_to(folder):
            for line, name in imports_of(path, module_level=module_level):
                yield name, f"{path.relative_to(ROOT)}:{line} imports {name}"


@pytest.mark.parametrize("room", ALLOWED)
def test_room_imports_allowed(room: str) -> None:
    allowed = {None, *ALLOWED[room]}
    wrong = [where for name, where in imports_in(PACKAGE / room) if room_of(name) not in allowed]
    assert not wrong, f"{room} may import only {sorted(ALLOWED[room])}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ["recipes", "compat"])
def test_room_imports_public_modules_only(room: str) -> None:
    wrong = [
        where
        for name, where in imports_in(PACKAGE / room)
        if room_of(name) not in (None, room)
        and any(part.startswith("_") for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_package_loads_no_test_tools() -> None:
    files = [path for path in SOURCES if path.parent == PACKAGE]
    assert not [
        name for path in files for _, name in imports_of(path) if room_of(name) == "testing"
    ]
    assert not [home for home in helmsman._HOMES.values() if room_of(home) == "testing"]


def part_of(name: str) -> str:
    """Return the sub-package of a room, or the module in the room itself."""
    return name.split(".")[2] if name.count(".") > 1 else ""


@pytest.mark.parametrize("room", LAYERS)
def test_room_parts_import_only_layers_below(room: str) -> None:
    level = {part: number for number, layer in enumerate(LAYERS[room]) for part in layer}
    sources = [
        path
        for path in SOURCES
        if path.is_relative_to(PACKAGE / room) and path.parent != PACKAGE / room
    ]
    sources += [path for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py"]
    found = {part_of(module_name(path)) for path in sources}
    assert found == set(level), "every part has a layer"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(set(sources))
        for line, name in imports_of(path)
        if room_of(name) == room
        and (here := part_of(module_name(path))) != (there := part_of(name))
        and level[there] >= level[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_library_imports_no_examples_benchmarks_or_tests() -> None:
    refused = {"examples", "benchmarks", "tests"}
    wrong = [where for name, where in imports_in(PACKAGE) if name.split(".")[0] in refused]
    assert not wrong, "\n".join(wrong)


def test_contracts_import_light_packages() -> None:
    light = LIGHT | sys.stdlib_module_names
    wrong = [
        where
        for name, where in imports_in(PACKAGE / "api", module_level=True)
        if room_of(name) is None and name.split(".")[0] not in light
    ]
    assert not wrong, "\n".join(wrong)


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NEW_MODULES = """
import sys
before = set(sys.modules)
import helmsman
new = set(sys.modules) - before
import json
print(json.dumps(sorted(new)))
"""


def test_import_helmsman_num_modules() -> None:
    new = json.loads(run_python(NEW_MODULES))
    assert "helmsman" in new
    assert not HEAVY & {name.split(".")[0] for name in new}
    assert len(new) <= MAX_MODULES, f"{len(new)} modules: {new}"


IMPORT_WITHOUT = """
import importlib, json, sys

class Refuser:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

refused, modules = map(json.loads, sys.argv[1:])
sys.meta_path.insert(0, Refuser())
for module in modules:
    importlib.import_module(module)
assert not {name.split(".")[0] for name in sys.modules} & set(refused)
import helmsman
for name in helmsman.__all__:
    try:
        getattr(helmsman, name)
    except ImportError as exc:
        print(name, type(exc).__name__, exc)
"""


def modules_of(*rooms: str) -> list[str]:
    return [
        module_name(path)
        for room in rooms
        for path in SOURCES
        if path.is_relative_to(PACKAGE / room)
    ]


def import_without(refused: set[str], modules: list[str]) -> list[str]:
    """Import modules in a process without these packages; returns the missing public names, each
    with its error.
    """
    return run_python(IMPORT_WITHOUT, json.dumps(sorted(refused)), json.dumps(modules)).splitlines()


def test_contracts_import_without_heavy_packages() -> None:
    import_without(HEAVY, ["helmsman", *modules_of("api")])


def test_driver_imports_without_torch_numpy_ray() -> None:
    modules = (
        set(modules_of("rpc_server", "controller", "_desk", "_cluster", *SHARED))
        - NEEDS_TORCH
        - NEEDS_RAY
    )
    missing = import_without({"torch", "numpy", "transformers", "ray"}, sorted(modules))
    assert {line.split()[0] for line in missing} == PUBLIC_FOR_RAY
    for line in missing:
        assert "BackendNotInstalledError" in line
        assert "pip install 'helmsman-rl[ray]'" in line


def test_ray_modules_import_without_torch() -> None:
    assert import_without({"torch", "transformers"}, sorted(NEEDS_RAY)) == []


def test_ray_imported_only_where_needed() -> None:
    at_module_level = {
        module_name(path)
        for path in SOURCES
        for _, name in imports_of(path, module_level=True)
        if name.split(".")[0] == "ray"
    }
    assert at_module_level <= NEEDS_RAY
    in_engines = {name.split(".")[0] for name, _ in imports_in(PACKAGE / "engines")}
    assert "ray" not in in_engines
