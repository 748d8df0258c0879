"""Reading of YAML, JSON and TOML files as users mean them, within limits."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000
"""Maximum keys and values of a file, each alias counted with all that it stands for."""
_MAX_DEPTH = 64
_MAX_DIGITS = 100
"""Maximum length of a number, since conversions of longer ones take long or fail."""

_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+$")
_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*)""" + f"{{{_MAX_DEPTH}}}"
)
"""A key of TOML with more parts than levels are allowed."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_config(path: Path) -> Any:
    """Read a TOML file, or a YAML or JSON file under any other name.

    Args:
        path: The file.

    Returns:
        Its plain value.

    Raises:
        ValueError: The content is invalid, or exceeds a limit. The message does not name the file.
        OSError: The file cannot be read.
        ModuleNotFoundError: PyYAML is missing.
    """
    try:
        text = _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the content is not UTF-8 text: {error}") from error
    if path.suffix != ".toml":
        return _read_yaml(text)
    if _LONG_KEY.search(text):  # tomllib takes quadratic time
        raise ValueError(_too_deep())
    try:
        found = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    _require_small(found)
    return found


def _read_bytes(path: Path) -> bytes:
    # A FIFO without a writer would block a plain open.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(
                "it is a pipe or a device, expected a regular file. Write the content to a file"
            )
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is too large, expected at most {_MAX_BYTES >> 20} MiB. Shorten it")
    return data


def _too_deep() -> str:
    return f"values are nested too deeply, expected at most {_MAX_DEPTH} levels. Flatten them"


def _too_many() -> str:
    return (
        f"there are too many keys and values, expected at most {_MAX_VALUES:,}. Shorten it, or use "
        "fewer aliases"
    )


def _require_small(found: Any) -> None:
    """Raise ValueError if a value without aliases exceeds a limit."""
    level, num_values = [found], 0
    for _ in range(_MAX_DEPTH + 1):
        num_values += len(level)
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                num_values += len(each)
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, int) and abs(each) >= 10**_MAX_DIGITS:
                raise ValueError(_too_long("a number"))
        if num_values > _MAX_VALUES:
            raise ValueError(_too_many())
        if not below:
            return
        level = below
    raise ValueError(_too_deep())


def _too_long(number: str) -> str:
    return f"{number} is too long, expected at most {_MAX_DIGITS} digits. Shorten it"


def _read_yaml(text: str) -> Any:
    """Read a YAML or JSON document with PyYAML's safe types.

    Numbers such as 1e-6 are numbers, which PyYAML itself takes for texts. A key that is given twice
    is an error, while PyYAML itself drops the first.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        depth = deepest = num_values = 0

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self.sizes: dict[int, tuple[int, int]] = {}
            """Number of values and of levels of each complete node."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
            before, deepest = self.num_values, self.deepest
            self.depth += 1
            self.deepest = self.depth
            self.num_values += 1
            self.require_small(mark)
            node = super().compose_node(parent, index)
            if is_alias:
                if id(node) not in self.sizes:
                    problem = "the alias stands for a value that contains it"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
                num_values, num_levels = self.sizes[id(node)]
                self.num_values += num_values - 1
                self.deepest += num_levels - 1
                self.require_small(mark)
            else:
                size = self.num_values - before, self.deepest - self.depth + 1
                self.sizes[id(node)] = size
            self.depth -= 1
            self.deepest = max(deepest, self.deepest)
            return node

        def require_small(self, mark: Any) -> None:
            if self.deepest > _MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem=_too_deep(), problem_mark=mark)
            if self.num_values > _MAX_VALUES:
                raise yaml.MarkedYAMLError(problem=_too_many(), problem_mark=mark)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if name in seen:
                    raise yaml.MarkedYAMLError(
                        "while reading keys and values",
                        node.start_mark,
                        f"the key {key.value!r:.80} is given twice",
                        key.start_mark,
                    )
                seen.add(name)
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            problem = ""
            if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
                problem = _too_long("the number")
            else:
                try:
                    return super().construct_object(node, deep)
                except yaml.YAMLError:
                    raise
                except Exception as error:  # noqa: BLE001 - of odd numbers, dates and tags
                    problem = f"{type(error).__name__}: {error}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
