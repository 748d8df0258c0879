"""Judges: models that reward answers, served as rollout roles whose weights stay as they are."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from helmsman import GenerationResult, Job, RolloutController, SamplingParams, Scheduler
from helmsman.api.errors import HelmsmanError
from helmsman.api.extras import needed_by
from helmsman.recipes.messages import is_token_ids, messages_of
from helmsman.recipes.prompts import Row
from helmsman.recipes.rewards import GIVEN, Caller, make_caller
from helmsman.recipes.roles import ENGINES, make_rollout
from helmsman.recipes.settings import Data, GRPOSettings, Reward, Train, name_of
from helmsman.recipes.tokens import ChatTokenizer

Value = float | Exception | None
"""A reward of an answer: a number, the error, or None if it does not apply to the answer."""
Pool = Callable[[Sequence[Mapping[str, Any]]], Awaitable[Any]]
"""Computes the rewards of answers from the arguments for rewards about each."""
_CLASSIFIER = "helmsman.engines.classifier.ClassifierEngine"
_CLASSIFIES = "ForSequenceClassification"
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the names of architectures."""
_OF_TEXT = ("parse", "max_new_tokens", "engine")
"""Settings of language models, which reward models do not have."""
_THINKING = re.compile(r"(?s)^\s*<think>(?:.*</think>|.*)")
"""Text before a verdict, whose numbers are none; it may be cut off."""
_MOST_KEPT = 4096
"""Number of newest texts whose answers are kept."""


class LastNumber:
    """The number that the first group of a regular expression has in its last match.

    Args:
        pattern: The regular expression.
    """

    def __init__(self, pattern: str) -> None:
        self._re = re.compile(pattern)
        if not self._re.groups:
            raise re.error("it has no group", pattern)

    def __call__(self, completion: str) -> float:
        """Return the number after all thinking; raise ValueError if there is none."""
        verdict = _THINKING.sub("", completion)
        hits = [each[1] for each in self._re.finditer(verdict)]
        try:
            return float(hits[-1])
        except (IndexError, TypeError, ValueError):
            raise ValueError(f"{self._re.pattern!r} finds {hits[-1:]}, expected a number") from None


