"""Random programs under their best plan and under random ones compute what one device computes."""

import random

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from autoshard.inspect import inspect
from tests.many_programs import check, failures
from tests.plans import MOST_COLLECTIVES, QUICK, check_random_plans, mesh_of, random_plan
from tests.random_programs import random_program

SEEDS = st.integers(0, 2**30)


def many(count: int):
    """Draws `count` programs, the same in every run; a failure is not shrunk, which takes hours."""
    return hypothesis.settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


@many(25)
@hypothesis.given(SEEDS)
def test_random_plans(seed):
    check(random.Random(seed), "random")


@many(12)
@hypothesis.given(SEEDS)
def test_best_plans(seed):
    check(random.Random(seed), "best")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_numbered_programs(part):
    """500 numbered programs each, in as many processes as there are cores (two at least)."""
    assert failures(range(500 * part, 500 * (part + 1))) == []


def test_long_loops_run_few_collectives(monkeypatch):
    """A program differentiated a scan over 3,200 steps, with hundreds of collectives in its body.

    Its random plan took hours on one CPU's devices, and looked like a hang.
    """

    def fn(x):
        return lax.scan(lambda c, y: (jnp.sin(c @ c + y), c[0]), x, jnp.ones((30_000, 8)))

    def collectives():
        planned = random_plan(fn, (jnp.ones((8, 8)),), mesh_of("4x2"), 1)
        compiled = planned.lower(jnp.ones((8, 8))).compile(compiler_options=QUICK)
        return sum(c.trips for c in inspect(compiled, mesh_of("4x2")).collectives)

    assert collectives() <= MOST_COLLECTIVES
    monkeypatch.setattr("tests.plans.MOST_COLLECTIVES", 10**9)
    assert collectives() > MOST_COLLECTIVES


def test_programs_hold_what_they_should():
    """All kinds of operations are drawn, nested ones too."""
    texts = " ".join(str(random_program(random.Random(k))) for k in range(60))
    for word in ("dot(", "scan{", "cond{", "checkpoint{", "grad{", "take", "scatter_add", "sort("):
        assert word in texts, word
    assert max(len(random_program(random.Random(k)).steps) for k in range(20)) > 20


@pytest.mark.parametrize(
    ("shape", "run"),
    [
        ((8, 0), lambda x: jnp.sum(jnp.abs(x) * 2.0, 1)),
        ((0, 8), lambda x: (x @ x.T, jnp.sum(x, 0), lax.cumsum(x, 1))),
    ],
)
def test_empty_arrays_are_never_split(shape, run):
    """Random programs found factors of size 0 split over every axis."""
    check_random_plans(run, (jnp.ones(shape),), range(6))


def test_batched_contractions_scatter_right():
    """Asked for by constraints alone, XLA 0.10.2 sums some of these over the wrong devices."""

    def fn(x, y):
        z = jnp.einsum("bik,bkj->bij", x, y)
        return z, jnp.sum(x, 2), jnp.einsum("bik,bik->bi", x, x)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 8, 8)).astype(np.float32)
    check_random_plans(fn, (x, y), range(12), mesh="2x2x2")


def test_empty_results_are_scattered():
    """Program 40 contracts an array with an empty dim, which is no dim of one to leave out."""

    def fn(x, y):
        return lax.dot_general(x, y, (((2,), (0,)), ((), ()))), jnp.sum(x, 2)

    check_random_plans(fn, (jnp.ones((6, 0, 8)), jnp.ones((8, 7, 8))), range(12))
