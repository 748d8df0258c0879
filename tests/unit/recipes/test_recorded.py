"""Test recorded rollouts: what is written is read back, and what does not fit is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from helmsman.__main__ import main
from helmsman.agents.samples import Sample
from helmsman.recipes.batches import Answer, Group, make_samples
from helmsman.recipes.prompts import Draws, DrawState, Row
from helmsman.recipes.recorded import RecordingError, RolloutFiles, find_parts, read_part
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import GRPOSettings
from tests.unit.recipes.data import settings

ROWS = [
    Row([ord("p"), number], f"prompt {number}", number, "s", {}, place="t") for number in range(4)
]
METRICS = {"groups/filtered": 3.0, "epoch": 0.75}


class Letters:
    """A tokenizer whose token ids are characters."""

    def __init__(self, *more: str) -> None:
        self.tokenizer, self._vocabulary = self, {letter: ord(letter) for letter in ("p", *more)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def sample(answer: str, reward: float, *, turns: int = 1, version: int = 2) -> Sample:
    ids = [ord("p"), *map(ord, answer)]
    return Sample(
        input_ids=ids,
        loss_mask=[0, *([1] * len(answer))],
        logprobs=[0.0, *(-0.1 / 3 for _ in answer)],
        versions=[-1, *([version] * len(answer))],
        turn_ends=[*range(len(ids) - turns + 1, len(ids) + 1)],
        turn_rewards=[0.25] * turns,
        reward=reward,
        session_id="s",
        is_truncated=reward == 0,
    )


def make_recording(
    out: Path, *flags: tuple[str, str], vocabulary: tuple[str, ...] = (), reads: bool = False
) -> tuple[RolloutFiles, GRPOSettings, Draws]:
    given = {"out": str(out), "steps": "2", "prompts_per_step": "2", "samples_per_prompt": "2"}
    given |= {"rollout.engine": "recorded", "rollout.recorded": str(out)} if reads else {}
    found = settings(*given.items(), *flags)
    tokenizer: Any = Letters(*vocabulary)
    return (
        RolloutFiles(found, tokenizer),
        found,
        Draws(ROWS, num_samples=2, seed=0, shuffle=False),
    )


def make_group(draws: Draws, number: int) -> Group:
    """Return an answer, and a session of two branches, the first of two turns."""
    one = Answer([sample("right\nor not", 1.0)], Scored({"exact": 1.0}, 1.0), 1.0)
    branches = [sample("long", 0.0, turns=2, version=1), sample("wrong", 0.0)]
    return Group(draws.draw(number), [one, Answer(branches, Scored({}, 0.7), 0.7)], 7.5, 2.0)


def write(out: Path, *steps: int, **more: Any) -> list[list[Group]]:
    recording, _, draws = make_recording(out, **more)
    groups = [[make_group(draws, 2 * step), make_group(draws, 1)] for step in steps]
    for step, each in zip(steps, groups, strict=True):
        recording.write(step, each, METRICS, DrawState(3, [5]))
    return groups


def test_recording_reads_back_exactly(tmp_path: Path) -> None:
    out = tmp_path / "a=b"  # pyarrow takes such a name for a column
    out.mkdir()
    (written,) = write(out, 1)
    recording, found, draws = make_recording(out, reads=True)
    groups, metrics = recording.read(1, draws)
    assert metrics == METRICS
    assert draws.state() == DrawState(3, [5])
    assert make_samples(groups, found) == make_samples(written, found)
    for ours, theirs in zip(groups, written, strict=True):
        assert (ours.draw, ours.started, ours.seconds) == (theirs.draw, 7.5, 2.0)
        for answer, other in zip(ours.answers, theirs.answers, strict=True):
            assert answer.scored == other.scored
            assert (answer.reward, answer.versions) == (other.scored.total, other.versions)
            for mine, its in zip(answer.samples, other.samples, strict=True):
                assert msgspec.structs.asdict(mine).items() >= msgspec.structs.asdict(its).items()


def test_recording_reward_is_shaped_again(tmp_path: Path) -> None:
    """The overlong penalty is the trainer's, so that its settings can be tried."""
    write(tmp_path, 1)
    flags = ("rollout.max_new_tokens", "12"), ("algorithm.overlong_buffer", "12")
    recording, _, draws = make_recording(tmp_path, *flags, reads=True)
    groups, _ = recording.read(1, draws)
    assert groups[0].answers[0].reward == 0.0, "12 tokens of 12 cost 1"


