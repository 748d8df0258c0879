"""Settings from files, their base files, scripts and command lines: read, completed, checked."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import math
import operator
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from helmsman.api.config_files import read_config
from helmsman.api.environment import unfit
from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.plain import plain
from helmsman.api.suggestions import did_you_mean
from helmsman.engines.train_config import LOSS_NAMES, TrainConfig
from helmsman.recipes.roles import ENGINES, unfit_adapters
from helmsman.recipes.settings import (
    AGENT_REWARD,
    DPOSettings,
    GRPOSettings,
    Reward,
    RunSettings,
    devices_apart,
    distillation,
    name_of,
)
from helmsman.recipes.sizes import CHOSEN, SizeChoice, choose

S = TypeVar("S", bound=RunSettings)
_SHORT = {"data": "data.train"}
"""Short flags and the keys that they set."""
EXTENDS = "extends"
"""Key that names a file's base; the path is relative to the file."""

CONFIGS = Path(__file__).parent / "configs"
"""Folder of the packaged configurations, which ``--config`` finds by name."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": True, "aggregation": "sequence"},
    "dr_grpo": {"normalize_std": False, "aggregation": "constant"},
    "ppo": {"normalize_std": False, "aggregation": "token"},
    "dapo": {
        "normalize_std": True,
        "aggregation": "token",
        "clip_high": 0.28,
        "overlong_filter": True,
        "dynamic_sampling": True,
    },
}
_OF_ALL = {"clip_low": 0.2, "clip_high": 0.2, "overlong_filter": False, "dynamic_sampling": False}
"""Entries of all presets that do not have others."""
_GIVEN_ELSEWHERE = {"model": "model", "lr": "train.lr", "seed": "seed"}
"""Fields of the trainer's engine that are set by other settings of the run."""
_CORRECTED = ("grpo", "ppo", "gspo", "cispo")
"""Losses that read the column ``importance``."""
_OF_JUDGES = (
    *("prompt", "parse", "label", "max_new_tokens"),
    *("instances", "devices", "engine", "engine_args"),
)
"""Settings of rewards that only judges have."""
_BOUNDS = {">=": "{:g} or more", ">": "more than {:g}", "<=": "at most {:g}"}
"""Words for the signs in messages of msgspec."""


def load(
    kind: type[S],
    path: str | Path | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    given: Mapping[str, Any] | None = None,
) -> S:
    """Read settings, choose those not given, and validate them together.

    Args:
        kind: The recipe's settings class.
        path: A YAML or TOML file, or the name of a packaged configuration.
        overrides: ``(dotted key, text)`` pairs of a command line; they override the script.
        given: Entries of a script; they override the file.

    Returns:
        The validated settings.

    Raises:
        ValueError: An entry is invalid; the message names file and key.
        OSError: A file cannot be read.
        BackendNotInstalledError: PyYAML is missing.
    """
    return read(kind, path, overrides, given)[0]


def read(
    kind: type[S],
    path: str | Path | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    given: Mapping[str, Any] | None = None,
) -> tuple[S, list[SizeChoice]]:
    """Do the same as ``load``, and also return the choices with their reasons."""
    if not isinstance(path, str | os.PathLike | None):
        raise ValueError(
            f"config is of type {type(path).__name__}; expected a file. Pass the entries of a "
            "mapping as arguments: **config"
        )
    where = "the settings" if path is None else str(path)
    entries = {} if path is None else _as_json(where, _read(_find(path)))
    _require_known(where, entries, kind)
    if given:
        given = _as_json("the arguments", plain(given))
        _require_known("the arguments", given, kind)
        entries = _merged(entries, given)
    for key, text in overrides:
        _set(entries, key, text, kind)
    full = _in_full(entries, kind)
    try:
        settings = msgspec.convert(full, kind, strict=False)
        _check_train(settings)  # sizes are derived from it
        settings, choices = choose(settings, flat_keys(full))
        return resolve(settings), choices
    except msgspec.ValidationError as error:
        text = _told(error, kind, full)
        if missing := re.fullmatch(r"Object missing required field `(\w+)`.*", text):
            text = f"{missing[1]} is not given. Set it in the file, by --{missing[1]}, or in Python"
        raise ValueError(f"{_origin(text, where, overrides)}: {text}") from error
    except ValueError as error:
        raise ValueError(f"{_origin(str(error), where, overrides)}: {error}") from error


