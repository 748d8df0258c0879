"""All cases, declared by being imported."""

from benchmarks.cases import calls, groups, payload, simulated  # noqa: F401
