"""The table of primitives: every one that JAX exports is accounted for, as the docs say."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard import primitives
from tests import rule_programs
from tests.rule_programs import f32, primitive_table, table_text

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "primitives.md"


@pytest.fixture(scope="module")
def table():
    return primitive_table()


def test_every_exported_primitive_is_accounted_for(table):
    missing = [name for name in rule_programs.jax_primitive_names() if name not in table]
    assert missing == []


def test_each_replicated_primitive_has_a_reason():
    assert all(len(reason) > 10 for reason in primitives.REPLICATED.values())
    assert not set(primitives.REPLICATED) & (set(primitives.RULES) | set(primitives.CORRECTIONS))


def test_no_program_meets_a_primitive_without_a_rule(table):
    assert [name for name, row in table.items() if row.source == "none"] == []


def test_docs_hold_the_table(table):
    assert DOCS.read_text() == table_text(table), (
        "run python -m tests.rule_programs > docs/primitives.md"
    )


# Where our rule is not what Shardy propagates for the lowered operation, and why.
WRITTEN_BECAUSE = {
    "top_k": "lowered to an operation that Shardy has no rule for",
    "ragged_dot_general": "lowered to an operation that Shardy has no rule for",
    "optimization_barrier": "Shardy lets shardings through without a rule",
    "igamma": "a loop until all converge hides that elements are independent",
    "igammac": "a loop until all converge hides that elements are independent",
    "igamma_grad_a": "a loop until all converge hides that elements are independent",
    "regularized_incomplete_beta": "a loop until all converge hides that elements are independent",
    "random_gamma": "a loop until all are drawn hides that elements are independent",
}


def test_shardy_has_no_rule_where_we_wrote_one():
    """A rule of ours is there because Shardy's is missing or has nothing to shard."""
    checked = set()
    for eqn, _ in rule_programs.ruled_equations():
        if eqn.primitive.name in primitives.RULES:
            (rule,) = primitives_shardy([eqn])
            assert rule is None or rule.is_replicated, eqn.primitive.name
            checked.add(eqn.primitive.name)
    assert checked == set(WRITTEN_BECAUSE)


def test_corrections_only_change_kinds_where_shardy_and_the_compiler_differ():
    """The factors of a corrected rule are Shardy's, but for the place within a stride."""
    for eqn, rule in rule_programs.ruled_equations():
        if eqn.primitive.name in primitives.CORRECTIONS:
            (shardy,) = primitives_shardy([eqn])
            assert shardy is not None
            for ours, theirs in zip(
                rule.operands + rule.results, shardy.operands + shardy.results, strict=True
            ):
                assert [dim[:1] for dim in ours] == [dim[:1] for dim in theirs]


def test_identity_rules_of_pins_and_transfers():
    for name in ("sharding_constraint", "device_put"):
        (eqn,) = rule_programs.equations(lambda x: jax.lax.optimization_barrier(x), (f32(4, 2),))
        assert str(primitives.RULES[name](eqn)) == "i j -> i j {i=4, j=2}"


def primitives_shardy(eqns):
    from autoshard import shardy

    return shardy.lowered_rules(eqns)


def test_ragged_dot_of_other_dims_falls_back():
    mode = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    fn = lambda x, y, g: jax.lax.ragged_dot_general(x, y, g, mode)  # noqa: E731
    avals = (f32(16, 8), f32(16, 4), jax.ShapeDtypeStruct((4,), jnp.int32))
    eqns = [
        e for e in rule_programs.equations(fn, avals) if e.primitive.name == "ragged_dot_general"
    ]
    assert all(primitives.RULES["ragged_dot_general"](eqn) is None for eqn in eqns)
