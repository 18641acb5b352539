"""A GPT of a billion parameters, planned and compiled ahead of time for machines not at hand."""

import functools
import math
import re

import pytest

import autoshard
from autoshard import aot
from autoshard.inspect import CompiledStep, inspect
from models import gpt

ITEMSIZE = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


@functools.cache
def compiled(target: str, mesh: str, hardware: str) -> tuple[autoshard.Plan, CompiledStep]:
    arguments = gpt.example_arguments("1b")
    plan = autoshard.plan(
        gpt.train_step, *arguments, mesh=mesh, hardware=hardware, donate_argnums=0
    )
    devices = aot.mesh(target, plan.mesh)
    lowered = plan.jit(gpt.train_step, devices).lower(*arguments)
    return plan, inspect(lowered.compile(), devices)


def largest_part(collective) -> float:
    """Returns the bytes of one run; of the largest array where XLA combined several into one."""
    parts = re.findall(r"(\w+)\[([\d,]*)\]", collective.shape)
    if len(parts) == 1:
        return collective.bytes
    return max(
        ITEMSIZE[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in parts
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mesh", "hardware"),
    [("v5e:4x4", "data=4,model=4", "v5e"), ("h100:8", "data=8", "h100")],
    ids=["v5e:4x4", "h100:8"],
)
def test_the_plan_fits_and_its_layers_move_only_what_was_planned(target, mesh, hardware):
    plan, step = compiled(target, mesh, hardware)
    assert plan.memory_limit_bytes is not None and step.memory is not None
    assert step.memory.peak_bytes <= plan.memory_limit_bytes
    in_loops = [c for c in step.collectives if c.trips > 1]
    planned = max(c.bytes for c in plan.collectives if c.trips > 1)
    assert in_loops, "a sharded train step gathers weights or sums gradients in its layers"
    for c in in_loops:
        assert largest_part(c) <= planned, f"unplanned: {c}"
