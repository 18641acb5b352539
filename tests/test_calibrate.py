"""Fitting recovers known links, measuring gives a usable model of CPU devices, files keep it."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from autoshard.calibrate import Sample, calibrate, fit, load, save
from autoshard.collectives import Kind, linear, seconds
from autoshard.errors import HardwareError
from autoshard.hardware import Hardware, Link, preset
from autoshard.sharding import MeshShape
from autoshard.topology import Topology, topology

MOVES = [k for k in Kind if k is not Kind.SLICE]


def device_mesh(**sizes) -> jax.sharding.Mesh:
    count = int(np.prod(list(sizes.values())))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), [*sizes])


def samples_of(top: Topology, noise=None) -> list[Sample]:
    found = []
    for axis, kind, size in itertools.product(top.mesh.names, MOVES, (1e4, 1e6, 1e8)):
        factor = 1.0 if noise is None else noise.uniform(0.9, 1.1)
        found.append(Sample(kind, axis, size, seconds(kind, top, (axis,), size) * factor))
    return found


@pytest.mark.parametrize("name", ["v5e", "h100", "cpu"])
@pytest.mark.parametrize("start, speed", [(1.0, 1.0), (3.0, 0.5), (0.2, 0.9)])
def test_fit_recovers_scaled_links(name, start, speed):
    presumed = topology(MeshShape.parse("a=4,b=8"), preset(name))

    def scale(link: Link) -> Link:
        return dataclasses.replace(
            link,
            bytes_per_s=link.bytes_per_s * speed,
            latency_s=link.latency_s * start,
            start_s=link.start_s * start,
            parts=tuple((n, scale(part)) for n, part in link.parts),
        )

    truth = dataclasses.replace(presumed, links=tuple(map(scale, presumed.links)))
    for noise, tolerance in ((None, 1e-6), (np.random.default_rng(0), 0.15)):
        fitted = topology(presumed.mesh, fit(samples_of(truth, noise), presumed))
        for axis, kind in itertools.product(("a", "b"), MOVES):
            got, want = linear(kind, fitted, (axis,)), linear(kind, truth, (axis,))
            assert got.s_per_byte == pytest.approx(want.s_per_byte, rel=tolerance)
            assert got.start_s == pytest.approx(want.start_s, rel=tolerance)


def test_fit_never_gives_negative_costs():
    presumed = topology(MeshShape.parse("a=4"), preset("cpu"))
    falling = [Sample(Kind.ALL_REDUCE, "a", 1e3, 1e-3), Sample(Kind.ALL_REDUCE, "a", 1e6, 5e-4)]
    steep = [Sample(Kind.ALL_REDUCE, "a", 1e3, 1e-9), Sample(Kind.ALL_REDUCE, "a", 1e6, 5e-3)]
    for samples in (falling, steep):
        link = fit(samples, presumed).axis_links["a"]
        assert link.bytes_per_s > 0 and link.start_s >= 0 and link.latency_s >= 0


def test_measured_cpu_devices(tmp_path):
    """What is measured is kept, gives finite costs, and prices more bytes higher."""
    mesh, path = device_mesh(data=4, model=2), tmp_path / "machines.json"
    hardware = calibrate(mesh, path)
    top = topology(MeshShape.parse("data=4,model=2"), hardware)
    for kind, axes in itertools.product(MOVES, (("data",), ("model",), ("data", "model"))):
        small, large = seconds(kind, top, axes, np.array([1e3, 1e8]))
        assert 0 <= small < large < 60
    assert 1e8 < hardware.chip.flops_for("float32") < 1e13
    assert 1e7 < hardware.chip.hbm_bytes_per_s < 1e12
    written = path.read_text()
    assert calibrate(mesh, path) == hardware == load(mesh, path)
    assert path.read_text() == written


def test_files_are_keyed_by_device_kind_and_mesh(tmp_path):
    path, first, second = tmp_path / "m.json", device_mesh(x=8), device_mesh(x=4, y=2)
    chip = preset("v5e").chip
    part = Link("ici", 1e9, wrap=True)
    one = Hardware("one", chip, axis_links={"x": Link("dcn", 1e8, parts=((2, part), (4, part)))})
    two = Hardware("two", chip, axis_links={"x": part, "y": part})
    save(one, first, path)
    assert load(second, path) is None
    save(two, second, path)
    assert load(first, path) == one and load(second, path) == two
    assert list(json.loads(path.read_text())["machines"]) == ["cpu x=8", "cpu x=4,y=2"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("not json", "is no file of measurements"),
        ("[]", "is no file of measurements"),
        ('{"version": 99, "machines": {}}', "has version 99, wanted 1"),
        ('{"version": 1, "machines": {"cpu x=8": {"name": "n"}}}', "no readable entry for cpu x=8"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        load(device_mesh(x=8), path)
