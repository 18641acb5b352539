"""Every model family, planned: three steps equal one device, and compile for real chips."""

import functools
import importlib

import jax
import numpy as np
import pytest

import autoshard
from autoshard import aot
from autoshard.sharding import MeshShape
from tests.plans import QUICK, mesh_of, random_plan, run

TRAINED = ["mlp", "gpt", "moe", "vit", "unet", "encdec", "lstm", "ssm", "gnn", "dlrm"]
FAMILIES = [*TRAINED, "lora", "dpsgd", "gan", "decode"]
MESHES = ["8", "4x2", "2x2x2"]
# One mesh a family in the default run; all of them in the slow one.
QUICK_MESH = {"mlp": "2x2x2", "gpt": "4x2", "lora": "4x2", "decode": "4x2", "dpsgd": "4x2"}
STEPS = 3


def family(name):
    return importlib.import_module(f"models.{name}")


def step_of(name):
    module = family(name)
    return module.serve_step if name == "decode" else module.train_step


@functools.cache
def initial(name):
    return jax.jit(lambda: family(name).init("tiny"), compiler_options=QUICK)()


def arguments(name):
    """Returns arrays of the caller's own, which it may donate."""
    return jax.tree.map(lambda x: x.copy(), initial(name))


def trained(step, name):
    """Returns the results of three steps, the state after the last one among them."""
    donated = family(name).donate_argnums[0]
    args = list(arguments(name))
    found = []
    for _ in range(STEPS):
        state, result = step(*args)
        args[donated] = state
        found.append(result)
    return found, state


@functools.cache
def on_one_device(name):
    return trained(jax.jit(step_of(name), compiler_options=QUICK), name)


def assert_close(found, wanted, tolerance):
    """Leaf by leaf in the Euclidean norm: another order of sums moves single elements."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        where = jax.tree_util.keystr(path)
        if not jax.numpy.issubdtype(y.dtype, jax.numpy.inexact):
            np.testing.assert_array_equal(_numbers(x), _numbers(y), err_msg=where)
            continue
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y) + 1e-6, where


def _numbers(x):
    key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=() if QUICK_MESH.get(n, "8") == m else pytest.mark.slow)
        for n in FAMILIES
        for m in MESHES
    ],
)
def test_three_steps_equal_one_device(name, mesh):
    plan = autoshard.plan(
        step_of(name),
        *family(name).example_arguments("tiny"),
        mesh=mesh_of(mesh),
        donate_argnums=family(name).donate_argnums,
    )
    planned = plan.jit(step_of(name))
    compiled = planned.lower(*arguments(name)).compile(compiler_options=QUICK)
    places = planned._shardings
    assert_close(
        trained(lambda *args: compiled(*jax.device_put(args, places)), name),
        on_one_device(name),
        1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_under_a_random_plan(name, seed):
    args = arguments(name)
    wanted = jax.jit(step_of(name), compiler_options=QUICK)(*args)
    planned = random_plan(step_of(name), args, mesh_of(MESHES[1 + seed % 2]), seed)
    assert_close(run(planned, args), wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_compiles_ahead_of_time(name, target):
    pytest.importorskip("libtpu" if target.startswith("v5e") else "jax_cuda12_plugin")
    mesh = aot.mesh(target, MeshShape.parse("data=4,model=2"))
    args = family(name).example_arguments("tiny")
    plan = autoshard.plan(
        step_of(name), *args, mesh=mesh, donate_argnums=family(name).donate_argnums
    )
    assert plan.jit(step_of(name), mesh).lower(*args).compile().as_text()
