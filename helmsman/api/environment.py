"""Environment variables of workers, and masking of secrets in them."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec

MASK = "***"

MASK_VARIABLE = "HELMSMAN_MASK"
"""Environment variable that lists more names of secrets: shell patterns, separated by commas
("MY_*,LICENSE").
"""

INSTANCE_DEVICES_ENV_VAR = "HELMSMAN_INSTANCE_DEVICES"
"""In a worker of a deferred job: JSON, [[address, [device id, ...]], ...] for each node of its
instance, its own node first.
"""


MAX_VARIABLE_BYTES = 128 * 1024 - 1
"""Size of 'NAME=value' with which Linux still starts a process (MAX_ARG_STRLEN)."""


class EnvironmentVariable(msgspec.Struct, frozen=True):
    """A variable of a worker, and its source."""

    name: str
    value: str
    source: str
    """'driver' (forwarded from the script's shell), 'spec.env_vars', 'devices' (the worker's device
    masks), 'cpu count' (thread counts), 'default' (unless the script sets it), 'set_worker_env',
    'node' (already set on the worker's node), 'helmsman' (set by Helmsman for its own use) or
    'engine' (changed later in the worker).
    """


_SECRET_NAME = re.compile(
    # Not secret: TOKENIZERS_PARALLELISM, PWD (the working directory), SSH_AUTH_SOCK (a path).
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|WEBHOOK|APIKEY|ACCESSKEY|ACCOUNTKEY|AUTHORIZATION"
    r"|(^|[_.-])(KEYS?|CREDS?|PASS|JWT)([_.-]|$)|(^|[_.-])(AUTH|PAT)$|_PWD$",
    re.IGNORECASE,
)
_SECRET_PARTS = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        MASK,
    ),
    # User and password of a URL, or a token alone.
    (
        re.compile(r"(://)[^/\s?#]*@"),
        rf"\1{MASK}@",
    ),
    (re.compile(r"\b(bearer|basic)(\s+|%20)[^\s,;]+", re.IGNORECASE), rf"\1 {MASK}"),
    # An AWS secret key: this length, all three kinds of characters, and not a path.
    (
        re.compile(
            r"(?<![\w+/.~-])(?!/)(?=[a-z0-9+/]{0,39}[A-Z])(?=[A-Z0-9+/]{0,39}[a-z])(?=\D{0,39}\d)[A-Za-z0-9+/]{40}(?![\w+/=.-])"
        ),
        MASK,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]*)?"), MASK),  # a JSON web token
    (
        re.compile(
            r"\b(?:hf_|sk-(?=[\w-]*\d)|sk_live_|sk_test_|rk_live_|gh[oprsu]_|github_pat_|glpat-|xox[abeoprs]-|xapp-|AKIA|ASIA|AIza|ya29\.|npm_"
            r"|pypi-|nvapi-|gsk_|r8_|hvs\.|dckr_pat_|wandb_v1_)[\w-]{12,}"
        ),
        MASK,
    ),
)
_ASSIGNED = re.compile(
    r"""(?<![\w.-])(-*[A-Za-z][\w.-]*)(["']?\s*(?:=|:(?!/))\s*["']?)(?!(?:bearer|basic)\b)([^\s;&,"'}]+)""",
    re.IGNORECASE,
)
"""name=value or "name": "value" within a value. A colon before a slash does not match, since it
separates the directories of a search path.
"""
_WORD = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]*")
_FEWEST_RANDOM = 20
"""Minimum length of a word that counts as random."""
_CHANGES = 0.45
"""Minimum share of adjacent characters of different kinds (capital, small, digit) in a word that
counts as random. The mean is 0.62 in random words, and below 0.4 in names chosen by people.
"""


_MOST_SHOWN = 40
"""Characters of a refused value that a message shows."""
_MOST_MASKED = 1000
"""Characters of a refused value that are searched for secrets."""


def unfit(name: Any, value: Any) -> tuple[Any, str] | None:
    """Return why no process can have a variable.

    Args:
        name: Name of the variable.
        value: Value of the variable.

    Returns:
        What the variable is, without secrets, and what was expected; None if processes can have it.
    """
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        return name, "a name that is a text, is not empty and has no '=' and no NUL"
    if not isinstance(value, str):
        return MASK if _is_secret(name) else value, "a text"
    shown = masked(name, value[:_MOST_MASKED])[:_MOST_SHOWN]
    try:
        size = len(f"{name}={value}".encode())
    except UnicodeEncodeError:
        return shown, "a text that UTF-8 can encode"
    if size > MAX_VARIABLE_BYTES:
        return shown, f"at most {MAX_VARIABLE_BYTES} bytes with its name, not {size}"
    return (shown, "a text without NUL") if "\0" in value else None


def masked(name: str, value: str) -> str:
    """Replace the secrets in a variable's value, which are detected by name and by shape.

    A value is masked as a whole if its name looks like that of a secret or matches HELMSMAN_MASK.
    In other values only the parts that look like a secret are masked: tokens with the prefixes of
    known services, JSON web tokens, private keys, passwords in URLs, 'name=value' with such a name,
    and long random words. Hexadecimal words are kept, since commits and digests look the same. An
    empty value is kept, since an empty token may be the error that the user is looking for.

    Args:
        name: Name of the variable; '' for a text without one.
        value: Value of the variable.

    Returns:
        The value with each secret replaced by MASK.
    """
    if value and _is_secret(name):
        return MASK
    for pattern, replacement in _SECRET_PARTS:
        value = pattern.sub(replacement, value)
    value = _ASSIGNED.sub(
        lambda found: f"{found[1]}{found[2]}{MASK}" if _is_secret(found[1]) else found[0], value
    )
    return _WORD.sub(lambda found: MASK if _is_random(found[0]) else found[0], value)


def masked_command(arguments: Sequence[str]) -> str:
    """Mask the secrets of a command line: ``--api-key VALUE`` and ``--api-key=VALUE``."""
    options = [
        "",
        *(each if each.startswith("-") and "=" not in each else "" for each in arguments),
    ]
    return " ".join(masked(option, each) for option, each in zip(options, arguments, strict=False))


def _is_secret(name: str) -> bool:
    name = name.lstrip("-")
    if _SECRET_NAME.search(name):
        return True
    patterns = os.environ.get(MASK_VARIABLE, "").upper().split(",")
    return any(
        fnmatch.fnmatchcase(name.upper(), pattern.strip())
        for pattern in patterns
        if pattern.strip()
    )


def _is_random(word: str) -> bool:
    """Detect words that look like a key: long, with three often alternating kinds of characters."""
    parts = [part for part in re.split(r"[+/_=-]+", word) if not _HEXADECIMAL.fullmatch(part)]
    kinds = [[_kind(character) for character in part] for part in parts]
    if sum(map(len, kinds)) < _FEWEST_RANDOM or len(set().union(*kinds)) < 3:
        return False
    changes = [first != second for part in kinds for first, second in itertools.pairwise(part)]
    return sum(changes) >= _CHANGES * len(changes)


def _kind(character: str) -> str:
    return "digit" if character.isdigit() else "capital" if character.isupper() else "small"
