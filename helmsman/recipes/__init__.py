"""Ready-made training runs, built on the public API only.

    from helmsman.recipes import GRPO

    GRPO(model="models/qwen", data="train.jsonl", rewards=["math"]).train()

``helmsman grpo`` runs the same from a shell. ``grpo``, ``sft`` and ``dpo`` have the loops;
docs/recipes.md is the guide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helmsman.recipes.dpo import DPO as DPO
    from helmsman.recipes.ending import RunSummary as RunSummary
    from helmsman.recipes.grpo_recipe import GRPO as GRPO
    from helmsman.recipes.grpo_recipe import PPO as PPO
    from helmsman.recipes.recipe import Recipe as Recipe
    from helmsman.recipes.settings import DPOSettings as DPOSettings
    from helmsman.recipes.settings import GRPOSettings as GRPOSettings
    from helmsman.recipes.settings import Reward as Reward
    from helmsman.recipes.settings import SFTSettings as SFTSettings
    from helmsman.recipes.sft import SFT as SFT
    from helmsman.recipes.tiny_model import make_model as make_model

_HOMES = {
    "DPO": "dpo",
    "DPOSettings": "settings",
    "SFT": "sft",
    "SFTSettings": "settings",
    "GRPO": "grpo_recipe",
    "GRPOSettings": "settings",
    "PPO": "grpo_recipe",
    "Recipe": "recipe",
    "Reward": "settings",
    "RunSummary": "ending",
    "make_model": "tiny_model",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names above


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'helmsman.recipes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"helmsman.recipes.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)
