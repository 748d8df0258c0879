"""Imports all modules of cases, which declare them."""

from benchmarks.cases import (  # noqa: F401
    agents,
    calls,
    end_to_end,
    groups,
    imports,
    operator,
    optimizer,
    packing,
    payload,
    planner,
    simulated,
    start,
    tls,
    up,
    watching,
    weights,
)
