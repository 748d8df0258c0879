"""Every row of the tables in docs/data.md does what the page says."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from helmsman.recipes import DPO, GRPO, SFT
from helmsman.recipes.ending import summarize
from helmsman.recipes.prompts import Row
from helmsman.recipes.tiny_model import make_tokenizer
from tests.unit.recipes.test_rows import read, write

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ sign if m.role == 'assistant' }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RECIPES: dict[str, Any] = {"SFT": SFT, "DPO": DPO, "GRPO": GRPO}
ROWS = [{"prompt": "1+1="}]


def table(title: str) -> list[list[str]]:
    """Return the cells of the first table after a text, without backquotes."""
    lines = iter(PAGE[PAGE.index(title) :].splitlines())
    rows = [line for line in _first_block(lines) if not re.fullmatch(r"[|-]+", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[1:]]


def _first_block(lines: Iterator[str]) -> Iterator[str]:
    is_inside = False
    for line in lines:
        if line.startswith("|"):
            is_inside = True
            yield line
        elif is_inside:
            return


def code(cell: str) -> str:
    return cell.removeprefix("`").removesuffix("`")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer of characters, which has an end-of-turn token."""
    folder = tmp_path_factory.mktemp("page")
    make_tokenizer(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<eot>"])
    tokenizer.add_tokens(list("()[]'\"_#|!"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def load(recipe: str, row: Any, model: Path) -> tuple[Row, Any]:
    """Return the row of a recipe and its tokenizer."""
    more = {"rewards": ["exact"]} if recipe == "GRPO" else {}
    made = RECIPES[recipe](str(model), [row], **more)
    made.load()
    return made.dataset.train[0], made.tokenizer.tokenizer


def trained(recipe: str, row: Any, model: Path) -> list[str]:
    """Return the text that counts in the loss of each sample."""
    found, tokenizer = load(recipe, row, model)
    return [
        tokenizer.decode(
            [
                token
                for token, counts in zip(sample["input_ids"], sample["loss_mask"], strict=True)
                if counts
            ]
        )
        for sample in found.samples
    ]


@pytest.mark.parametrize(("row", "prompt"), table("### Prompts"))
def test_prompts(row: str, prompt: str, model: Path) -> None:
    assert load("GRPO", json.loads(code(row)), model)[0].prompt == code(prompt)


@pytest.mark.parametrize(("row", "text"), table("### Answers"))
def test_answers(row: str, text: str, model: Path) -> None:
    assert trained("SFT", json.loads(code(row)), model) == [code(text)]


@pytest.mark.parametrize(("row", "texts"), table("### Pairs"))
def test_pairs(row: str, texts: str, model: Path) -> None:
    assert trained("DPO", json.loads(code(row)), model) == re.findall("`(.*?)`", texts)


@pytest.mark.parametrize(("recipe", "row", "message"), table("### Refused rows"))
def test_refused_rows(recipe: str, row: str, message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"(data, row 1): {code(message)}")):
        load(recipe, json.loads(code(row)), model)


@pytest.mark.parametrize(("expression", "_rows"), table("A Python script can pass"))
def test_objects(expression: str, _rows: str) -> None:
    names: dict[str, Any] = {}
    for name in set(re.findall(r"(\w+)\.", code(expression))) & {
        "datasets",
        "numpy",
        "pandas",
        "polars",
        "pyarrow",
    }:
        pytest.importorskip(name)
        names[name] = importlib.import_module(name)
    found = read(eval(code(expression), names))
    assert found == ([[4, 5, 6]] if "numpy" in names else ROWS) or found == ["1+1="]


def _save(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    return folder


def _table(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    rows = pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(rows, path)
    else:
        with pyarrow.ipc.new_stream(str(path), rows.schema) as writer:
            writer.write_table(rows)
    return path


def _hub(folder: Path) -> Path:
    pytest.importorskip("datasets")
    write(folder / "data" / "train-00000-of-00001.jsonl", ROWS)
    return folder


def _make(path: Path) -> Path:
    """Write the rows as the name of a file or folder says."""
    packers: dict[str, Any] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack = packers.get(path.suffix)
    if path.suffix in (".parquet", ".arrow"):
        return _table(path)
    if path.suffix in (".csv", ".tsv"):
        pytest.importorskip("datasets")
        path.write_text("prompt\n1+1=\n")
    elif path.suffix in (".txt", ".json"):
        path.write_text("1+1=\n" if path.suffix == ".txt" else json.dumps(ROWS))
    elif pack:
        path.write_bytes(pack(json.dumps(ROWS[0]).encode()))
    elif path.name in ("saved", "hub"):
        return _save(path) if path.name == "saved" else _hub(path)
    else:
        write(path.with_name(path.name.replace("*", "1")), ROWS)
    return path


@pytest.mark.parametrize(("sources", "_rows"), table("## Sources of rows"))
def test_sources(sources: str, _rows: str, tmp_path: Path) -> None:
    for name in re.findall("`(.*?)`", sources):
        path = _make(tmp_path / name)
        assert read(path) == ([{"text": "1+1="}] if path.suffix == ".txt" else ROWS)


def test_printed_line(model: Path) -> None:
    good = {"prompt": "hi", "answer": "yo"}
    rows = [good, {"prompt": "hi"}, {"prompt": "7" * 90, "answer": "7"}, "text", good]
    recipe = SFT(str(model), {"train": rows, "on_bad_row": "skip", "max_tokens": 80})
    recipe.load()
    line = recipe.describe_data()
    assert "\n" not in line
    assert line.startswith(
        "data: 5 rows read, 3 rows to train on (11 trained tokens), 0 held out, 1 left out as "
        "longer than data.max_tokens, 1 left out as unusable (first: unusable row (data, row 2): "
        "the row has 'prompt', expected "
    )
    assert line.endswith("; the longest has 23 tokens; end-of-turn token: '<eot>'")
    summary = summarize(recipe.settings, recipe.dataset, [], seconds=1.0)
    assert (summary.num_rows, summary.num_too_long, summary.num_skipped) == (5, 1, 1)


def test_no_usable_row(model: Path) -> None:
    recipe = SFT(str(model), {"train": ["", {"prompt": "hi"}], "on_bad_row": "skip"})
    with pytest.raises(
        ValueError, match=r"no usable row \(rows-2-.*\): 0 of 2 are longer .* 2 unusable, .* row 1"
    ):
        recipe.load()
