"""Reports about settings that do nothing: each one is changed, and the run must change."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.recipes import GRPO, make_model
from helmsman.recipes.command import main
from helmsman.recipes.config import all_keys
from tests.recipes.judge_models import make_classifier, make_judge
from tests.recipes.processes import run_here
from tests.unit.recipes.data import write_jsonl

pytestmark = pytest.mark.timeout(1800)

UNSEEN = {
    "cluster.address": "a Ray cluster",
    "cluster.num_nodes": "a Ray cluster",
    "cluster.start_timeout_s": "workers that start slowly",
    "cluster.engine_timeout_s": "models that load slowly",
    "cluster.device_memory_gb": "devices",
    "cluster.rollout_devices": "devices",
    "algorithm.teacher_workers": "processes of their own",
    "checkpoints.keep": "more steps",
    "checkpoints.max_recoveries": "ranks that die",
    "checkpoints.in_background": "processes of their own",
    "rewards[].timeout_s": "slow rewards",
    "rewards[].processes": "processes of their own",
    "rewards[].on_cluster": "a cluster",
    "rollout.max_in_flight": "many requests",
    "rollout.episode_timeout": "slow episodes",
    "rollout.policy": "several instances",
    "rollout.oversample": "slow episodes",
    "rollout.staleness": "a rollout beside the trainer",
    "sync.way": "processes of their own",
    "sync.folder": "processes of their own",
    "sync.bucket_mb": "large models",
    "sync.checksum": "damaged weights",
    "sync.in_flight": "requests beside an update",
    "tracking.project": "Weights & Biases",
    "tracking.name": "Weights & Biases",
    "agent.timeout_s": "slow agents",
    "agent.host": "other hosts",
    "agent.port": "other hosts",
    "agent.public_url": "other hosts",
    "agent.family": "models that call tools",
    "agent.command": "programs",
    "data.split": "folders of data sets",
    "data.held_out_split": "folders of data sets",
    "data.subset": "folders of data sets",
    "data.max_tokens": "SFT and DPO",
}
"""Setting -> the part that a small run on the inline scheduler lacks to show a difference."""

REWARD: dict[str, Any] = {"use": "tests.nightly.field.test_settings:share", "on_cluster": True}
JUDGE = ["--rewards", json.dumps([{"judge": "DATA/judge"}])]
LABELS = ["--rewards", json.dumps([{"judge": "DATA/labels", "label": 1}])]
ASKED = {"judge": "DATA/asked", "prompt": "{{ completion }}", "parse": r"(\d)(\d)?"}
VERDICT = ["--rewards", json.dumps([{**ASKED, "max_new_tokens": 3, "on_failure": "value"}])]
AGENT = ["--agent.use", "tests.field.phases:talk", "--rewards", "[]"]
TURNS = ["--agent.use", "tests.nightly.field.test_settings:talk_twice", "--rewards", "[]"]
JUDGED = [
    "--evaluation.greedy",
    "false",
    "--evaluation.right_from",
    "0.3",
    "--data.num_held_out",
    "8",
]
HELD = [*JUDGED, "--evaluation.samples", "4"]
PPO = ["--algorithm.preset", "ppo"]
LONG = ["--algorithm.overlong_buffer", "3"]
ROUNDED = ["--sync.dtype", "bfloat16"]
"""The rollout's probabilities then differ from the trainer's."""
CUT = [*ROUNDED, "--correction.mode", "mask"]
ADAPTERS = ["--train.engine", '{"lora": {"rank": 1}, "max_tokens_per_micro_batch": 999}']

CHANGES: dict[str, tuple[str, list[str]]] = {
    # the changed value, and other settings without which it has no meaning
    "out": ("OUT/elsewhere", []),
    "data.train": ("DATA/others.jsonl", []),
    "data.held_out": ("DATA/others.jsonl", []),
    "data.num_held_out": ("3", []),
    "data.prompt_key": ("question", []),
    "data.answer_key": ("solution", ["--rewards", json.dumps([{"use": "number"}])]),
    "data.source_key": ("origin", []),
    "data.system_prompt": ("Be brief.", []),
    "data.chat_template": ("DATA/template.jinja", []),
    "data.template_args": ('{"mark": "!"}', ["--data.chat_template", "DATA/template.jinja"]),
    "data.max_prompt_tokens": ("3", []),
    "data.on_long_prompt": ("error", ["--data.max_prompt_tokens", "4"]),
    "data.on_bad_row": ("skip", ["--data.train", "DATA/bad.jsonl"]),
    "cluster.scheduler": ("local", []),
    "cluster.devices_per_node": ("1", []),
    "cluster.placement": ("colocated", []),
    "cluster.train_workers": ("2", []),
    "cluster.rollout_instances": ("2", []),
    "cluster.train_mem": ("0.5", []),
    "cluster.rollout_mem": ("0.5", []),
    "cluster.env_vars": ('{"A": "b"}', []),
    "cluster.train_threads": ("2", []),
    "cluster.rollout_threads": ("2", []),
    "cluster.train_cpus": ("1", []),
    "cluster.rollout_cpus": ("1", []),
    "cluster.call_timeout_s": ("0.0001", []),
    "train.lr_schedule": ("linear", []),
    "train.lr_end": ("0.5", ["--train.lr_schedule", "linear"]),
    "train.minibatches": ("2", []),
    "train.engine": ('{"weight_decay": 10.0, "max_tokens_per_micro_batch": 999}', []),
    "tracking.to": ('["console"]', []),
    "tracking.samples": ("0", []),
    "tracking.show_samples_every": ("0", ["--tracking.to", '["console"]']),
    "checkpoints.export": ("all", []),
    "checkpoints.export_dtype": ("bfloat16", ["--checkpoints.export", "last"]),
    "checkpoints.every": ("1", []),
    "rewards[].use": ("format", []),
    "rewards[].judge": ("DATA/labels", JUDGE),
    "rewards[].prompt": ("{{ completion }}", JUDGE),
    "rewards[].parse": (r"\d(\d)", VERDICT),
    "rewards[].label": ("0", LABELS),
    "rewards[].max_new_tokens": ("1", VERDICT),
    "rewards[].instances": ("2", JUDGE),
    "rewards[].devices": ("0", [*JUDGE, "--cluster.devices_per_node", "3"]),
    "rewards[].engine": ("vllm", VERDICT),
    "rewards[].engine_args": ('{"max_model_len": 3}', JUDGE),
    "rewards[].name": ("another", []),
    "rewards[].args": ('{"scale": 3}', []),
    "rewards[].on_failure": (
        "value",
        ["--rewards", json.dumps([{**REWARD, "args": {"fails": True}}])],
    ),
    "rewards[].failure_value": (
        "-3",
        ["--rewards", json.dumps([{**REWARD, "args": {"fails": True}, "on_failure": "value"}])],
    ),
    "agent.use": ("tests.nightly.field.test_settings:talk_twice", AGENT),
    "agent.max_turns": ("1", TURNS),
    "agent.max_tokens": ("1", TURNS),
    "agent.max_context": ("20", TURNS),
    "agent.truncated_reward": ("-7", [*TURNS, "--agent.max_turns", "1"]),
    "agent.credit": ("turn", TURNS),
    "agent.discount": ("0.1", [*TURNS, "--agent.credit", "turn"]),
    "rollout.engine": ("vllm", []),
    "rollout.engine_args": ('{"max_concurrency": 0}', []),
    "rollout.top_k": ("1", []),
    "rollout.top_p": ("0.01", []),
    "rollout.temperature": ("0.01", []),
    "rollout.recorded": ("DATA/elsewhere", []),
    "algorithm.preset": ("ppo", []),
    "algorithm.normalize_std": ("false", []),
    "algorithm.aggregation": ("constant", []),
    "algorithm.clip_low": ("0.000001", ["--train.minibatches", "2"]),
    "algorithm.clip_high": ("0.000001", ["--train.minibatches", "2"]),
    "algorithm.overlong_filter": ("true", []),
    "algorithm.dynamic_sampling": ("false", ["--algorithm.preset", "dapo", "--rewards", "ZERO"]),
    "algorithm.max_filtered_batches": (
        "1",
        ["--algorithm.preset", "dapo", "--rewards", "ZERO"],
    ),
    "algorithm.overlong_buffer": ("3", []),
    "algorithm.overlong_penalty": ("2.0", LONG),
    "algorithm.kl_coef": ("0.5", []),
    "algorithm.old_logprobs": ("both", ["--algorithm.loss", "decoupled_ppo"]),
    "algorithm.loss": ("gspo", ["--train.minibatches", "2"]),
    "algorithm.teacher": ("DATA/model", []),
    "algorithm.teacher_coef": ("30", ["--algorithm.teacher", "DATA/model"]),
    "algorithm.teacher_top_k": ("4", ["--algorithm.teacher", "DATA/model"]),
    "correction.mode": ("truncate", []),
    "correction.level": ("sequence", [*ROUNDED, "--correction.mode", "truncate"]),
    "correction.low": ("1.0", CUT),
    "correction.high": ("1.0", CUT),
    "correction.outlier": ("1.00001", ROUNDED),
    "algorithm.loss_args": ('{"entropy_coef": 1.0}', []),
    "critic.lr": ("0.1", PPO),
    "critic.gamma": ("0.5", PPO),
    "critic.lam": ("0.1", PPO),
    "critic.clip": ("0.000001", [*PPO, "--train.minibatches", "2", "--critic.lr", "0.1"]),
    "sync.dtype": ("bfloat16", []),
    "sync.lora": ("merged", ADAPTERS),
    "check.weights": ("true", []),
    "check.prompts": ("1", ["--check.weights", "true"]),
    "check.max_new_tokens": ("2", ["--check.weights", "true"]),
    "check.tolerance": ("1e-12", ["--check.weights", "true", "--sync.dtype", "bfloat16"]),
    "evaluation.every": ("0", []),
    "evaluation.samples": ("4", JUDGED),
    "evaluation.k": ("[2]", HELD),
    "evaluation.temperature": ("9", HELD),
    "evaluation.top_p": ("0.01", HELD),
    "evaluation.max_new_tokens": ("1", HELD),
    "evaluation.reward": ("other", ["--rewards", "TWO"]),
    "evaluation.right_from": ("-1", []),
}


def share(completion: str, num_tokens: int, scale: float = 1.0, fails: bool = False) -> float:
    """Return the share of digits."""
    if fails and len(completion) % 2:
        raise ValueError("the judge is down")
    return scale * sum(map(str.isdigit, completion)) / max(1, num_tokens)


def other(completion: str) -> float:
    """Return 1."""
    return 1.0


def zero(completion: str) -> float:
    """Return 0."""
    return 0.0


async def talk_twice(base_url: str, api_key: str, session: Any) -> float:
    """Ask the model twice, with a reward after each turn."""
    messages: list[Any] = [{"role": "user", "content": "1"}]
    total = 0.0
    for _ in range(2):
        message = await session.complete(messages)
        score = share(message.get("content") or "", 4)
        total += score
        messages += [message, {"role": "user", "content": "2"}]
    return total


class Runs:
    """Runs with settings, each once.

    Args:
        folder: Where the model, the data and the outputs are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model(folder / "model", num_layers=1, width=32)
        make_classifier(folder / "judge")
        make_classifier(folder / "labels", labels=("poor", "good"))
        make_judge(folder / "asked")
        rows = [
            {
                "prompt": f"{a}+{b}=",
                "question": f"{b}?",
                "answer": str(a + b),
                "solution": str(a),
                "data_source": "small" if a < 2 else "large",
                "origin": "here",
            }
            for a in range(4)
            for b in range(4)
        ]
        write_jsonl(folder / "rows.jsonl", rows)
        write_jsonl(folder / "others.jsonl", rows[:7])
        write_jsonl(folder / "bad.jsonl", [*rows, {"nothing": 1}])
        template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
        (folder / "template.jinja").write_text(template)
        self.outcome = functools.cache(self._outcome)

    def _outcome(self, *flags: str) -> dict[str, Any]:
        """Return all that a run shows, without its settings and durations."""
        out = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        two = [REWARD, {**REWARD, "use": f"{__name__}:other"}]
        names = {
            "OUT": str(out),
            "DATA": str(self.folder),
            "ZERO": json.dumps([{**REWARD, "use": f"{__name__}:zero"}]),
            "TWO": json.dumps(two),
        }
        given = [
            *("--model", "DATA/model", "--data.train", "DATA/rows.jsonl", "--out", "OUT"),
            *("--rewards", json.dumps([REWARD]), "--cluster.scheduler", "inline", "--steps", "2"),
            *("--prompts_per_step", "2", "--samples_per_prompt", "4", "--data.num_held_out", "2"),
            *("--rollout.max_new_tokens", "4", "--evaluation.every", "1", "--train.lr", "1e-2"),
            *("--tracking.to", "[]", "--cluster.train_cpus", "0.5"),
            *("--train.engine", '{"max_tokens_per_micro_batch": 999}'),
            *("--cluster.rollout_cpus", "0.5", "--rollout.max_in_flight", "8", *flags),
        ]
        given = [re.sub("|".join(names), lambda found: names[found[0]], each) for each in given]
        settings = dict(zip(given[::2], given[1::2], strict=True))
        given = [part for pair in settings.items() for part in pair]
        jobs = []
        with contextlib.suppress(ValueError, OSError):
            overrides = [(key.removeprefix("--"), value) for key, value in settings.items()]
            jobs = [repr(job) for job in GRPO(overrides=overrides).jobs()]
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = run_here(functools.partial(main, "grpo"), given)
        files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        lines = {path.name: path.read_text().splitlines() for path in out.glob("*.jsonl")}
        shown = printed.getvalue().replace(str(out), "OUT")
        return {
            "code": code,
            "errors": errors.getvalue().rpartition("\n")[0][-300:] if code else "",
            "jobs": jobs,
            "num_lines": len(shown.partition("ready after")[2].splitlines()),
            "described": shown.partition("all workers")[0],
            "files": sorted(each for each in files if not each.startswith("logs")),
            "logs": sorted(each for each in files if each.endswith(".log")),
            "sizes": [path.stat().st_size for path in sorted(out.glob("model/*.safetensors"))],
            **{name: [_untimed(json.loads(line)) for line in each] for name, each in lines.items()},
        }