class Judge:
    """The model of a reward, and the texts that it reads.

    Args:
        reward: The settings of the reward.
        settings: The settings of the run.
        functions: Functions that the script passed, by name.

    Raises:
        ValueError: The folder has no model that can judge, or the settings do not fit it.
        OSError: A file cannot be read.
        BackendNotInstalledError: A package is missing.
    """

    def __init__(
        self, reward: Reward, settings: GRPOSettings, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.rollout: RolloutController
        """The started instances."""
        self.reward, self.name, self._settings = reward, name_of(reward), settings
        self._at = f"rewards[{settings.rewards.index(reward)}]"
        self._folder = str(Path(reward.judge or "").absolute())
        self._config = self._read_config()
        self._label = self._find_label() if self.is_classifier else 0
        self._template: Any = self._compile() if reward.prompt else None
        self.parser = None if self.is_classifier else self._make_parser(functions)
        self._longest = ""
        data = Data(train="", template_args=reward.args)
        self.tokenizer = ChatTokenizer(self._folder, data, needs_end=not self.is_classifier)

    # --- the settings -----------------------------------------------------------------------------

    def _wrong(self, field: str, found: str, expected: str) -> ValueError:
        return ValueError(f"{self._at}.{field} {found}, expected {expected}")

    def _read_config(self) -> dict[str, Any]:
        """Return config.json of a model that can judge with these settings."""
        path, reward = Path(self._folder) / "config.json", self.reward
        files = {each.suffix for each in path.parent.glob("*")}
        if not path.is_file() or not files & {".safetensors", ".bin"}:
            lacks = "weights (*.safetensors, *.bin)" if path.is_file() else "config.json"
            raise self._wrong("judge", f"is {reward.judge!r}, without {lacks}", "a model's folder")
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise self._wrong("judge", f"has {path}: {error}", "a mapping") from error
        if (path.parent / "adapter_config.json").exists():  # transformers would add the adapter
            whole = "a whole model; merge it into its base model (merge_and_unload)"
            raise self._wrong("judge", f"is {reward.judge!r}, which holds a PEFT adapter", whole)
        kind = (config.get("architectures") or ["model of unknown architecture"])[0]
        self.is_classifier = kind.endswith(_CLASSIFIES)
        has_code = f"AutoModel{_CLASSIFIES}" in (config.get("auto_map") or {})
        if has_code:
            kind += " with code of its own (auto_map)"
        if has_code or not kind.endswith((_CLASSIFIES, *_GENERATES)):
            known = f"...{_CLASSIFIES} or ...ForCausalLM; a function (use) can call its own code"
            raise self._wrong("judge", f"is {reward.judge!r}, which holds a {kind}", known)
        for name in _OF_TEXT if self.is_classifier else ("label",):
            if (value := getattr(reward, name)) != getattr(Reward(), name):
                raise self._wrong(name, f"is {value!r}", f"none for a {kind}")
        cluster, rollout = self._settings.cluster, self._settings.rollout
        is_off = cluster.devices_per_node and not reward.devices
        engine = "hf" if is_off or rollout.engine not in ENGINES else rollout.engine
        self._engine = _CLASSIFIER if self.is_classifier else reward.engine or engine
        takes_one = self.is_classifier or (cluster.devices_per_node and self._engine == "hf")
        if takes_one and reward.devices > 1:
            by = kind if self.is_classifier else "judge with the engine 'hf'"
            raise self._wrong("devices", f"is {reward.devices}", f"1 or 0 for a {by}")
        reads_pairs = self.is_classifier and (config.get("type_vocab_size") or 0) < 2
        if not reward.prompt and not reads_pairs:
            example = "the text that it reads, such as 'Rate from 0 to 9: {{ completion }}'"
            raise self._wrong("prompt", f"is not given for a {kind}", example)
        return config

    def _find_label(self) -> int:
        count = self._config.get("num_labels") or 2  # transformers' number without names
        names = self._config.get("id2label") or {each: f"LABEL_{each}" for each in range(count)}
        labels, label = [str(names[each]) for each in sorted(names, key=int)], self.reward.label
        if label in labels or (label is None and len(labels) == 1):
            return labels.index(str(label)) if label else 0
        if not isinstance(label, int) or not 0 <= label < len(labels):
            known = f"its number from 0, or one of {', '.join(map(repr, labels))}"
            raise self._wrong("label", f"is {label!r} for a judge with {len(labels)}", known)
        return label

    def _compile(self) -> Any:
        """Return the template of the text, which must contain the answer."""
        with needed_by("the prompt of a judge", "jinja2"):
            import jinja2.meta
            import jinja2.sandbox

        text = self.reward.prompt
        jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            text = Path(text).read_text(encoding="utf-8") if text.endswith(".jinja") else text
            names = jinja2.meta.find_undeclared_variables(jinja.parse(text))
        except (OSError, UnicodeError, jinja2.TemplateSyntaxError) as error:
            raise self._wrong("prompt", f"is no template: {error}", "one of Jinja") from error
        if "completion" not in names:
            raise self._wrong("prompt", f"is {text!r:.200}", "the answer in it: {{ completion }}")
        return jinja.from_string(text)

    def _make_parser(self, functions: Mapping[str, Callable[..., Any]]) -> Caller:
        parse = self.reward.parse
        try:
            given = {parse: LastNumber(parse)} if "(" in parse else functions
            return make_caller(Reward(use=parse), given)
        except (ValueError, re.error) as error:
            known = "a regular expression with a group, such as 'Score: ([0-9.]+)', or a function"
            raise self._wrong("parse", f"is {parse!r} ({error})", known) from error

    def require_row(self, row: Row) -> None:
        """Check that a row has what the judge reads of it.

        Raises:
            ValueError: The template cannot be filled in, the judge's chat template refuses the row
                or leaves a part out, or a prompt of tokens has no messages.
        """
        given: dict[str, Any] = {**dict.fromkeys(GIVEN, ""), "completion": "x", "row": row.entry}
        given |= {"num_tokens": 1, "is_truncated": False, "token_ids": [0], "source": row.source}
        given |= {"answer": row.answer, "prompt": row.prompt, "chat": row.asked}
        try:
            if self._template is not None:
                self._longest = max(self._longest, self._text(given), key=len)
            elif is_token_ids(row.asked):
                raise ValueError(f"{self._at}.judge reads texts and chats, not token ids")
            elif self.tokenizer.tokenizer.chat_template:
                self.tokenizer.encode_chat(row.asked, "x")
        except ValueError as error:
            advice = f"Mend the row, or give another {self._at}.prompt"
            raise ValueError(f"unusable row ({row.place}): {error}. {advice}") from error

    # --- the model --------------------------------------------------------------------------------

    def serve(self, scheduler: Scheduler, job: Job) -> None:
        """Start the instances; call it when all rows were checked.

        Args:
            scheduler: The scheduler of the run.
            job: The job of the judge.
        """
        reward, settings, replace = self.reward, self._settings, msgspec.structs.replace
        rollout, cluster = settings.rollout, settings.cluster
        arguments = {"max_model_len": self._max_len(), **reward.engine_args}
        settings = replace(
            settings,
            model=self._folder,
            train=Train(),  # without adapters
            cluster=replace(cluster, placement="separated", rollout_devices=reward.devices or 1),
            rollout=replace(rollout, engine=self._engine, engine_args=arguments),
        )
        self.rollout = make_rollout(settings, scheduler, job, reward.timeout_s)
        self.rollout.initialize()

    def _max_len(self) -> int:
        """Return the maximum tokens of a text, with those that follow it."""
        if self.is_classifier:
            longest: int = min(self.tokenizer.tokenizer.model_max_length, 1 << 30)
            return 1 + min(longest, self.tokenizer.max_positions)
        longest = len(self.tokenizer.encode(self._longest)[1])
        # Its tokenizer may write an answer of the policy in more tokens.
        longest += 2 * (self._settings.max_model_len - self._settings.data.max_prompt_tokens)
        return min(longest + self.reward.max_new_tokens, self.tokenizer.max_positions)

    def encode(self, given: Mapping[str, Any]) -> list[int]:
        """Return the tokens that the judge reads about an answer.

        Args:
            given: The arguments for rewards about the answer, by the names in ``GIVEN``.

        Raises:
            ValueError: The template or the tokenizer refuses the answer.
        """
        texts = [_text_of(given), given["completion"]]
        if self._template is not None:
            texts = [self._text(given)]
            if not self.is_classifier:
                return self.tokenizer.encode(*texts)[1]
        elif self.tokenizer.tokenizer.chat_template:
            return self.tokenizer.encode_chat(given["chat"], given["completion"])
        return list(self.tokenizer.tokenizer(*texts)["input_ids"])

    def _text(self, given: Mapping[str, Any]) -> str:
        named = {**given["row"], **given, "prompt": _text_of(given)}
        given = {name: value for name, value in named.items() if value is not None}  # no word None
        try:
            return str(self._template.render(given))
        except Exception as error:  # templates may raise any exception
            raise ValueError(
                f"{self._at}.prompt cannot be filled in ({error}), expected only {', '.join(given)}"
            ) from error

    def score(self, logits: Sequence[float]) -> float:
        """Return the reward of a reward model from the logits of its labels.

        It is the logit of the only label, or of a regression. Otherwise it is the probability of
        the chosen label, alone if several labels can apply.
        """
        value, kind = logits[self._label], self._config.get("problem_type")
        if len(logits) > 1 and kind != "regression":
            others = [0.0, value] if kind == "multi_label_classification" else logits
            value = 1 / sum(math.exp(min(each - value, 700.0)) for each in others)
        if not math.isfinite(value):
            raise ValueError(f"the judge {self.name!r} returned {value}, expected a finite number")
        return value


def _text_of(given: Mapping[str, Any]) -> str:
    """Return the text of a prompt, without the template of the policy."""
    asked = given["chat"]
    if isinstance(asked, str) or is_token_ids(asked):
        return asked if isinstance(asked, str) else str(given["prompt"])
    return "\n\n".join(each["content"] for each in messages_of(asked, "'prompt'"))


class JudgeReward:
    """The reward of a judge. The same text is judged once.

    Args:
        judge: The judge, which is served.
        parse: Processes that read its answers; None for a reward model.
    """

    def __init__(self, judge: Judge, parse: Pool | None) -> None:
        self._judge, self._parse = judge, parse
        self._asked: dict[bytes, Future[GenerationResult]] = {}
        most, ends = judge.reward.max_new_tokens, judge.tokenizer.stop_ids
        self._sampling = SamplingParams(max_new_tokens=most, temperature=0.0, stop_token_ids=ends)

    async def __call__(self, answers: Sequence[Mapping[str, Any]]) -> list[Value]:
        """Return the reward of one answer: a number, or None where it does not apply.

        Raises:
            HelmsmanError: The judge did not answer.
            ValueError: It does not take the answer, or its own cannot be read.
        """
        (given,) = answers
        ids = self._judge.encode(given)
        key = hashlib.sha256(repr(ids).encode()).digest()
        asked = self._asked.get(key)
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception())):
            for old in [*self._asked][: max(0, len(self._asked) - _MOST_KEPT + 1)]:
                self._asked.pop(old, None)
            asked = self._asked[key] = self._judge.rollout.submit(ids, self._sampling)
        # On any event loop. A caller that is cancelled leaves the answer to the others.
        result = await asyncio.shield(asyncio.wrap_future(asked))
        if self._parse is None:
            return [self._judge.score(result.logprobs)]
        tokenizer = self._judge.tokenizer
        begins = tokenizer.decode(ids[-16:]).rstrip().endswith("<think>")  # in the chat template
        verdict = "<think>" * begins + tokenizer.decode(result.token_ids)
        (found,) = await values_of(self._parse, [{**given, "completion": verdict}])
        if isinstance(found, Exception):
            end = ", cut off at max_new_tokens" if result.stop_reason == "length" else ""
            text = f"{verdict[-400:]!r}{end}"  # judges reason first
            raise ValueError(f"the judge {self._judge.name!r} answered {text}: {found}")
        return [found]


async def values_of(pool: Pool, answers: Sequence[Mapping[str, Any]]) -> list[Value]:
    """Return the rewards of answers; the error of a call stands for all of them.

    Args:
        pool: Computes the rewards.
        answers: The arguments for rewards about each answer, by the names in ``GIVEN``.
    """
    try:
        return list(await pool(answers))
    except (HelmsmanError, ValueError) as error:
        return [error] * len(answers)
