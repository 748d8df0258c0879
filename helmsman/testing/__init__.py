"""Test tools: fault plans, simulated rollout instances on a virtual clock, and the contract suite of schedulers.

The suite is the module ``helmsman.testing.contract``, which needs pytest.
"""

from helmsman.api.faults import DropNode, Fault, Hang, Injection, Kill, Slow
from helmsman.testing._fault_injector import FaultInjector, FaultRecord
from helmsman.testing._fault_plan import FaultPlan
from helmsman.testing._simulation import (
    GENERATED,
    EngineModel,
    Lengths,
    SimulatedBackend,
    SimulatedInstance,
    log_normal_lengths,
)
from helmsman.testing._virtual_time import VirtualLoop, run_virtually

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
