"""What XLA is told when a plan is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import aot
from autoshard.compiling import PACKED, accepted, compiler_options
from autoshard.sharding import MeshShape
from tests.plans import QUICK, mesh_of


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


ARRAYS = (np.ones((8, 8), np.float32) / 8, np.ones((16, 8), np.float32))


def test_options_reach_the_compiler():
    """XLA refuses those that it does not know."""
    planned = autoshard.jit(step, mesh=mesh_of("8"), compiler_options={"xla_no_such_thing": True})
    with pytest.raises(Exception, match="xla_no_such_thing"):
        planned(*ARRAYS)


@pytest.mark.parametrize("outer", [jax.jit, lambda f: jax.jit(jax.vmap(f, (None, 0)))])
def test_under_another_jit_its_options_count(outer):
    """JAX refuses options on a jit inside another."""
    planned = autoshard.jit(step, mesh=mesh_of("8"), compiler_options=QUICK)
    w, x = ARRAYS
    x = x if outer is jax.jit else x[None]
    planned(w, ARRAYS[1])
    np.testing.assert_allclose(outer(planned)(w, x), outer(step)(w, x), rtol=1e-5)


def test_gradients_of_a_function_with_options():
    planned = autoshard.jit(step, mesh=mesh_of("8"), compiler_options=QUICK)
    got = jax.grad(lambda w: jnp.sum(planned(w, ARRAYS[1]) ** 2))(ARRAYS[0])
    want = jax.grad(lambda w: jnp.sum(step(w, ARRAYS[1]) ** 2))(ARRAYS[0])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_constant_argument_inside_another_jit():
    planned = autoshard.jit(step, mesh=mesh_of("8"), compiler_options=QUICK)
    planned(*ARRAYS)
    got = jax.jit(lambda y: planned(*ARRAYS) + y)(jnp.ones(()))
    np.testing.assert_allclose(got, step(*ARRAYS) + 1, rtol=1e-5)


def test_only_the_tpu_compiler_is_told():
    assert compiler_options(mesh_of("8")) == {}
    assert compiler_options(mesh_of("8"), {"xla_a": 1}) == {"xla_a": 1}


def test_the_tpu_compiler_takes_the_packing():
    mesh = aot.mesh("v5e:2x4", MeshShape.parse("a=8"))
    assert compiler_options(mesh) == PACKED
    assert compiler_options(mesh, {"xla_a": 1}) == {**PACKED, "xla_a": 1}
    assert not accepted(mesh, (("xla_tpu_no_such_thing", True),))


def test_a_compiler_without_the_packing_is_told_none(monkeypatch):
    mesh = aot.mesh("v5e:2x4", MeshShape.parse("a=8"))
    monkeypatch.setattr("autoshard.compiling.PACKED", {"xla_tpu_no_such_thing": True})
    with pytest.warns(UserWarning, match="xla_tpu_no_such_thing"):
        assert compiler_options(mesh) == {}
