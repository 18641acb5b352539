"""Programs at the edges: nothing, scalars, empty arrays, shared and unused arguments, constants."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autoshard
from autoshard.rules import ReplicatedWarning
from tests.plans import QUICK, assert_same, check_random_plans, mesh_of, on_one_device

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)
W = RNG.normal(size=(16, 16)).astype(np.float32) / 4
TABLE = RNG.normal(size=(64, 16)).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: jax.Array
    y: jax.Array | None
    name: str = dataclasses.field(metadata={"static": True}, default="point")


def no_arguments():
    return jnp.arange(16.0).reshape(4, 4) @ jnp.ones((4, 4)), jnp.float32(3)


def no_results(x):
    jnp.sin(x)


def scalars(a, b):
    return a * b + 1.0, a > b


def scalar_loss(x, w):
    return jnp.mean((x @ w) ** 2)


def empty(x):
    return jnp.sum(x, 0), jnp.sum(x, 1), jnp.concatenate([x, x], 1), x @ x.T, x.T @ x


def empty_reshaped(x):
    """Random programs found a reshape of nothing that no rule fits."""
    return x[:, :0, None].reshape(8, 0), x[:0].reshape(0)


def references(x, w):
    total = jax.new_ref(jnp.zeros(16))
    whole = jax.new_ref(x)
    whole[0] = whole[1] * 2.0
    whole[...] += 1.0

    def body(count, row):
        total[...] += jnp.tanh(row @ w)
        return count + 1, None

    count, _ = lax.scan(body, 0, x)
    return whole[...] @ w, count, total[...]


def ones(x):
    return x + x.T, jnp.sum(x), x.reshape(1, 1, 1), jnp.broadcast_to(x, (8, 8))


def same_argument_twice(x, w):
    return x @ w, x + 1.0, x.T @ x


def returned_unchanged(x, w):
    return x, w, x @ w, x


def unused(x, w):
    return jnp.sin(x)


def constant_results(x):
    return jnp.zeros((8, 8)), 3.0, x


def tied(table, ids):
    hidden = jnp.tanh(table[ids])
    return jax.value_and_grad(lambda t: jnp.mean(jax.nn.logsumexp(jnp.tanh(t[ids]) @ t.T, -1)))(
        table
    ), hidden @ table.T


def aliased(x):
    y = jnp.sin(x)
    return {"a": y, "b": [y, y]}, y


def integers(ids):
    return ids * 2, jnp.argmax(ids, -1), jnp.sum(ids), ids > 3, ids.astype(jnp.uint8)


def none_leaves(tree):
    return {"a": tree["a"] * 2.0, "none": None, "empty": ()}, None


def data_class(p):
    return Point(p.x @ p.x.T, p.y, "result")


def random_keys(key, x):
    a, b = jax.random.split(key)
    keys = jax.random.split(b, 8)
    noise = jax.vmap(lambda k, row: row + jax.random.normal(k, row.shape))(keys, x)
    return a, jax.random.bernoulli(a, 0.5, x.shape), noise, jax.random.permutation(b, x)


def weak_types(x):
    y = jnp.asarray(2.0)
    return lax.fori_loop(0, 3, lambda i, c: c * y, 1.0), x * y, y


def prime(x, w):
    return jax.value_and_grad(lambda w: jnp.sum(jax.nn.softmax(x @ w) ** 2))(w)


def rank_8(x):
    y = jnp.einsum("abcdefgh,hgfedcij->abij", x, x.T.reshape(2, 2, 2, 2, 2, 2, 2, 2))
    return y, jnp.sum(x, (1, 3, 5)), x.transpose(7, 0, 6, 1, 5, 2, 4, 3), jnp.flip(x, 4)


def small_types(x):
    y = x.astype(jnp.bfloat16)
    z = x.astype(jnp.float8_e4m3fn)
    n = (x * 4).astype(jnp.int4)
    w = lax.complex(x, x)
    return y, z, n, n.astype(jnp.int8) * 2, w @ w.T, x.astype(jnp.float16)


def numpy_constants(x):
    return x @ W + TABLE[:8], jnp.take(TABLE, jnp.arange(8) * 3, axis=0)


def constants_in_bodies(x):
    """Arrays closed over inside every kind of body."""
    with jax.ensure_compile_time_eval():
        w, table = jnp.asarray(W), jnp.asarray(TABLE)

    @jax.custom_vjp
    def custom(x):
        return x @ w

    custom.defvjp(lambda x: (x @ w, x), lambda x, g: (g @ w.T + table[:8],))

    @jax.jit
    def inner(x):
        return jnp.tanh(x @ w) + table[:8]

    @jax.checkpoint
    def block(x):
        y, _ = lax.scan(lambda c, _: (inner(c) + custom(c), None), x, None, length=2)
        return lax.cond(y[0, 0] > 0, lambda y: y @ w, lambda y: y - table[8:16], y)

    return jax.value_and_grad(lambda x: jnp.sum(block(inner(x)) ** 2))(x)


def dead_code(x):
    y = jnp.linalg.eigh(x @ x.T)
    return x, (y[0] * 0)[:0]


def duplicated_calls(x):
    f = jax.jit(lambda x: jnp.sin(x) @ W)
    return f(x) + f(f(x))


def f32(*shape):
    return RNG.normal(size=shape).astype(np.float32)


PROGRAMS = {
    "no arguments": (no_arguments, ()),
    "no results": (no_results, (X,)),
    "scalars": (scalars, (np.float32(2), np.float32(3))),
    "Python scalars": (scalars, (2.0, 3.0)),
    "0-dim loss": (scalar_loss, (X, W)),
    "size 0": (empty, (f32(0, 8),)),
    "size 0 minor": (empty, (f32(8, 0),)),
    "size 0 reshaped": (empty_reshaped, (X,)),
    "mutable references": (references, (X, W)),
    "size 1": (ones, (f32(1, 1),)),
    "same argument twice": (same_argument_twice, (X, W)),
    "returned unchanged": (returned_unchanged, (X, W)),
    "unused": (unused, (X, W)),
    "constant results": (constant_results, (X,)),
    "tied weights": (tied, (TABLE, np.arange(12, dtype=np.int32).reshape(3, 4) * 5)),
    "aliased": (aliased, (X,)),
    "integers": (integers, (np.arange(32, dtype=np.int32).reshape(4, 8),)),
    "None leaves": (none_leaves, ({"a": X, "b": None},)),
    "dataclass": (data_class, (Point(jnp.asarray(X), None),)),
    "keys": (random_keys, (jax.random.key(0), X)),
    "weak types": (weak_types, (X,)),
    "prime dims": (prime, (f32(7, 13), f32(13, 11))),
    "rank 8": (rank_8, (f32(2, 2, 2, 2, 2, 2, 2, 2),)),
    "small types": (small_types, (X,)),
    "numpy constants": (numpy_constants, (X,)),
    "constants in bodies": (constants_in_bodies, (X,)),
    "dead code": (dead_code, (X,)),
    "duplicated calls": (duplicated_calls, (X,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_under_random_plans(name):
    check_random_plans(*PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_under_the_best_plan(name):
    fn, args = PROGRAMS[name]
    wanted = on_one_device(fn, args)
    assert_same(autoshard.jit(fn, mesh=mesh_of("4x2"))(*args), wanted)


def test_one_array_as_two_arguments():
    x = jnp.asarray(W)
    run = autoshard.jit(same_argument_twice, mesh=mesh_of("4x2"))
    assert_same(run(x, x), same_argument_twice(x, x))


@pytest.mark.parametrize("seed", [0, 1])
def test_64_bits(seed):
    def fn(x, i):
        return jnp.linalg.norm(x @ x.T), x[i], jnp.cumsum(x, 1), x.astype(jnp.float32), i * 2

    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(8, 6))
        check_random_plans(fn, (x, np.arange(4)), seeds=(seed,), tolerance=1e-12)


def test_committed_constants():
    w = jax.device_put(W, jax.devices()[3])
    table = jax.device_put(TABLE, jax.devices()[3])

    def fn(x):
        y = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        return lax.scan(lambda c, _: (c @ w + table[:8], None), y, None, length=2)[0]

    wanted = np.asarray(on_one_device(fn, (jax.device_put(X, jax.devices()[3]),)))
    assert_same(autoshard.jit(fn, mesh=mesh_of("4x2"))(X), jnp.asarray(wanted))


def test_constants_on_the_mesh_itself():
    mesh = mesh_of("4x2")
    spec = jax.sharding.PartitionSpec("a", "b")
    w = jax.device_put(W, jax.sharding.NamedSharding(mesh, spec))
    assert_same(autoshard.jit(lambda x: x @ w, mesh=mesh)(X), jnp.asarray(X) @ jnp.asarray(W))


def test_an_nnx_module_as_argument():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)

    def step(state, x):
        def loss(state):
            return jnp.mean(nnx.merge(definition, state)(x) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    check_random_plans(step, (state, X))
    wanted = on_one_device(step, (state, X))
    assert_same(autoshard.jit(step, mesh=mesh_of("4x2"))(state, X), wanted)


class Net(nnx.Module):
    """State of several kinds: parameters, running means, and the keys of dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def test_nnx_modules_and_optimizers_go_in_and_out_as_they_are():
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return model, optimizer, value

    def trained(run):
        with jax.numpy_dtype_promotion("standard"):  # NNX counts in other types
            model = Net(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
            for _ in range(3):
                model, optimizer, value = run(model, optimizer, X)
            return [value, *jax.tree.leaves(nnx.state(model))]

    planned = trained(autoshard.jit(step, mesh=mesh_of("4x2")))
    assert_same(planned, trained(jax.jit(step, compiler_options=QUICK)))


def mystery_primitive() -> Primitive:
    """A primitive that nobody has a rule for."""
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x.update(shape=x.shape[::-1]))

    def lower(ctx, x):
        # Alone, as rules are asked for, it refuses to lower.
        if not vars(mystery).get("allowed"):
            raise NotImplementedError("mystery has no lowering here")
        return mlir.lower_fun(lambda x: x.T * 2.0, multiple_results=False)(ctx, x)

    mlir.register_lowering(mystery, lower)
    return mystery


