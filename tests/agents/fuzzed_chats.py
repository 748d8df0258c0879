"""Fuzzed chats, whose trained tokens must be exactly the sampled ones."""

from __future__ import annotations

import collections
import random
import zlib
from typing import Any

from helmsman.agents._conversation import Conversation, Prompt, Turn
from helmsman.agents._messages import BadRequestError, ChatRequest, Message, ToolCall
from helmsman.agents._template import ChatTemplate
from helmsman.api.generation import GenerationResult
from tests.agents.chat_models import call_text, loosely, tokenizer_of

TEMPLATES = [
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "llama3_1", "llama3_2",
    "deepseekv3", "glm4moe", "gptoss", "lfm2", "nemotron_3_nano", "phi3", "deepseek_r1_distill",
]  # fmt: skip
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
WORDS = [
    "yes", "the answer", "naïve café", "日本語のテキスト", "🙂🙃", "a  b\n\nc", "\n", "<b>",
    '{"x": 1}', "forty two",
]  # fmt: skip


def logprob(prefix: list[int], token: int, version: int) -> float:
    """The model's log-probability, a function of everything before the token."""
    return -(zlib.crc32(repr((prefix, token, version)).encode()) % 10_000) / 1000 - 0.001


class Model:
    """Samples texts as a family's models write them, with the results of an engine."""

    def __init__(self, name: str, seed: str) -> None:
        self.tokenizer = tokenizer_of(name)
        self.template = ChatTemplate(self.tokenizer)
        self.draw = random.Random(seed)
        self.version = 0
        self.thinks = any(
            each in self.tokenizer.chat_template for each in ("</think>", "<|channel|>")
        )
        self.has_tools = "tool" in self.tokenizer.chat_template

    def text(self, prompt_end: str, *, calls: bool) -> str:
        draw, family = self.draw, self.template.format.family
        words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 4)))
        made = [
            ToolCall("", "add", f'{{"a": {draw.randint(0, 99)}, "b": {draw.randint(0, 9)}}}')
            for _ in range(draw.choice([1, 1, 2]) if family != "llama" else 1)
        ]
        if family == "gptoss":
            thought = f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant"
            final = call_text(family, made) if calls else f"<|channel|>final<|message|>{words}"
            return (thought if draw.random() < 0.5 else "") + final
        thought = ""
        if "</think>" in self.tokenizer.chat_template and draw.random() < 0.7:
            opening = "" if prompt_end.rstrip().endswith("<think>") else "<think>\n"
            thought = f"{opening}{draw.choice(WORDS)}\n</think>\n\n"
        if calls:
            lead = "" if family == "llama" or draw.random() < 0.6 else words
            return thought + lead + call_text(family, made)
        return thought + words

    def sample(self, prompt_ids: list[int], prompt_end: str, *, calls: bool) -> GenerationResult:
        text = self.text(prompt_end, calls=calls)
        ids = loosely(self.tokenizer, text, self.draw)
        reason: Any = "stop"
        if self.draw.random() < 0.12:
            ids, reason = ids[: self.draw.randint(1, max(1, len(ids)))] or [5], "length"
        else:
            ends = list(self.template.stop_ids)
            if self.template.format.family == "gptoss":
                end = self.tokenizer.convert_tokens_to_ids("<|call|>" if calls else "<|return|>")
            elif self.template.format.family == "glm":
                end = self.tokenizer.convert_tokens_to_ids(
                    "<|observation|>" if calls else "<|user|>"
                )
            else:
                end = self.draw.choice(ends) if self.draw.random() < 0.05 else self.main_end()
            ids = [*ids, end]
        logprobs, versions = [], []
        for index, id_ in enumerate(ids):
            self.version += self.draw.random() < 0.01
            versions.append(self.version)
            logprobs.append(logprob(prompt_ids + ids[:index], id_, self.version))
        return GenerationResult(
            request_id="", token_ids=ids, logprobs=logprobs, versions=versions, stop_reason=reason
        )

    def main_end(self) -> int:
        eos = self.tokenizer.eos_token_id
        return int(eos if eos in self.template.stop_ids else self.template.stop_ids[0])


def returned(message: Message, draw: random.Random) -> Message:
    """Return the message of an agent: without the reasoning, or with other spacing of arguments."""
    calls = tuple(
        ToolCall(f"other-{index}", each.name, each.arguments.replace(": ", " :  "))
        for index, each in enumerate(message.tool_calls)
    )
    kept = message.reasoning if draw.random() < 0.3 else ""
    content = "edited" if draw.random() < 0.03 else message.content
    return Message(role="assistant", content=content, reasoning=kept, tool_calls=calls)


