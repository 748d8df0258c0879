"""Test that another user cannot speak to vLLM's processes, on one machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman.engines.vllm_engine import VLLMEngine
from tests.hostile.other_user import connected
from tests.listeners import family_of, listeners_of
from tests.vllm.vllm_models import ENGINE, LLAMA, SPEC_ENV, folder_of, model_of


def test_listeners_of_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are this user's alone, whatever the umask; gloo's ports are closed."""
    for name, value in SPEC_ENV.items():
        monkeypatch.setenv(name, value)
    before = listeners_of(family_of(os.getpid()))
    engine = VLLMEngine(model=folder_of(model_of(LLAMA, seed=1), tmp_path), **ENGINE)
    mask = os.umask(0)
    try:
        engine.initialize()
        listeners = listeners_of(family_of(os.getpid())) - before
        assert {each.family for each in listeners} == {"unix", "tcp"}
        for each in listeners:
            if each.family == "unix":
                assert not os.stat(each.address).st_mode & 0o077, each
            else:
                assert each.address == "127.0.0.1"
                with pytest.raises(TimeoutError):
                    connected(each.family, each.address, each.port)
    finally:
        os.umask(mask)
        engine.destroy()
