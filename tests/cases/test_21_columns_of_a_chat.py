"""Columns, roles and weights that belong to a chat: they count in the tokens, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.tiny_model import make_model
from tests.cases.inputs import ANSWER, USER, load, texts, tokenizer_folder

TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<eot>{% endgeneration %}{% else %}{{ m.content }}<eot>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
NO = {"role": "assistant", "content": "no"}
CALL = {"name": "f", "arguments": {"a": 1}}
CHAT = "<user>hi<eot><assistant>yo<eot>"
IGNORED: list[tuple[str, Any]] = [
    ("history", [["a", "b"]]),
    ("documents", [{"text": "x"}]),
    ("images", ["a.png"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("case"), TEMPLATE)


def refusal(recipe: str, data: Any, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller checks the message
        load(recipe, data, folder)
    return str(caught.value).removeprefix("unusable row (data, row 1): ")


# --- columns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("SFT", {"conversations": [HUMAN, GPT]}),
        ("SFT", {"messages": [USER, ANSWER]}),
        ("SFT", {"messages": [{"role": "system", "content": "Be"}, USER, ANSWER]}),
        ("SFT", {"prompt": "hi", "answer": "yo"}),
        ("SFT", {"prompt": USER, "completion": [ANSWER]}),
        ("DPO", {"prompt": "hi", "chosen": "yo", "rejected": "no"}),
        ("DPO", {"chosen": [USER, ANSWER], "rejected": [USER, NO]}),
    ],
)
def test_system_column(recipe: str, row: dict[str, Any], column: str, folder: Path) -> None:
    (found,) = load(recipe, [{**row, column: "Be"}], folder)
    assert texts(found, folder, trained=False)[0] == f"<system>Be<eot>{CHAT}"
    assert texts(found, folder)[0] == "yo<eot>"


def test_system_column_of_a_prompt(folder: Path) -> None:
    (found,) = load("GRPO", [{"prompt": "hi", "answer": "1", "system": "Be"}], folder)
    assert found.prompt == "<system>Be<eot><user>hi<eot><assistant>"
    begun = "<system>Be<eot><user>hi<eot><assistant>"
    (found,) = load("GRPO", [{"prompt": begun, "answer": "1", "system": "Be"}], folder)
    assert found.prompt == begun


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("column", ["system", "input", "history", "documents", "functions"])
def test_empty_column(column: str, value: Any, folder: Path) -> None:
    (found,) = load("SFT", [{"prompt": "hi", "answer": "yo", column: value}], folder)
    assert texts(found, folder, trained=False) == [CHAT]


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("SFT", {"prompt": "hi", "answer": "yo"}),
        ("SFT", {"messages": [USER, ANSWER]}),
        ("DPO", {"prompt": "hi", "chosen": "yo", "rejected": "no"}),
        ("GRPO", {"prompt": "hi", "answer": "yo"}),
    ],
)
@pytest.mark.parametrize(("column", "value"), IGNORED)
def test_refused_column(
    recipe: str, row: dict[str, Any], column: str, value: Any, folder: Path
) -> None:
    assert refusal(recipe, [{**row, column: value}], folder).startswith(f"'{column}' is [")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "system", "content": "Be"}, USER, ANSWER], "system": "Do"},
            "'system' is 'Do', expected a text that is in 'messages'. Join them",
        ),
        ({"prompt": "hi", "answer": "yo", "system": ["Do"]}, "'system' is ['Do'], expected a text"),
        ({"prompt": [4, 5], "answer": "yo", "system": "Do"}, "'prompt' is [4, 5], expected mess"),
        ({"prompt": "hi", "answer": "yo", "input": "Hund"}, "'input' is 'Hund', expected a text"),
        ({"prompt": "hi", "completion": "no", "label": False}, "'label' is False, expected true"),
        ({"messages": [USER, NO], "kto_tag": "False"}, "'kto_tag' is 'False', expected true"),
        ({"input_ids": [4, 5], "response_mask": [0, 1]}, "'response_mask' is [0, 1], expected a"),
        ({"input_ids": [4, 5], "prompt_mask": [1, 0]}, "'prompt_mask' is [1, 0], expected a mask"),
        ({"input_ids": [4, 5], "position_ids": [0, 0]}, "'position_ids' is [0, 0], expected [0, 1"),
        ({"input_ids": [4, 5], "seq_lengths": [1, 1]}, "'seq_lengths' is [1, 1], expected [2]"),
    ],
)
def test_refused_row(row: dict[str, Any], message: str, folder: Path) -> None:
    assert refusal("SFT", [row], folder).startswith(message)


def test_input_beside_an_instruction(folder: Path) -> None:
    row = {"instruction": "Translate", "input": "Hund", "output": "dog"}
    data: dict[str, Any] = {"train": [row], "prompt_key": "instruction", "answer_key": "output"}
    assert "'input' is 'Hund', expected a text that is in 'instruction'" in refusal(
        "SFT", data, folder
    )
    data["train"] = [{**row, "instruction": "Translate: Hund"}]
    assert texts(load("SFT", data, folder)[0], folder) == ["dog<eot>"]


def test_one_sequence_with_positions(folder: Path) -> None:
    row = {"input_ids": [4, 5], "position_ids": [0, 1], "seq_lengths": [2]}
    assert texts(load("SFT", [row], folder)[0], folder) == ["12"]


# --- roles and calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["gpt", "chatgpt", "bot", "model", "Assistant", "GPT"])
@pytest.mark.parametrize("user", ["human", "User", "Human"])
def test_roles(user: str, answer: str, folder: Path) -> None:
    row = {"conversations": [{"from": user, "value": "hi"}, {"from": answer, "value": "yo"}]}
    (found,) = load("SFT", [row], folder)
    assert texts(found, folder, trained=False) == [CHAT]


@pytest.mark.parametrize("role", ["narrator", "function", "", "tools", 7])
def test_other_roles(role: Any, folder: Path) -> None:
    row = {"messages": [USER, {"role": role, "content": "x"}, ANSWER]}
    assert refusal("SFT", [row], folder).startswith("'messages'[1].role is not of a chat of texts")


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"from": "function_call", "value": str(CALL)},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "content": "", "function_call": {**CALL, "arguments": '{"a": 1}'}},
        {"role": "assistant", "content": "", "tool_call": {"type": "function", "function": CALL}},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
    ],
)
@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize(
    "result", [{"from": "observation", "value": "1"}, {"role": "function", "name": "f"}]
)
def test_calls(turn: dict[str, Any], key: str, result: dict[str, Any], folder: Path) -> None:
    chat = [HUMAN, turn, {"value": "1", **result}, GPT]
    row = {"conversations": chat, key: json.dumps([{"name": "f"}])}
    (found,) = load("SFT", [row], folder)
    assert texts(found, folder) == ['CALL f {"a": 1}<eot>yo<eot>']
    whole = '<user>hi<eot><assistant>CALL f {"a": 1}<eot><tool>1<eot><assistant>yo<eot>'
    assert texts(found, folder, trained=False) == [f"TOOL f{whole}"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("look", "'conversations'[1].function_call is 'look', expected JSON"),
        ("{}", "'conversations'[1].tool_calls[0] is not of a chat of texts"),
        ("7", "'conversations'[1].tool_calls[0] is not of a chat of texts"),
    ],
)
def test_other_calls(value: str, message: str, folder: Path) -> None:
    row = {"conversations": [HUMAN, {"from": "function_call", "value": value}, GPT]}
    assert refusal("SFT", [row], folder).startswith(message)


# --- weights and other keys of messages ---------------------------------------------------------


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_weights(off: Any, key: str, template: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, template)
    user = {**USER, key: off}
    (found,) = load("SFT", [{"messages": [user, {**NO, key: off}, user, ANSWER]}], folder)
    assert texts(found, folder) == ["yo<eot>"]
    (found,) = load("SFT", [{"messages": [user, {**NO, key: 1}, user, ANSWER]}], folder)
    assert texts(found, folder) == ["no<eot>yo<eot>"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {**ANSWER, "weight": 0.5}], "'messages'[1].weight is 0.5, expected 0 or 1"),
        ([USER, {**ANSWER, "weight": "0"}], "'messages'[1].weight is '0', expected 0 or 1"),
        ([{**USER, "train": True}, ANSWER], "'messages'[0].train is True, expected 0"),
        ([USER, {**ANSWER, "weight": 0}], "'messages' has no turn of the assistant"),
        ([{**USER, "images": ["a"]}, ANSWER], "'messages'[0].images is ['a'], expected rows of"),
        ([USER, {**ANSWER, "audio": {"id": "a"}}], "'messages'[1].audio is {'id': 'a'}"),
        ([USER, {**ANSWER, "train_detail": [{"train": False}]}], "'messages'[1].train_detail is"),
    ],
)
def test_keys_of_messages(messages: list[Any], message: str, folder: Path) -> None:
    assert refusal("SFT", [{"messages": messages}], folder).startswith(message)


# --- chats stored as texts ----------------------------------------------------------------------


@pytest.mark.parametrize("write", [json.dumps, str])
def test_chats_stored_as_texts(write: Any, folder: Path) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("SFT", {"messages": write([USER, ANSWER])}),
        ("SFT", {"conversations": write([HUMAN, GPT])}),
        ("SFT", {"prompt": write([USER]), "completion": write([ANSWER])}),
        ("SFT", {"prompt": "hi", "answer": write(ANSWER)}),
        ("DPO", {"chosen": write([USER, ANSWER]), "rejected": write([USER, NO])}),
        ("DPO", {"prompt": "hi", "chosen": write([ANSWER]), "rejected": write(NO)}),
    ]
    for recipe, row in rows:
        (found,) = load(recipe, [row], folder)
        assert texts(found, folder, trained=False)[0] == CHAT
    (found,) = load("GRPO", [{"prompt": write([USER]), "answer": "1"}], folder)
    assert found.prompt == "<user>hi<eot><assistant>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": f"[{USER}\n {ANSWER}]", "answer": "yo"}, "'prompt' is "),  # of NumPy
        ({"prompt": "hi", "answer": f"array([{ANSWER}], dtype=object)"}, "'answer' is "),
        ({"text": json.dumps([USER, ANSWER])}, "'text' is "),
    ],
)
def test_other_stored_chats(row: dict[str, Any], message: str, folder: Path) -> None:
    assert refusal("SFT", [row], folder).startswith(message)


@pytest.mark.parametrize("answer", ['{"a": 1}', "[1, 2]", '[{"from": "A", "to": "B"}]', "[{'a'}]"])
def test_answers_in_json(answer: str, folder: Path) -> None:
    (found,) = load("SFT", [{"prompt": "hi", "answer": answer}], folder)
    assert len(found.samples[0]["input_ids"]) > len(answer)


# --- tokens and lengths of the model ------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a model whose tokenizer has more tokens than its embedding, and 64 positions."""
    make_model(tmp_path, num_positions=64)
    return tokenizer_folder(tmp_path, TEMPLATE)


