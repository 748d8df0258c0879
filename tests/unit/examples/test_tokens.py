"""Test that the small tokenizer is lossless, and that its prompts are short."""

from __future__ import annotations

from examples.common.settings import Settings
from examples.common.tasks import load_tasks
from examples.common.tokens import CharTokenizer, longest, make_tokenizer

PROMPTS = [
    "Add the numbers 3, 4\nand 5.",
    "Add the numbers 10, 2\nand 7.",
    "Add the numbers 8, 6\nand 31.",
]


def test_char_tokenizer_decodes_answers() -> None:
    tokenizer = CharTokenizer(PROMPTS, ["12", "-1 9", "a, b\n"])

    for text in ("12", "-1 9", "a, b\n", "9 9"):
        ids = tokenizer.encode_answer(text)
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids) == text


def test_char_tokenizer_shared_text_one_token() -> None:
    tokenizer = CharTokenizer(PROMPTS, ["12"])

    # "Add the numbers " 1 0 ", " 2 "\n" "and" ... "." and the separator
    assert len(tokenizer.encode_prompt(PROMPTS[1])) <= 11
    assert tokenizer.decode(tokenizer.encode_prompt(PROMPTS[1])) == PROMPTS[1]


def test_char_tokenizer_unknown_character() -> None:
    tokenizer = CharTokenizer(PROMPTS, ["12"])

    assert len(tokenizer.encode_answer("1Ω2")) == 4


def test_make_tokenizer_demo_prompts_short() -> None:
    tasks = load_tasks(Settings(num_tasks=1000, task_params={"min_length": 5, "max_length": 8}))
    tokenizer = make_tokenizer(None, tasks)

    assert longest(tasks, tokenizer) == (18, 9)
    for task in tasks.held_out[:20]:
        assert tokenizer.decode(tokenizer.encode_prompt(task.prompt)) == task.prompt
