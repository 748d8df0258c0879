"""Settings and specs made of other libraries' objects are converted, or refused by field."""

from __future__ import annotations

import enum
import importlib
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from omegaconf import OmegaConf

from helmsman import Job, SchedulingSpec, SchedulingStrategy, make_scheduler
from helmsman.api.environment import MASK, MAX_VARIABLE_BYTES
from helmsman.api.errors import InvalidSpecError
from helmsman.recipes import GRPO
from helmsman.recipes.settings import Reward
from tests.recipes.test_data_page import code, table

ONE: Any = numpy.int8(1)
BY_NUMBER: Any = enum.IntEnum("BY_NUMBER", "A")


class Section(Mapping[str, Any]):
    """A mapping that is no dict and has its keys as attributes, as of OmegaConf."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_entries"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Items(Sequence[Any]):
    """A sequence that is neither list nor tuple."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Kind(enum.Enum):
    """Placements, as a structured configuration has them."""

    APART = "separation"
    BESIDE = "colocation"


def grpo(**settings: Any) -> Any:
    return GRPO(**{"model": "m", "data": ["1+1="], "rewards": ["exact"], **settings}).settings


def job(**fields: Any) -> Job:
    made = Job(**{"role": "a", **fields})
    made.validate()
    return made


def evaluated(cell: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name in set(re.findall(r"(\w+)\.", code(cell))):
        if name in ("collections", "enum", "numpy", "omegaconf", "pathlib", "torch"):
            names[name] = importlib.import_module(name)
    arguments: dict[str, Any] = eval(f"dict({code(cell)})", names)
    return arguments


def made_of(arguments: dict[str, Any]) -> Any:
    return (job if arguments.keys() & {*Job.__struct_fields__} else grpo)(**arguments)


@pytest.mark.parametrize(("argument", "value"), table("## Settings"))
def test_page_values(argument: str, value: str) -> None:
    path, expected = re.findall("`(.*?)`", value)
    found = made_of(evaluated(argument))
    for name in path.split("."):
        found = getattr(found, name)
    specs = {"SchedulingSpec": SchedulingSpec, "SchedulingStrategy": SchedulingStrategy}
    assert found == eval(expected, specs)


@pytest.mark.parametrize(("argument", "message"), table("Other values are refused"))
def test_page_messages(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(code(message))):
        made_of(evaluated(argument))


def test_nested_sections() -> None:
    engine = Section(num_warmup_steps=numpy.int64(2))
    found = grpo(
        data=Section(train=Items("a.jsonl", Path("b.jsonl")), template_args=Section(a=Items(1))),
        rewards=Items(Section(use="exact", args=Section()), "number"),
        train=Section(lr=numpy.float64(0.5), engine=engine),
        tracking=types.MappingProxyType({"to": Items("console")}),
        cluster=Section(env_vars=Section(A="1")),
    )
    assert found.data.train == ("a.jsonl", "b.jsonl")
    assert found.data.template_args == {"a": [1]}
    assert [reward.use for reward in found.rewards] == ["exact", "number"]
    assert (found.train.lr, found.train.engine) == (0.5, {"num_warmup_steps": 2})
    assert (found.tracking.to, found.cluster.env_vars) == (("console",), {"A": "1"})
    assert grpo(**Section(steps=3, out=Path("runs/b"))).out == "runs/b"


def test_interpolations() -> None:
    made = OmegaConf.create({"base": 0.5, "train": {"lr": "${base}"}, "bad": {"lr": "???"}})
    assert grpo(train=made.train).train.lr == 0.5
    with pytest.raises(Exception, match=r"bad\.lr"):
        grpo(train=made.bad)


@pytest.mark.parametrize(
    "reward", ["exact", Section(use="exact"), Reward(use="exact"), ("exact",), Items("exact")]
)
def test_one_reward(reward: Any) -> None:
    assert [each.use for each in grpo(rewards=reward).rewards] == ["exact"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 5}, "model: Expected `str`, got `int`"),
        ({"steps": numpy.array([3])}, "steps: Expected `int`, got `array`"),
        ({"steps": numpy.float64(2.5)}, "steps: Expected `int`, got `float`"),
        ({"train": Section(lr=numpy.float32("nan"))}, "train.lr is nan; expected 0 or more"),
        ({"train": types.SimpleNamespace(lr=1)}, "train is namespace(lr=1); expected null"),
        ({"train": None}, "train is None; expected keys and values"),
        ({"rewards": [Section(use="exact", args={"f": len})]}, "rewards[0].args.f is <built-in"),
        ({"algorithm": {"preset": BY_NUMBER.A}}, "algorithm.preset: Expected `str`"),
        ({"cluster": {"env_vars": {"A": 1}}}, "cluster.env_vars[...]: Expected `str`, got `int`"),
        ({"cluster": {"env_vars": Section(**{"A=": "1"})}}, "cluster.env_vars['A='] is 'A='"),
    ],
)
def test_settings_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        grpo(**settings)


def as_list(*each: Any) -> list[Any]:
    return [*each]


def as_tuple(*each: Any) -> tuple[Any, ...]:
    return each


