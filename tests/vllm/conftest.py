"""These tests run where vLLM is installed: `make test-vllm` makes an environment for them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
