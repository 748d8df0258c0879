"""Rewards by name or by a function of the user's, each in processes of its own with a limit of time
that holds.

A function of the user's is called with what it has parameters for:

    completion (solution_str)   the answer's text, without special tokens
    answer (ground_truth)       of the row
    prompt                      the text that the model was given
    source (data_source)        of the row
    row                         the whole row
    extra_info                  the row's ``extra_info``; the whole row where it has none
    num_tokens, is_truncated    of the answer
    token_ids                   of the answer
    chat                        the prompt as the row has it: a text, a chat or token ids

A function with a parameter ``completions`` is called as TRL calls its reward functions, with lists:
``prompts``, ``completions``, ``completion_ids`` and every other key of the row; it returns a list.
One that is
written for verl is called by the names in parentheses.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from helmsman import Job, RewardPool, Scheduler, SchedulingSpec
from helmsman.api.errors import BackendNotInstalledError, RewardLostError, RewardTimeoutError
from helmsman.api.extras import install_command
from helmsman.recipes.prompts import Row
from helmsman.recipes.settings import Reward, name_of

GIVEN = (
    "completion",
    "answer",
    "prompt",
    "source",
    "row",
    "num_tokens",
    "is_truncated",
    "token_ids",
    "chat",
)
_ALIASES = {"solution_str": "completion", "ground_truth": "answer", "data_source": "source"}
_MAX_RESTARTS = 10_000
"""Of a pool's processes within an hour. Each answer that takes too long costs one, and a run with
many goes on.
"""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class Scored(msgspec.Struct, frozen=True):
    """What an answer is worth."""

    values: dict[str, float]
    """By the rewards' names, without their weights."""
    total: float
    """Their weighted sum."""
    failed: int = 0
    """Rewards that took too long or lost their process, and count as 0."""


# --- rewards by name ------------------------------------------------------------------------------


class ExactMatch:
    """1 when the answer is the same text, up to blanks around it."""

    def __call__(self, completion: str, answer: Any) -> float:
        return float(answer is not None and completion.strip() == str(answer).strip())


class NumberMatch:
    """1 when the last number of the text is the answer's.

    Args:
        tolerance: largest relative difference.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self._tolerance = Decimal(str(tolerance))

    def __call__(self, completion: str, answer: Any) -> float:
        found, expected = _last_number(completion), _last_number(str(answer))
        if found is None or expected is None:
            return 0.0
        try:
            return float(abs(found - expected) <= self._tolerance * abs(expected))
        except ArithmeticError:  # of 1e9999999, which a model may well write
            return 0.0


class FormatMatch:
    """1 when the whole text, up to blanks around it, has the form of a regular expression.

    Args:
        pattern: ``.`` matches the end of a line, too.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, completion: str) -> float:
        return float(self._pattern.fullmatch(completion.strip()) is not None)


class MathVerify:
    """1 when the text's final expression equals the answer's, by math-verify.

    Its own limits of time are off: they use SIGALRM, which needs the main thread, and the process
        has the pool's.
    """

    def __init__(self) -> None:
        require_math_verify()
        # it warns at each call that its limits are off
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, completion: str, answer: Any) -> float:
        from math_verify import parse, verify

        # A bare "1/2" or "\\frac12" is LaTeX only between dollars; what has an anchor of its own is
        # read as it is.
        text = str(answer)
        gold = parse(
            text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None
        )
        return float(
            bool(gold)
            and verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None)
        )


def require_math_verify() -> None:
    """Raises: BackendNotInstalledError."""
    if importlib.util.find_spec("math_verify") is None:
        raise BackendNotInstalledError(
            backend="the reward 'math'",
            package="math-verify",
            command=install_command("math_verify"),
        )


_BY_NAME: dict[str, Callable[..., Callable[..., float]]] = {
    "exact": ExactMatch,
    "number": NumberMatch,
    "format": FormatMatch,
    "math": MathVerify,
}


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


# --- a function of the user's ---------------------------------------------------------------------


