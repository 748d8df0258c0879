"""Test that every trained token is exactly the sampled one, for some chats and chat templates."""

from __future__ import annotations

import pytest

from tests.agents.fuzzed_chats import fuzz


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe", "gptoss"])
def test_tokens_of_fuzzed_chats(name: str) -> None:
    fuzz(name, range(8))