def resolve(settings: S) -> S:
    """Fill in the values of the preset, and validate the settings together.

    Args:
        settings: Settings within the bounds of their fields.

    Raises:
        ValueError: A setting is invalid; the message names the key.
    """
    _check_numbers(msgspec.to_builtins(settings), "")
    for name, text in settings.cluster.env_vars.items():
        if found := unfit(name, text):
            raise ValueError(f"cluster.env_vars[{name!r}] is {found[0]!r}; expected {found[1]}")
    # Workers may have another working directory, so make the path absolute.
    settings = msgspec.structs.replace(settings, model=str(Path(settings.model).absolute()))
    _check_train(settings)
    _check_data(settings)
    if isinstance(settings, GRPOSettings):
        given = msgspec.structs.asdict(settings.algorithm)
        preset = _OF_ALL | PRESETS[settings.algorithm.preset]
        missing = {name: preset[name] for name, value in given.items() if value is None}
        filled = msgspec.structs.replace(settings.algorithm, **missing)
        settings = msgspec.structs.replace(settings, algorithm=filled)
        for check in (_check_cluster, _check_rewards, _check_recorded, _check_rest):
            check(settings)
    return settings


def _told(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], entries: Any, section: str = ""
) -> str:
    """Format a validation error as key and reason, with the value or the expected values."""
    reason, _, at = str(error).partition(" - at `$.")
    at = at.rstrip("`")
    key = ".".join(filter(None, (section, at)))
    if bound := re.fullmatch(r"Expected `\w+` ([<>]=?) (.*)", reason):
        for part in re.findall(r"\w+", at):
            entries = entries[int(part) if isinstance(entries, list) else part]
        return f"{key} is {entries}; expected {_BOUNDS[bound[1]].format(float(bound[2]))}"
    if reason.startswith("Invalid enum value"):
        reason += f"; expected {' or '.join(map(repr, _choices(kind, at)))}"
    elif found := re.search(r"unknown field `(.*)`", reason):
        of = _section(_hint(kind, at)) or kind
        reason += f"; {did_you_mean(found[1], of.__struct_fields__)}"
    return f"{key}: {reason}" if key else reason


def flat_keys(entries: Mapping[str, Any], prefix: str = "") -> frozenset[str]:
    """Return the dotted keys of nested entries."""
    keys: set[str] = set()
    for name, value in entries.items():
        keys |= (
            flat_keys(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name}
        )
    return frozenset(keys)


def _find(path: str | Path) -> Path:
    """Resolve a path; a bare name may also name a packaged configuration."""
    path = Path(path)
    if not path.exists() and path.parent == Path("."):
        for name in (path.name, f"{path.name}.yaml"):
            if (CONFIGS / name).is_file():
                return CONFIGS / name
    return path


def _origin(text: str, path: str | Path, overrides: Sequence[tuple[str, str]]) -> str:
    """Return the origin of an invalid value, from the words of the message about it.

    This is the flag that set the key at the start of the message, or else the file, with all flags
    that the message mentions.
    """
    words = re.findall(r"[\w.]+", text)
    for name, _ in reversed(overrides):
        if f"{words[0]}.".startswith(f"{name}.") or (
            name.startswith(f"{words[0]}.") and name.rpartition(".")[2] in words
        ):
            return f"--{name}"
    spoken = [
        f"--{name}"
        for name, _ in overrides
        if {name, name.partition(".")[0], name.rpartition(".")[2]} & {*words}
    ]
    return f"{path} with {', '.join(spoken)}" if spoken else str(path)


def as_yaml(settings: RunSettings) -> str:
    """Format all settings as a YAML file that reproduces them."""
    lines = []
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {_scalar(each)}" for key, each in value.items()]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return "\n".join(lines)


def all_keys(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, description) of each setting, a struct's own fields first."""
    docs, hints = _field_docs(kind), typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        if _section(hints[field.name]) is None:
            key = prefix + field.name
            yield key, "chosen" if key in CHOSEN else _default(field), docs[field.name]
    for field in msgspec.structs.fields(kind):
        section = _section(hints[field.name])
        if section is not None:
            many = "[]" if section is not hints[field.name] else ""
            yield from all_keys(section, f"{prefix}{field.name}{many}.")


