"""Copies counted as usages: as many bytes as they take, and none where nothing is copied."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import cost
from autoshard.copies import copy_usages
from autoshard.sharding import Sharding
from tests.test_cost import array, choices_of, pick

ROWS = Sharding((("x",), ()))


def counted(choices: cost.Choices, around: list[int]):
    usages = copy_usages(choices, around).values()
    problem = choices.problem
    return dataclasses.replace(problem, usages=(*problem.usages, *usages))


def test_rows_with_the_copies_of_a_solution_hold_its_peak():
    choices = choices_of(lambda x, w: jnp.sin(x @ w), array(512, 512), array(512, 512))
    split = pick(choices, sin=ROWS, dot_general=ROWS)
    size, _ = cost.peak(choices, split)
    assert choices.problem.peak_bytes(split) < size
    assert counted(choices, split).peak_bytes(split) == pytest.approx(size, rel=1e-6)


def test_a_reader_that_takes_the_value_as_it_lies_holds_no_copy():
    choices = choices_of(lambda x, w: jnp.sin(x @ w), array(512, 512), array(512, 512))
    split = pick(choices, sin=ROWS, dot_general=ROWS)
    for (i, k), usage in copy_usages(choices, split).items():
        value = choices.ops[i].operands[k]
        assert value is not None
        have = choices.sharding_of(value, split)
        for strategy, held in zip(choices.strategies[i], usage.bytes, strict=True):
            assert (held == 0) == (strategy.operands[k] == have)


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_only_as_many_layers_are_sharded_as_memory_asks_for(share):
    """Twelve equal layers, all their weights whole where there is room: with less of it, some are
    sharded and gathered, each for the same seconds; all sharded is the known plan."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        grads = jax.grad(loss)(weights)
        return [w - g for w, g in zip(weights, grads, strict=True)]

    def planned(**options):
        weights = [array(1024, 1024) for _ in range(12)]
        return autoshard.plan(
            step, weights, array(8192, 1024), mesh="x=8", hardware="v5e", donate_argnums=0,
            **options,
        )  # fmt: skip

    ample = planned()
    least, all_sharded_s = min((peak_bytes, seconds) for _, seconds, peak_bytes in ample.known)
    limit = share * ample.peak_bytes
    assert least < limit
    plan = planned(memory_limit_bytes=limit)
    assert 0.85 * limit < plan.peak_bytes <= limit
    slower = (all_sharded_s - ample.objective_s) * (ample.peak_bytes - limit)
    assert plan.objective_s <= ample.objective_s + 1.2 * slower / (ample.peak_bytes - least)
