"""Partial sums that a loop adds up: combined once after it, or in every trip."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from autoshard import planning
from autoshard.cost import build
from autoshard.graph import Kind
from autoshard.rules import rules_for
from autoshard.sharding import Sharding
from autoshard.trace import trace
from benchmarks import conformance

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
ROWS, WHOLE = Sharding((("x",), ())), Sharding(((), ()))


def gradients(xs, gs):
    """[T, B, D] and [T, B, F] -> [D, F], as the backward pass of a recurrence sums them."""

    def step(total, now):
        x, g = now
        return total + x.T @ g, None

    return jax.lax.scan(step, jnp.zeros((1024, 512)), (xs, gs))[0]


@pytest.mark.parametrize(("total", "trips"), [(WHOLE, 1), (ROWS, 6)])
def test_a_total_sharded_otherwise_is_combined_in_every_trip(total, trips):
    args = tuple(jax.ShapeDtypeStruct((6, 1024, n), jnp.float32) for n in (1024, 512))
    case = conformance.Case("", {}, "v5e:2x4", "x=8")
    p = prepared(case, args)
    solution = [
        position(op, strategies, total)
        for op, strategies in zip(p.choices.ops, p.choices.strategies, strict=True)
    ]
    plan = conformance.plan_of(p, solution)
    found = plan.check(p.fn, *p.args, topology=case.target).comparison
    assert found is not None
    (planned,), (compiled,) = found.planned, found.compiled
    assert planned.kind == "all-reduce"  # compiled as a reduce-scatter where it is sliced at once
    assert planned.trips == compiled.trips == trips
    assert compiled.bytes == pytest.approx(planned.bytes)
    (priced,) = plan.collectives
    assert added_s(p.choices, solution) == pytest.approx(priced.seconds * (trips - 1) / trips)


def added_s(choices, solution) -> float:
    """Returns what the choices of the product and of the total cost together."""
    (dot,) = [i for i, op in enumerate(choices.ops) if op.primitive == "dot_general"]
    (carry,) = [i for i, op in enumerate(choices.ops) if op.kind is Kind.CARRY]
    between = [e for e in choices.problem.edges if {e.a, e.b} == {dot, carry}]
    return sum(float(e.costs_s[solution[e.a], solution[e.b]]) for e in between)


def prepared(case, args) -> conformance.Prepared:
    options = planning.Options(hardware=case.target.split(":")[0])
    program = trace(gradients, args)
    shape = conformance.MeshShape.parse(case.mesh)
    target = planning.target(conformance.aot.mesh(case.target, shape), options)
    program, pins = planning.pinned(program, target, options)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = planning.strategies(program, rules, target, pins)
    choices = build(program.graph, strategies, target.topology, program.donated, None)
    return conformance.Prepared(case, gradients, args, program, target, choices)


def position(op, strategies, total: Sharding) -> int:
    """Inputs split over the batch, whole partial sums, total as given."""
    if op.primitive == "dot_general":
        fits = [s for s in strategies if s.reduced and not s.scattered]
    elif op.results[0].shape == (1024, 512) and op.kind is not Kind.SLICE:
        fits = [s for s in strategies if s.results[0] == total]
    else:
        fits = [s for s in strategies if batch_only(op, s.results[0])]
    return strategies.index((fits or strategies)[0])


def batch_only(op, sharding: Sharding) -> bool:
    """The batch is the dim after the steps, the first of a slice, the last of a transposed one."""
    where = 1 if len(sharding.dims) == 3 or op.primitive == "transpose" else 0
    return all(bool(axes) == (d == where) for d, axes in enumerate(sharding.dims))
