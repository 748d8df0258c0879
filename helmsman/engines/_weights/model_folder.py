"""The check that a model folder is whole, by which all engines give the same answer.

``transformers`` draws random weights for tensors that the files lack, and skips tensors that the
model lacks. vLLM and SGLang have other rules. So before an engine reads weights, the headers of the
files are compared with the model that config.json describes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from helmsman.api.engines import Head
from helmsman.engines._models.checkpoint_files import is_checkpoint
from helmsman.engines._models.folders import (
    Stored,
    read_config,
    read_headers,
    read_tensor,
    refused,
    some,
)
from helmsman.engines._models.heads import AUTO_CLASSES, CONFIG_ENTRIES, check_saved_head
from helmsman.engines._models.model import without_progress_bars
from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines._weights.fit import form_in_files
from helmsman.engines.train_config import Init

_QUANTISED = ("quantization_config", "compression_config", "quantization")
_QUANTISED_NAME = re.compile(
    r"(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|input_scale|absmax|quant_map|weight_packed"
    r"|_blocks|_scales|quant_state\..*)$"
)
_LAYER = re.compile(r"\.(\d+)\.")
_SAVE = "Save the model with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"


def check_model_folder(
    folder: str,
    *,
    head: Head = "lm",
    init: Init = "nothing",
    reads_checkpoints: bool = False,
    needs_transformers: bool = False,
) -> None:
    """Raise ValueError unless the files of a folder have every tensor of its model, and no others.

    Only headers are read, except for tied tensors that the files have twice.

    Args:
        folder: Folder in the Hugging Face layout, or a checkpoint.
        head: Head of the model to build.
        init: Parameters that the files may lack, because they are drawn from a seed.
        reads_checkpoints: Whether the engine reads checkpoints of the train engine, too.
        needs_transformers: Whether a model that ``transformers`` lacks is refused. vLLM and other
            servers have models of their own, of which only the files are checked.
    """
    if reads_checkpoints and is_checkpoint(folder):
        check_saved_head(folder, head, exact=True)
        return
    entries = read_config(folder)
    _require_plain(folder, entries)
    model = _skeleton(folder, entries, head)
    stored = read_headers(folder)
    if isinstance(model, str):
        if needs_transformers:
            raise refused(
                folder,
                f"transformers {transformers.__version__} cannot build it: {model}",
                "an architecture of transformers",
                "Check config.json, or install a newer transformers",
            )
        return
    _require_architecture(folder, model, head)
    drawn, allowed = _drawn(model, init), _other_head(folder, head)
    found = _Comparison.of(model, stored).without(drawn, allowed)
    if found.problems and not _loads(model, stored, drawn, allowed):
        raise refused(
            folder,
            found.problems,
            f"every tensor of {type(model).__name__} as config.json describes it, and no other",
            _next_step(found, stored, model),
        )
    _require_equal_ties(folder, model, stored)
    _require_tokenizer_fit(folder, model)


def _require_plain(folder: str, entries: Mapping[str, Any]) -> None:
    for key in _QUANTISED:
        if given := entries.get(key):
            method = given.get("quant_method") if isinstance(given, dict) else None
            raise refused(
                folder,
                f"its weights are quantised ({key} in config.json: {method or given})",
                "floating-point weights, which a weight update can replace",
                "Use the unquantised model, or write one: from_pretrained(...), then "
                "dequantize() and save_pretrained(...)",
            )


def _skeleton(folder: str, entries: Mapping[str, Any], head: Head) -> PreTrainedModel | str:
    """Build the model without storage, or return why transformers cannot."""
    try:
        config: Any = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **CONFIG_ENTRIES[head]
        )
        with torch.device("meta"):
            model: PreTrainedModel = AUTO_CLASSES[head].from_config(config)
    except Exception as error:  # noqa: BLE001 - configurations raise arbitrary errors
        reason = " ".join(str(error).split())[:300]
        return f"{entries['model_type']!r}: {type(error).__name__}: {reason}"
    return model


def _require_architecture(folder: str, model: PreTrainedModel, head: Head) -> None:
    """Refuse a class of another model type: transformers goes by the type, vLLM by the class."""
    own = type(model).__name__
    for name in model.config.architectures or ():
        named: Any = getattr(transformers, name, None)
        of_type = getattr(getattr(named, "config_class", None), "model_type", "")
        if not of_type or name == own:
            continue
        predicts = hasattr(named, "generate") and named.can_generate()
        if of_type != model.config.model_type:
            raise refused(
                folder,
                f"config.json has the architecture {name} and the model_type "
                f"{model.config.model_type!r}",
                own,
                "Copy the config.json of the model that the weights are of",
            )
        if head == "lm" and not predicts:
            raise refused(
                folder,
                f"it holds a {name}, which does not predict tokens",
                own,
                "Give a policy; critics and reward models are for TrainConfig.head 'value'",
            )


class _Comparison(msgspec.Struct, frozen=True):
    """Differences of files from a model, by names in files."""

    missing: list[str]
    extra: list[str]
    shapes: dict[str, tuple[Sequence[int], Sequence[int]]]
    """Name -> shape in the files, shape in the model."""
    kinds: dict[str, str]
    """Name -> type of a tensor that is no floating-point number of at least 16 bits."""

    @classmethod
    def of(cls, model: PreTrainedModel, stored: Mapping[str, Stored]) -> _Comparison:
        form = form_in_files(CheckpointNames(model))
        floats = {name for name, each in model.state_dict().items() if each.is_floating_point()}
        given = stored.keys() | {form.aliases[name] for name in stored if name in form.aliases}
        return cls(
            [name for name in form.shapes if name not in given and name not in form.aliases],
            _wanted(model, [name for name in stored if name not in form.shapes]),
            {
                name: (each.shape, shape)
                for name, each in stored.items()
                if (shape := form.shapes.get(name)) is not None and list(each.shape) != shape
            },
            {
                name: each.dtype
                for name, each in stored.items()
                if not each.is_float and name in form.shapes and name in floats
            },
        )

    def without(self, drawn: Sequence[str], allowed: Sequence[str]) -> _Comparison:
        return msgspec.structs.replace(
            self,
            missing=[name for name in self.missing if name not in drawn],
            extra=[name for name in self.extra if name not in allowed],
        )

    @property
    def problems(self) -> str:
        """The differences in words; '' without any."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.extra,
            "of another shape": [
                f"{name} {tuple(here)} for {tuple(there)}"
                for name, (here, there) in self.shapes.items()
            ],
            "quantised": [f"{name} {kind}" for name, kind in self.kinds.items()],
        }
        return "; ".join(
            f"{len(names)} {kind}: {some(names)}" for kind, names in kinds.items() if names
        )


