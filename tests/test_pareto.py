"""Memory against time: less memory never makes a plan faster, and every plan is right."""

from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from models import gpt, mlp
from tests.plans import QUICK, run


def on_one_device(module):
    return jax.jit(module.train_step, compiler_options=QUICK)(*module.init("tiny"))


WHERE: Any = dict(mesh="data=8", hardware="v5e", donate_argnums=0)


@pytest.mark.parametrize("module", [mlp, pytest.param(gpt, marks=pytest.mark.slow)])
def test_the_frontier_falls_in_memory_and_rises_in_time_and_computes_the_same(module):
    plans = autoshard.plan.pareto(
        module.train_step,
        *module.example_arguments("tiny"),
        points=5,
        **WHERE,
    )
    assert len(plans) >= 3, "a train step can trade memory for time"
    for plan in plans:
        assert plan.memory_limit_bytes is not None
        assert plan.peak_bytes <= plan.memory_limit_bytes
    for ample, tight in zip(plans, plans[1:], strict=False):
        assert tight.memory_limit_bytes < ample.memory_limit_bytes
        assert tight.peak_bytes < ample.peak_bytes
        assert tight.step_time_s > ample.step_time_s
    limit = 0.8 * plans[-1].peak_bytes
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.plan(
            module.train_step, *module.example_arguments("tiny"), memory_limit_bytes=limit, **WHERE
        )
    wanted = jax.tree.leaves(on_one_device(module))
    for plan in plans:
        found = jax.tree.leaves(run(_planned(plan, module), module.init("tiny")))
        for x, y in zip(found, wanted, strict=True):
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-6


def _planned(plan: autoshard.Plan, module) -> Any:
    return plan.jit(module.train_step)
