"""Test tools: fault plans, simulated rollout instances on a virtual clock, and a contract suite.

The contract suite for schedulers is the module ``helmsman.testing.contract``; it needs pytest.
"""

from helmsman.testing._faults import Fault, FaultInjector, FaultPlan, FaultRecord, Hang, Kill
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
    "EngineModel",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRecord",
    "Hang",
    "Kill",
    "Lengths",
    "SimulatedBackend",
    "SimulatedInstance",
    "VirtualLoop",
    "log_normal_lengths",
    "run_virtually",
]
