"""Targets that are not here: their devices, their meshes, and what is said where there are none."""

import importlib.util
import os

import numpy as np
import pytest

from autoshard import aot
from autoshard.errors import HardwareError, MeshError
from autoshard.sharding import MeshShape

needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
needs_gpu = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA compiler installed"
)


@needs_tpu
@pytest.mark.parametrize(
    ("target", "count", "kind", "slices"),
    [
        ("v5e:2x4", 8, "TPU v5 lite", 1),
        ("v5e:4x4", 16, "TPU v5 lite", 1),
        ("v5e:2x4*2", 16, "TPU v5 lite", 2),
        ("v5p:2x2x2", 8, "TPU v5", 1),
        ("v6e:4x4", 16, "TPU v6 lite", 1),
        ("v4:2x2x2", 16, "TPU v4", 1),
        ("v7:2x2x1", 8, "TPU7x", 1),
    ],
)
def test_tpu_devices(target, count, kind, slices):
    found = aot.devices(target)
    assert found.shape == (count,)
    assert {d.device_kind for d in found} == {kind}
    per_slice = [getattr(d, "slice_index", None) or 0 for d in found]
    assert per_slice == sorted(per_slice) and len(set(per_slice)) == slices
    assert aot.devices(target) is not found and (aot.devices(target) == found).all()


@needs_gpu
@pytest.mark.parametrize(("target", "hosts"), [("h100:8", 1), ("h100:2x8", 2)])
def test_gpu_devices(target, hosts):
    found = aot.devices(target)
    assert found.shape == (8 * hosts,)
    assert [d.process_index for d in found] == sorted(list(range(hosts)) * 8)
    assert found[0].device_kind == "NVIDIA H100 80GB HBM3"


@needs_tpu
@pytest.mark.parametrize("axes", ["data=4,model=4", "data=16", "a=4,b=2,c=2"])
def test_neighbours_on_a_mesh_are_neighbours_on_the_torus(axes):
    mesh = aot.mesh("v5e:4x4", MeshShape.parse(axes))
    minor = mesh.devices.reshape(-1, mesh.devices.shape[-1])
    coords = np.array([[d.coords for d in row] for row in minor])
    steps = np.abs(np.diff(coords, axis=1)).sum(-1)
    assert (steps == 1).all(), f"steps along the last axis: {steps}"
    assert len({d.id for d in mesh.devices.flat}) == 16


@needs_tpu
def test_leading_axes_run_over_slices():
    mesh = aot.mesh("v5e:2x4*2", MeshShape.parse("dcn=2,data=4,model=2"))
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert (slices == np.array([0, 1])[:, None, None]).all()


@needs_tpu
def test_mesh_must_have_as_many_devices():
    with pytest.raises(MeshError, match="a=3 has 3 devices, the target 'v5e:2x4' has 8"):
        aot.mesh("v5e:2x4", MeshShape.parse("a=3"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("v5e", "cannot read target 'v5e': write chip:shape"),
        ("v5e:", "cannot read target"),
        ("v9:4x4", "unknown chip 'v9' .* wanted one of v4, v5e"),
        ("h100:2x2x8", "hosts x GPUs a host"),
        ("h100:8*2", "hosts x GPUs a host"),
    ],
)
def test_unreadable_targets(target, message):
    with pytest.raises(HardwareError, match=message):
        aot.devices(target)


@needs_tpu
def test_a_shape_that_is_not_made():
    with pytest.raises(HardwareError, match="refuses the target v5e:3x5 .* wanted a shape"):
        aot.devices("v5e:3x5")


@pytest.mark.parametrize("target", ["v5e:2x2", "h100:4"])
def test_a_missing_compiler_names_the_extra(target, monkeypatch):
    aot._devices.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HardwareError, match=r"pip install 'autoshard\[aot\]'"):
        aot.devices(target)


@needs_tpu
def test_the_environment_is_left_as_it_was(monkeypatch):
    names = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    monkeypatch.setenv(names[0], "0")
    monkeypatch.delenv(names[1], raising=False)
    aot._devices.cache_clear()
    aot.devices("v5e:2x2")
    assert [os.environ.get(name) for name in names] == ["0", None]
