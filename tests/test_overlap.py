"""What collectives hide behind: never more than their region computes."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import cost, overlap
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


def deep(weights, x):
    """Four matmuls a layer: three gathers compete for the time before the last."""

    def layer(x, four):
        for weight in four:
            x = jnp.tanh(x @ weight.astype(jnp.bfloat16).astype(jnp.float32))
        return x, None

    return jax.lax.scan(layer, x, weights)[0]


def forked(weights, x):
    """The first product is read late, but before the last weight."""

    def layer(x, four):
        first, *between, last = four
        late = x @ first
        for weight in between:
            x = jnp.tanh(x @ weight)
        return jnp.tanh((x + late) @ last), None

    return jax.lax.scan(layer, x, weights)[0]


def priced(hardware: Hardware, mesh: dict[str, int] | None = None, function=deep) -> cost.Choices:
    (weight, _), x = arguments()
    options = Options(hardware=hardware)
    program = trace(function, ([weight] * 4, x))
    at = target(mesh or {"x": 8}, options)
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


@pytest.mark.parametrize("bytes_per_s", [1e9, 1e10])
def test_no_more_hides_than_is_computed(bytes_per_s):
    (weight, _), x = arguments()
    plan = autoshard.plan(
        deep, [weight] * 4, x, mesh={"x": 8}, hardware=machine(bytes_per_s, ("all-gather",)),
        in_shardings=([jax.P(None, "x")] * 4, jax.P("x")), out_shardings=jax.P("x"),
    )  # fmt: skip
    hidden = [c.hidden_s for c in plan.collectives if c.hidden_s]
    compute_s = plan.objective_s - sum(c.seconds - c.hidden_s for c in plan.collectives)
    assert len(hidden) == 3 and compute_s / 2 < sum(hidden) < compute_s


def test_a_weight_hides_wherever_it_is_gathered():
    """As it is, converted or where it is read: a plan does one of them, all are granted alike."""
    choices = priced(machine(1e10, ("all-gather",)))
    by_name: dict[str, set[float]] = {}
    for (i, k), ((_, seconds),) in choices.granted.operands.items():
        value = choices.ops[i].operands[k]
        assert value is not None
        by_name.setdefault(value.name, set()).add(seconds)
    every = set.union(*by_name.values())  # rounded where they begin
    assert len(by_name) == 9 and max(every) < 1.1 * min(every)


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


def two_links(
    across: tuple[str, ...], pipelined: bool = True, far: float = 6e9, near: float = 1e11
) -> Hardware:
    chip = Chip("plain", {"float32": 2e13}, 1e12, 1e11)
    links = {
        "far": Link("dcn", far, overlaps=across, pipelined=pipelined),
        "near": Link("custom", near, overlaps=("all-gather",)),
    }
    return Hardware("plain", chip, axis_links=links)


def test_sums_over_one_kind_of_link_take_nothing_from_gathers_over_another():
    alone, beside = (
        priced(two_links(across, far=5e10, near=5e9), {"far": 2, "near": 4}, forked)
        for across in ((), ("all-reduce",))
    )
    assert beside.granted.sums and not alone.granted.sums
    assert beside.granted.operands == alone.granted.operands != {}


def test_sums_of_what_a_loop_stacks_hide_in_its_next_trip():
    def plan(across: tuple[str, ...], pipelined: bool = True) -> autoshard.Plan:
        return autoshard.plan(
            trained, *arguments(), mesh={"far": 2, "near": 4},
            hardware=two_links(across, pipelined),
            in_shardings=((jax.P(None, "near"),) * 2, jax.P(("far", "near"))),
            out_shardings=(jax.P(None, "near"),) * 2,
        )  # fmt: skip

    alone, beside = plan(()), plan(("all-reduce",))
    sums = [c for c in beside.collectives if c.axes == ("far",) and c.trips == LAYERS]
    assert {c.kind for c in sums} == {"all-reduce"} and len(sums) == 2
    compute_s = beside.objective_s - sum(c.seconds - c.hidden_s for c in beside.collectives)
    assert 0 < sum(c.hidden_s for c in sums) < compute_s
    in_its_trip = plan(("all-reduce",), pipelined=False)  # the last gradient of a trip cannot hide
    assert beside.objective_s < in_its_trip.objective_s < alone.objective_s


@pytest.mark.parametrize(("claim_s", "expected"), [(0.0, [10.0, 2.0]), (4.0, [8.0, 4.0])])
def test_what_no_plan_would_combine_leaves_time_to_those_with_a_claim(claim_s, expected):
    endless = overlap.Wish(
        end_s=10.0, start_s=0.0, node=0, operand=None, seconds=1e3, claim_s=0.0, of=0
    )
    gradient = overlap.Wish(
        end_s=12.0, start_s=2.0, node=1, operand=None, seconds=5.0, claim_s=claim_s, of=1
    )
    assert [seconds for _, seconds in overlap.dealt([endless, gradient], 12.0)] == expected


def test_sums_of_nothing_take_no_time():
    """An array without items, over a link without latency."""
    chip = Chip("plain", {"float32": 1e14}, 1e12, 1e11)
    link = Link("custom", 1e10, latency_s=0.0, overlaps=SUMS)
    plan = autoshard.plan(
        lambda x: x.sum(0), jax.ShapeDtypeStruct((8, 0), jnp.float32), mesh={"x": 8},
        hardware=Hardware("plain", chip, axis_links={"x": link}),
        in_shardings=(jax.P("x"),),
    )  # fmt: skip
    assert plan.step_time_s == 0


def trained(weights, x):
    return jax.grad(lambda weights: jnp.sum(scanned(weights, x) ** 2))(weights)
