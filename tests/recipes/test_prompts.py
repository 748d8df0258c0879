"""Test the prompts of the GRPO recipe: templates, lengths, the held-out split, and their order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from helmsman.recipes.prompts import Draws, load_dataset
from helmsman.recipes.settings import Data
from helmsman.recipes.tiny_model import SPECIAL, make_tokenizer
from helmsman.recipes.tokens import ChatTokenizer, FolderTokenizer
from tests.unit.recipes.data import SUMS, write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_folder_tokenizer(folder: Path) -> None:
    tokenizer = FolderTokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode_prompt("1+1=")) == "<user>1+1=\n<assistant>"
    assert tokenizer.encode_answer("2")[-1] == tokenizer.eos_id
    assert tokenizer.decode(tokenizer.encode_answer("2")) == "2"
    with pytest.raises(ValueError, match="there is no model folder 'nowhere'"):
        FolderTokenizer("nowhere")


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_chat_tokenizer_encode_template(folder: Path) -> None:
    tokenizer = ChatTokenizer(str(folder), Data(train=""))
    text, ids = tokenizer.encode("1+1=")
    assert text == "<user>1+1=\n<assistant>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(chat(("user", "1+1=")))[0] == text
    prompted = ChatTokenizer(str(folder), Data(train="", system_prompt="add"))
    assert prompted.encode("1+1=")[0] == "<system>add\n<user>1+1=\n<assistant>"
    assert (
        prompted.encode(chat(("system", "mine"), ("user", "x")))[0]
        == "<system>mine\n<user>x\n<assistant>"
    )


def test_chat_tokenizer_encode_without_template(folder: Path) -> None:
    make_tokenizer(folder, chat_template=None)
    tokenizer = ChatTokenizer(str(folder), Data(train=""))
    assert tokenizer.encode("1+1=")[0] == "1+1="
    assert tokenizer.encode(chat(("user", "1+1=")))[0] == "User: 1+1=\n\nAssistant:"


def test_chat_tokenizer_encode_own_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}{{ '?' if curious }}")
    data = Data(
        train="", chat_template=str(tmp_path / "mine.jinja"), template_args={"curious": True}
    )
    assert ChatTokenizer(str(folder), data).encode("x")[0] == "x?"


def test_chat_tokenizer_stop_ids(folder: Path) -> None:
    assert ChatTokenizer(str(folder), Data(train="")).stop_ids == (SPECIAL.index("<eos>"),)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert ChatTokenizer(str(folder), Data(train="")).stop_ids == (1, 7)


def test_chat_tokenizer_invalid_files(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(
        ValueError, match=r"generation_config.json: Expected `int`, got `str` - at `\$.eos_token_id"
    ):
        ChatTokenizer(str(folder), Data(train=""))
    (folder / "generation_config.json").unlink()
    (tmp_path / "mine.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"data.chat_template, .*mine.jinja, is not UTF-8 text"):
        ChatTokenizer(str(folder), Data(train="", chat_template=str(tmp_path / "mine.jinja")))


def test_load_dataset_long_prompts(folder: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*SUMS[:6], {"prompt": "7" * 60, "answer": "7"}])
    data = Data(train=str(path), num_held_out=2, max_prompt_tokens=40)
    found = load_dataset(data, ChatTokenizer(str(folder), data), seed=0)
    assert (len(found.train), len(found.held_out), found.num_too_long) == (4, 2, 1)
    strict = Data(train=str(path), max_prompt_tokens=40, on_long_prompt="error")
    with pytest.raises(
        ValueError,
        match=r"rows.jsonl, line 7: the prompt has 78 tokens; data.max_prompt_tokens is 40",
    ):
        load_dataset(strict, ChatTokenizer(str(folder), strict), seed=0)


def test_load_dataset_held_out_by_seed(folder: Path, tmp_path: Path) -> None:
    data = Data(train=str(write_jsonl(tmp_path / "rows.jsonl", [*SUMS, *SUMS])), num_held_out=10)
    tokenizer = ChatTokenizer(str(folder), data)
    first, again, other = (load_dataset(data, tokenizer, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.held_out != other.held_out
    assert not {row.prompt for row in first.train} & {row.prompt for row in first.held_out}
    assert first.num_in_both == 0


def test_load_dataset_num_in_both(folder: Path, tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", SUMS[:7])
    held_out = write_jsonl(tmp_path / "test.jsonl", SUMS[5:10])
    data = Data(train=str(train), held_out=str(held_out))
    found = load_dataset(data, ChatTokenizer(str(folder), data), seed=0)
    assert (len(found.train), len(found.held_out), found.num_in_both) == (7, 5, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2\): the line is not JSON"),
        ('{"answer": 1}', r"line 2\): the row has 'answer', expected 'prompt'"),
        ('{"prompt": [{"role": "user"}]}', r"line 2\): 'prompt'\[0\].content is null"),
    ],
)
def test_load_dataset_malformed_line(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(SUMS[0]) + "\n" + line + "\n")
    data = Data(train=str(path))
    with pytest.raises(ValueError, match=message):
        load_dataset(data, ChatTokenizer(str(folder), data), seed=0)


def test_load_dataset_given_rows(folder: Path) -> None:
    tokenizer = ChatTokenizer(str(folder), Data(train=""))
    question = chat(("user", "1+1="))
    verl = {"prompt": question, "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    rows = ["1+1=", question, [4, 5, 6], {"prompt": "2+2=", "answer": "4"}, verl]
    found = load_dataset(Data(train="rows"), tokenizer, 0, {"rows": rows}).train
    assert [row.prompt for row in found[:2]] == ["<user>1+1=\n<assistant>"] * 2
    assert found[2].prompt_ids == [4, 5, 6]
    assert found[3].answer == "4"
    assert (found[4].answer, found[4].source) == ("2", "sums")
    with pytest.raises(ValueError, match=r"\(data, row 2\): 'prompt' is 7, expected messages"):
        load_dataset(Data(train="rows"), tokenizer, 0, {"rows": ["x", 7]})


def test_load_dataset_row_fields(folder: Path, tmp_path: Path) -> None:
    entry = {"prompt": "x", "answer": [1], "data_source": None, "extra_info": {"a": 2}}
    data = Data(train=str(write_jsonl(tmp_path / "rows.jsonl", [entry])))
    (row,) = load_dataset(data, ChatTokenizer(str(folder), data), seed=0).train
    assert (row.answer, row.source, row.entry["extra_info"]) == ([1], "rows", {"a": 2})


@pytest.fixture
def draws(folder: Path, tmp_path: Path) -> Draws:
    data = Data(train=str(write_jsonl(tmp_path / "rows.jsonl", SUMS[:7])))
    rows = load_dataset(data, ChatTokenizer(str(folder), data), seed=0).train
    return Draws(rows, num_samples=3, seed=5, shuffle=True)


def test_draws_epochs(draws: Draws) -> None:
    taken = [draw.row.prompt for draw in itertools.islice(draws, 21)]
    epochs = [taken[:7], taken[7:14], taken[14:]]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_draws_by_number(draws: Draws) -> None:
    taken = list(itertools.islice(draws, 10))
    assert [draws.draw(number) for number in reversed(range(10))] == taken[::-1]
    assert len({seed for draw in taken for seed in draw.seeds}) == 30


def test_draws_state_and_restore(draws: Draws) -> None:
    for number in (0, 1, 3, 6):  # 2, 4 and 5 were under way
        draws.use(number)
    state = draws.state()
    assert (state.used_below, state.used) == (2, [3, 6])
    assert [draw.number for draw in itertools.islice(draws, 5)] == [2, 4, 5, 7, 8]
    for number in (2, 4, 5):
        draws.use(number)
    assert draws.state().used_below == 7
    assert draws.epoch == 1.0
    draws.restore(state)
    assert next(iter(draws)).number == 2
