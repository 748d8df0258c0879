"""Train a Hugging Face model by GRPO, Dr. GRPO or DAPO on your prompts and answers, on one machine or many, GPU, NPU or CPU.

    python examples/grpo_hf.py --config examples/hf/one_machine_8gpu.yaml --model path/to/model --data.train train.jsonl
    python examples/grpo_hf.py --config ... --plan                   # settings and places; nothing is started
    python examples/grpo_hf.py --config ... --resume                 # go on from the last checkpoint in `out`
    python examples/grpo_hf.py --config ... --check-weights          # compare instances and trainer after every update
    helmsman up -- python examples/grpo_hf.py --config examples/hf/many_nodes_gpu.yaml    # on every node of a job

Every setting is a key of the file, and a flag (`--train.lr 1e-6`); `--keys` lists them. docs/training_hf.md tells how to begin.
The loop is `Run.train` in examples/hf/run.py, a step of it `Run.train_step`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from helmsman import Checkpoints, HelmsmanError, TrainController
from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes import config
from helmsman.recipes.ending import finish
from helmsman.recipes.files import clear, only_run_in, write_json
from helmsman.recipes.interrupts import Interrupted, interruptible
from helmsman.recipes.prompts import ChatTokenizer, Dataset, load_dataset
from helmsman.recipes.rewards import Scorer, make_caller
from helmsman.recipes.roles import make_jobs, make_rollout, make_trainer, start_scheduler
from helmsman.recipes.run import NothingToLearnError, Run
from helmsman.recipes.settings import Settings
from helmsman.recipes.trackers import MetricsFile, open_trackers, require_trackers
from helmsman.recipes.weight_check import WeightsDifferError

FILES = ("checks.jsonl", "wandb.json")
FOLDERS = ("evaluations", "model", "tensorboard", "wandb", "weights")
"""What a run leaves besides what examples/common/record.py names."""
_FIXED = ("model", "data", "seed", "samples_per_prompt")
"""What must be as in the run that is resumed, since it decides what was drawn before."""


def prepare(settings: Settings, *, resume: bool) -> None:
    """Make the output folder ready, before anything is started.

    Raises: ValueError, OSError when it cannot be, or the run that is in it cannot be resumed.
    """
    out = Path(settings.out)
    path = out / "settings.json"
    if resume:
        if not path.exists():
            raise ValueError(f"there is no run to resume in {out}: it has no {path.name}")
        try:
            before = msgspec.json.decode(path.read_bytes(), type=Settings)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not of this version of the script ({error}); start anew without --resume") from error
        for name in _FIXED:
            if getattr(before, name) != getattr(settings, name):
                raise ValueError(
                    f"{name} is {getattr(before, name)!r} in the run to resume and {getattr(settings, name)!r} now; "
                    "leave it as it was, or start anew without --resume"
                )
        found = Checkpoints(out / "checkpoints", settings.checkpoints.keep).latest()
        if found is not None and found[0] > settings.steps:
            raise ValueError(f"the run in {out} is at step {found[0]} already; expected steps of {found[0]} or more")
        MetricsFile(out / "metrics.jsonl").read()
    else:
        if Path(settings.model).resolve().is_relative_to(out.resolve()):
            raise ValueError(f"model {settings.model} lies in the output folder, which a new run replaces; give another out")
        if clear(out, files=FILES, folders=FOLDERS):
            print(f"the earlier run in {out} is replaced")
    write_json(path, settings)


def show(settings: Settings, dataset: Dataset, tokenizer: ChatTokenizer) -> None:
    """Print what the run will do."""
    print(config.as_yaml(settings))
    longest = max(len(row.prompt_ids) for row in [*dataset.train, *dataset.held_out])
    both = f" ({dataset.num_in_both} trained on as well)" if dataset.num_in_both else ""
    print(
        f"\n{len(dataset.train)} prompts to train on, {len(dataset.held_out)} held out{both}, {dataset.num_too_long} left out "
        f"as longer than {settings.data.max_prompt_tokens} tokens; the longest has {longest} tokens; answers end with the "
        f"tokens {list(tokenizer.stop_ids)}\n"
    )


def run(settings: Settings, dataset: Dataset, tokenizer: ChatTokenizer, *, only_plan: bool) -> None:
    """Start the workers, train, and write what a run leaves."""
    started = time.monotonic()
    out = Path(settings.out)
    metrics = MetricsFile(out / "metrics.jsonl")
    jobs = make_jobs(settings)
    with contextlib.ExitStack() as held:
        # What is only planned leaves nothing in the output folder, or a run would find it in the way.
        log_dir = None if only_plan else out / "logs"
        scheduler = held.enter_context(start_scheduler(settings.cluster, settings.seed, log_dir))
        print(f"{scheduler.plan(jobs).table()}\n")
        if only_plan:
            return
        by_role = {job.role: job for job in jobs}
        scorer = held.enter_context(Scorer(settings.rewards, scheduler))
        trainer = make_trainer(settings, scheduler, by_role["train"])
        rollout = make_rollout(settings, scheduler, by_role["rollout"])
        reference = make_trainer(settings, scheduler, by_role["reference"]) if "reference" in by_role else None
        for controller in (trainer, reference, rollout):
            if controller is not None:
                controller.initialize()
            if isinstance(controller, TrainController) and settings.cluster.takes_turns:
                controller.sleep()  # the next one needs the devices
        print(f"all workers are ready after {time.monotonic() - started:.0f} s\n", flush=True)
        trackers = held.enter_context(open_trackers(settings, metrics))
        this = Run(settings, dataset, tokenizer, trainer, rollout, reference, scorer, trackers)
        with contextlib.closing(this):
            this.train()
    finish(settings, dataset, metrics.read(), seconds=time.monotonic() - started)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Flags, and settings that were given as flags. Exits with code 2 and a message where one makes no sense."""
    parser = argparse.ArgumentParser(
        description="Train a Hugging Face model by GRPO, Dr. GRPO or DAPO.", usage="%(prog)s --config FILE [--key value ...]"
    )
    parser.add_argument("--config", help="YAML or TOML file, such as those in examples/hf")
    parser.add_argument("--plan", action="store_true", help="print settings and places, and end")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    parser.add_argument("--check-weights", action="store_true", help="the same as --check.weights true")
    parser.add_argument("--keys", action="store_true", help="list all settings, with defaults and meanings")
    flags, rest = parser.parse_known_args(argv)
    given = []
    while rest:
        key = rest.pop(0)
        if not key.startswith("--"):
            parser.error(f"{key!r} belongs to no flag")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not rest:
                parser.error(f"--{key} has no value")
            value = rest.pop(0)
        given.append((key, value))
    if flags.check_weights:
        given.append(("check.weights", "true"))
    if not flags.keys and not flags.config:
        parser.error("--config is missing; there are files in examples/hf, and --keys lists what they may have")
    return flags, given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    flags, given = parse(argv)
    if flags.keys:
        for key, default, meaning in config.all_keys():
            print(f"{key} ({f'default: {default}' if default else 'required'})\n    {meaning}")
        return 0
    settings: Settings | None = None
    try:
        with interruptible(), contextlib.ExitStack() as held:
            try:
                settings = config.load(flags.config, given)
                tokenizer = ChatTokenizer(settings.model, settings.data)
                dataset = load_dataset(settings.data, tokenizer, settings.seed)
                for reward in settings.rewards:
                    make_caller(reward)
                require_trackers(settings)
                if not flags.plan:
                    out = Path(settings.out)
                    out.mkdir(parents=True, exist_ok=True)
                    held.enter_context(only_run_in(out))
                    prepare(settings, resume=flags.resume)
            except (ValueError, OSError, BackendNotInstalledError) as error:
                print(error, file=sys.stderr)
                return 2
            show(settings, dataset, tokenizer)
            run(settings, dataset, tokenizer, only_plan=flags.plan)
    except Interrupted as interrupt:
        print(f"\nstopped by {interrupt}; everything was ended.{how_to_go_on(settings, flags.config)}", file=sys.stderr)
        return interrupt.exit_code
    except (HelmsmanError, WeightsDifferError, NothingToLearnError, OSError) as error:
        print(f"{type(error).__name__}: {error}{how_to_go_on(settings, flags.config)}", file=sys.stderr)
        return 1
    return 0


def how_to_go_on(settings: Settings | None, path: str) -> str:
    """What to do after a run that was cut short; nothing when it has not saved anything."""
    if settings is None or Checkpoints(Path(settings.out) / "checkpoints", settings.checkpoints.keep).latest() is None:
        return ""
    return f"\nGo on from the last checkpoint with the same command line and --resume (--config {path} ...)."


if __name__ == "__main__":
    sys.exit(main())
