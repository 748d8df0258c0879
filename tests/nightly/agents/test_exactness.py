"""Test that every trained token is exactly the sampled one, for all chat templates."""

from __future__ import annotations

import os

import pytest

from tests.agents.fuzzed_chats import TEMPLATES, fuzz

NUM_CHATS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "2")) * 16
"""Per template; 50 rounds make more than 10,000 chats in total."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_fuzzed_chats(name: str) -> None:
    fuzz(name, range(8, 8 + NUM_CHATS))
