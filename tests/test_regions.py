"""Regions that are left alone: manual code, the user's own constraints, foreign calls, effects."""

import contextlib
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.rules import ReplicatedWarning
from tests.plans import assert_same, check_random_plans, mesh_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)
W = RNG.normal(size=(16, 16)).astype(np.float32) / 4


def explicit_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def manual(mesh: Mesh | AbstractMesh | None):
    """Returns a program whose middle is written by hand over a mesh, None for the context's."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("a", "b"), P("b", None)), out_specs=P("a", None)
    )
    def product(x, w):
        return lax.psum(x @ w, "b")

    def fn(x, w):
        return jnp.tanh(product(jnp.sin(x), w) @ w)

    return fn


def whole(x, w):
    return jnp.tanh(jnp.sin(x) @ w @ w)


@pytest.mark.parametrize("mesh", ["auto", "abstract"])
def test_shard_map(mesh):
    over = mesh_of("4x2") if mesh == "auto" else mesh_of("4x2").abstract_mesh
    assert_same(autoshard.jit(manual(over), mesh=mesh_of("4x2"))(X, W), jax.jit(whole)(X, W))


def test_shard_map_over_the_explicit_mesh_of_the_context():
    wanted = jax.jit(whole)(X, W)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        assert_same(autoshard.jit(manual(None), mesh=mesh)(X, W), wanted)


def test_shard_map_under_random_plans_and_gradients():
    fn = manual(mesh_of("4x2"))

    def step(x, w):
        return jax.value_and_grad(lambda w: jnp.sum(fn(x, w) ** 2))(w)

    def wanted(x, w):
        return jax.value_and_grad(lambda w: jnp.sum(whole(x, w) ** 2))(w)

    check_random_plans(step, (X, W), range(4), mesh="4x2", reference=wanted)


def test_shard_map_in_a_scan():
    fn = manual(mesh_of("4x2"))

    def run(x, w):
        return lax.scan(lambda c, _: (fn(c, w), None), x, None, length=2)[0]

    check_random_plans(run, (X, W), mesh="4x2", reference=lambda x, w: whole(whole(x, w), w))


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("b", "a")), P("b"), P()])
def test_a_constraint_of_the_user_is_a_pin(spec):
    mesh = mesh_of("4x2")

    def fn(x, w):
        y = lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(mesh, spec))
        return y, jnp.cos(y)

    plan = autoshard.plan(fn, X, W, mesh=mesh)
    (path,) = [
        str(i)
        for i, e in enumerate(jax.make_jaxpr(fn)(X, W).eqns)
        if e.primitive.name == "sharding_constraint"
    ]
    assert plan.constraints.results[path, 0][-1].to_spec() == spec
    check_random_plans(fn, (X, W), mesh="4x2", reference=fn_free)


def fn_free(x, w):
    y = jnp.sin(x) @ w
    return y, jnp.cos(y)


def test_a_constraint_that_leaves_a_dim_open():
    mesh = mesh_of("4x2")
    spec = P(P.UNCONSTRAINED, "b")

    def fn(x, w):
        y = lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(mesh, spec))
        return y, jnp.cos(y)

    check_random_plans(fn, (X, W), range(3), mesh="4x2", reference=fn_free)


def test_a_constraint_by_spec_under_a_mesh_context():
    mesh = mesh_of("4x2")

    def fn(x, w):
        y = lax.with_sharding_constraint(jnp.sin(x) @ w, P("a", None))
        return y, jnp.cos(y)

    with jax.set_mesh(mesh):
        assert_same(autoshard.jit(fn, mesh=mesh)(X, W), jax.jit(fn_free)(X, W))


def test_custom_partitioning():
    @custom_partitioning
    def scaled(x, y):
        return x * 2.0 + y

    def partition(mesh, arg_shapes, result_shape):
        shardings = tuple(a.sharding for a in arg_shapes)
        return mesh, lambda x, y: x * 2.0 + y, result_shape.sharding, shardings

    scaled.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arg_shapes, shape: arg_shapes[0].sharding,
        sharding_rule="i j, i j -> i j",
    )

    def fn(x, w):
        return scaled(x @ w, jnp.sin(x))

    wanted = X @ W * 2.0 + np.sin(X)
    assert_same(autoshard.jit(fn, mesh=mesh_of("4x2"))(X, W), jnp.asarray(wanted))


def by_reshard(x, w):
    return jax.sharding.reshard(x @ w, P("a", "b")) + 1.0


def by_out_sharding(x, w):
    return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a", "b")) + 1.0


def by_gather_and_iota(x, w):
    rows = w.at[jnp.arange(8)].get(out_sharding=P("a", None))
    return rows + lax.broadcasted_iota(jnp.float32, (8, 16), 0, out_sharding=P("a", None))


def by_reshape(x, w):
    return lax.reshape(x @ w, (128,), out_sharding=P("a")) * 2.0


def by_auto_axes(x, w):
    product: Any = jax.sharding.auto_axes(lambda x, w: x @ w, out_sharding=P("a", "b"))
    return product(x, w) + 1.0


def in_a_scan(x, w):
    def body(c, _):
        c = jnp.einsum("ij,jk->ik", c, w, out_sharding=P("a", None))
        return jax.sharding.reshard(jnp.tanh(c), P("a", "b")), None

    return lax.scan(body, jax.sharding.reshard(x, P("a", "b")), None, length=3)[0]


def under_a_gradient(x, w):
    loss = jax.checkpoint(lambda w: jnp.sum(in_a_scan(x, w) ** 2))
    return jax.value_and_grad(loss)(w)


def under_a_mesh_of_its_own(x, w):
    with jax.sharding.use_abstract_mesh(explicit_mesh().abstract_mesh):
        return by_reshard(x, w)


EXPLICIT = [by_reshard, by_out_sharding, by_gather_and_iota, by_reshape, by_auto_axes, in_a_scan]
EXPLICIT += [under_a_gradient, under_a_mesh_of_its_own]


def leaves(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize("fn", EXPLICIT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("context", [True, False], ids=["in context", "by argument"])
def test_explicit_sharding_inside(fn, context):
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        wanted = leaves(jax.jit(fn)(X, W))
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        assert_same(leaves(autoshard.jit(fn, mesh=mesh)(X, W)), wanted)


def test_an_explicit_sharding_is_a_pin():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        plan = autoshard.plan(by_reshard, X, W, mesh=mesh)
        assert P("a", "b") in [chain[-1].to_spec() for chain in plan.constraints.results.values()]
        assert_same(leaves(plan.jit(by_reshard)(X, W)), leaves(jax.jit(by_reshard)(X, W)))


def test_arguments_with_explicit_shardings():
    """Their types hold while the program is traced, and are not pins."""
    mesh = explicit_mesh()
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    w = jax.device_put(W, NamedSharding(mesh, P("b", None)))
    for over in (mesh, None):
        with jax.set_mesh(mesh):
            fn = manual(over)
            wanted = leaves(jax.jit(fn)(x, w))
            assert_same(leaves(autoshard.jit(fn, mesh=mesh)(x, w)), wanted)


def test_what_explicit_axes_refuse_is_refused_with_a_note():
    mesh = explicit_mesh()
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    w = jax.device_put(W, NamedSharding(mesh, P("b", None)))
    with jax.set_mesh(mesh), pytest.raises(Exception, match="ambiguous") as caught:
        autoshard.jit(by_reshard, mesh=mesh)(x, w)
    assert any("Explicit axes of" in note for note in caught.value.__notes__)
    assert any(entry.name == "by_reshard" for entry in caught.traceback)


def pallas_double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x
    )


def test_pallas_is_whole_and_named_once():
    def fn(x, w):
        return pallas_double(pallas_double(x @ w)) @ w

    run = autoshard.jit(fn, mesh=mesh_of("4x2"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        found = run(X, W)
        run(X, W)
    assert_same(found, jnp.asarray(X) @ W * 4.0 @ W)
    texts = [str(w.message) for w in seen if issubclass(w.category, ReplicatedWarning)]
    assert len(texts) == len(set(texts)) == 1
    assert "pallas_call" in texts[0] and "test_regions.py" in texts[0]


def test_an_ffi_call_is_whole_and_named():
    def factor(a):
        result = (jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), np.int32))
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", result, input_output_aliases={0: 0})
        return jnp.triu(call(a, uplo=np.uint8(ord("L")))[0])

    a = X @ X.T + np.eye(8, dtype=np.float32)
    wanted = jnp.linalg.cholesky(a).T  # makes JAX load the library
    with pytest.warns(ReplicatedWarning, match=r"'ffi_call' at .*test_regions\.py:\d+") as seen:
        found = autoshard.jit(factor, mesh=mesh_of("4x2"))(a)
    assert len(seen) == 1
    assert_same(found, wanted)


def test_shard_map_over_some_axes_and_with_permutes():
    mesh = mesh_of("4x2")
    over_a = {"mesh": mesh, "in_specs": P("a"), "axis_names": {"a"}}

    def ring(x):
        x = lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)])
        return x + lax.axis_index("a").astype(x.dtype)

    def fn(x, w):
        total = jax.shard_map(lambda x: lax.psum(x, "a"), out_specs=P(), **over_a)(jnp.sin(x))
        return total @ w, jax.shard_map(ring, out_specs=P("a"), **over_a)(x @ w)

    def whole(x, w):
        blocks = jnp.arange(4, dtype=x.dtype).repeat(2)[:, None]
        return sum(jnp.split(jnp.sin(x), 4)) @ w, jnp.roll(x @ w, 2, 0) + blocks

    check_random_plans(fn, (X, W), range(3), mesh="4x2", reference=whole)


def test_a_constraint_over_another_mesh_of_the_same_devices():
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "q"))

    def fn(x, w):
        y = lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(other, P("p", "q")))
        return y, jnp.cos(y)

    assert_same(autoshard.jit(fn, mesh=mesh_of("4x2"))(X, W), jax.jit(fn_free)(X, W))


def test_foreign_calls_are_whole():
    def fn(x):
        values, vectors = jnp.linalg.eigh(x @ x.T)
        return values, jnp.abs(vectors @ x)

    check_random_plans(fn, (X,), tolerance=1e-4)


def test_pure_callback():
    def host(x):
        assert x.shape == X.shape
        return np.cumsum(x, 0)

    def fn(x, w):
        y = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.sin(x))
        return y @ w

    check_random_plans(fn, (X, W), reference=lambda x, w: jnp.cumsum(jnp.sin(x), 0) @ w)


@pytest.mark.parametrize("ordered", [True, False])
def test_io_callback_runs_once_in_order(ordered):
    seen = []

    def fn(x, w):
        for k in range(3):
            x = jnp.tanh(x @ w)
            io_callback(lambda k, s: seen.append((int(k), s.shape)), None, k, x, ordered=ordered)
        return x

    run = autoshard.jit(fn, mesh=mesh_of("4x2"))
    jax.block_until_ready(run(X, W))
    jax.effects_barrier()
    assert (seen if ordered else sorted(seen)) == [(k, (8, 16)) for k in range(3)]


def test_ordered_effects_in_a_loop():
    seen = []

    def fn(x, w):
        def body(k, x):
            io_callback(
                lambda k, s: seen.append((int(k), float(s))), None, k, jnp.sum(x), ordered=True
            )
            return jnp.tanh(x @ w)

        return lax.fori_loop(0, 3, body, x)

    found = autoshard.jit(fn, mesh=mesh_of("4x2"))(X, W)
    jax.effects_barrier()
    wanted = [X]
    for _ in range(3):
        wanted.append(np.tanh(wanted[-1] @ W))
    assert [k for k, _ in seen] == [0, 1, 2]
    np.testing.assert_allclose([s for _, s in seen], [x.sum() for x in wanted[:3]], rtol=1e-4)
    assert_same(found, jnp.asarray(wanted[3]))


def test_ordered_debugging(capfd):
    """JAX alone has it on one device only."""
    seen = []

    def fn(x, w):
        def body(k, x):
            jax.debug.callback(lambda k, s: seen.append((int(k), s.shape)), k, s=x, ordered=True)
            jax.debug.print("k={} {y.shape}", k, y=x, ordered=True)
            return jnp.tanh(x @ w)

        return lax.fori_loop(0, 3, body, x)

    jax.block_until_ready(autoshard.jit(fn, mesh=mesh_of("4x2"))(X, W))
    jax.effects_barrier()
    assert seen == [(k, (8, 16)) for k in range(3)]
    assert capfd.readouterr().out.split("\n")[:3] == [f"k={k} (8, 16)" for k in range(3)]


def test_debug_print_of_a_sharded_array(capfd):
    def fn(x, w):
        y = x @ w
        jax.debug.print("total {s:.3f}", s=jnp.sum(y))
        jax.debug.print("shape {y.shape}", y=y)
        return y

    run = autoshard.jit(fn, mesh=mesh_of("2x2x2"))
    jax.block_until_ready(run(X, W))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert f"total {(X @ W).sum():.3f}" in out and out.count("total") == 1
    assert out.count("shape (8, 16)") == 1
