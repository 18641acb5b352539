"""What collectives hide behind: never more than their region computes."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import cost
from autoshard.baselines import baselines
from autoshard.hardware import COLLECTIVES, Chip, Hardware, Link
from autoshard.overlap import EXPOSED, hidden_s
from autoshard.planning import Options, leaf_ops, pinned, strategies, target
from autoshard.rules import rules_for
from autoshard.trace import trace

WIDTH, BATCH, LAYERS = 1024, 8192, 4
SUMS = ("all-reduce", "reduce-scatter")


def machine(bytes_per_s: float, overlaps: tuple[str, ...]) -> Hardware:
    chip = Chip("plain", {"bfloat16": 1e14, "float32": 1e14}, 1e12, 1e11)
    return Hardware("plain", chip, axis_links={"x": Link("custom", bytes_per_s, overlaps=overlaps)})


def scanned(weights, x):
    def layer(x, pair):
        return jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None

    return jax.lax.scan(layer, x, weights)[0]


def arguments():
    weight = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return (weight, weight), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def priced(hardware: Hardware) -> cost.Choices:
    """A layer of four matmuls, so that three gathers compete for the time before the last."""

    def fn(weights, x):
        def layer(x, four):
            for weight in four:
                x = jnp.tanh(x @ weight)
            return x, None

        return jax.lax.scan(layer, x, weights)[0]

    (weight, _), x = arguments()
    options = Options(hardware=hardware)
    program = trace(fn, ([weight] * 4, x))
    at = target({"x": 8}, options)
    program, pins = pinned(program, at, options)
    rules = rules_for([op.eqn for op in leaf_ops(program)])
    return cost.build(
        program.graph, strategies(program, rules, at, pins), at.topology, program.donated, None
    )


def fully_sharded(hardware: Hardware) -> autoshard.Plan:
    args = arguments()
    return autoshard.plan(
        scanned, *args, mesh={"x": 8}, hardware=hardware,
        in_shardings=((jax.P(None, "x"), jax.P(None, "x")), jax.P("x")), out_shardings=jax.P("x"),
    )  # fmt: skip


def test_what_a_body_reads_first_cannot_hide_and_what_it_reads_later_can():
    fast = fully_sharded(machine(1e11, ("all-gather",)))
    hidden = {c.value: c.hidden_s / c.seconds for c in fast.collectives if c.kind == "all-gather"}
    assert hidden["weights[0]"] == 0
    (in_the_loop,) = [share for value, share in hidden.items() if value.endswith("xs1")]
    assert 0.3 < in_the_loop <= 1 - EXPOSED
    alone = fully_sharded(machine(1e11, ()))
    assert all(c.hidden_s == 0 for c in alone.collectives)
    assert fast.objective_s < alone.objective_s


def test_no_more_hides_than_is_computed():
    slow = fully_sharded(machine(1e9, ("all-gather",)))
    compute_s = slow.objective_s - sum(c.seconds - c.hidden_s for c in slow.collectives)
    assert 0 < sum(c.hidden_s for c in slow.collectives) < compute_s


def test_what_is_granted_fits_beside_the_compute_of_each_region():
    choices = priced(machine(1e10, COLLECTIVES))
    given: dict = {}
    for (i, _), seconds in choices.granted.operands.items():
        region = choices.live.spans.get(choices.ops[i])
        given[region] = given.get(region, 0.0) + seconds
    for i, seconds in choices.granted.sums.items():
        region = choices.live.spans.get(choices.ops[i])
        given[region] = given.get(region, 0.0) + seconds
    least: dict = {}
    for op, node in zip(choices.ops, choices.problem.nodes, strict=True):
        region = choices.live.spans.get(op)
        least[region] = least.get(region, 0.0) + float(node.costs_s.min()) / op.trips
    assert given and all(seconds <= least[region] for region, seconds in given.items())


def test_hiding_only_lowers_costs():
    alone, beside = priced(machine(1e10, ())), priced(machine(1e10, COLLECTIVES))
    carried = (None,) * 5
    for a, b in zip(baselines(alone, carried), baselines(beside, carried), strict=True):
        assert b.choices == a.choices and b.objective_s <= a.objective_s + 1e-12


def test_gradients_combined_while_the_rest_is_computed():
    """The combination of one layer's gradient hides behind the backward pass of those before it."""

    def step(weights, x):
        def loss(weights):
            hidden = x
            for w in weights:
                hidden = jnp.tanh(hidden @ w)
            return jnp.sum(hidden * hidden)

        return jax.grad(loss)(weights)

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    found = {
        overlaps: autoshard.plan(
            step, weights, x, mesh={"x": 8}, hardware=machine(1e11, overlaps),
            in_shardings=(jax.P(), jax.P("x")), out_shardings=jax.P(),
        )
        for overlaps in ((), SUMS)
    }  # fmt: skip
    sums = [c for c in found[SUMS].collectives if c.reason == "partial sums"]
    hidden = [c.hidden_s > 0 for c in sums]
    assert len(sums) == LAYERS and hidden[:-1] == [True] * (LAYERS - 1)
    assert found[SUMS].objective_s < found[()].objective_s


def test_hidden_seconds():
    assert hidden_s(2.0, 1.0) == pytest.approx(1 - EXPOSED)
    assert hidden_s(0.5, 1.0) == pytest.approx(0.5 * (1 - EXPOSED))
