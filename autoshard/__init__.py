"""autoshard decides how a JAX program is sharded."""

from autoshard.api import jit, pareto, plan, sharding_problem
from autoshard.calibrate import calibrate
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
from autoshard.hardware import Chip, Hardware, Link
from autoshard.plan import Plan, load

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "AutoshardError",
    "Chip",
    "Hardware",
    "HardwareError",
    "InfeasibleError",
    "Link",
    "MeshError",
    "NoSolutionError",
    "PinError",
    "Plan",
    "PlanError",
    "ProblemError",
    "calibrate",
    "jit",
    "load",
    "pareto",
    "plan",
    "sharding_problem",
]