def _wanted(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Leave out the names that transformers skips for this model (old buffers, further heads)."""
    info = _Info(missing_keys=set(), unexpected_keys={*names})
    model._adjust_missing_and_unexpected_keys(info)
    return [name for name in names if name in info.unexpected_keys]


class _Info(msgspec.Struct):
    """The part of transformers' LoadStateDictInfo that its rules for names change."""

    missing_keys: set[str]
    unexpected_keys: set[str]


def _loads(
    model: PreTrainedModel,
    stored: Mapping[str, Stored],
    drawn: Sequence[str],
    allowed: Sequence[str],
) -> bool:
    """Return whether transformers reads every tensor of the model from files with other names.

    Its own loader runs on tensors without storage. It knows older names, and the forms in which
    other versions save the experts of a layer.
    """
    tensors = {
        name: torch.empty(each.shape, dtype=torch.bfloat16, device="meta")
        for name, each in stored.items()
        if each.is_float
    }
    config = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=torch.bfloat16,
        weight_mapping=get_model_conversion_mapping(model),
    )
    with without_progress_bars():
        info, _ = convert_and_load_state_dict_in_model(model, tensors, config)
    ties = model.all_tied_weights_keys
    info.missing_keys = {
        name for name in info.missing_keys if ties.get(name, name) in info.missing_keys
    }
    model._adjust_missing_and_unexpected_keys(info)
    return not (
        info.missing_keys - {*drawn}
        or info.unexpected_keys - {*allowed}
        or info.mismatched_keys
        or info.conversion_errors
        or len(tensors) < len(stored)
    )


def _drawn(model: PreTrainedModel, init: Init) -> list[str]:
    names = model.state_dict() if init == "value_head" else ()
    return [name for name in names if name.startswith("score.")]


def _other_head(folder: str, head: Head) -> list[str]:
    """Return the tensors of a policy's head, which a value head takes the place of."""
    if head == "lm":
        return []
    with torch.device("meta"):
        policy: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    output = {id(each) for each in policy.get_output_embeddings().parameters()}
    state = policy.state_dict(keep_vars=True)
    return [name for name, each in state.items() if id(each) in output and "embed" not in name]


