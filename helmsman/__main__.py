"""Command line: ``python -m helmsman`` and ``helmsman``."""

import sys
from collections.abc import Sequence

RECIPES = {
    "grpo": "train a model by GRPO, Dr. GRPO or DAPO, on prompts and rewards",
    "ppo": "train a model by PPO with a critic, on prompts and rewards",
    "sft": "fine-tune a model on given answers",
    "dpo": "train a model on preferences by DPO",
}
"""Recipe commands and their help texts."""
AGENTS = {
    "chat-check": "check whether a model's chat template only appends, before training agents"
}
"""Commands for agents and their help texts."""
RECORDED = {"rollouts": "show and search the recorded rollouts of a run"}
"""Commands for recorded rollouts and their help texts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Command-line arguments; ``sys.argv[1:]`` by default.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in RECIPES:
        from helmsman.recipes.command import main as run_recipe

        return run_recipe(given[0], given[1:])
    from helmsman._cli import guarded
    from helmsman._cli import main as run_command

    if given and given[0] in AGENTS:
        from helmsman.agents.checking import main as check_chat

        return guarded(lambda: check_chat(given[1:]))
    if given and given[0] in RECORDED:
        from helmsman.recipes.rollouts import main as show_rollouts

        return guarded(lambda: show_rollouts(given[1:]))
    return run_command(given, recipes={**RECIPES, **AGENTS, **RECORDED})


if __name__ == "__main__":
    sys.exit(main())
