"""What a plan costs and holds, for programs whose costs can be added up by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import collectives, cost, planning
from autoshard.graph import Kind
from autoshard.rules import rules_for
from autoshard.sharding import Sharding
from autoshard.trace import trace
from models import dlrm, gpt, moe


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def choices_of(fn, *args, mesh="x=8", donated=(), hardware="h100") -> cost.Choices:
    options = planning.Options(hardware=hardware, donate_argnums=donated)
    program = trace(fn, args, donate_argnums=donated)
    target = planning.target(mesh, options)
    program, pins = planning.pinned(program, target, options)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = planning.strategies(program, rules, target, pins)
    return cost.build(program.graph, strategies, target.topology, program.donated, None)


def pick(choices: cost.Choices, **wanted: Sharding) -> list[int]:
    """Returns a solution with the first result of the named operations as wanted, else whole."""
    found = []
    for op, strategies in zip(choices.ops, choices.strategies, strict=True):
        sharding = wanted.get(op.primitive)
        fits = [p for p, s in enumerate(strategies) if _fits(s, sharding)]
        found.append(fits[0])
    return found


def _fits(strategy, sharding: Sharding | None) -> bool:
    if sharding is not None:
        return strategy.results[0] == sharding
    return strategy.results[0].is_replicated and strategy.shards == 1


def test_everything_replicated_costs_compute_alone():
    choices = choices_of(jnp.matmul, array(512, 512), array(512, 512))
    solution = pick(choices)
    chip = choices.topology.chip
    seconds = max(2 * 512**3 / chip.flops_for("float32"), 3 * 512 * 512 * 4 / chip.hbm_bytes_per_s)
    assert choices.problem.objective_s(solution) == pytest.approx(seconds)
    assert cost.peak(choices, solution)[0] == pytest.approx(3 * 512 * 512 * 4, rel=0.16)


def test_a_resharded_result_pays_for_its_gather_and_its_copy():
    choices = choices_of(lambda x, w: jnp.sin(x @ w), array(512, 512), array(512, 512))
    whole = pick(choices)
    rows = Sharding((("x",), ()))
    split = pick(choices, sin=rows, dot_general=rows)
    gather = collectives.all_gather_s(choices.topology, ("x",), 512 * 512 * 4)
    edges = [e for e in choices.problem.edges if e.costs_s[split[e.a], split[e.b]] > 0]
    prices = [e.costs_s[split[e.a], split[e.b]] for e in edges]
    assert max(prices) == pytest.approx(gather, rel=1e-6)
    assert cost.peak(choices, split)[0] > cost.peak(choices, whole)[0] * 0.9


def test_a_state_that_is_not_donated_is_held_twice():
    def step(w):
        return w + 1

    kept, given = choices_of(step, array(256, 256)), choices_of(step, array(256, 256), donated=(0,))
    size = 256 * 256 * 4
    assert cost.peak(given, pick(given))[0] == pytest.approx(size)
    assert cost.peak(kept, pick(kept))[0] == pytest.approx(2 * size)


def test_a_donated_state_that_is_gathered_anew_is_copied_first():
    choices = choices_of(lambda w: jnp.sin(w), array(256, 256), donated=(0,))
    split = pick(choices, sin=Sharding((("x",), ())))
    labels = dict(cost.peak(choices, split)[1])
    assert labels["copy of w"] == pytest.approx(256 * 256 * 4)


def test_partial_sums_are_held_until_they_are_combined():
    choices = choices_of(lambda x, w: jnp.sin(x @ w) @ w, array(64, 4096), array(4096, 4096))
    node = next(i for i, op in enumerate(choices.ops) if op.primitive == "dot_general")
    reduced = [p for p, s in enumerate(choices.strategies[node]) if s.reduced and not s.scattered]
    solution = pick(choices)
    solution[node] = reduced[0]
    labels = [label for label, _ in _alive(choices, solution)]
    assert any("partial" in label for label in labels)


def _alive(choices, solution):
    return [
        (u.label, u.bytes[solution[u.node]])
        for u in choices.problem.usages
        if u.bytes[solution[u.node]] > 0
    ]


def test_tile_padding_is_paid_in_memory_on_a_tpu():
    choices = choices_of(lambda x: x + 1, array(64, 3, 3), hardware="v5e", donated=(0,))
    usage = next(u for u in choices.problem.usages if choices.ops[u.node].kind is Kind.INPUT)
    assert np.max(usage.bytes) == 128 * 4 * 3 * 4  # 64 to 128 lanes, 3 to 4 sublanes


def test_a_state_that_leaves_tiles_part_empty_is_held_in_another_layout_too():
    def step(w):
        return w + 1

    for shape, copies in (((512, 4, 512), 2), ((512, 8, 512), 1), ((4, 512, 512), 1)):
        choices = choices_of(step, array(*shape), hardware="v5e", donated=(0,))
        size = shape[0] * shape[1] * shape[2] * 4
        assert cost.peak(choices, pick(choices))[0] == pytest.approx(copies * size)


@pytest.mark.parametrize(("model", "scan"), [(gpt, True), (gpt, False), (moe, False), (dlrm, True)])
def test_operations_that_share_a_price_would_each_have_it_alone(model, scan):
    sizes = model.SIZES["tiny"]
    if model is not dlrm:
        sizes = dataclasses.replace(sizes, scan=scan)
    shared = choices_of(
        model.train_step, *model.example_arguments(sizes), mesh="x=4,y=2", donated=(0,),
        hardware="v5e",
    )  # fmt: skip
    alone = cost._Pricing(
        shared.ops, shared.strategies, shared.topology, shared.live, shared.donated
    )

    def forget():
        for held in vars(alone).values():
            if isinstance(held, dict) and held is not alone.producer and held is not alone.copied:
                held.clear()

    for i, node in enumerate(shared.problem.nodes):
        forget()
        np.testing.assert_array_equal(alone.node(i).costs_s, node.costs_s)
    edges = iter(shared.problem.edges)
    for i, op in enumerate(shared.ops):
        for k, value in enumerate(op.operands):
            if value is None or not value.shape or value in shared.live.fusion.free:
                continue
            forget()
            a, r = shared.producer[value]
            donated = op.kind is Kind.INPUT and shared.donated[int(op.path.removeprefix("in"))]
            priced = alone._edge(a, r, i, k, value, op.operand_trips[k], donated)
            if priced.costs is not None and a != i:
                edge = next(edges)
                assert (edge.a, edge.b) == (a, i)
                np.testing.assert_array_equal(priced.costs, edge.costs_s)
