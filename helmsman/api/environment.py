"""What is told of a worker's environment, and how secrets are kept out of it."""

from __future__ import annotations

import re

import msgspec

MASK = "***"


class EnvironmentVariable(msgspec.Struct, frozen=True):
    """A variable of a worker, and who set it."""

    name: str
    value: str
    source: str
    """'driver' (forwarded from the script's shell), 'spec.env_vars', 'devices' (the worker's masks), 'cpu count' (thread
    counts), 'set_worker_env', 'node' (the worker's node had it by itself), 'helmsman' (its own marks) or 'engine' (changed in
    the worker since)."""


_SECRET_NAME = re.compile(
    # TOKENIZERS_PARALLELISM is no secret; nor is PWD, the working folder.
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|WEBHOOK|APIKEY|ACCESSKEY|_KEY(_|$)|_PWD$|AUTHORIZATION",
    re.IGNORECASE,
)
_SECRET_PARTS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"(://)[^/\s?#]*@", rf"\1{MASK}@"),  # user and password of a URL; a token may also stand there alone
        (r"\b(bearer|basic)(\s+|%20)[^\s,;]+", rf"\1 {MASK}"),
        (r"\b((?:password|passwd|pwd|secret|token|(?:api|access)[_-]?key)\s*[=:]\s*)[^\s;&,]+", rf"\1{MASK}"),
        (r"\b(?:hf_|sk-|ghp_|gho_|ghs_|glpat-|github_pat_|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}", MASK),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", MASK),
    )
)


def masked(name: str, value: str) -> str:
    """The value of a variable as it may be shown: without what its name or its form tells to be a secret.

    A value whose name speaks of a secret is masked as a whole, in others only the part that looks like one. An empty value is
    shown as it is, since that a token is empty is what one may be looking for.
    """
    if value and _SECRET_NAME.search(name):
        return MASK
    for pattern, replacement in _SECRET_PARTS:
        value = pattern.sub(replacement, value)
    return value
