"""Built-in and user-defined reward functions.

A user-defined function receives those of these arguments that it has parameters for:

    completion (solution_str)   the answer's text, without special tokens
    answer (ground_truth)       the row's correct answer
    prompt                      the text given to the model, template included
    source (data_source)        the row's source
    row                         the whole row
    extra_info                  the row's ``extra_info``, or the whole row without one
    num_tokens, is_truncated    length of the answer, and whether it was cut off
    token_ids                   tokens of the answer
    chat                        the prompt as it is in the row: a text, a chat or token ids

A function with a parameter ``completions`` is called like TRL's reward functions, once for all
answers to a prompt, with lists: ``prompts``, ``completions``, ``completion_ids`` and every other
key of the row; it returns a list. One with parameters ``queries`` and ``labels`` is called like
OpenRLHF's, with lists of texts: ``queries`` (prompt and answer), ``prompts`` and ``labels`` (the
correct answers); it returns a tensor or list, or a dict with one as ``rewards``. Other functions
are called once per answer. A function written for verl can use the names in parentheses.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.extras import install_command
from helmsman.api.plain import finite
from helmsman.recipes.settings import Reward

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
_OF_BATCHES = ({"completions"}, {"queries", "labels"})
"""Parameters by which functions written for TRL and for OpenRLHF are recognised."""
_ALIASES = {"solution_str": "completion", "ground_truth": "answer", "data_source": "source"}
_ANSWERS = ("answer", "ground_truth", "labels")
"""Parameters that are the row's correct answer."""
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


# --- rewards by name ------------------------------------------------------------------------------


class ExactMatch:
    """1 when completion and answer are equal, ignoring surrounding whitespace."""

    def __call__(self, completion: str, answer: Any) -> float:
        """Return 1.0 or 0.0."""
        return float(completion.strip() == _given(answer).strip())


class NumberMatch:
    """1 when the last numbers of completion and answer are equal.

    Args:
        tolerance: Largest relative difference.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self._tolerance = Decimal(str(tolerance))

    def __call__(self, completion: str, answer: Any) -> float:
        """Return 1.0 or 0.0."""
        found, expected = _last_number(completion), _last_number(_given(answer))
        if found is None or expected is None:
            return 0.0
        try:
            return float(abs(found - expected) <= self._tolerance * abs(expected))
        except ArithmeticError:  # models may write numbers such as 1e9999999
            return 0.0


class FormatMatch:
    """1 when the stripped completion fully matches a regular expression.

    Args:
        pattern: The regular expression; ``.`` also matches a newline.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, completion: str) -> float:
        """Return 1.0 or 0.0."""
        return float(self._pattern.fullmatch(completion.strip()) is not None)


class MathVerify:
    """1 when the completion's final expression equals the answer, by math-verify.

    math-verify's timeouts use SIGALRM, which works only in the main thread. They are disabled,
    because the pool enforces its own time limit.
    """

    def __init__(self) -> None:
        require_math_verify()
        # math-verify warns at each call that its timeouts are disabled
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, completion: str, answer: Any) -> float:
        """Return 1.0 or 0.0."""
        from math_verify import parse, verify

        # math-verify reads a bare "1/2" or "\\frac12" as LaTeX only between dollars. Texts with
        # dollars or \\boxed are passed unchanged.
        text = _given(answer)
        gold = parse(
            text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None
        )
        return float(
            bool(gold)
            and verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None)
        )


def require_math_verify() -> None:
    """Check that math-verify is installed.

    Raises:
        BackendNotInstalledError: It is not.
    """
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


def _given(answer: Any) -> str:
    """Return the text of an answer, which must be there."""
    if answer is None:
        raise ValueError("the row has no answer")
    return str(answer)


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


# --- user-defined functions -----------------------------------------------------------------------