def _untimed(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {
        key: round(value, 5) if isinstance(value, float) else value
        for key, value in row.items()
        if not re.search("time|seconds|per_s|throughput|session|memory", key)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runs(tmp_path_factory.mktemp("settings"))
    torch.set_num_threads(before)


def flags_of(key: str, value: str, others: Sequence[str]) -> list[str]:
    """Return the flags that change a setting; those of a list change its one entry."""
    section, _, name = key.rpartition("[].")
    if not section:
        return [*others, f"--{key}", value]
    (entry,) = json.loads(others[1]) if others[:1] == ["--rewards"] else [REWARD]
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return [*others, "--rewards", json.dumps([{**entry, name: value}])]


def changed(default: str) -> str:
    """Return another value than a default."""
    value = json.loads(default)
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return str(value / 2 if isinstance(value, float) and value else value + 1)
    raise ValueError(f"no other value than {default} is known; add one to CHANGES")


KEYS = {key: default for key, default, _ in all_keys(GRPO.kind)}


def test_same_settings_same_run(runs: Runs) -> None:
    """Differences between runs come from their settings."""
    assert runs._outcome() == runs._outcome()


@pytest.mark.parametrize("key", [each for each in KEYS if each not in {*UNSEEN, "model"}])
def test_setting_changes_the_run(key: str, runs: Runs) -> None:
    """open-instruct #1823: a setting is declared and documented, and nothing reads it."""
    value, others = CHANGES.get(key) or (changed(KEYS[key]), [])
    assert runs.outcome(*flags_of(key, value, others)) != runs.outcome(*others)
