"""Train a language model by GRPO from one script, on one machine or a cluster: `make demo`.

    python examples/grpo.py                            # a small new model, on an embedded local Ray
    python examples/grpo.py --scheduler local          # without Ray; `inline` for a debugger
    python examples/grpo.py --model path/to/model --data tasks.jsonl
    python examples/grpo.py --out runs/grpo --resume   # go on from the last checkpoint
    python examples/grpo.py --async --staleness 1      # generate ahead while the trainer works
    # a fault drill; the run continues
    python examples/grpo.py --faults '[{"type": "Kill", "worker_id": "rollout/0", "at_step": 170}]'

The loop is `Run.train`, and its step `Run.grpo_step`: draw prompts, generate answers, score them,
compare each with the other answers to its prompt, take one optimizer step, and send the new weights
to the rollout workers. Settings, tasks, metrics and the command line are in examples/common/.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# the script is run by its path, and imports its neighbours
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.common.groups import Draw, Group, GroupSource
from examples.common.launch import NUM_CHECKPOINTS, launch
from examples.common.record import MetricsLog, Record, draw, summarize
from examples.common.settings import Settings
from examples.common.tasks import TaskSet
from examples.common.tokens import Tokenizer, longest, small_model
from examples.common.view import View, open_view
from helmsman import (
    BoundedStaleness,
    Job,
    RecoverableTraining,
    RecoveryPolicy,
    RetryGeneration,
    RolloutController,
    SchedulingSpec,
    SupervisionPolicy,
    TrainController,
    WorkflowExecutor,
    make_scheduler,
)
from helmsman.api.advantages import group_advantages
from helmsman.recipes.files import write_json
from helmsman.recipes.roles import ENGINE_MODULES


class Run:
    """A training run on workers that are ready."""

    def __init__(
        self,
        settings: Settings,
        source: GroupSource,
        trainer: TrainController,
        rollout: RolloutController,
    ) -> None:
        self.settings, self.source = settings, source
        self.tasks, self.tokenizer = source.tasks, source.tokenizer
        self.trainer, self.rollout = trainer, rollout
        self.drill = settings.fault_plan.begin(rollout.scheduler)
        self.executor: WorkflowExecutor | None = None
        """Runs the groups of later steps while the trainer works, in an asynchronous run."""
        self.draws: Iterator[Draw] = iter(())
        self.metrics = MetricsLog(Path(settings.out) / "metrics.jsonl")

    def train(self, view: View) -> None:
        """Run the steps after the last checkpoint: an evaluation (step 0), supervised steps, GRPO.

        When a train worker dies, the steps after the last checkpoint run again.
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
        """Start from a step; discard metrics of it and of later steps."""
        self.close()
        self.metrics.rewind(step - 1)
        self.trainer.set_lr(self.settings.lr_of(step))
        self.trainer.update_rollout(self.rollout)

    def step(self, step: int) -> Record:
        """Run one step and return its record."""
        settings = self.settings
        started = time.monotonic()
        self.drill.step(step)
        if step == settings.sft_steps + 1:
            self.trainer.set_lr(settings.lr_of(step))
        if step == 0:
            record = Record(step=0, phase="eval")
        elif step <= settings.sft_steps:
            record = self.supervised_step(step)
        else:
            record = self.grpo_step(step)
        record.held_out_accuracy = (
            self.evaluate() if settings.is_due(step, settings.eval_every) else None
        )
        record.weight_version = self.trainer.get_version()
        record.seconds = time.monotonic() - started
        self.metrics.append(record)
        return record

    def supervised_step(self, step: int) -> Record:
        """Take one optimizer step on solved tasks."""
        started = time.monotonic()
        samples = []
        for task in self.source.rng(step).choices(self.tasks.solved, k=self.settings.sft_batch):
            prompt = self.tokenizer.encode_prompt(task.prompt)
            answer = self.tokenizer.encode_answer(str(task.answer))
            samples.append(
                {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}
            )
        stats = self.trainer.train_batch(samples, "sft")
        num_tokens = sum(len(sample["input_ids"]) for sample in samples)
        return Record(step=step, phase="sft", loss=stats["loss"]).with_tokens(
            num_tokens, time.monotonic() - started
        )

    def grpo_step(self, step: int) -> Record:
        """Take one optimizer step on the model's own answers, weighted by their rewards."""
        started = time.monotonic()
        groups = self.next_groups(step)
        rewards = [reward for group in groups for reward in group.rewards]
        # Without the standard deviation, a group of almost equally wrong answers has little weight.
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

        record = Record(step=step, phase="grpo", loss=stats["loss"])
        record.reward = statistics.fmean(rewards)
        record.accuracy = statistics.fmean(reward >= 1 for reward in rewards)
        record.draws = [group.draw for group in groups]
        num_tokens = sum(len(answer.token_ids) for _, answer in answers)
        return record.with_tokens(num_tokens, time.monotonic() - started)

    def next_groups(self, step: int) -> list[Group]:
        """Return the groups of a step; an asynchronous run began them in earlier steps."""
        if self.settings.staleness is None:
            draws = self.source.draw(step)
            prompts = [
                self.tokenizer.encode_prompt(draw.task.prompt) for draw in draws for _ in draw.seeds
            ]
            sampling = [
                self.source.sampling(self.settings.temperature, seed=seed)
                for draw in draws
                for seed in draw.seeds
            ]
            answers = iter(self.rollout.generate(prompts, sampling))
            return [self.source.scored(draw, [next(answers) for _ in draw.seeds]) for draw in draws]
        if self.executor is None:
            self.executor = WorkflowExecutor(
                self.episode, batch_policy=BoundedStaleness(self.settings.staleness)
            )
            self.executor.set_version(step - self.settings.sft_steps - 1)
            self.draws = itertools.chain.from_iterable(map(self.source.draw, itertools.count(step)))
        batch = self.executor.prepare_batch(self.draws, self.settings.prompts_per_step)
        return [episode.value for episode in batch]

    async def episode(self, draw: Draw) -> Group:
        """Generate and score all answers to a task."""
        prompt = self.tokenizer.encode_prompt(draw.task.prompt)
        sampling = [self.source.sampling(self.settings.temperature, seed) for seed in draw.seeds]
        generating = [self.rollout.async_generate_one(prompt, each) for each in sampling]
        return self.source.scored(draw, await asyncio.gather(*generating))

    def close(self) -> None:
        """Stop the generation of later steps."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()

    def evaluate(self) -> float:
        """Return the share of held-out tasks that the current weights solve by greedy decoding."""
        self.trainer.update_rollout(self.rollout)
        prompts = [self.tokenizer.encode_prompt(task.prompt) for task in self.tasks.held_out]
        answers = self.rollout.generate(prompts, self.source.sampling(temperature=0.0, seed=0))
        scores = [
            self.source.score(task, answer.token_ids)
            for task, answer in zip(self.tasks.held_out, answers, strict=True)
        ]
        return statistics.fmean(score >= 1 for score in scores)


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
        source = GroupSource(settings, tasks, tokenizer, max_new_tokens)
        this = Run(settings, source, trainer, rollout)
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
        f"{summary.accuracy_after_sft:.1%} after {settings.sft_steps} supervised steps, "
        f"{summary.accuracy_after_grpo:.1%} after {settings.steps} GRPO steps "
        f"({summary.seconds:.0f} s)\nsummary: {out / 'summary.json'}\ncurve:   {out / 'curve.png'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    return launch(run, argv)


if __name__ == "__main__":
    sys.exit(main())