def key_table(kind: type[msgspec.Struct]) -> str:
    """Format the settings as one Markdown table per section."""
    tables: dict[str, list[str]] = {}
    for key, default, meaning in all_keys(kind):
        section = key.rpartition(".")[0]
        tables.setdefault(section, []).append(
            f"| `{key}` | {f'`{default}`' if default else 'required'} | {meaning} |"
        )
    return "\n\n".join(
        "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) for rows in tables.values()
    )


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path} extends itself, through {', '.join(str(each) for each in seen)}")
    entries = _parse(path)
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(entries).__name__}")
    base = entries.pop(EXTENDS, None)
    if base is None:
        return entries
    return _merged(_read(path.parent / str(base), (*seen, path)), entries)


def _parse(path: Path) -> Any:
    try:
        return read_config(path)
    except ModuleNotFoundError as error:
        raise BackendNotInstalledError(
            backend="a YAML file",
            package="yaml",
            command="pip install pyyaml   (or write the file in TOML)",
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``top`` over ``base``: sections are merged, lists and values replaced."""
    merged = dict(base)
    for name, value in top.items():
        below = merged.get(name)
        merged[name] = (
            _merged(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def _require_known(
    where: str, entries: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str = ""
) -> None:
    hints = typing.get_type_hints(kind)
    for name, value in entries.items():
        if name not in hints:
            raise ValueError(
                f"{where}: {_unknown(f'{prefix}{name}', name, kind.__struct_fields__)}"
            )
        section = _section(hints[name])
        if section is None:
            continue
        many = value if isinstance(value, list) else [value]
        for index, each in enumerate(many):
            if isinstance(each, str) and "use" in section.__struct_fields__:
                continue
            at = f"{prefix}{name}" + (f"[{index}]" if isinstance(value, list) else "")
            if not isinstance(each, Mapping):
                raise ValueError(f"{where}: {at} is {each!r}; expected keys and values")
            _require_known(where, each, section, f"{at}.")


def _as_json(where: str, value: Any, key: str = "") -> Any:
    """Convert to what settings.json can hold, such as a date to a text, or name the key."""
    if isinstance(value, dict):
        return {
            name: _as_json(where, each, f"{key}.{name}" if key else str(name))
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_as_json(where, each, f"{key}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, bytes | bytearray | memoryview):
        with contextlib.suppress(TypeError):
            return msgspec.to_builtins(value)
    expected = "null, a bool, number or text, or a list or mapping of these"
    raise ValueError(f"{where}: {key} is {value!r:.80}; expected {expected}")


def _in_full(entries: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Replace a text by ``{"use": text}`` where rewards or an agent are expected."""

    def full(value: Any) -> Any:
        if isinstance(value, list):
            return [full(each) for each in value]
        return {"use": value} if isinstance(value, str) else value

    for name, hint in typing.get_type_hints(kind).items():
        section = _section(hint)
        if name in entries and section is not None and "use" in section.__struct_fields__:
            entries[name] = full(entries[name])
    return entries


def _unknown(key: str, name: str, known: Sequence[str]) -> str:
    return f"there is no setting {key!r}; {did_you_mean(str(name), known)}"


def _set(entries: dict[str, Any], key: str, text: str, kind: type[msgspec.Struct]) -> None:
    """Set the value of a dotted key from the command line."""
    key = _SHORT.get(key, key)
    hint: Any = kind
    at, parts = entries, key.split(".")
    for depth, part in enumerate(parts):
        if depth:
            below = at.get(parts[depth - 1])
            at[parts[depth - 1]] = at = dict(below) if isinstance(below, Mapping) else {}
        section = _section(hint)
        if section is not None and hint is section:
            if part not in section.__struct_fields__:
                raise ValueError(f"--{key}: {_unknown(key, part, section.__struct_fields__)}")
            hint = typing.get_type_hints(section)[part]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif hint is not Any:
            raise ValueError(
                f"--{key}: {'.'.join(parts[:depth])} has no keys below it. Give its whole value "
                "as JSON."
            )
    at[parts[-1]] = _value(key, text, hint)


def _value(key: str, text: str, hint: Any) -> Any:
    """Convert a command-line text to the type of its field."""
    if text == "null":
        return None
    if str in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)):
        return text  # even if it looks like a number
    if typing.get_origin(hint) is tuple and not text.startswith("["):
        return text.split(",") if text else []
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if hint is not Any and text.startswith(("[", "{")):
            raise ValueError(f"--{key}: {text!r:.80} is not valid JSON: {error}") from error
        return text