def test_an_unknown_primitive_is_whole_and_named():
    mystery = mystery_primitive()

    def fn(x, w):
        return jnp.sin(mystery.bind(x @ w)) @ x

    with pytest.warns(ReplicatedWarning, match=r"'mystery' at .*test_odd_programs\.py:\d+") as seen:
        plan = autoshard.plan(fn, X, W, mesh=mesh_of("4x2"))
    assert len(seen) == 1 and seen[0].filename == __file__
    vars(mystery)["allowed"] = True
    wanted = jnp.sin((jnp.asarray(X) @ W).T * 2.0) @ X
    assert_same(plan.jit(fn)(X, W), wanted)
    run = autoshard.jit(fn, mesh=mesh_of("2x2x2"))
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        assert_same(run(X, W), wanted)
        assert_same(run(X, W), wanted)
    assert len(later) == 1


def test_a_start_out_of_bounds_is_clamped_before_it_is_resharded():
    """XLA 0.10.2 gets dynamic_slice(dynamic_slice(x, 14, 2), 1, 1) wrong for eight rows."""

    def fn(x, i):
        part = lax.dynamic_slice_in_dim(x, jnp.max(i), 2, 0)
        return part, part @ part.T

    start = np.array([14, 1, 2, 3], np.int32)
    check_random_plans(fn, (X, start), seeds=range(1, 12, 2))


