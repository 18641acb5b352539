"""Rules as text: what each expression's equations become, and what survives odd input."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive

from autoshard import rules
from autoshard.compose import Composition, Limit, OpFactors
from autoshard.factors import Kind, Rule, factor_name, parse_rule, replicated
from autoshard.rules import ReplicatedWarning, rules_for
from tests.rule_programs import Aval, bools, c64, equations, f32, i32, keys

MATMUL = "i j, j k -> i k {i=32, j=64:reduce, k=128}"

TABLE = [
    (jnp.dot, (f32(32, 64), f32(64, 128)), [MATMUL]),
    (
        lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y),
        (f32(8, 4, 2, 16), f32(8, 32, 2, 16)),
        ["i j k l, i m k l -> i k j m {i=8, j=4, k=2, l=16:reduce, m=32}"],
    ),
    (lambda x: x + 1.0, (f32(4, 6),), ["i j, . -> i j {i=4, j=6}"]),
    (lambda x: x.T, (f32(4, 6),), ["i j -> j i {i=4, j=6}"]),
    (lambda x: x.reshape(8, 4, 6), (f32(32, 6),), ["(i j) k -> i j k {i=8, j=4, k=6}"]),
    (lambda x: x.reshape(6, 4), (f32(12, 2),), ["(i j) k -> i (j k) {i=6, j=2, k=2}"]),
    (lambda x: x[:, None], (f32(4, 6),), ["i j -> i 1 j {i=4, j=6}"]),
    (lambda x: jnp.sum(x, 1), (f32(4, 6),), ["i j -> i {i=4, j=6:reduce}"]),
    (lambda x: jnp.max(x, 0), (f32(4, 6),), ["i j -> j {i=4:reduce(max), j=6}"]),
    (lambda x: jnp.all(x), (bools(4, 6),), ["i j -> . {i=4:reduce(and), j=6:reduce(and)}"]),
    (lambda x: jnp.argmax(x, 1), (f32(4, 6),), ["i j -> i {i=4, j=6:reduce(gather)}"]),
    (lambda x: jnp.cumsum(x, 1), (f32(4, 6),), ["i j -> i j {i=4, j=6:replicate}"]),
    (lambda x: jnp.sort(x, 1), (f32(4, 6),), ["i j -> i j {i=4, j=6:replicate}"]),
    (
        lambda x: lax.top_k(x, 2),
        (f32(4, 6),),
        ["i j -> i k, i k {i=4, j=6:replicate, k=2:replicate}"],
    ),
    (lambda x: x[:, 2:4], (f32(4, 6),), ["i j -> i j {i=4, j=6:permute}"]),
    (lambda x: x[::2], (f32(4, 6),), ["(i k) j -> i j {i=2, j=6, k=2:replicate}"]),
    (lambda x: x[::-1], (f32(4, 6),), ["i j -> i j {i=4:permute, j=6}"]),
    (
        lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))),
        (f32(4, 6),),
        ["i j, . -> i j {i=6:permute, j=6}"],
    ),
    (
        lambda x: lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 0))),
        (f32(4, 6),),
        ["i j, . -> i j {i=4:permute, j=6}"],
    ),
    (
        lambda x, y: jnp.concatenate([x, y]),
        (f32(4, 6), f32(2, 6)),
        ["i j, i j -> i j {i=6:replicate, j=6}"],
    ),
    (lambda x: jnp.split(x, 2), (f32(4, 6),), ["i j -> i j, i j {i=4:permute, j=6}"]),
    (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 0), (), [" -> i j {i=4, j=6}"]),
    (
        lambda x: lax.optimization_barrier((x, x)),
        (f32(4, 6),),
        ["i j, k l -> i j, k l {i=4, j=6, k=4, l=6}"],
    ),
    (lambda k: jax.random.bits(k, (4, 6)), (keys(),), [". -> i j {i=4, j=6}"]),
    (lambda k: jax.random.split(k, 8), (keys(),), [". -> i {i=8}"]),
    (jax.random.key_data, (keys(8),), ["i -> i j {i=8, j=2:replicate}"]),
    (lambda x: jnp.fft.fft(x), (c64(4, 6),), ["i j -> i j {i=4, j=6:replicate}"]),
    (lambda x, i: lax.dynamic_slice(x, (i, i), (4, 2)), (f32(4, 6), i32()), None),
]


@pytest.mark.parametrize("fn, avals, expected", TABLE)
def test_rule_text(fn, avals, expected):
    texts = [str(rule) for rule in rules_for(equations(fn, avals))]
    if expected is None:
        expected = ["i j, ., . -> i j {i=4, j=6:replicate}"]
    assert texts[-len(expected) :] == expected


def last_rule(fn, *avals, primitive: str) -> Rule:
    eqns = [eqn for eqn in equations(fn, avals) if eqn.primitive.name == primitive]
    return rules_for(eqns)[-1]


def test_embedding_lookup_reduces_over_the_vocabulary():
    rule = last_rule(lambda t, i: t[i], f32(100, 16), i32(8, 4), primitive="gather")
    assert str(rule) == "i j, k l 1 -> k l j {i=100:reduce, j=16, k=8, l=4}"


def test_its_gradient_reduces_over_the_batch():
    grad = jax.grad(lambda t, i: jnp.sum(t[i] ** 2))
    rule = last_rule(grad, f32(100, 16), i32(8, 4), primitive="scatter-add")
    assert str(rule) == "i j, k l 1, k l j -> i j {i=100, j=16, k=8:reduce, l=4:reduce}"


@pytest.mark.parametrize("width, sharded", [(1, Kind.PASS), (4, Kind.REPLICATE), (16, Kind.PASS)])
def test_dynamic_update_slice_passes_where_one_element_is_written(width, sharded):
    write = lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0))  # noqa: E731
    rule = last_rule(write, f32(16, 8), f32(width, 8), i32(), primitive="dynamic_update_slice")
    (factor,) = rule.operands[0][0]
    assert rule.kinds[factor] is sharded


def test_a_reduction_that_no_all_reduce_computes_needs_the_whole_dim():
    rule = last_rule(
        lambda x: lax.reduce(x, 0.0, lambda a, b: a - b, (0,)), f32(8, 4), primitive="reduce"
    )
    assert str(rule) == "i j, . -> j {i=8:replicate, j=4}"


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 4), (1,), (1, 1), (2, 3, 5, 7), (2, 1, 2, 1, 2, 1, 2, 2)]
)
def test_odd_shapes_fit(shape):
    for eqn in equations(lambda x: jnp.sum(jnp.sin(x) + x * 2), (f32(*shape),)):
        (rule,) = rules_for([eqn])
        avals: list = [[v.aval for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
        shapes = [[a.shape for a in some] for some in avals]
        assert rule.check(*shapes) is None


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "int4", "int8", "uint32", "bool", "complex64"]
)
def test_dtypes(dtype):
    aval = Aval((4, 6), jnp.dtype(dtype))
    assert str(last_rule(lambda x: x.T, aval, primitive="transpose")) == "i j -> j i {i=4, j=6}"


def test_wide_types_outside_their_context():
    with jax.enable_x64(True):
        eqns = equations(jnp.dot, (Aval((32, 64), jnp.float64), Aval((64, 128), jnp.float64)))
    assert [str(r) for r in rules_for(eqns)][-1] == MATMUL


def test_equal_equations_of_two_traces_share_one_rule(monkeypatch):
    trace = lambda: equations(lambda x: jnp.cos(x).reshape(3, 7, 11), (f32(21, 11),))  # noqa: E731
    first = rules_for(trace())
    monkeypatch.setattr(
        rules.shardy, "lowered_rules", lambda eqns: pytest.fail("lowered again") if eqns else []
    )
    assert all(a is b for a, b in zip(first, rules_for(trace()), strict=True))


def test_no_equations():
    assert rules_for([]) == []


mystery_p = Primitive("mystery")
mystery_p.def_abstract_eval(lambda x: x)


def test_unknown_primitive_is_replicated_with_name_and_line():
    def user_function(x):
        return mystery_p.bind(x) + 1.0

    eqns = equations(user_function, (f32(8, 4),))
    with pytest.warns(
        ReplicatedWarning, match=r"'mystery' at test_rules.py:\d+ \(.*user_function\)"
    ) as caught:
        found = rules_for(eqns)
    assert len(caught) == 1
    assert [str(rule) for rule in found] == [
        "i j -> k l {i=8:replicate, j=4:replicate, k=8:replicate, l=4:replicate}",
        "i j, . -> i j {i=8, j=4}",
    ]


def test_unknown_primitive_does_not_spoil_its_neighbours():
    def program(x):
        for _ in range(3):
            x = mystery_p.bind(jnp.exp2(x.reshape(5, 17))).reshape(17, 5)
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)
        found = rules_for(equations(program, (f32(17, 5),)))
    assert sum(rule.is_replicated for rule in found) == 3


def test_custom_partitioning_keeps_its_own_rule():
    @custom_partitioning
    def scale(x, y):
        return x * y[None]

    scale.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            scale,
            result.sharding,
            [a.sharding for a in args],
        ),
        sharding_rule="i j, j -> i j",
    )
    rule = last_rule(scale, f32(8, 4), f32(4), primitive="custom_partitioning")
    assert str(rule) == "i j, j -> i j {i=8, j=4}"


def test_callbacks_are_replicated_without_a_warning():
    def program(x):
        jax.debug.print("{}", x)
        return jax.pure_callback(np.sin, f32(8), x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rules_for(equations(program, (f32(8),)))
    assert all(rule.is_replicated for rule in found)


def test_check_names_the_fault():
    rule = parse_rule("i k, k j -> i j", [(2, 3), (3, 4)], [(2, 4)])
    assert rule.check([(2, 3), (3, 4)], [(2, 4)]) is None
    assert "another size than 5" in str(rule.check([(2, 5), (3, 4)], [(2, 4)]))
    assert "3 dims" not in str(rule.check([(2, 3), (3, 4)], [(2, 4)]))
    assert "1 results, wanted 2" in str(rule.check([(2, 3), (3, 4)], [(2, 4), (2,)]))
    twice = Rule((((0,), (0,)),), (((0,), (0,)),), (2,), (Kind.PASS,))
    assert "appears twice" in str(twice.check([(2, 2)], [(2, 2)]))
    leaking = Rule((((0,),),), (((0,),),), (2,), (Kind.REDUCE,))
    assert "operands only" in str(leaking.check([(2,)], [(2,)]))
    unread = Rule((((0,),),), ((),), (2,), (Kind.PASS,))
    assert "must be in a result" in str(unread.check([(2,)], [()]))


def test_replicated_text():
    assert str(replicated([(2, 1)], [()])) == "i 1 -> . {i=2:replicate}"


def test_factor_names_do_not_repeat():
    assert len({factor_name(f) for f in range(200)}) == 200


def pointwise(shape) -> OpFactors:
    dims = [[f] for f in range(len(shape))]
    return OpFactors([dims], [dims], shape, [Limit.NONE] * len(shape), [None] * len(shape))


def test_composition_splits_a_factor_that_a_reshape_splits():
    c = Composition()
    x = c.new_array((12,))
    (y,) = c.apply(pointwise((12,)), [x], [(12,)], [(12,)])
    reshape = OpFactors([[[0, 1]]], [[[0], [1]]], (3, 4), [Limit.NONE] * 2, [None] * 2)
    (z,) = c.apply(reshape, [y], [(12,)], [(3, 4)])
    assert str(c.rule([x], [z])) == "(i j) -> i j {i=3, j=4}"


def test_composition_of_coprime_splits_needs_replication():
    c = Composition()
    x = c.new_array((6,))
    for sizes in ((2, 3), (3, 2)):
        op = OpFactors([[[0, 1]]], [[[0], [1]]], sizes, [Limit.NONE] * 2, [None] * 2)
        (y,) = c.apply(op, [x], [(6,)], [sizes])
    assert c.rule([x], [y]).is_replicated


def test_composition_of_a_matrix_and_its_transpose_needs_replication():
    c = Composition()
    x = c.new_array((4, 4))
    transpose = OpFactors([[[0], [1]]], [[[1], [0]]], (4, 4), [Limit.NONE] * 2, [None] * 2)
    (t,) = c.apply(transpose, [x], [(4, 4)], [(4, 4)])
    add = OpFactors([[[0], [1]]] * 2, [[[0], [1]]], (4, 4), [Limit.NONE] * 2, [None] * 2)
    (y,) = c.apply(add, [x, t], [(4, 4)] * 2, [(4, 4)])
    assert c.rule([x], [y]).is_replicated


def test_a_sum_that_is_used_with_its_terms_needs_replication():
    c = Composition()
    x = c.new_array((4,))
    total = OpFactors([[[0]]], [[]], (4,), [Limit.NONE], ["add"])
    (s,) = c.apply(total, [x], [(4,)], [()])
    divide = OpFactors([[[0]], []], [[[0]]], (4,), [Limit.NONE], [None])
    (y,) = c.apply(divide, [x, s], [(4,), ()], [(4,)])
    assert str(c.rule([x], [y])) == "i -> i {i=4:replicate}"
