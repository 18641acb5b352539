"""The table of primitives: every one that JAX exports is accounted for, as the docs say."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard import primitives
from tests import rule_programs, shardy_table
from tests.rule_programs import f32, primitive_table, table_text

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "primitives.md"
SHARDY = DOCS.with_name("shardy.md")


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


@pytest.fixture(scope="module")
def lines():
    return shardy_table.lines()


def test_docs_hold_our_rules_beside_shardys(lines):
    assert SHARDY.read_text() == shardy_table.table_text(lines), (
        "run python -m tests.shardy_table > docs/shardy.md"
    )


def test_shardy_has_no_rule_where_we_wrote_one(lines):
    """A rule of ours is there because Shardy's is missing or has nothing to shard."""
    written = [line for line in lines if line.primitive in primitives.RULES]
    assert {line.verdict for line in written} <= {"no rule", "replicated", "the same"}


def test_corrections_only_change_kinds_where_shardy_and_the_compiler_differ(lines):
    """The factors of a corrected rule are Shardy's, but for the place within a stride."""
    corrected = [line for line in lines if line.primitive in primitives.CORRECTIONS]
    assert {line.primitive for line in corrected} == set(primitives.CORRECTIONS)
    for line in corrected:
        assert line.theirs is not None
        for ours, theirs in zip(
            line.ours.operands + line.ours.results,
            line.theirs.operands + line.theirs.results,
            strict=True,
        ):
            assert [dim[:1] for dim in ours] == [dim[:1] for dim in theirs]


def test_a_correction_opens_only_what_needs_no_exchange(lines):
    """Where we let a factor pass that Shardy does not, windows fit their strides."""
    opened = {line.primitive for line in lines if shardy_table.frees(line)}
    windows = {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}
    assert opened <= windows | {"slice", "conv_general_dilated"}


def test_every_rule_of_ours_is_in_the_table(lines):
    assert set(primitives.RULES) - {line.primitive for line in lines} == {
        "sharding_constraint",
        "device_put",
    }, "what moves nothing and computes nothing has no lowering of its own"


def test_identity_rules_of_pins_and_transfers():
    for name in ("sharding_constraint", "device_put"):
        (eqn,) = rule_programs.equations(lambda x: jax.lax.optimization_barrier(x), (f32(4, 2),))
        assert str(primitives.RULES[name](eqn)) == "i j -> i j {i=4, j=2}"


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
