"""Every rule, executed: each strategy on 8 devices gives what one device gives.

It talks as the rule says: pass-through factors not at all, reductions to combine partial results.
"""

import dataclasses
import pathlib
import random

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from autoshard.factors import Kind, Rule
from autoshard.strategies import Strategy, strategies
from tests import rule_runs
from tests.rule_programs import ruled_equations
from tests.rule_runs import (
    COLLECTIVE,
    GATHERED_ON_CPU,
    MESH,
    allowed_collectives,
    difference,
    random_array,
    tolerance,
)

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "rules_executed.md"


def compiled(eqn, strategy: Strategy, mesh: Mesh):
    """Returns the equation compiled with the strategy's shardings of operands and results."""

    def run(*operands):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return out if eqn.primitive.multiple_results else [out]

    def shardings(of):
        return tuple(NamedSharding(mesh, s.to_spec()) for s in of)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    inner = jax.jit(
        run,
        in_shardings=shardings(strategy.operands),
        out_shardings=list(shardings(strategy.results)),
        keep_unused=True,
    )
    return inner.lower(*avals).compile()


def unplanned_collectives(eqn, rule: Rule, strategy: Strategy, text: str | None) -> list[str]:
    allowed = allowed_collectives(eqn.primitive.name, rule, bool(strategy.reduced))
    return [c for c in COLLECTIVE.findall(text or "") if c not in allowed]


def assert_same(got, want) -> None:
    assert difference(got, want) <= tolerance(want)


def is_pointwise(rule: Rule) -> bool:
    return all(dims in ((), rule.results[0]) for dims in rule.operands)


def sampled(rule: Rule, count: int) -> list[Strategy]:
    """Returns some strategies, fewer for pointwise rules, which are many and alike.

    How partial results are scattered is not the rule's matter.
    """
    found = [s for s in strategies(rule, MESH) if s.shards > 1 and not s.scattered]
    count = 1 if is_pointwise(rule) else count
    return found if len(found) <= count else random.Random(str(rule)).sample(found, count)


def failures(eqns, count: int) -> list[str]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), MESH.names)
    rng = np.random.default_rng(0)
    found = []
    for eqn, rule in eqns:
        chosen = sampled(rule, count)
        if not chosen:
            continue
        operands = [random_array(v.aval, rng) for v in eqn.invars]
        params = eqn.primitive.get_bind_params(eqn.params)
        want = jax.jit(lambda *a, e=eqn, p=params: e.primitive.bind(*a, **p))(*operands)
        for strategy in chosen:
            label = f"{eqn.primitive.name}: {rule} under {strategy}"
            try:
                program = compiled(eqn, strategy, mesh)
            except jax.errors.JaxRuntimeError as e:
                found.append(f"{label}: does not compile: {e}")
                continue
            unplanned = unplanned_collectives(eqn, rule, strategy, program.as_text())
            if unplanned and eqn.primitive.name not in GATHERED_ON_CPU:
                found.append(f"{label}: {unplanned}")
            try:
                placed = jax.device_put(operands, list(program.input_shardings[0]))
                for a, b in zip(program(*placed), jax.tree.leaves(want), strict=True):
                    assert_same(a, b)
            except AssertionError as e:
                found.append(f"{label}: {e}")
    return found


@pytest.fixture(scope="module")
def eqns():
    return ruled_equations()


def test_programs_cover_many_rules(eqns):
    assert len({eqn.primitive.name for eqn, rule in eqns if not rule.is_replicated}) > 100


def test_every_rule_fits_its_shapes(eqns):
    for eqn, rule in eqns:
        shapes = [[v.aval.shape for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
        assert rule.check(*shapes) is None, eqn.primitive.name


def test_sampled_strategies_equal_one_device(eqns):
    distinct = {
        (eqn.primitive.name, rule): (eqn, rule) for eqn, rule in eqns if not is_pointwise(rule)
    }
    assert failures(list(distinct.values()), count=1) == []


@pytest.mark.slow
def test_every_strategy_equals_one_device(eqns):
    found = rule_runs.rows(eqns)
    assert [text for row in found.values() for text in row.failures] == []
    wanted = DOCS.read_text().splitlines()
    made = rule_runs.table_text(found).splitlines()
    # The error is another one where sums have another order.
    assert [line.rpartition(" | ")[0] for line in made] == [
        line.rpartition(" | ")[0] for line in wanted
    ], "run python -m tests.rule_runs > docs/rules_executed.md"


def test_a_wrong_rule_is_found(eqns):
    """A running sum does not pass along the dim that it runs over."""
    eqn, rule = next((e, r) for e, r in eqns if e.primitive.name == "cumsum")
    wrong = dataclasses.replace(rule, kinds=(Kind.PASS,) * len(rule.kinds))
    (row,) = rule_runs.rows([(eqn, wrong)]).values()
    assert any("talks by" in text for text in row.failures)
    (row,) = rule_runs.rows([(eqn, rule)]).values()
    assert row.failures == []


def test_tpu_compiles_to_no_other_collectives(eqns):
    """What the CPU's library calls hide is checked on programs compiled ahead of time for a TPU."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), MESH.names)
    names = GATHERED_ON_CPU | {
        "dynamic_update_slice",
        "cumsum",
        "gather",
        "scatter-add",
        "slice",
        "argmax",
        "sort",
    }
    found = []
    for eqn, rule in eqns:
        for strategy in sampled(rule, 1) if eqn.primitive.name in names else ():
            text = compiled(eqn, strategy, mesh).as_text()
            if unplanned_collectives(eqn, rule, strategy, text):
                found.append(f"{eqn.primitive.name}: {rule} under {strategy}")
    assert found == []
