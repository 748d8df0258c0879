"""Settings of a run, in turn from the command line, the resumed run and the defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.testing import Fault, FaultPlan


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a run."""

    scheduler: str = "ray"
    train_workers: int = 1
    rollout_workers: int = 2
    cpus_per_worker: float = 0.5
    gpus_per_worker: float = 0.0
    task: str = "palindrome_generation"
    task_params: dict[str, Any] = {}
    data: str | None = None
    model: str | None = None
    sft_steps: int = 165
    steps: int = 150
    sft_batch: int = 64
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    sft_lr: float = 1e-3
    lr: float = 2e-4
    temperature: float = 1.0
    staleness: float | None = None
    """Weight versions by which answers may lag the trained weights; None for a synchronous run."""
    faults: list[dict[str, Any]] = []
    """Faults of a drill in their JSON form, by the numbers of the steps."""
    max_new_tokens: int | None = None
    num_tasks: int = 6000
    num_held_out: int = 256
    eval_every: int = 25
    save_every: int = 25
    seed: int = 0
    out: str = "runs/grpo"

    @property
    def fault_plan(self) -> FaultPlan:
        """Return the plan of the drill. Raises: ValueError for an invalid fault."""
        return FaultPlan(msgspec.convert(self.faults, list[Fault]))

    @property
    def total_steps(self) -> int:
        """Number of supervised steps and GRPO steps, which are numbered consecutively from 1."""
        return self.sft_steps + self.steps

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a step's phase."""
        return self.sft_lr if step <= self.sft_steps else self.lr

    def is_due(self, step: int, every: int) -> bool:
        """Whether an action of every ``every`` steps of a phase is due; it is at a phase's end."""
        steps_of_phase = step - self.sft_steps if step > self.sft_steps else step
        return steps_of_phase % every == 0 or step in (self.sft_steps, self.total_steps)


TASK_PARAMS: dict[str, dict[str, Any]] = {
    "palindrome_generation": {"min_length": 5, "max_length": 8}
}
"""Parameters of tasks that a small model learns in minutes; other tasks have the defaults of
reasoning-gym.
"""

_FOR_A_PRETRAINED_MODEL = {"sft_steps": 0, "sft_lr": 1e-5, "lr": 1e-6, "max_new_tokens": 256}
_FREE_ON_RESUME = {
    "scheduler",
    "train_workers",
    "rollout_workers",
    "cpus_per_worker",
    "gpus_per_worker",
    "steps",
    "eval_every",
    "save_every",
    "staleness",
    "faults",
    "out",
}
"""Settings that may differ from those of a resumed run; the others determine its earlier steps."""
_LEAST = {
    **dict.fromkeys(
        ("train_workers", "rollout_workers", "prompts_per_step", "samples_per_prompt", "sft_batch"),
        1,
    ),
    **dict.fromkeys(("num_tasks", "num_held_out", "eval_every", "save_every", "max_new_tokens"), 1),
    **dict.fromkeys(
        (
            "sft_steps",
            "steps",
            "sft_lr",
            "lr",
            "temperature",
            "cpus_per_worker",
            "gpus_per_worker",
            "seed",
            "staleness",
        ),
        0,
    ),
}