def is_ambiguous(conversation: Conversation, prompt: Prompt) -> bool:
    """Whether a turn of the chat has a sibling that an agent cannot tell from it."""
    turns = prompt.parent.line() if prompt.parent else []
    tokens: dict[bytes, set[tuple[int, ...]]] = collections.defaultdict(set)
    for turn in conversation.turns:
        tokens[turn.digest].add(tuple(turn.result.ids))
    return any(len(tokens[turn.digest]) > 1 for turn in turns)


def converse(name: str, seed: str, counts: collections.Counter[str]) -> None:
    model = Model(name, seed)
    draw = model.draw
    conversation = Conversation(model.template)
    tools = [ADD] if model.has_tools and draw.random() < 0.8 else []
    chats: list[list[Message]] = [[Message(role="user", content=draw.choice(WORDS))]]
    if draw.random() < 0.5:
        chats[0].insert(0, Message(role="system", content="be brief"))
    seen: dict[int, tuple[list[int], GenerationResult]] = {}
    kept: list[Turn] = []
    plain = set() if model.thinks else {id(chats[0])}
    """Chats whose model turns are written as the template writes them."""
    for _ in range(draw.randint(2, 7)):
        chat = draw.choice(chats) if draw.random() < 0.25 else chats[-1]
        try:
            prompt = conversation.prepare(ChatRequest(messages=chat, tools=tools))
        except BadRequestError:  # such as two calls at once, for Llama 3.1
            counts["rejected"] += 1
            return
        ids = prompt.ids()
        if id(chat) in plain and not prompt.fork and not is_ambiguous(conversation, prompt):
            assert model.template.decode(ids) == model.template.render(chat, tools)
            counts["plain"] += 1
        results = [
            model.sample(ids, prompt.rendered.end, calls=bool(tools) and draw.random() < 0.6)
            for _ in range(draw.choice([1, 1, 1, 2]))
        ]
        found = [conversation.describe(prompt, each) for each in results]
        turns, choices = [turn for turn, _ in found], [choice for _, choice in found]
        conversation.add(prompt, turns)
        if draw.random() < 0.05:  # the agent leaves before it has read the answer, and asks again
            conversation.withdraw(turns)
            counts["withdrawn"] += 1
            continue
        for turn, result in zip(turns, results, strict=True):
            seen[id(turn)] = ids, result
        kept += turns
        choice = draw.choice(choices)
        counts["calls"] += len(choice.message.tool_calls)
        longer = [*chat, returned(choice.message, draw)]
        calls = choice.message.tool_calls
        if draw.random() < 0.03 and len(longer) > 3:
            longer = [longer[0], *longer[-1:]]  # the agent drops history
        for call in calls:
            longer.append(Message(role="tool", content=draw.choice(WORDS), tool_call_id=call.id))
        if not calls or draw.random() < 0.2:
            longer.append(Message(role="user", content=draw.choice(WORDS)))
        chats.append(longer)
        text = model.template.decode(results[choices.index(choice)].token_ids[:-1])
        is_plain = text == choice.message.content == longer[-2].content and choice.finish == "stop"
        if id(chat) in plain and is_plain:
            plain.add(id(longer))
    counts["turns"] += len(kept)
    counts["forks"] += len(conversation.forks)
    check(conversation, kept, seen)


def check(
    conversation: Conversation,
    kept: list[Turn],
    seen: dict[int, tuple[list[int], GenerationResult]],
) -> None:
    samples = conversation.samples("id", 1.0)
    engine = collections.Counter(
        (tuple(prompt), tuple(result.token_ids), tuple(result.logprobs))
        for prompt, result in (seen[id(turn)] for turn in kept)
    )
    trained: collections.Counter[Any] = collections.Counter()
    for sample in samples:
        size = len(sample.input_ids)
        assert size == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)
        begin = None
        for index in range(size + 1):
            is_trained = index < size and sample.loss_mask[index]
            if is_trained:
                prefix, token = sample.input_ids[:index], sample.input_ids[index]
                expected = logprob(prefix, token, sample.versions[index])
                assert abs(expected - sample.logprobs[index]) < 1e-9
            is_end = index in sample.turn_ends
            if begin is not None and (is_end or not is_trained):
                trained[
                    tuple(sample.input_ids[:begin]),
                    tuple(sample.input_ids[begin:index]),
                    tuple(sample.logprobs[begin:index]),
                ] += 1
                begin = None
            if is_trained and begin is None:
                begin = index
    assert trained == engine  # each sampled token is trained on once, after its own prompt


def fuzz(name: str, numbers: range) -> None:
    """Check chats with these numbers for one template."""
    counts: collections.Counter[str] = collections.Counter()
    for number in numbers:
        converse(name, f"{name}/{number}", counts)
    print(name, dict(counts))
    assert counts["turns"] > len(numbers)
