"""Train a language model by GRPO from one script, on one machine or a cluster: `make demo`.

    python examples/grpo.py                            # a small new model, on an embedded local Ray
    python examples/grpo.py --scheduler local          # without Ray; `inline` for a debugger
    python examples/grpo.py --model path/to/model --data tasks.jsonl
    python examples/grpo.py --out runs/grpo --resume   # go on from the last checkpoint
    python examples/grpo.py --async --staleness 1      # generate ahead while the trainer works
    # a drill: the run goes on
    python examples/grpo.py --faults '[{"type": "Kill", "worker_id": "rollout/0", "at_step": 170}]'

The loop is `Run.train`, and a step of it `Run.grpo_step`: draw prompts, generate answers, reward
them, compare each with the others of its prompt, take one optimizer step, bring the new weights to
the rollout workers. What surrounds it is in examples/common/.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# the script is run by its path, and imports its neighbours
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.common.record import MetricsLog, Record, draw, summarize
from examples.common.settings import Settings, parse
from examples.common.tasks import Task, TaskSet, load_tasks
from examples.common.tokens import Tokenizer, longest, make_tokenizer, small_model
from examples.common.view import View, open_view
from helmsman import (
    BoundedStaleness,
    Checkpoints,
    HelmsmanError,
    Job,
    RecoverableTraining,
    RecoveryPolicy,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    SupervisionPolicy,
    TrainController,
    WorkflowExecutor,
    make_scheduler,
)
from helmsman.api.advantages import group_advantages
from helmsman.api.generation import GenerationResult
from helmsman.recipes.files import clear, only_run_in, write_json
from helmsman.recipes.interrupts import Interrupted, interruptible
from helmsman.recipes.roles import ENGINE_MODULES

NUM_CHECKPOINTS = 3
"""How many stay."""


class Draw(NamedTuple):
    """A task to answer several times, with a seed for each answer."""

    number: int
    """In the order of the steps that it is drawn for."""
    task: Task
    seeds: list[int]


class Group(NamedTuple):
    """The answers to one task, which are compared with each other."""

    draw: int
    """Its number."""
    prompt: list[int]
    answers: list[GenerationResult]
    rewards: list[float]


class Run:
    """A training run on workers that are ready."""

    def __init__(
        self,
        settings: Settings,
        tasks: TaskSet,
        tokenizer: Tokenizer,
        trainer: TrainController,
        rollout: RolloutController,
        max_new_tokens: int,
    ) -> None:
        self.settings = settings
        self.tasks = tasks
        self.tokenizer = tokenizer
        self.trainer = trainer
        self.rollout = rollout
        self.drill = settings.fault_plan.begin(rollout.scheduler)
        self.max_new_tokens = max_new_tokens
        self.executor: WorkflowExecutor | None = None
        """Runs the groups of later steps while the trainer works, in an asynchronous run."""
        self.draws: Iterator[Draw] = iter(())
        self.metrics = MetricsLog(Path(settings.out) / "metrics.jsonl")

    # --- the loop ---------------------------------------------------------------------------------

    def train(self, view: View) -> None:
        """Do all steps that no checkpoint has: 0 only evaluates, then come supervised steps, then
        GRPO.

        When a train worker dies, the steps after the last checkpoint are done again.
        """
        settings = self.settings
        policy = RecoveryPolicy(
            checkpoints=Path(settings.out) / "checkpoints",
            save_every=settings.save_every,
            num_kept=NUM_CHECKPOINTS,
        )

        def begin(step: int) -> None:
            self.begin(step)
            view.note(f"from step {step}" if step else "training begins")

        training = RecoverableTraining(
            self.trainer,
            policy,
            step=lambda step: view.show(self.step(step)),
            on_begin=begin,
            add_files=self.tokenizer.save,
        )
        training.run(0, settings.total_steps)

    def begin(self, step: int) -> None:
        """Go on with a step, whatever has been done of it and of later ones before."""
        self.close()
        self.metrics.rewind(step - 1)
        self.set_lr(step)
        self.trainer.update_rollout(self.rollout)

    def set_lr(self, step: int) -> None:
        """The learning rate of a step's phase."""
        self.trainer.set_lr(
            self.settings.sft_lr if step <= self.settings.sft_steps else self.settings.lr
        )

    def step(self, step: int) -> Record:
        """One step, with its record."""
        settings = self.settings
        started = time.monotonic()
        self.drill.step(step)
        if step == settings.sft_steps + 1:
            self.set_lr(step)
        if step == 0:
            record = Record(step=0, phase="eval")
        elif step <= settings.sft_steps:
            record = self.supervised_step(step)
        else:
            record = self.grpo_step(step)
        record.held_out_accuracy = (
            self.evaluate() if self.is_due(step, settings.eval_every) else None
        )
        record.weight_version = self.trainer.get_version()
        record.seconds = time.monotonic() - started
        self.metrics.append(record)
        return record

    def supervised_step(self, step: int) -> Record:
        """One optimizer step on solved tasks."""
        started = time.monotonic()
        samples = []
        for task in self.rng(step).choices(self.tasks.solved, k=self.settings.sft_batch):
            prompt, answer = (
                self.tokenizer.encode_prompt(task.prompt),
                self.tokenizer.encode_answer(str(task.answer)),
            )
            samples.append(
                {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}
            )
        stats = self.trainer.train_batch(samples, "sft")
        num_tokens = sum(len(sample["input_ids"]) for sample in samples)
        return Record(step=step, phase="sft", loss=stats["loss"]).with_tokens(
            num_tokens, time.monotonic() - started
        )

    def grpo_step(self, step: int) -> Record:
        """One optimizer step on answers that the model itself gave, by nothing but their
        rewards.
        """
        started = time.monotonic()
        groups = self.next_groups(step)
        rewards = [reward for group in groups for reward in group.rewards]
        # Not divided by the standard deviation: a group of all but equally wrong answers then says
        # next to nothing.
        advantages = group_advantages(
            rewards, group_size=self.settings.samples_per_prompt, normalize_std=False
        )
        answers = [(group.prompt, answer) for group in groups for answer in group.answers]
        samples = [
            {
                "input_ids": prompt + answer.token_ids,
                "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids),
                "logprobs": [0.0] * len(prompt) + answer.logprobs,
                "advantages": advantage,
            }
            for (prompt, answer), advantage in zip(answers, advantages, strict=True)
        ]
        stats = self.trainer.train_batch(samples, "grpo", {"clip_high": 0.28})
        self.trainer.update_rollout(self.rollout)
        if self.executor is not None:
            self.executor.set_version(step - self.settings.sft_steps)

        accuracy = statistics.fmean(reward >= 1 for reward in rewards)
        record = Record(
            step=step,
            phase="grpo",
            loss=stats["loss"],
            reward=statistics.fmean(rewards),
            accuracy=accuracy,
        )
        record.draws = [group.draw for group in groups]
        return record.with_tokens(
            sum(len(answer.token_ids) for _, answer in answers), time.monotonic() - started
        )

    def next_groups(self, step: int) -> list[Group]:
        """The groups of a step: generated now, or since earlier steps in an asynchronous run."""
        if self.settings.staleness is None:
            draws = self.draw(step)
            prompts = [
                self.tokenizer.encode_prompt(draw.task.prompt) for draw in draws for _ in draw.seeds
            ]
            sampling = [
                self.sampling(self.settings.temperature, seed=seed)
                for draw in draws
                for seed in draw.seeds
            ]
            answers = iter(self.rollout.generate(prompts, sampling))
            return [self.scored(draw, [next(answers) for _ in draw.seeds]) for draw in draws]
        if self.executor is None:
            self.executor = WorkflowExecutor(
                self.episode, batch_policy=BoundedStaleness(self.settings.staleness)
            )
            self.executor.set_version(step - self.settings.sft_steps - 1)
            self.draws = (draw for later in itertools.count(step) for draw in self.draw(later))
        batch = self.executor.prepare_batch(self.draws, self.settings.prompts_per_step)
        return [episode.value for episode in batch]

    def draw(self, step: int) -> list[Draw]:
        """The tasks of a step, with a seed for each answer, so that it does not matter which worker
        draws it, and when.
        """
        rng, group_size = self.rng(step), self.settings.samples_per_prompt
        tasks = rng.choices(self.tasks.train, k=self.settings.prompts_per_step)
        first = (step - self.settings.sft_steps - 1) * len(tasks)
        return [
            Draw(number, task, [rng.getrandbits(62) for _ in range(group_size)])
            for number, task in enumerate(tasks, first)
        ]

    async def episode(self, draw: Draw) -> Group:
        """All answers to a task, and what they are worth."""
        prompt = self.tokenizer.encode_prompt(draw.task.prompt)
        generating = [
            self.rollout.async_generate_one(prompt, self.sampling(self.settings.temperature, seed))
            for seed in draw.seeds
        ]
        return self.scored(draw, await asyncio.gather(*generating))

    def scored(self, draw: Draw, answers: Sequence[GenerationResult]) -> Group:
        """A group with its rewards."""
        rewards = [self.score(draw.task, answer.token_ids) for answer in answers]
        return Group(
            draw.number, self.tokenizer.encode_prompt(draw.task.prompt), list(answers), rewards
        )

    def close(self) -> None:
        """End what is generated ahead."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()

    def evaluate(self) -> float:
        """Share of held-out tasks that the current weights solve with greedy decoding."""
        self.trainer.update_rollout(self.rollout)
        prompts = [self.tokenizer.encode_prompt(task.prompt) for task in self.tasks.held_out]
        answers = self.rollout.generate(prompts, self.sampling(temperature=0.0, seed=0))
        scores = [
            self.score(task, answer.token_ids)
            for task, answer in zip(self.tasks.held_out, answers, strict=True)
        ]
        return statistics.fmean(score >= 1 for score in scores)

    # --- parts of it ------------------------------------------------------------------------------

    def rng(self, step: int) -> random.Random:
        """What a step draws depends on seed and step alone, so a resumed run goes on as an unbroken
        one.
        """
        return random.Random(f"{self.settings.seed}/{step}")

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """Parameters of one answer."""
        stop = (self.tokenizer.eos_id,)
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            stop_token_ids=stop,
            seed=seed,
        )

    def score(self, task: Task, token_ids: Sequence[int]) -> float:
        """Reward of an answer, by the task's own verifier."""
        return self.tasks.score(task, self.tokenizer.decode(token_ids))

    def is_due(self, step: int, every: int) -> bool:
        """Whether what is done every so many steps of a phase is due; both phases end with it."""
        sft_steps = self.settings.sft_steps
        steps_of_phase = step - sft_steps if step > sft_steps else step
        return steps_of_phase % every == 0 or step in (sft_steps, self.settings.total_steps)