def find_function(use: str, what: str = "reward") -> Callable[..., Any]:
    """Import the function of ``module:function`` or ``path/to/file.py:function``.

    Args:
        use: The function.
        what: Its purpose, for messages.

    Raises:
        ValueError: There is no such file, module or function.
        Exception: Any error that the import raises.
    """
    place, _, name = use.rpartition(":")
    if not place or not name:
        raise ValueError(
            f"there is no {what} {use!r}; expected "
            f"{', '.join(_BY_NAME) + ', ' if what == 'reward' else ''}'module:function' or "
            "'path/to/file.py:function'"
        )
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(
                f"the {what} {use!r} cannot be loaded: there is no file {str(path.absolute())!r}"
            )
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look it up there
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"the {what} {use!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"the {what} {use!r}: {place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


class Caller:
    """Calls a reward with the arguments that it has parameters for.

    The function is resolved in the process that computes the reward.

    Args:
        use: ``Reward.use``.
        args: ``Reward.args``.
        function: The function, if the script passed one.
    """

    def __init__(
        self, use: str, args: Mapping[str, Any], function: Callable[..., Any] | None = None
    ) -> None:
        self._use, self._args, self._given = use, dict(args), function
        self._function: Callable[..., Any] | None = None
        self._names: frozenset[str] = frozenset()

    def find(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            ValueError: There is no such function, or it rejects ``args``.
            BackendNotInstalledError: A built-in reward needs a package that is missing.
        """
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

    @property
    def takes_batches(self) -> bool:
        """Whether the function follows TRL's or OpenRLHF's signature."""
        names = inspect.signature(self.find()).parameters.keys()
        return any(names >= parameters for parameters in _OF_BATCHES)

    def calls(self, answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the arguments of each call that scores the answers.

        Args:
            answers: The arguments for rewards about each answer, by the names in ``GIVEN``.

        Returns:
            Keyword arguments that the function has parameters for: of one call if it takes
            batches, otherwise of one call per answer.
        """
        if self.takes_batches:
            return [{**batch_arguments(self.find(), answers), **self._args}]
        extra = {} if self._use in _BY_NAME else self._args
        return [{**self._one(given), **extra} for given in answers]

    def _one(self, given: Mapping[str, Any]) -> dict[str, Any]:
        everything = {**given, **{alias: given[name] for alias, name in _ALIASES.items()}}
        everything["extra_info"] = _extra_info(given["row"])
        return {name: value for name, value in everything.items() if name in self._names}

    def require_parameters(self) -> None:
        """Check that the function requires only arguments that rewards receive.

        Functions that take batches are not checked, because their columns come from the row.

        Raises:
            ValueError: The function requires other arguments.
        """
        if self.takes_batches:
            return
        (arguments,) = self.calls([dict.fromkeys(GIVEN)])
        try:
            inspect.signature(self.find()).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"the reward {self._use!r} cannot be called: {error}. A reward may have the "
                "parameters "
                f"{', '.join(GIVEN)}, and those of its args, {self._args}."
            ) from error

    def require_row(self, row: Mapping[str, Any], answer: Any) -> None:
        """Check that a row has the values that the function requires.

        Args:
            row: The row.
            answer: Its correct answer.

        Raises:
            ValueError: It has no value for a parameter without a default, or a number of which a
                built-in reward cannot know the digits.
        """
        (found,) = self.calls([{**dict.fromkeys(GIVEN, ""), "row": row, "answer": answer}])
        for name, each in inspect.signature(self.find()).parameters.items():
            is_answer = name in _ANSWERS and found.get(name, None) in (None, [None])
            is_optional = each.default is not each.empty or each.kind in _OPEN
            if not is_optional and (is_answer or name not in found):
                raise ValueError(
                    f"the reward {self._use!r} requires {name!r}, and the row has "
                    f"{', '.join(map(repr, row))}"
                )
        is_float = self._use in _BY_NAME and isinstance(answer, float)
        if is_float and (self._use == "exact" or math.isinf(answer)):
            raise ValueError(
                f"the reward {self._use!r} takes texts and whole numbers, and the answer is "
                f"{answer}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._use, self._args, self._given)

    def values(self, returned: Sequence[Any], num_answers: int) -> list[Any]:
        """Return the reward of each answer from the results of ``calls``.

        Args:
            returned: The results.
            num_answers: Number of answers.

        Returns:
            A number for each answer, None where the reward does not apply, or an error.

        Raises:
            ValueError: A function that takes batches did not return a value for each answer.
        """
        is_batch = self.takes_batches
        values = values_of_batch(self._use, returned[0], num_answers) if is_batch else returned
        return [_number_of(value) for value in values]

    def __call__(self, answers: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function, and return the reward of each answer."""
        function = self.find()
        return self.values([function(**each) for each in self.calls(answers)], len(answers))


class AsyncCaller(Caller):
    """A Caller of an ``async def`` function."""

    async def __call__(self, answers: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Call the function, and return the reward of each answer."""
        function = self.find()
        calls = (function(**each) for each in self.calls(answers))
        return self.values(await asyncio.gather(*calls), len(answers))


def batch_arguments(
    function: Callable[..., Any], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the arguments of a function written for TRL or OpenRLHF.

    Args:
        function: The function.
        answers: The arguments for rewards about each answer, by the names in ``GIVEN``; the answers
            have the same row.

    Returns:
        Lists with one entry per answer. TRL: ``prompts``, ``completions`` (texts, or chats where
        the prompt is a chat), ``completion_ids``, and every other key of the row. OpenRLHF:
        ``queries``, ``prompts`` and ``labels``.
    """
    row, prompt = answers[0]["row"] or {}, answers[0]["chat"]
    completions: list[Any] = [each["completion"] for each in answers]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    everything: dict[str, Any] = {
        **{name: [value] * len(answers) for name, value in row.items() if name != "prompt"},
        "prompts": [prompt] * len(answers),
        "completions": completions,
        "completion_ids": [each["token_ids"] for each in answers],
    }
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters}
    if names >= _OF_BATCHES[1]:
        return {
            "queries": [f"{each['prompt']}{each['completion']}" for each in answers],
            "prompts": [each["prompt"] for each in answers],
            "labels": [each["answer"] for each in answers],
        }
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        names |= everything.keys()
    everything |= {"trainer_state": None, "log_extra": _drop, "log_metric": _drop}
    return {name: value for name, value in everything.items() if name in names}


def _drop(*_: Any) -> None:
    """Drop values for TRL's logs; no tracker of this run is reachable from a reward's process."""


def values_of_batch(use: str, returned: Any, num_answers: int) -> list[Any]:
    """Return the rewards that a function written for TRL or OpenRLHF computed.

    Of OpenRLHF's dict only ``rewards`` counts.

    Args:
        use: ``Reward.use``.
        returned: Result of the function.
        num_answers: Number of answers that it was called for.

    Returns:
        One reward per answer.

    Raises:
        ValueError: ``returned`` is not a series of ``num_answers`` values.
    """
    rewards: Any = returned.get("rewards") if isinstance(returned, Mapping) else returned
    try:
        values = None if isinstance(rewards, str | bytes | Mapping | Set) else list(rewards)
    except TypeError:
        values = None
    if values is None or len(values) != num_answers:
        found = "" if values is None else f"{len(values)} values, "
        raise ValueError(
            f"the reward {use!r} returned {found}{returned!r:.200}, for {num_answers} completions; "
            f"expected a list of {num_answers} numbers, one per completion"
        )
    return values


def _number_of(value: Any) -> float | ValueError | None:
    """Convert a reward in the process that computed it, since the script may lack torch."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if value is None or (number := finite(value)) is not None:
        return None if value is None else number
    return ValueError(
        f"returned {value!r:.200}; expected a finite number, a mapping with 'score', or None where "
        "the reward does not apply"
    )


def _extra_info(row: Any) -> Any:
    """Return the row's ``extra_info``, which rows made for verl have, or the row."""
    return row["extra_info"] if isinstance(row, Mapping) and "extra_info" in row else row


def _names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters; with ``**kwargs`` also all names of ``GIVEN``."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return frozenset(each.name for each in parameters) | frozenset(GIVEN if takes_any else ())


def make_caller(
    reward: Reward, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Caller:
    """Resolve a reward.

    Args:
        reward: The settings of the reward.
        functions: Functions that the script passed, by ``use``.

    Returns:
        The caller of the reward.

    Raises:
        ValueError: There is no such reward, or it cannot be called.
        BackendNotInstalledError: A built-in reward needs a package that is missing.
    """
    place, _, name = reward.use.rpartition(":")
    given = functions.get(reward.use)
    # The reward processes have other working directories, so make the path absolute.
    use = (
        f"{Path(place).absolute()}:{name}"
        if place.endswith(".py") and given is None
        else reward.use
    )
    function = Caller(use, reward.args, given).find()
    by_call = getattr(type(function), "__call__", None)  # noqa: B004 - for an object whose __call__ is async
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(by_call)
    caller = (AsyncCaller if is_async else Caller)(use, reward.args, given)
    caller.require_parameters()
    return caller
