"""Tests that unknown arguments of engines and losses are refused without an import of these."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import helmsman
from helmsman.api.errors import InvalidSpecError
from helmsman.api.scheduler import Job
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._schedulers.factory import make_scheduler
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._validation.argument_names import (
    require_engine_arguments,
    require_loss_settings,
)
from tests.controller.engines import RecordingTrainer
from tests.controller.fakes import FakeScheduler


@pytest.mark.parametrize(
    ("engine", "arguments", "expected"),
    [
        (
            "helmsman.engines.train.FSDPTrainEngine",
            {"model": "m", "learning_rate": 1.0},
            "FSDPTrainEngine: did you mean 'lr'?",
        ),
        (
            "helmsman.engines.rollout.HFRolloutEngine",
            {"max_len": 1},
            "did you mean 'max_model_len'?",
        ),
        (
            "helmsman.engines.vllm_engine.VLLMEngine",
            {"tensor_parallel": 2},
            "did you mean 'tensor_parallel_size'?",
        ),
        ("helmsman.engines.server_engine.ServerEngine", {"modle": "m"}, "did you mean 'model'?"),
        (RecordingTrainer, {"nam": "n"}, "did you mean 'name'?"),
        ("tests.controller.engines.RecordingTrainer", {"nam": "n"}, "did you mean 'name'?"),
    ],
)
def test_engine_argument_unknown(engine: Any, arguments: dict[str, Any], expected: str) -> None:
    with FakeScheduler() as scheduler:
        for controller in (TrainController, RolloutController):
            with pytest.raises(InvalidSpecError) as caught:
                controller(scheduler, engine, Job(role="actor"), engine_kwargs=arguments)
            assert expected in str(caught.value)


SOURCE = """
import functools
from helmsman.engines.train import FSDPTrainEngine
from helmsman.engines.train_config import TrainConfig

class Passing(FSDPTrainEngine):
    def __init__(self, own=1, **others):
        super().__init__(**others)

class Inheriting(FSDPTrainEngine):
    pass

class Wrapped:
    def __init__(self, config: TrainConfig, **kwargs):
        self.kwargs = kwargs

def scaled(function):
    @functools.wraps(function)
    def wrapper(*args, hidden_option=1, **kwargs):
        return function(*args, **kwargs)
    return wrapper

class Decorated:
    @scaled
    def __init__(self, own=1): ...

@scaled
def decorated(outputs, batch, *, strength=1.0): ...
def loss(outputs, batch, *, strength=1.0): ...
def anything(outputs, batch, **settings): ...
"""


@pytest.mark.parametrize("name", ["Passing", "Inheriting", "Wrapped", "NotThere", "Decorated"])
def test_engine_arguments_that_cannot_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_engines.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    require_engine_arguments("actor", f"own_engines.{name}", {"hidden_option": 1})
    require_engine_arguments("actor", "no_such_package.module.Engine", {"hidden_option": 1})
    assert "own_engines" not in sys.modules


@pytest.mark.parametrize("engine", [lambda name: None, functools.partial(RecordingTrainer), None])
def test_engine_of_invalid_type(engine: Any) -> None:
    with FakeScheduler() as scheduler:
        for controller in (TrainController, RolloutController):
            with pytest.raises(
                TypeError, match=f"{controller.__name__}: the argument engine is .*, expected str"
            ):
                controller(scheduler, engine, Job(role="actor"), engine_kwargs={"name": "n"})


def test_loss_setting_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def local(outputs: Any, batch: Any, strength: float = 1.0) -> Any: ...

    @functools.wraps(local)
    def wrapped(*args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        return local(*args, **kwargs)

    for loss, settings, expected in (
        (
            "grpo",
            {"cliphigh": 0.3},
            "loss 'grpo' has no setting 'cliphigh'; did you mean 'clip_high'?",
        ),
        ("dpo", {"bta": 0.3}, "did you mean 'beta'?"),
        ("own_losses.loss", {"strenght": 1}, "did you mean 'strength'?"),
        (
            local,
            {"strenght": 1},
            "loss 'local' has no setting 'strenght'; did you mean 'strength'?",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            require_loss_settings(loss, settings)
    require_loss_settings("own_losses.anything", {"strenght": 1})
    # an engine may pass one positional argument
    require_loss_settings(lambda num_samples, scale: None, {"scale": 1})  # type: ignore[arg-type, return-value]
    require_loss_settings("own_losses.decorated", {"hidden_option": 1})
    require_loss_settings("no.such.loss", {"strenght": 1})
    require_loss_settings("grpo", None)
    # settings of the wrapper are valid
    require_loss_settings(wrapped, {"strength": 1.0, "scale": 2.0})


def test_train_batch_unknown_loss_setting_is_not_sent() -> None:
    with (
        FakeScheduler() as scheduler,
        TrainController(scheduler, RecordingTrainer, Job(role="actor")) as actor,
    ):
        actor.initialize()
        num_sent = len(scheduler.sent)
        with pytest.raises(ValueError, match="did you mean 'clip_high'"):
            actor.train_batch([{"input_ids": [1]}], "grpo", {"cliphigh": 0.3})
        assert len(scheduler.sent) == num_sent


def test_argument_names_import_no_torch() -> None:
    program = """
import sys
from helmsman.controller._validation.argument_names import (
    require_engine_arguments, require_loss_settings
)
engine = "helmsman.engines.train.FSDPTrainEngine"
for check in (
    lambda: require_engine_arguments("r", engine, {"learning_rate": 1}),
    lambda: require_loss_settings("grpo", {"cliphigh": 1}),
):
    try:
        check()
    except ValueError:
        continue
    raise SystemExit("the argument was accepted")
assert "torch" not in sys.modules and "helmsman.engines.train" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_argument_names_of_an_editable_install() -> None:
    """Such a package is not in sys.path; a finder of its own locates it."""
    program = f"""
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "helmsman":
            return importlib.util.spec_from_file_location(name, {helmsman.__file__!r})
find = importlib.machinery.PathFinder.find_spec
sys.path[:] = [each for each in sys.path if not find("helmsman", [each])]
sys.meta_path.insert(0, Finder)
from helmsman.controller._validation.argument_names import require_engine_arguments
try:
    require_engine_arguments("r", "helmsman.engines.train.FSDPTrainEngine", {{"learning_rate": 1}})
except ValueError:
    sys.exit(0)
sys.exit("the argument was accepted")
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "option", "expected"), [("local", "num_gpu", "num_gpus"), ("inline", "sed", "seed")]
)
def test_make_scheduler_unknown_option(name: str, option: str, expected: str) -> None:
    with pytest.raises(
        TypeError, match=f"scheduler {name!r} has no option {option!r}; did you mean {expected!r}"
    ):
        make_scheduler(name, **{option: 1})