def test_tokens_beyond_the_embedding(small: Path) -> None:
    size = json.loads((small / "config.json").read_text())["vocab_size"]
    expected = f", expected less than {size}"
    for recipe, row in [
        ("SFT", {"prompt": "hi", "answer": "yo"}),
        ("SFT", {"input_ids": [4, size]}),
        ("DPO", {"prompt": "hi", "chosen": "yo", "rejected": "no"}),
        ("GRPO", {"prompt": "hi", "answer": "1"}),
        ("GRPO", {"prompt": [4, size], "answer": "1"}),
    ]:
        message = refusal(recipe, [row], small)
        assert " has the token " in message
        assert expected in message
    data = {"train": [{"input_ids": [4, size]}, {"input_ids": [4, 5]}], "on_bad_row": "skip"}
    assert len(load("SFT", data, small)) == 1


def test_rows_beyond_the_positions(small: Path) -> None:
    rows = [{"input_ids": [4] * 65}, {"input_ids": [4] * 64}]
    assert [len(row.prompt_ids) for row in load("SFT", rows, small)] == [64]
    data = {"train": rows, "on_long_prompt": "error"}
    assert "has 65 tokens; the model's context length is 64" in refusal("SFT", data, small)


def test_scaled_positions(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (small / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert len(load("SFT", [{"input_ids": [4] * 256}, {"input_ids": [4] * 257}], small)) == 1