def prepare(settings: Settings, *, resume: bool) -> None:
    """Make the output folder ready, before anything is started.

    Raises: ValueError, OSError when it cannot be, or the run that is in it cannot be resumed.
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


def run(settings: Settings, tasks: TaskSet, tokenizer: Tokenizer) -> None:
    """Start the workers, train, and write curve and summary."""
    started = time.monotonic()
    out = Path(settings.out)
    longest_prompt, longest_answer = longest(tasks, tokenizer)
    max_new_tokens = settings.max_new_tokens or longest_answer + 2
    max_len = longest_prompt + max_new_tokens
    model: Any = settings.model or small_model(tokenizer, max_len)

    spec = SchedulingSpec(cpu=settings.cpus_per_worker, gpu=settings.gpus_per_worker)
    options: dict[str, Any] = {} if settings.scheduler == "inline" else {"preload": ENGINE_MODULES}
    with (
        make_scheduler(
            settings.scheduler, seed=settings.seed, log_dir=out / "logs", **options
        ) as scheduler,
        open_view(settings, scheduler) as view,
    ):
        view.note(
            f"{len(tasks.train)} tasks to train on, {len(tasks.held_out)} held out; starting "
            "workers"
        )
        trainer = TrainController(
            scheduler,
            "helmsman.engines.train.FSDPTrainEngine",
            Job(role="train", replicas=settings.train_workers, tasks=[spec]),
            engine_kwargs={"model": model, "seed": settings.seed, "lr": settings.lr},
        )
        rollout = RolloutController(
            scheduler,
            "helmsman.engines.rollout.HFRolloutEngine",
            Job(role="rollout", replicas=settings.rollout_workers, tasks=[spec]),
            engine_kwargs={
                "model": model,
                "seed": settings.seed,
                "max_concurrency": 128,
                "max_model_len": max_len,
            },
            max_in_flight_per_worker=128,
            retries=RetryGeneration(),
            supervision=SupervisionPolicy(),
        )
        trainer.initialize()
        rollout.initialize()
        this = Run(settings, tasks, tokenizer, trainer, rollout, max_new_tokens)
        seconds_before = sum(record.seconds for record in this.metrics.read())
        with contextlib.closing(this):
            this.train(view)

    records = this.metrics.read()
    summary = summarize(
        records, settings, tasks.name, seconds=seconds_before + time.monotonic() - started
    )
    write_json(out / "summary.json", summary)
    draw(records, out / "curve.png", summary)
    print(
        f"held-out accuracy: {summary.accuracy_before:.1%} before training, "
        f"{summary.accuracy_after_sft:.1%} after "
        f"{settings.sft_steps} supervised steps, {summary.accuracy_after_grpo:.1%} after "
        f"{settings.steps} GRPO steps "
        f"({summary.seconds:.0f} s)\n"
        f"summary: {out / 'summary.json'}\n"
        f"curve:   {out / 'curve.png'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
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
        print(f"\nstopped by {interrupt}; everything was ended.", file=sys.stderr)
        print(how_to_go_on(settings), end="", file=sys.stderr)
        return interrupt.exit_code
    except (HelmsmanError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(how_to_go_on(settings), end="", file=sys.stderr)
        return 1
    return 0


def how_to_go_on(settings: Settings) -> str:
    """What to type after a run that was cut short; nothing when it has not saved anything."""
    if Checkpoints(Path(settings.out) / "checkpoints", NUM_CHECKPOINTS).latest() is None:
        return ""
    return (
        f"Go on from the last checkpoint with:\n  python {sys.argv[0]} --out "
        f"{shlex.quote(settings.out)} --resume\n"
    )


if __name__ == "__main__":
    sys.exit(main())
