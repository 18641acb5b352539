"""The loop through the compiler: the fastest compiled plan wins, refusals are taken in."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard import api, planning, refine
from autoshard.fitting import fitted
from autoshard.stages import Stages
from autoshard.trace import trace
from models import mlp
from tests.plans import mesh_of, run

STEP = (mlp.train_step, *mlp.example_arguments("tiny"))


def test_on_devices_without_a_schedule_the_plan_is_compiled_and_right():
    plan = autoshard.plan(*STEP, mesh=mesh_of("4x2"), donate_argnums=0, refine=1)
    assert plan.compiled and min(s for _, _, s in plan.compiled) < math.inf
    assert "plans compiled" in plan.explain()
    planned: Any = plan.jit(mlp.train_step)
    found = jax.tree.leaves(run(planned, mlp.init("tiny")))
    wanted = jax.tree.leaves(jax.jit(mlp.train_step)(*mlp.init("tiny")))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_the_fastest_compiled_plan_is_returned():
    pytest.importorskip("libtpu")
    plan = autoshard.plan(*STEP, mesh="v5e:2x4", donate_argnums=0, refine=2)
    made = plan.check(*STEP).times
    assert made is not None
    assert made.step_s == pytest.approx(min(s for _, _, s in plan.compiled), rel=1e-6)
    assert plan.tried, "other meshes were considered"


def test_a_refused_plan_is_planned_again_in_less_memory():
    """A compiler that refuses everything: each plan is to fit in less than the one before."""
    peaks = []

    def solve(priced):
        solution = fitted(priced.choices, priced.known, 60.0)
        peaks.append(solution.peak_bytes)
        limit = priced.choices.problem.usage_limit_bytes
        assert len(peaks) == 1 or limit == pytest.approx(peaks[-2] * refine.SHRINK)
        return refine.Attempt(priced, solution, _plan(solution, len(peaks)))

    check = dataclasses.make_dataclass("Refusal", ["refused", "memory", "times", "comparison"])
    refused: Any = check("no", None, None, None)
    best = refine.refined([solve(_priced())], 2, lambda _: refused, solve)
    assert len(best.compiled) == 3 and all(s == math.inf for _, _, s in best.compiled)
    assert peaks == sorted(peaks, reverse=True)


def _priced():
    options = planning.Options(hardware="v5e", donate_argnums=(0,))
    program = trace(mlp.train_step, STEP[1:], donate_argnums=(0,))
    target = planning.target("data=4,model=2", options)
    return api._priced(program, target, options, Stages("test", show=False))


def _plan(solution, number):
    plan = autoshard.plan(*STEP, mesh="data=4,model=2", hardware="v5e", donate_argnums=0)
    constraints = dataclasses.replace(plan.constraints, scatters={str(number): Any})
    return dataclasses.replace(plan, constraints=constraints, objective_s=solution.objective_s)