def test_recording_begin_drops_later_steps(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    folder = tmp_path / "rollouts"
    (folder / ".step-000001.parquet").write_bytes(b"PAR1, and no more")
    (folder / "step-all.parquet").write_bytes(b"a user's")
    make_recording(tmp_path, reads=True)[0].begin(1)
    assert [*find_parts(tmp_path)] == [1, 2, 3], "a run that reads them drops none"
    make_recording(tmp_path)[0].begin(2)
    assert [*find_parts(tmp_path)] == [*find_parts(folder)] == [1]
    assert find_parts(folder / "step-000001.parquet").keys() == {1}
    assert find_parts(tmp_path / "nowhere") == {}
    assert (folder / "step-all.parquet").exists()


@pytest.mark.parametrize(
    ("flags", "more", "message"),
    [
        (
            [("samples_per_prompt", "4")],
            {},
            r"\(.*step-000001.parquet\): samples_per_prompt is 2, expected 4, as in this run",
        ),
        (
            [("algorithm.dynamic_sampling", "true")],
            {},
            "algorithm.dynamic_sampling is False, expected True",
        ),
        (
            [("rollout.max_new_tokens", "8")],
            {},
            "rollout.max_new_tokens is 16, expected 8, as in this run",
        ),
        (
            [("rewards", '[{"use": "exact", "weight": 2}]')],
            {},
            r"rewards is \[{'use': 'exact'}\], expected \[{'use': 'exact', 'weight': 2.0}\]",
        ),
        (
            [("rewards", '[{"judge": "models/a", "prompt": "{{ completion }}"}]')],
            {},
            r"expected \[{'judge': 'models/a', 'prompt': '{{ completion }}'}\], as in this run",
        ),
        (
            [],
            {"vocabulary": ("q",)},
            "the tokenizer of model is '1 tokens, digest .*', expected '2 tokens, digest .*'",
        ),
    ],
)
def test_recording_of_another_run(
    flags: list[tuple[str, str]], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, 1, 2)
    recording, _, draws = make_recording(tmp_path, *flags, reads=True, **more)
    with pytest.raises(RecordingError, match=message):
        recording.require(1, draws)


def test_recording_of_other_prompts(tmp_path: Path) -> None:
    """No step is trained before the refusal, also where the second step alone does not fit."""
    write(tmp_path, 1, 2)
    recording, _, _ = make_recording(tmp_path, reads=True)
    for rows, place, theirs in (
        (ROWS[1:], r"step-000001.parquet, draw 2\)", 2),
        ([*ROWS, ROWS[3]], r"step-000002.parquet, draw 4\)", 0),
    ):
        message = (
            f"{place}: prompt_ids are those of 'prompt {theirs}', expected those of 'prompt 3'"
        )
        others = Draws(rows, num_samples=2, seed=0, shuffle=False)
        with pytest.raises(RecordingError, match=message):
            recording.require(1, others)


def test_recording_without_a_step(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for folder, message in (
        (tmp_path, "step-000001.parquet; .* its steps 1 to 2. It has 1 steps, the last is 2"),
        (tmp_path / "rollouts", "step-000001.parquet; expected the output folder of a run with"),
        (tmp_path / "nowhere", "its steps 1 to 2. It has 0 steps, the last is 0"),
    ):
        flags = ("rollout.recorded", str(folder))
        recording, _, draws = make_recording(tmp_path, flags, reads=True)
        with pytest.raises(RecordingError, match=f"{re.escape(str(folder))}, which .*{message}"):
            recording.require(1, draws)
        if folder.exists():
            recording.require(2, draws)
        recording.require(3, draws)


def test_read_part_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = find_parts(tmp_path)[1]
    whole = pyarrow.parquet.read_table(path)
    other = tmp_path / "other.parquet"

    def refusal() -> str:
        with pytest.raises(RecordingError) as caught:
            read_part(other)
        assert f"({other}): " in str(caught.value)
        return str(caught.value)

    other.write_bytes(path.read_bytes()[:500])
    assert "Parquet magic bytes not found" in refusal()
    other.write_text('{"prompt": "a"}\n')
    assert "Parquet magic bytes not found" in refusal()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), other)
    assert "no key 'helmsman', expected a part as a run with rollout.record" in refusal()
    pyarrow.parquet.write_table(whole.drop_columns(["logprobs"]), other)
    assert "missing required field `logprobs` - at `$[0]`" in refusal()
    nulls = pyarrow.array([None] * len(whole), pyarrow.int32())
    changed = whole.set_column(whole.schema.get_field_index("draw"), "draw", nulls)
    pyarrow.parquet.write_table(changed, other)
    assert "Expected `int`, got `null` - at `$[0].draw`" in refusal()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"rollout.engine": "recorded"},
            "rollout.recorded is None and rollout.engine is 'recorded'; expected the engine",
        ),
        (
            {"rollout.recorded": "runs/a"},
            "rollout.recorded is 'runs/a' and rollout.engine is 'hf'; expected the engine",
        ),
        (
            {"rollout.engine": "recorded", "rollout.recorded": "a", "rollout.record": "true"},
            "rollout.record is true; expected false with rollout.engine 'recorded'",
        ),
        (
            {"rollout.engine": "recorded", "rollout.recorded": "a", "check.weights": "true"},
            "check.weights is true; expected false with rollout.engine 'recorded'",
        ),
    ],
)
def test_settings_that_contradict(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(*flags.items())


def test_many_nodes_without_instances() -> None:
    """The placement of instances does not matter."""
    flags = {"rollout.engine": "recorded", "rollout.recorded": "a", "cluster.rollout_devices": "16"}
    assert settings(*flags.items(), name="many_nodes_gpu.yaml").rollout.is_recorded


# --- helmsman rollouts ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> str:
    write(tmp_path, 1, 2)
    return str(tmp_path)


def test_rollouts_table(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6, "the last step, a line for each branch of a session"
    numbers = r"step 2 +draw 4 +answer 0 +reward 1.000 +tokens 12 +versions \[2\]"
    assert re.fullmatch(f"{numbers} +prompt 0 +right or not", lines[0])


def test_rollouts_full_text(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", run, "--step", "1", "--full", "-n", "1"]) == 0
    printed = capsys.readouterr()
    first, *rest = printed.out.splitlines()
    assert first.startswith("=== step 1     draw 2      answer 0   reward 1.000")
    assert rest == [
        "{'exact': 1.0}, expected: 2",
        "--- prompt",
        "prompt 2",
        "--- answer",
        "right",
        "or not",
    ]
    assert printed.err == "1 of 6 are shown; -n 0: all\n"


def test_rollouts_search(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*flags: str) -> list[dict[str, Any]]:
        assert main(["rollouts", run, "--json", "-n", "0", *flags]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    longs = found("--grep", "(?i)^LON")
    assert [each["step"] for each in longs] == [1, 1, 2, 2], "all steps are searched"
    assert longs[0]["completion"] == "long"
    assert longs[0]["versions"] == [1]
    assert longs[0]["num_tokens"] == 4
    assert longs[0]["is_truncated"] is True
    assert len(found("--grep", "prompt 1")) == 6, "prompts are searched, too"
    assert len(found("--max-reward", "0.9")) == 8
    assert len(found("--min-reward", "0.9", "--step", "1-9")) == 4
    assert len(found("--step", "1-2")) == 12


def test_rollouts_of_a_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, _, draws = make_recording(tmp_path)
    long = Answer([sample("x " * 99 + "therefore 7", 1.0)], Scored({}, 1.0), 1.0)
    recording.write(1, [Group(draws.draw(0), [long])], {}, DrawState())
    assert main(["rollouts", str(tmp_path), "--grep", "therefore"]) == 0
    assert capsys.readouterr().out.endswith("x x x x therefore 7\n"), "what matches is seen"


def test_rollouts_refusals(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", run, "--grep", "nothing"]) == 1
    assert capsys.readouterr().err == "nothing matches; there are steps 1 to 2\n"
    assert main(["rollouts", run, "--step", "7"]) == 1
    capsys.readouterr()
    assert main(["rollouts", str(tmp_path / "nowhere")]) == 2
    assert "there are no recorded rollouts (" in capsys.readouterr().err
    find_parts(tmp_path)[2].write_bytes(b"nonsense")
    assert main(["rollouts", run]) == 2
    assert "step-000002.parquet): Parquet" in capsys.readouterr().err
    for flag, value in (("--grep", "["), ("--step", "last")):
        with pytest.raises(SystemExit):
            main(["rollouts", run, flag, value])
        assert f"argument {flag}: " in capsys.readouterr().err


def test_rollouts_output_closed_or_ascii(tmp_path: Path) -> None:
    recording, _, draws = make_recording(tmp_path)
    answer = Answer([sample("caf\u00e9", 1.0)], Scored({}, 1.0), 1.0)
    recording.write(1, [Group(draws.draw(0), [answer])], {}, DrawState())
    command = [sys.executable, "-m", "helmsman", "rollouts", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        ran = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=True)
        fails = "from helmsman._cli import guarded; exit(guarded(lambda: print('bad') or 1))"
        buffered = {each: os.environ[each] for each in os.environ if each != "PYTHONUNBUFFERED"}
        failed = subprocess.run([sys.executable, "-c", fails], stdout=closed, env=buffered)
    assert not ran.stderr
    assert failed.returncode == 1, "a check that has failed, before | head"
    subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], check=True)
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert rb"caf\xe9" in subprocess.run(command, env=ascii_only, stdout=-1, check=True).stdout


def test_rollouts_interrupted(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no success, on which a shell would go on."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("helmsman.recipes.rollouts.find_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["rollouts", run])