@pytest.mark.parametrize("start", [-9, -1, 5, 7, 9])
def test_an_update_out_of_bounds_is_clamped(start):
    """XLA 0.10.2 drops a dynamic_update_slice that starts behind the end of a sharded dim."""

    def fn(x, row, i):
        return lax.dynamic_update_slice(x, row, (i, 2)), lax.dynamic_update_slice(x, row, (0, i))

    args = np.zeros((8, 8), np.float32), np.ones((1, 4), np.float32), np.int32(start)
    check_random_plans(fn, args, range(6))


def test_padding_that_keeps_the_size_moves_elements():
    """XLA 0.10.2 aborts where a dim that is dilated and cut to its old size is sharded."""

    def fn(x):
        return lax.pad(x, jnp.float32(0.5), ((-1, 0, 1), (1, -1, 0))) + 1.0

    check_random_plans(fn, (np.ones((2, 4), np.float32),), range(8))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_a_narrow_index_into_a_long_dim(dtype):
    """XLA 0.10.2 multiplies the number of a device and the size of a block in the index's type.

    Even on one device it compares an int8 with a size of 512, and writes anywhere.
    """
    gathers = lax.GatherDimensionNumbers((1,), (), (0,))
    scatters = lax.ScatterDimensionNumbers((1,), (), (0,))

    def fn(x, i, many):
        part = lax.dynamic_slice(x, (i,), (2,))
        rows = lax.gather(x, many, gathers, (1,))
        added = lax.scatter_add(x, many, rows * 2.0, scatters)
        return part, rows, added, lax.dynamic_update_slice(x, part[:1] + 1, (i,))

    def wide(x, i, many):
        return fn(x, i.astype(np.int32), many.astype(np.int32))

    x, many = np.arange(512, dtype=np.float32), np.arange(0, 128, 16).astype(dtype)[:, None]
    check_random_plans(fn, (x, dtype(100), many), range(6), reference=wide)


def test_an_integer_a_device_keeps_its_factor():
    """XLA 0.10.2 makes dynamic_slice(dynamic_slice(x, i, 4) * 3, j, 1) lose the 3."""
    check_random_plans(lambda i: (i * 3, i * 3 + 1), (np.arange(8, dtype=np.int32),), range(40))


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_scatter_at_one_index_keeps_other_rows(index):
    """XLA 0.10.2 overwrites the edge of every block that does not hold the index."""

    def fn(x, i, row, column):
        y = x * 2.0
        added = jnp.zeros_like(x).at[i].add(row) + y
        return added, y.at[i].set(row), y.at[i[0], i[0] + 1].max(5.0), y.at[:, i].mul(column)

    def gradient(*args):
        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in fn(x, *args[1:])))(args[0])

    i = np.array([index], np.int32)
    args = X[:, :8], i, X[:1, 8:], W[:8, :1]
    check_random_plans(fn, args, range(12))
    check_random_plans(gradient, args, range(6))