@pytest.mark.parametrize("pack", [as_list, as_tuple, Items])
def test_specs(pack: Callable[..., Any]) -> None:
    strategy = Section(
        type=Kind.BESIDE,
        target="b",
        fork=numpy.bool_(True),
        device_mapping=pack(numpy.array([0]), pack(1)),
    )
    found = job(
        replicas=numpy.int64(2),
        tasks=pack(Section(cpu=numpy.float32(0.5), nodelist=pack("n")), SchedulingSpec(gpu=ONE)),
        scheduling_strategy=strategy,
    )
    assert type(found.replicas) is int
    assert [type(spec) for spec in found.tasks] == [SchedulingSpec] * 2
    assert (found.spec(0).cpu, [*found.spec(0).nodelist], found.spec(1).gpu) == (0.5, ["n"], 1)
    made = found.scheduling_strategy
    assert isinstance(made, SchedulingStrategy)
    assert (made.type, made.fork, [[*each] for each in made.device_mapping]) == (
        "colocation",
        True,
        [[0], [1]],
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": [Section(gpus=1)]}, "tasks[0].gpus is 1; expected a field of SchedulingSpec"),
        ({"tasks": [SchedulingSpec(), object]}, "tasks[1] is <class 'object'>; expected object"),
        ({"tasks": iter([SchedulingSpec()])}, "tasks is <list_iterator object"),
        ({"tasks": [Section(cpu=object)]}, "tasks[0].cpu is <class 'object'>; expected float"),
        ({"tasks": [SchedulingStrategy()]}, "tasks[0] is SchedulingStrategy("),
        (
            {"tasks": [Section(resources={"a": "1"})]},
            "tasks[0].resources[...] is {'a': '1'}; expec",
        ),
        ({"tasks": [Section(cpu=True)]}, "tasks[0].cpu is True; expected float, got bool"),
        ({"tasks": [Section(nodelist="n")]}, "tasks[0].nodelist is 'n'; expected array, got str"),
        ({"tasks": [Section(cmd=b"x")]}, "tasks[0].cmd is b'x'; expected str | null, got bytes"),
        ({"replicas": numpy.array([2])}, "replicas is [2]; expected int, got array"),
        ({"scheduling_strategy": Section(kind="x")}, "scheduling_strategy.kind is 'x'; expected a"),
        (
            {"scheduling_strategy": {"type": BY_NUMBER.A}},
            "strategy.type is 1; expected",
        ),
    ],
)
def test_specs_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(message)):
        job(**fields)


VARIABLES: list[tuple[Any, Any, str]] = [
    ("A", b"x", "['A'] is b'x'; expected a text."),
    ("A", None, "['A'] is None; expected a text."),
    ("A", "x\0y", "['A'] is 'x\\x00y'; expected a text without NUL."),
    ("A", "\udc80", "['A'] is '\\udc80'; expected a text that UTF-8 can encode."),
    ("A", "é" * 70_000, f"expected at most {MAX_VARIABLE_BYTES} bytes with its name, not 140002."),
    ("A", "x" * (MAX_VARIABLE_BYTES - 1), f"not {MAX_VARIABLE_BYTES + 1}."),
    (
        "A\0",
        "1",
        "['A\\x00'] is 'A\\x00'; expected a name that is a text, is not empty and has no ",
    ),
    (1, "1", "[1] is 1; expected a name that is a text"),
    ("HF_TOKEN", b"secret", f"['HF_TOKEN'] is '{MASK}'; expected a text."),
    ("HF_TOKEN", "secret\0", f"['HF_TOKEN'] is '{MASK}'; expected a text without NUL."),
]


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_variables_refused_before_start(kind: str) -> None:
    with make_scheduler(kind) as scheduler:
        for name, value, message in VARIABLES:
            tasks = [SchedulingSpec(), SchedulingSpec(env_vars={name: value})]
            wrong = Job(role="a", replicas=2, tasks=tasks)
            starts: tuple[Any, ...] = (scheduler.create_workers, scheduler.reserve, scheduler.plan)
            for start in starts:
                with pytest.raises(InvalidSpecError) as caught:
                    start([wrong] if start == scheduler.plan else wrong)
                assert "job 'a': tasks[1].env_vars[" in str(caught.value)
                assert message in str(caught.value) and "secret" not in str(caught.value)
        assert scheduler.status() == []


async def test_variables_of_a_worker() -> None:
    with make_scheduler("inline") as scheduler:
        (worker,) = scheduler.create_workers(Job(role="a", tasks=[SchedulingSpec(cpu=0.1)]))
        await scheduler.set_worker_env(worker, Section(OF_A_SECTION=numpy.str_("1")))
        found = {each.name: each.value for each in scheduler.environment("a")[worker]}
        assert found["OF_A_SECTION"] == "1"
        for name, value, message in VARIABLES:
            if isinstance(name, str) and isinstance(value, str):
                with pytest.raises(InvalidSpecError) as caught:
                    await scheduler.set_worker_env(worker, {name: value})
                assert str(caught.value).startswith(
                    f"job 'a': environment variable {name!r} of a/0 is "
                )
                assert message.rpartition("; ")[2] in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of Linux")
@pytest.mark.parametrize("more", [0, 1])
def test_longest_variable(more: int) -> None:
    value = "x" * (MAX_VARIABLE_BYTES - len("A=") + more)
    program = [sys.executable, "-c", ""]
    if more:
        with pytest.raises(OSError, match="Argument list too long"):
            subprocess.run(program, env={"A": value}, check=True)
        return
    subprocess.run(program, env={"A": value}, check=True)
    job(tasks=[SchedulingSpec(env_vars={"A": value})])
