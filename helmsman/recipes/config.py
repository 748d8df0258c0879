"""Reads settings from files, their base files, scripts and command lines."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman.api.config_files import read_config
from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.plain import plain
from helmsman.api.suggestions import did_you_mean
from helmsman.recipes.choosing import CHOSEN, Choice, choose
from helmsman.recipes.resolving import resolve, told
from helmsman.recipes.settings import RunSettings

S = TypeVar("S", bound=RunSettings)
_SHORT = {"data": "data.train"}
"""Short flags and the keys that they set."""
EXTENDS = "extends"
"""Key that names a file's base; the path is relative to the file."""

CONFIGS = Path(__file__).parent / "configs"
"""Folder of the packaged configurations, which ``--config`` finds by name."""


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
) -> tuple[S, list[Choice]]:
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
    try:
        full = _in_full(entries, kind)
        settings, choices = choose(msgspec.convert(full, kind, strict=False), flat_keys(full))
        return resolve(settings), choices
    except msgspec.ValidationError as error:
        text = told(error, kind)
        if missing := re.fullmatch(r"Object missing required field `(\w+)`.*", text):
            text = f"{missing[1]} is not given. Set it in the file, by --{missing[1]}, or in Python"
        raise ValueError(f"{_origin(text, where, overrides)}: {text}") from error
    except ValueError as error:
        raise ValueError(f"{_origin(str(error), where, overrides)}: {error}") from error


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