def find_function(use: str) -> Callable[..., Any]:
    """The function of ``module:function`` or ``path/to/file.py:function``. Raises: ValueError, and
    what importing raises.
    """
    place, _, name = use.rpartition(":")
    if not place or not name:
        raise ValueError(
            f"there is no reward {use!r}; expected {', '.join(_BY_NAME)}, 'module:function' or "
            "'path/to/file.py:function'"
        )
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"the reward {use!r} is in no file {str(path.absolute())!r}")
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses and pickle look for it
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"the reward {use!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"the reward {use!r}: {place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


class Caller:
    """Calls a reward with the arguments that it has parameters for; found in the process that
    computes it.

    Args:
        use, args: of Reward.
        function: the function itself, where a script gave one.
    """

    def __init__(
        self, use: str, args: Mapping[str, Any], function: Callable[..., Any] | None = None
    ) -> None:
        self._use, self._args, self._given = use, dict(args), function
        self._function: Callable[..., Any] | None = None
        self._names: frozenset[str] = frozenset()

    def find(self) -> Callable[..., Any]:
        """Return the function itself. Raises: ValueError; BackendNotInstalledError."""
        if self._function is None:
            if self._given is not None:
                self._function = self._given
            elif self._use in _BY_NAME:
                try:
                    self._function = _BY_NAME[self._use](**self._args)
                except (TypeError, ArithmeticError, re.error) as error:
                    raise ValueError(
                        f"the reward {self._use!r} does not take {self._args}: {error}"
                    ) from error
            else:
                self._function = find_function(self._use)
            self._names = _names_of(self._function)
        return self._function

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``given`` that the function has parameters for."""
        function = self.find()
        if takes_batches(function):
            chosen = batch_arguments(function, given)
        else:
            everything = {**given, **{alias: given[name] for alias, name in _ALIASES.items()}}
            everything["extra_info"] = _extra_info(given["row"])
            chosen = {name: value for name, value in everything.items() if name in self._names}
        return {**chosen, **({} if self._use in _BY_NAME else self._args)}

    def require_parameters(self) -> None:
        """Raise ValueError for a function that needs more than rewards are given; columns of a
        batch come from the row.
        """
        if takes_batches(self.find()):
            return
        try:
            inspect.signature(self.find()).bind(**self.arguments(dict.fromkeys(GIVEN)))
        except TypeError as error:
            raise ValueError(
                f"the reward {self._use!r} cannot be called: {error}. It is given what it has "
                "parameters for, of "
                f"{', '.join(GIVEN)}, and its args, {self._args}"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._use, self._args, self._given)

    def value(self, returned: Any) -> Any:
        """Return the value of one answer from what the function returned."""
        return one_of_batch(self._use, returned) if takes_batches(self.find()) else returned

    def __call__(self, given: Mapping[str, Any]) -> Any:
        return self.value(self.find()(**self.arguments(given)))


class AsyncCaller(Caller):
    """The same of an ``async def``."""

    async def __call__(self, given: Mapping[str, Any]) -> Any:
        return self.value(await self.find()(**self.arguments(given)))


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether a function is written as TRL's reward functions are: it has a parameter
    ``completions``.
    """
    return "completions" in inspect.signature(function).parameters


def batch_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function written for TRL, for a batch of one answer.

    Each is a list: ``prompts``, ``completions`` (texts, or chats where the prompt is a chat),
    ``completion_ids``, and every other key of the row.
    """
    row, completion = given["row"] or {}, given["completion"]
    prompt = given["chat"]
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    everything: dict[str, Any] = {
        **{name: [value] for name, value in row.items() if name != "prompt"},
        "prompts": [prompt],
        "completions": [[{"role": "assistant", "content": completion}] if is_chat else completion],
        "completion_ids": [given["token_ids"]],
    }
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        names |= everything.keys()
    everything["trainer_state"] = None
    return {name: value for name, value in everything.items() if name in names}


def one_of_batch(use: str, returned: Any) -> Any:
    """Return the value of a batch of one; None counts as 0, as TRL leaves such a reward out of the
    sum.
    """
    try:
        (value,) = returned
    except (TypeError, ValueError):
        raise ValueError(
            f"the reward {use!r} returned {returned!r} for one completion; expected a list of one "
            f"number"
        ) from None
    return 0.0 if value is None else value


def _extra_info(row: Any) -> Any:
    """Return the row's own ``extra_info``, as rows made for verl have it; else the row."""
    return row["extra_info"] if isinstance(row, Mapping) and "extra_info" in row else row


def _names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of its parameters; also all that is given, by its first name, where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return frozenset(each.name for each in parameters) | frozenset(GIVEN if takes_any else ())


def make_caller(
    reward: Reward, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Caller:
    """Return a reward that was found.

    Args:
        reward: of the settings.
        functions: that a script gave, by ``use``.

    Raises: ValueError; BackendNotInstalledError.
    """
    place, _, name = reward.use.rpartition(":")
    given = functions.get(reward.use)
    # Its processes have folders of their own.
    use = (
        f"{Path(place).absolute()}:{name}"
        if place.endswith(".py") and given is None
        else reward.use
    )
    function = Caller(use, reward.args, given).find()
    by_call = getattr(type(function), "__call__", None)  # noqa: B004 - of an object whose __call__ is async
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(by_call)
    caller = (AsyncCaller if is_async else Caller)(use, reward.args, given)
    caller.require_parameters()
    return caller


# --- all of them ----------------------------------------------------------------------------------


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """All rewards of a run, each with a pool of processes.

    Args:
        rewards: of the settings; those ``on_cluster`` run on ``scheduler``'s workers.
        scheduler: of the run.
        functions: that a script gave, by ``Reward.use``.

    Raises: as make_caller, and what starting workers raises.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        scheduler: Scheduler,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._rewards = tuple(rewards)
        self._held = contextlib.ExitStack()
        self._pools: list[RewardPool] = []
        with contextlib.ExitStack() as starting:
            for reward in self._rewards:
                caller = make_caller(reward, functions)
                if reward.on_cluster:
                    job = Job(
                        role=f"reward-{name_of(reward)}",
                        replicas=reward.processes,
                        tasks=[SchedulingSpec(cpu=1)],
                    )
                    pool = RewardPool(
                        scheduler, caller, job, reward.timeout_s, max_restarts=_MAX_RESTARTS
                    )
                    starting.enter_context(pool).initialize()
                else:
                    pool = RewardPool.on_this_machine(
                        caller, reward.processes, reward.timeout_s, max_restarts=_MAX_RESTARTS
                    )
                    starting.enter_context(pool)
                self._pools.append(pool)
            self._held = starting.pop_all()

    async def score(
        self,
        row: Row,
        completion: str,
        *,
        num_tokens: int,
        is_truncated: bool,
        token_ids: Sequence[int] = (),
    ) -> Scored:
        """What an answer is worth.

        Raises: EngineCallError, what a reward raised, with its traceback; ValueError for what is no
            finite number.
        """
        values: tuple[Any, ...] = (
            completion,
            row.answer,
            row.prompt,
            row.source,
            row.entry,
            num_tokens,
            is_truncated,
        )
        given = dict(zip(GIVEN, (*values, list(token_ids), row.asked), strict=True))
        found = await asyncio.gather(*(self._one(pool, given) for pool in self._pools))
        names = [name_of(reward) for reward in self._rewards]
        by_name = {
            name: _as_number(name, value) for name, (value, _) in zip(names, found, strict=True)
        }
        total = sum(reward.weight * by_name[name_of(reward)] for reward in self._rewards)
        return Scored(by_name, total, sum(is_lost for _, is_lost in found))

    async def _one(self, pool: RewardPool, given: Mapping[str, Any]) -> tuple[Any, bool]:
        """What it is worth, and whether it has not come to an end."""
        try:
            return await pool(given), False
        except (RewardTimeoutError, RewardLostError):
            return 0.0, True

    def __exit__(self, *_: object) -> None:
        self._held.close()


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, Mapping) and "score" in value:  # what functions that return more call it
        value = value["score"]
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"the reward {name!r} returned {value!r}; expected a finite number, or a mapping with "
        "'score'"
    )
