"""Training under a plan equals training on one device: losses and parameters, step after step."""

import dataclasses
import functools

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


def train(step, state, batch):
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(state.params)


class Runs:
    """Initial states and one-device runs, each computed once a model and form."""

    def __init__(self):
        self.start = functools.cache(lambda name, sizes: jax.device_get(MODELS[name].init(sizes)))
        self.on_one_device = functools.cache(self._on_one_device)

    def _on_one_device(self, name, sizes):
        return train(jax.jit(MODELS[name].train_step), *self.start(name, sizes))


@pytest.fixture(scope="module")
def runs():
    return Runs()


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found[1]):
        want = wanted[1]
        for key in path:
            want = want[key.key]
        np.testing.assert_allclose(
            leaf, want, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path)
        )


def cases():
    """Every form of both models on every mesh; of the GPT, one form a mesh in the default run."""
    quick = {("unrolled", "8"), ("scanned-remat", "4x2"), ("scanned", "2x2x2")}
    for name in MODELS:
        for form in ("unrolled", "unrolled-remat", "scanned", "scanned-remat"):
            for mesh in MESHES:
                slow = name == "gpt" and (form, mesh) not in quick
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(name, form, mesh, marks=marks, id=f"{name}-{form}-{mesh}")


@pytest.mark.parametrize(("name", "form", "mesh"), list(cases()))
def test_training_agrees_with_one_device(name, form, mesh, runs):
    model = MODELS[name]
    sizes = dataclasses.replace(model.SIZES["tiny"], scan="scanned" in form, remat="remat" in form)
    step = autoshard.jit(model.train_step, mesh=mesh_of(mesh), donate_argnums=0)
    assert_same(train(step, *runs.start(name, sizes)), runs.on_one_device(name, sizes))