def _section(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct of a field that holds one struct or a sequence of them."""
    for each in (hint, *typing.get_args(hint)):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            return each
    return None


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return _scalar(msgspec.to_builtins(value))


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each field on one line, including inherited fields."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
            ):
                assert isinstance(below.value, ast.Constant)
                docs[field.target.id] = " ".join(str(below.value.value).split()).replace("``", "`")
    return docs


def _hint(kind: Any, path: str) -> Any:
    """Return the type of a setting, such as ``rewards[0].use``."""
    for name, is_item in re.findall(r"(\w+)(\[\d+\])?", path):
        kind = typing.get_type_hints(_section(kind) or kind)[name]
        kind = typing.get_args(kind)[0] if is_item else kind
    return kind


def _choices(kind: Any, path: str) -> list[Any]:
    """Return the allowed values of a setting whose type is a Literal."""
    kind = _hint(kind, path)
    alternatives = [kind] if typing.get_origin(kind) is Literal else typing.get_args(kind)
    return [
        value
        for each in alternatives
        if typing.get_origin(each) is Literal
        for value in typing.get_args(each)
    ]


def _check_numbers(value: Any, key: str) -> None:
    """Reject numbers that settings.json cannot hold: NaN, infinity, more than 64 bits."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_numbers(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_numbers(each, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}; expected a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key} is {value}; expected a number of at most 64 bits")


def _unfit(settings: RunSettings, key: str, expected: str) -> ValueError:
    """Return the refusal of a setting that is within its bounds, but does not fit the others."""
    return ValueError(f"{key} is {operator.attrgetter(key)(settings)!r}; expected {expected}")


def _check_train(settings: RunSettings) -> None:
    if taken := _GIVEN_ELSEWHERE.keys() & settings.train.engine.keys():
        name = min(taken)
        other = _GIVEN_ELSEWHERE[name]
        raise ValueError(f"train.engine.{name} cannot be set here; set {other} instead")
    entries = {"model": settings.model, **settings.train.engine}
    try:
        msgspec.convert(entries, TrainConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_told(error, TrainConfig, entries, "train.engine")) from error
    has_reference = isinstance(settings, DPOSettings) or (
        isinstance(settings, GRPOSettings) and settings.algorithm.kl_coef
    )
    if (settings.train.lora or {}).get("path") and has_reference:
        raise ValueError(
            "train.engine.lora.path is given, and the reference of adapters is the base model "
            "without them, not the policy that the run starts from. Merge the adapter into its "
            "base (merge_and_unload), give that as model, and train a new adapter"
        )
    name = "prompts_per_step" if isinstance(settings, GRPOSettings) else "batch_size"
    if (size := getattr(settings, name, 0)) % settings.train.minibatches:
        raise _unfit(settings, "train.minibatches", f"a number that divides {name}, {size}")


def _check_data(settings: RunSettings) -> None:
    data = settings.data
    for key in ("held_out", "held_out_split"):
        if getattr(data, key) is not None and data.num_held_out:
            both = f"data.{key} and data.num_held_out are both given"
            raise ValueError(f"{both}; expected one of them")
    cluster = settings.cluster
    shared_by = settings.train.model_parallel_size
    found, prefix = distillation(settings)
    for field in () if found.teacher else msgspec.structs.fields(found):
        key, value = f"{prefix}{field.name}", getattr(found, field.name)
        if field.name.startswith("teacher_") and value != field.default:
            raise ValueError(f"{key} is {value} without {prefix}teacher; expected both")
    alone = f"{prefix}teacher_workers", found.teacher_workers
    for key, num in ("cluster.train_workers", cluster.train_workers), alone:
        if shared_by < 1 or num % shared_by:
            raise ValueError(
                f"train.engine has tensor_parallel_size x context_parallel_size of {shared_by}, "
                f"which does not divide {key}, {num}"
            )
        if cluster.scheduler == "inline" and num > 1:
            expected = "1 with scheduler 'inline', one rank of each model in the script's process"
            raise _unfit(settings, key, expected)
    needed, total = cluster.train_workers, cluster.devices_per_node * cluster.num_nodes
    has_rollout = isinstance(settings, GRPOSettings) and not settings.rollout.is_recorded
    if has_rollout and cluster.placement == "separated":
        needed += cluster.rollout_instances * cluster.rollout_devices
    if (apart := devices_apart(settings)) and needed + sum(apart.values()) > total:
        taken = ", ".join(f"{key} is {num}" for key, num in apart.items())
        raise ValueError(
            f"{taken}, of devices that no other role has, beside {needed} of the other roles; "
            f"expected at most {total} together (cluster.devices_per_node x num_nodes)"
        )
    if cluster.scheduler != "ray" and cluster.num_nodes > 1:
        raise _unfit(settings, "cluster.num_nodes", "1 without cluster.scheduler 'ray'")


