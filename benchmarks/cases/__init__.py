"""All cases, declared by being imported."""

from benchmarks.cases import calls, groups, imports, packing, payload, planner, simulated, start, tls, up, watching, weights  # noqa: F401
