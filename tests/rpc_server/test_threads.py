"""How the threads of a worker share the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from helmsman.rpc_server.threads import SWITCH_INTERVAL_S, share_interpreter

sys.path.insert(0, sys.argv[1])
share_interpreter()
import outer
assert outer.SEEN == (0.005, 0.005, 0.005), outer.SEEN
assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-9
try:
    import broken
except KeyError:
    assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-9
    import importlib
    importlib.reload(outer)
    import nowhere
"""


def test_imports_keep_the_interval_of_python(tmp_path: Path) -> None:
    seen = "import sys; INTERVAL = round(sys.getswitchinterval(), 6)\n"
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer/__init__.py").write_text(
        f"{seen}from outer import part\nimport other\nSEEN = (INTERVAL, part.INTERVAL, other.INTERVAL)\n"
    )
    for name in ("outer/part", "other"):
        (tmp_path / f"{name}.py").write_text(seen)
    (tmp_path / "broken.py").write_text("raise KeyError\n")
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ModuleNotFoundError: No module named 'nowhere'" in told.stderr, told.stderr
    assert "AssertionError" not in told.stderr
