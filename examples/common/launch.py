"""Prepares the output folder of a run, reports its failures, and names the command to resume it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.common.record import MetricsLog
from examples.common.settings import Settings, parse
from examples.common.tasks import TaskSet, load_tasks
from examples.common.tokens import Tokenizer, make_tokenizer
from helmsman import Checkpoints, HelmsmanError
from helmsman.recipes.files import clear, only_run_in, write_json
from helmsman.recipes.interrupts import Interrupted, interruptible

NUM_CHECKPOINTS = 3
"""Checkpoints that a run keeps."""


def prepare(settings: Settings, *, resume: bool) -> None:
    """Prepare the output folder, before anything is started.

    Raises: ValueError, OSError if the folder cannot be used, or its run cannot be resumed.
    """
    out = Path(settings.out)
    found = Checkpoints(out / "checkpoints", NUM_CHECKPOINTS).latest()
    if not resume:
        if settings.model and Path(settings.model).resolve().is_relative_to(
            (out / "checkpoints").resolve()
        ):
            raise ValueError(
                f"--model {settings.model} lies in the run that this one would replace; give "
                "another --out"
            )
        if clear(out):
            print(f"the earlier run in {out} is replaced")
    elif found is not None:
        step, _ = found
        if step > settings.total_steps:
            raise ValueError(
                f"the run in {out} is at step {step} already; expected --steps "
                f"{step - settings.sft_steps} or more, besides "
                f"{settings.sft_steps} supervised ones"
            )
        if [record.step for record in MetricsLog(out / "metrics.jsonl").read()][: step + 1] != list(
            range(step + 1)
        ):
            raise ValueError(
                f"{out / 'metrics.jsonl'} lacks steps before the checkpoint of step {step}; start "
                "again without --resume"
            )
    write_json(out / "settings.json", settings)


def launch(run: Callable[[Settings, TaskSet, Tokenizer], None], argv: Sequence[str] | None) -> int:
    """Parse the command line and run the example; returns the exit code."""
    settings, resume = parse(argv)
    try:
        with interruptible(), contextlib.ExitStack() as held:
            try:
                tasks = load_tasks(settings)
                tokenizer = make_tokenizer(settings.model, tasks)
                out = Path(settings.out)
                out.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_run_in(out))
                prepare(settings, resume=resume)
            except (ValueError, OSError) as error:
                print(error, file=sys.stderr)
                return 2
            run(settings, tasks, tokenizer)
    except Interrupted as interrupt:
        print(f"\nstopped by {interrupt}; all workers have ended.", file=sys.stderr)
        print(how_to_go_on(settings), end="", file=sys.stderr)
        return interrupt.exit_code
    except (HelmsmanError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(how_to_go_on(settings), end="", file=sys.stderr)
        return 1
    return 0


def how_to_go_on(settings: Settings) -> str:
    """Return the command that resumes an interrupted run; '' without a checkpoint."""
    if Checkpoints(Path(settings.out) / "checkpoints", NUM_CHECKPOINTS).latest() is None:
        return ""
    return (
        f"Go on from the last checkpoint with:\n  python {sys.argv[0]} --out "
        f"{shlex.quote(settings.out)} --resume\n"
    )
