"""Test tools: fault plans, simulated rollout instances on a virtual clock, and a contract suite.

The contract suite for schedulers is the module ``helmsman.testing.contract``; it needs pytest.
"""

from helmsman.api.faults import DropNode, Fault, Hang, Injection, Kill, Slow
from helmsman.testing._faults import FaultInjector, FaultPlan, FaultRecord
from helmsman.testing._simulation import (
    GENERATED,
    EngineModel,
    Lengths,
    SimulatedBackend,
    SimulatedInstance,
    VirtualLoop,
    log_normal_lengths,
    run_virtually,
)

__all__ = [
    "GENERATED",
    "DropNode",
    "EngineModel",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRecord",
    "Hang",
    "Injection",
    "Kill",
    "Lengths",
    "SimulatedBackend",
    "SimulatedInstance",
    "Slow",
    "VirtualLoop",
    "log_normal_lengths",
    "run_virtually",
]
