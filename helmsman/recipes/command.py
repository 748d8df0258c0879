"""The command lines of the recipes: ``helmsman grpo`` and the others.

    helmsman grpo --config one_machine_8gpu --model path/to/model --data train.jsonl
    helmsman grpo --config ... --plan              # print settings, sizes and placement only
    helmsman grpo --config ... --resume            # continue from the last checkpoint in `out`
    helmsman grpo --config ... --check-weights     # compare instances and trainer after updates
    helmsman up -- helmsman grpo --config many_nodes_gpu ...      # on every node of a job

Each setting is a key of the file and a flag (`--train.lr 1e-6`); `--keys` lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman import Checkpoints, HelmsmanError
from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.config import CONFIGS, all_keys
from helmsman.recipes.interrupts import Interrupted, interruptible
from helmsman.recipes.recipe import Recipe

RECIPES = {
    "grpo": "helmsman.recipes.grpo_recipe:GRPO",
    "ppo": "helmsman.recipes.grpo_recipe:PPO",
    "sft": "helmsman.recipes.sft:SFT",
    "dpo": "helmsman.recipes.dpo:DPO",
}
"""Command -> recipe class or factory."""


def recipe_of(command: str) -> Any:
    """Return the recipe class or factory of a command."""
    module, _, name = RECIPES[command].partition(":")
    return getattr(importlib.import_module(module), name)


def parse(
    command: str, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Parse a command line; invalid flags exit with code 2 and a message.

    Returns:
        The flags, and the settings given as flags.
    """
    recipe = recipe_of(command)
    parser = argparse.ArgumentParser(
        prog=f"helmsman {command}",
        description=(recipe.__doc__ or "").partition("\n")[0],
        usage="%(prog)s [--config FILE] [--model FOLDER] [--data FILE] [--key value ...]",
    )
    configurations = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--config", help=f"YAML or TOML file, or one of {configurations}")
    add_switch = functools.partial(parser.add_argument, action="store_true")
    add_switch("--plan", help="print settings, sizes and placement, and exit")
    add_switch("--resume", help="continue from the last checkpoint in the output folder")
    add_switch("--overwrite", help="replace an earlier run in the output folder")
    add_switch("--check-weights", help="the same as --check.weights true")
    add_switch("--keys", help="list all settings with defaults and descriptions")
    flags, rest = parser.parse_known_args(argv)
    given = []
    while rest:
        key = rest.pop(0)
        if not key.startswith("--"):
            parser.error(f"{key!r} is not a flag, and no flag precedes it")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not rest:
                parser.error(f"--{key} has no value")
            value = rest.pop(0)
        given.append((key, value))
    if flags.check_weights:
        given.append(("check.weights", "true"))
    if flags.resume and flags.overwrite:
        parser.error(
            "--resume continues the run in the output folder and --overwrite replaces it; give one "
            "of them"
        )
    return flags, given


def main(command: str = "grpo", argv: Sequence[str] | None = None) -> int:
    """Run a recipe from the command line.

    Args:
        command: A key of RECIPES.
        argv: The flags; None takes those of the process.

    Returns:
        The exit code: 0 on success, 1 if the run failed, 2 if nothing was started, 128 + n if
        signal n stopped the run.
    """
    flags, given = parse(command, argv)
    kind = recipe_of(command)
    if flags.keys:
        for key, default, meaning in all_keys(kind.kind):
            print(f"{key} ({f'default: {default}' if default else 'required'})\n    {meaning}")
        return 0
    recipe: Recipe[Any] | None = None
    try:
        with interruptible(), contextlib.ExitStack() as held:
            try:
                recipe = kind(
                    config=flags.config,
                    resume=flags.resume,
                    overwrite=flags.overwrite,
                    overrides=given,
                )
                recipe.load()
                if not flags.plan:
                    held.enter_context(recipe.reserve())
            except (ValueError, OSError, BackendNotInstalledError) as error:
                print(error, file=sys.stderr)
                return 2
            if flags.plan:
                print(recipe.plan())
            else:
                recipe.run()
    except Interrupted as interrupt:
        print(
            f"\nstopped by {interrupt}; all workers have ended.{how_to_continue(recipe)}",
            file=sys.stderr,
        )
        return interrupt.exit_code
    except (HelmsmanError, OSError) as error:
        print(f"{type(error).__name__}: {error}{how_to_continue(recipe)}", file=sys.stderr)
        return 1
    return 0


def how_to_continue(recipe: Recipe[Any] | None) -> str:
    """Return advice on resuming an interrupted run, or "" if it has no checkpoint."""
    if recipe is None:
        return ""
    settings = recipe.settings
    if Checkpoints(Path(settings.out) / "checkpoints", settings.checkpoints.keep).latest() is None:
        return ""
    return "\nContinue from the last checkpoint with the same command line and --resume."
