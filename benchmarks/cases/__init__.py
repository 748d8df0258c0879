"""All cases, declared by being imported."""

from benchmarks.cases import calls  # noqa: F401
