"""Training under a plan equals training on one device: losses and parameters, step after step."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import autoshard
from models import gpt, mlp

STEPS = 20
MODELS = {"mlp": mlp, "gpt": gpt}
MESHES = {"8": (8,), "4x2": (4, 2), "2x2x2": (2, 2, 2)}


def mesh_of(name: str) -> Mesh:
    sizes = MESHES[name]
    return Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model", "extra")[: len(sizes)])


def train(step, model, sizes):
    state, batch = model.init(sizes)
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(state.params)


@pytest.fixture(scope="module")
def one_device():
    """Training on one device, computed once a model and form."""
    runs = {}

    def run(name, sizes):
        if (name, sizes) not in runs:
            runs[name, sizes] = train(jax.jit(MODELS[name].train_step), MODELS[name], sizes)
        return runs[name, sizes]

    return run


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found[1]):
        want = wanted[1]
        for key in path:
            want = want[key.key]
        np.testing.assert_allclose(
            leaf, want, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", MODELS)
def test_training_agrees_with_one_device(name, scan, remat, mesh, one_device):
    model = MODELS[name]
    sizes = dataclasses.replace(model.SIZES["tiny"], scan=scan, remat=remat)
    step = autoshard.jit(model.train_step, mesh=mesh_of(mesh), donate_argnums=(0,))
    assert_same(train(step, model, sizes), one_device(name, sizes))
