"""Model folders as users hand them in: whole ones, and ones with a part lost or another form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helmsman.recipes.tiny_model import make_tokenizer
from tests.engines.small_models import LLAMA

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], Any]


def write(
    folder: Path, config: dict[str, Any] = LLAMA, auto: Any = AutoModelForCausalLM, **fields: Any
) -> Path:
    """Save a tiny model; ``fields`` are entries of its configuration."""
    torch.manual_seed(0)
    auto.from_config(AutoConfig.for_model(**{**config, **fields})).save_pretrained(folder)
    return folder


def tensors(change: Callable[[Tensors], Tensors]) -> Change:
    """Change the tensors of model.safetensors."""

    def apply(folder: Path) -> None:
        changed = change(load_file(folder / WEIGHTS))
        whole = {name: tensor.contiguous() for name, tensor in changed.items()}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def without(part: str) -> Change:
    """Remove the tensors with a part in their name."""
    return tensors(lambda given: {name: t for name, t in given.items() if part not in name})


def renamed(change: Callable[[str], str]) -> Change:
    return tensors(lambda given: {change(name): tensor for name, tensor in given.items()})


def added(**new: torch.Tensor) -> Change:
    """Add tensors; double underscores stand for dots."""
    return tensors(lambda given: given | {key.replace("__", "."): t for key, t in new.items()})


def entries(name: str = "config.json", **changed: Any) -> Change:
    """Change entries of a JSON file, which begins as {}."""

    def apply(folder: Path) -> None:
        path = folder / name
        given = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**given, **changed}))

    return apply


def only(*names: str) -> Change:
    """Leave these files alone, and create those that are missing."""

    def apply(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    return apply


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def in_shards(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")


def in_shards_too(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    in_shards(folder)
    (folder / WEIGHTS).write_bytes(whole)


def one_shard_less(folder: Path) -> None:
    in_shards(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def as_bin_shards(folder: Path) -> None:
    given = load_file(folder / WEIGHTS)
    names = {name: f"pytorch_model-0000{1 + ('lm_head' in name)}-of-00002.bin" for name in given}
    for file in set(names.values()):
        torch.save({name: given[name] for name in given if names[name] == file}, folder / file)
    entries("pytorch_model.bin.index.json", metadata={}, weight_map=names)(folder)
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def as_lfs_pointer(folder: Path, name: str = WEIGHTS) -> None:
    (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    )


def with_tokenizer(more: int = 0, *, special: bool = False, vocab: int = 82) -> Change:
    """Write a model of ``vocab`` tokens with a tokenizer of 82 and ``more`` added tokens."""

    def apply(folder: Path) -> None:
        from tokenizers import Tokenizer

        write(folder, vocab_size=vocab)
        make_tokenizer(folder)
        path = folder / "tokenizer.json"
        fast = Tokenizer.from_file(str(path))
        names = [f"<more-{number}>" for number in range(more)]
        fast.add_special_tokens(names) if special else fast.add_tokens(names)
        fast.save(str(path))

    return apply


def of_head(number: int) -> Change:
    """Write a model that classifies sequences."""
    return lambda folder: write(
        folder, auto=AutoModelForSequenceClassification, num_labels=number, pad_token_id=0
    )
