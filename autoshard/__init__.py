"""autoshard decides how a JAX program is sharded."""

from autoshard.api import jit, plan
from autoshard.errors import (
    ArgumentError,
    AutoshardError,
    HardwareError,
    InfeasibleError,
    MeshError,
    NoSolutionError,
    PinError,
    PlanError,
    ProblemError,
)
from autoshard.hardware import Hardware
from autoshard.plan import Plan, load

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "AutoshardError",
    "Hardware",
    "HardwareError",
    "InfeasibleError",
    "MeshError",
    "NoSolutionError",
    "PinError",
    "Plan",
    "PlanError",
    "ProblemError",
    "jit",
    "load",
    "plan",
]