def _check_cluster(settings: GRPOSettings) -> None:
    cluster, rollout = settings.cluster, settings.rollout
    if cluster.rollout_spans_nodes and not rollout.is_recorded:
        spans = (
            f"cluster.rollout_devices is {cluster.rollout_devices}, more than "
            f"cluster.devices_per_node, {cluster.devices_per_node}, so that an instance spans nodes"
        )
        if rollout.engine != "vllm":
            raise ValueError(f"{spans}; expected rollout.engine 'vllm', not {rollout.engine!r}")
        if settings.sync.way not in ("collective", "disk"):
            raise ValueError(
                f"{spans}; sync.way {settings.sync.way!r} reaches only one of these nodes, "
                "use 'collective' or 'disk'"
            )
    if cluster.devices_per_node and cluster.rollout_devices > 1 and rollout.engine == "hf":
        expected = "1 with rollout.engine 'hf', or 'vllm' or 'server'"
        raise _unfit(settings, "cluster.rollout_devices", expected)
    if cluster.placement == "colocated":
        beside = "with cluster.placement 'colocated'"
        num_devices = cluster.rollout_instances * cluster.rollout_devices
        if cluster.takes_turns and num_devices != cluster.train_workers:
            raise ValueError(
                f"cluster.rollout_instances x rollout_devices is {num_devices}; expected "
                f"cluster.train_workers, {cluster.train_workers}, because the rollout uses the "
                f"trainer's devices {beside}"
            )
        if rollout.staleness:
            expected = f"0 {beside}, where the roles alternate, or placement 'separated'"
            raise _unfit(settings, "rollout.staleness", expected)
        if settings.sync.way == "collective":
            expected = f"'auto' {beside}, since a collective needs one device per member"
            raise _unfit(settings, "sync.way", expected)
        if settings.sync.in_flight == "abort":
            expected = f"'keep' {beside}, where no request is in flight during a weight sync"
            raise _unfit(settings, "sync.in_flight", expected)