def _next_step(found: _Comparison, stored: Mapping[str, Stored], model: PreTrainedModel) -> str:
    """Return the nearest way to a folder that fits."""
    config = model.config.get_text_config()
    missing, extra = found.missing, found.extra
    if found.kinds or any(_QUANTISED_NAME.search(name) for name in extra):
        return "The weights are quantised; use the unquantised model"
    if any(0 in here for here, _ in found.shapes.values()):
        return "DeepSpeed ZeRO-3 saved parts of tensors; run: python zero_to_fp32.py . OUTPUT"
    if any(name.startswith("v_head.") for name in extra):
        return (
            "It has a value head of TRL: save model.pretrained_model for a policy; a critic of "
            "Helmsman starts from that with init='value_head'"
        )
    if prefix := _prefix_of(missing, extra):
        return f"All names begin with {prefix!r}, as a wrapper leaves them; save the inner model"
    if prefix := _prefix_of(extra, missing):
        return f"The names lack {prefix!r}, as in a model without its head. {_SAVE}"
    if missing and all(name.startswith("score.") for name in missing) and not found.shapes:
        return "To begin with a new value head, set TrainConfig.init to 'value_head'"
    if any(name.startswith(("score.", "value_head.", "reward_head.")) for name in extra):
        return "It is a critic or reward model; give TrainConfig.head 'value', or a policy"
    if missing and not extra and {_output_name(model)} == {*missing} and not found.shapes:
        return (
            "If this model shares the head with its embeddings, set tie_word_embeddings to true in "
            f"config.json; else the head was lost. {_SAVE}"
        )
    layers = {int(each[1]) for name in stored if (each := _LAYER.search(name))}
    num_layers = getattr(config, "num_hidden_layers", None)
    if layers and num_layers not in (None, max(layers) + 1):
        return (
            f"config.json has num_hidden_layers {num_layers}, and the files have "
            f"{max(layers) + 1} layers; take both from the same model"
        )
    for here, there in found.shapes.values():
        if config.vocab_size in there and [*here][1:] == [*there][1:]:
            return (
                f"config.json has vocab_size {config.vocab_size}, and the files have {here[0]} "
                "rows; take both from the same model, or save it after resize_token_embeddings"
            )
    return f"Take config.json and weights from the same model, as a whole. {_SAVE}"


def _output_name(model: PreTrainedModel) -> str:
    output = model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is output)
    return f"{next(names, '')}.weight"


def _prefix_of(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Return the prefix with which most ``missing`` names are in ``extra``; '' if there is none."""
    if not missing:
        return ""
    shared = (name.removesuffix(missing[0]) for name in extra if name.endswith(f".{missing[0]}"))
    prefix, given = next(shared, ""), {*extra}
    fits = sum(f"{prefix}{name}" in given for name in missing)
    return prefix if 2 * fits > len(missing) else ""


def _require_equal_ties(folder: str, model: PreTrainedModel, stored: Mapping[str, Stored]) -> None:
    """Refuse two different tensors that config.json declares as one: programs keep one of them."""
    for one, other in model.all_tied_weights_keys.items():
        if one in stored and other in stored:
            here, there = (read_tensor(folder, name) for name in (one, other))
            # Bytes are compared, since a number that is none differs from itself.
            if here.dtype == there.dtype and torch.equal(
                here.view(torch.uint8), there.view(torch.uint8)
            ):
                continue
            raise refused(
                folder,
                f"{one} and {other} differ, and config.json ties them (tie_word_embeddings)",
                "one tensor, or two with tie_word_embeddings false",
                "Set tie_word_embeddings to false in config.json, if the model was trained untied",
            )


def _require_tokenizer_fit(folder: str, model: PreTrainedModel) -> None:
    """Refuse a tokenizer that writes tokens for which the model has no embedding.

    Special tokens that no chat has may be beyond: Gemma 3 of 1B has one for images.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    config, fast = (_entries(folder, f"tokenizer{each}.json") for each in ("_config", ""))
    vocabulary = fast.get("model", {}).get("vocab") or _entries(folder, "vocab.json")
    added = [each | {"id": int(number)} for number, each in _added(config)]
    added += fast.get("added_tokens", ())
    template = config.get("chat_template") or _text(folder, "chat_template.jinja")
    used = {_content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
    beyond = {
        each["content"]: each["id"]
        for each in added
        if each["id"] >= rows
        and (not each["special"] or each["content"] in used or each["content"] in str(template))
    }
    if isinstance(vocabulary, dict):
        beyond |= {text: number for text, number in vocabulary.items() if number >= rows}
    elif len(vocabulary) > rows:
        beyond[str(vocabulary[-1][0])] = len(vocabulary) - 1
    if beyond:
        raise refused(
            folder,
            f"its tokenizer writes {len(beyond)} tokens from {rows} on "
            f"({some([f'{text!r} {number}' for text, number in beyond.items()])}), and the "
            f"embedding has {rows} rows",
            "an embedding for each token",
            "Call resize_token_embeddings(len(tokenizer)) and save the model, or use the tokenizer "
            "that it was trained with",
        )


def _added(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (number, {"special": False, **each})
        for number, each in config.get("added_tokens_decoder", {}).items()
    ]


def _content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _entries(folder: str, name: str) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(_text(folder, name) or "{}")
    return entries


def _text(folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()