def parse(argv: Sequence[str] | None = None) -> tuple[Settings, bool]:
    """Return the settings from the command line, and whether to resume.

    Exits with code 2 and a message if they are invalid.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    resume = bool(given.pop("resume", False))
    if given.pop("async", False):
        given.setdefault("staleness", 1.0)
    layers: dict[str, Any] = dict(_FOR_A_PRETRAINED_MODEL) if given.get("model") else {}
    if resume:
        path = Path(given.get("out", Settings().out)) / "settings.json"
        if not path.exists():
            parser.error(f"there is no run to resume in {path.parent}: it has no {path.name}")
        try:
            layers = msgspec.structs.asdict(msgspec.json.decode(path.read_bytes(), type=Settings))
        except (msgspec.DecodeError, OSError) as error:
            parser.error(f"{path} cannot be read ({error}); start again without --resume")
        for name in sorted(given.keys() - _FREE_ON_RESUME):
            if given[name] != layers[name]:
                parser.error(
                    f"{_flag(name)} is {layers[name]!r} in the run to resume; leave it out, or "
                    "start again without --resume"
                )
    settings = msgspec.convert({**layers, **given}, Settings)
    if not resume and "task_params" not in given:
        settings = msgspec.structs.replace(settings, task_params=TASK_PARAMS.get(settings.task, {}))
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:  # also refuses nan
            parser.error(f"{_flag(name)} is {value}; expected {least} or more")
    if settings.seed >= 2**32:
        parser.error(f"--seed is {settings.seed}; expected less than 2**32")
    if settings.scheduler == "inline" and settings.train_workers > 1:
        parser.error(
            "--scheduler inline has one process and so one rank; leave --train-workers out, or "
            "use --scheduler local"
        )
    try:
        _ = settings.fault_plan
    except ValueError as error:
        parser.error(f"--faults: {error}")
    if settings.faults and settings.scheduler == "inline":
        parser.error(
            "--scheduler inline has the workers in this process, which --faults would end; use "
            "--scheduler local"
        )
    if settings.data is not None and "task" in given:
        parser.error("--data takes the place of --task; give one of them")
    return settings, resume


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _json_objects(text: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(
            f"not a JSON array of objects: {text!r} ({error})"
        ) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r} ({error})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a language model by GRPO on tasks with verifiers: a short supervised "
        "phase, then reinforcement "
        "learning, with trainers and rollout workers driven from this one script.",
        argument_default=argparse.SUPPRESS,
        usage="%(prog)s [flags]; --help lists them",
    )
    defaults = Settings()

    def add(flag: str, text: str, **options: Any) -> None:
        default = getattr(defaults, flag[2:].replace("-", "_"), None)
        shown = f" (default: {default})" if default not in (None, {}, []) else ""
        parser.add_argument(flag, help=text + shown, **options)

    add("--scheduler", "what runs the workers", choices=("ray", "local", "inline"))
    add("--train-workers", "ranks of the training job (inline: 1)", type=int)
    add("--rollout-workers", "rollout instances", type=int)
    add("--cpus-per-worker", "cores that each worker is granted", type=float)
    add("--gpus-per-worker", "accelerators that each worker is granted", type=float)
    add("--task", "a dataset of reasoning-gym")
    add("--task-params", 'its parameters as JSON, such as {"min_length": 5}', type=_json_object)
    add("--data", "JSONL file of {prompt, answer} instead of a task")
    add("--model", "local Hugging Face folder to start from; a small new model without it")
    add("--sft-steps", "supervised steps before GRPO (with --model: 0)", type=int)
    add("--steps", "GRPO steps", type=int)
    add("--sft-batch", "solved tasks in a supervised step", type=int)
    add("--prompts-per-step", "prompts in a GRPO step", type=int)
    add("--samples-per-prompt", "answers drawn for each prompt", type=int)
    add("--sft-lr", "learning rate of the supervised phase (with --model: 1e-5)", type=float)
    add("--lr", "learning rate of GRPO (with --model: 1e-6)", type=float)
    add("--temperature", "of the sampling in training; evaluation is greedy", type=float)
    parser.add_argument(
        "--async",
        action="store_true",
        help="generate the answers of later steps while the trainer works",
    )
    add(
        "--staleness",
        "weight versions that answers may be behind, also a fraction (with --async: 1)",
        type=float,
    )
    add(
        "--faults",
        'what to do to workers at which steps, as JSON: [{"type": "Kill", "worker_id": '
        '"rollout/0", "at_step": 170}]',
        type=_json_objects,
    )
    add(
        "--max-new-tokens",
        "longest answer; what the known answers need when not given (with --model: 256)",
        type=int,
    )
    add("--num-tasks", "tasks to generate", type=int)
    add("--num-held-out", "tasks to evaluate on, never trained on", type=int)
    add("--eval-every", "steps between evaluations", type=int)
    add("--save-every", "steps between checkpoints", type=int)
    add("--seed", "of everything that is drawn", type=int)
    add("--out", "output folder")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in the output folder"
    )
    return parser