def _check_rewards(settings: GRPOSettings) -> None:
    names = [name_of(reward) for reward in settings.rewards]
    for index, reward in enumerate(settings.rewards):
        at = f"rewards[{index}]"
        if bool(reward.use) == bool(reward.judge):
            found = "are both given" if reward.use else "are both empty"
            raise ValueError(f"{at}.use and {at}.judge {found}; expected one of them")
        given = [name for name in _OF_JUDGES if getattr(reward, name) != getattr(Reward(), name)]
        if given and not reward.judge:
            raise ValueError(f"{at}.{given[0]} is given without {at}.judge; expected both")
    agent = settings.agent
    if agent.use and agent.command:
        raise ValueError("agent.use and agent.command are both given; expected one of them")
    if agent.is_given and names:
        raise ValueError("rewards and agent are both given; expected one, as agents return rewards")
    is_rewarded, algorithm = settings.is_rewarded, settings.algorithm
    has_critic = algorithm.preset == "ppo"
    if agent.is_given:
        names = [AGENT_REWARD]
        if agent.credit == "turn" and has_critic:
            raise ValueError("agent.credit is 'turn'; expected 'session' with a critic")
        if algorithm.overlong_buffer:
            expected = "0 with an agent, which has agent.max_tokens and agent.truncated_reward"
            raise _unfit(settings, "algorithm.overlong_buffer", expected)
    found = "rewards[].weight is 0 for all" if names else "rewards is empty"
    is_taught = algorithm.teacher and algorithm.teacher_coef and not has_critic
    is_own_loss = names and "." in algorithm.loss  # it may need no advantages
    if not (names and is_rewarded) and not is_taught and not is_own_loss:
        if algorithm.teacher:
            found += " and algorithm."
            found += "preset 'ppo' needs one" if has_critic else "teacher_coef is 0"
        raise ValueError(f"{found}; expected at least one, such as [exact], or an agent")
    if is_rewarded and settings.samples_per_prompt < 2 and not has_critic:
        expected = "2 or more, since rewards are compared with those of other answers"
        raise _unfit(settings, "samples_per_prompt", expected)
    differ = agent.is_given or any(reward.weight for reward in settings.rewards)
    if not differ and algorithm.dynamic_sampling:
        raise ValueError(
            f"{found} and algorithm.dynamic_sampling is true, which replaces all prompts "
            "whose answers have equal rewards; set it to false"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rewards are called {min(twice)!r}; give each a name of its own")
    right = settings.evaluation.reward
    if right is not None and right not in names:
        raise ValueError(f"evaluation.reward is {right!r}; the rewards are {', '.join(names)}")


def _check_recorded(settings: GRPOSettings) -> None:
    rollout = settings.rollout
    if rollout.is_recorded != bool(rollout.recorded):
        raise ValueError(
            f"rollout.recorded is {rollout.recorded!r} and rollout.engine is {rollout.engine!r}; "
            "expected the engine 'recorded' with the output folder of a run with rollout.record"
        )
    if rollout.is_recorded and (rollout.record or settings.check.weights):
        name = "rollout.record" if rollout.record else "check.weights"
        raise ValueError(f"{name} is true; expected false with rollout.engine 'recorded'")


def _check_rest(settings: GRPOSettings) -> None:
    evaluation, algorithm = settings.evaluation, settings.algorithm
    engines: dict[str, str | None] = {"rollout.engine": settings.rollout.engine}
    engines |= {f"rewards[{i}].engine": each.engine for i, each in enumerate(settings.rewards)}
    for key, engine in engines.items():
        known = (*ENGINES, "recorded") if key == "rollout.engine" else tuple(ENGINES)
        if engine is not None and engine not in known and "." not in engine:
            raise ValueError(
                f"{key} is {engine!r}; expected {', '.join(known)}, or a class's import path"
            )
    if "." not in algorithm.loss and algorithm.loss not in LOSS_NAMES:
        expected = f"{', '.join(LOSS_NAMES)}, or a function's import path"
        raise _unfit(settings, "algorithm.loss", expected)
    if settings.correction.mode != "none" or settings.correction.outlier is not None:
        if algorithm.loss not in _CORRECTED:
            expected = f"{', '.join(_CORRECTED)}, which weigh their tokens by the correction"
            raise _unfit(settings, "algorithm.loss", expected)
        if algorithm.old_logprobs == "both":
            raise ValueError(
                "correction is given, and the loss is relative to the trainer's "
                "log-probabilities then; expected algorithm.old_logprobs 'rollout' or 'trainer'"
            )
    losses = (*_CORRECTED, "decoupled_ppo")
    if algorithm.teacher_top_k and algorithm.loss not in losses:
        expected = f"{', '.join(losses)}, which add the divergence from the teacher, or "
        expected += f"algorithm.teacher_top_k 0, not {algorithm.teacher_top_k}"
        raise _unfit(settings, "algorithm.loss", expected)
    if settings.sync.lora == "adapter" and (why := unfit_adapters(settings)):
        raise ValueError(f"sync.lora is 'adapter', and {why}; expected 'merged' or 'auto'")
    if evaluation.samples and not all(1 <= k <= evaluation.samples for k in evaluation.k):
        raise ValueError(
            f"evaluation.k is {list(evaluation.k)}; expected 1 to evaluation.samples, "
            f"{evaluation.samples}"
        )
    if algorithm.overlong_buffer > settings.rollout.max_new_tokens:
        expected = f"at most rollout.max_new_tokens, {settings.rollout.max_new_tokens}"
        raise _unfit(settings, "algorithm.overlong_buffer", expected)
