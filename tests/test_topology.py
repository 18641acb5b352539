"""Which links each mesh axis gets, from devices and without."""

import types

import numpy as np
import pytest

from autoshard import collectives
from autoshard.errors import HardwareError, MeshError
from autoshard.hardware import Fabric, Hardware, Link, preset
from autoshard.sharding import MeshShape
from autoshard.topology import slice_shape, topology


def tpu(x, y, z=0, slice_index=None, core=0):
    return types.SimpleNamespace(
        coords=(x, y, z),
        slice_index=slice_index,
        core_on_chip=core,
        process_index=0,
        platform="tpu",
    )


def gpu(process, slice_index=None):
    return types.SimpleNamespace(process_index=process, slice_index=slice_index, platform="gpu")


def devices(shape, make):
    """Returns make(*index) at each index of an array."""
    found = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        found[index] = make(*index)
    return found


def links(mesh, hardware, at=None):
    return topology(MeshShape.parse(mesh), preset(hardware), at).links


def test_a_full_v5e_pod_has_rings():
    x, y = links("x=16,y=16", "v5e", devices((16, 16), tpu))
    assert x == y and x.wrap and x.bytes_per_s == 4.5e10


def test_a_part_of_a_v5e_pod_has_none_below_16():
    x, y = links("x=8,y=16", "v5e", devices((8, 16), tpu))
    assert not x.wrap and y.wrap


def test_v5p_wraps_whole_cubes_only():
    assert all(link.wrap for link in links("x=4,y=4,z=4", "v5p", devices((4, 4, 4), tpu)))
    assert not any(link.wrap for link in links("x=2,y=2,z=4", "v5p", devices((2, 2, 4), tpu)))


def test_an_axis_over_two_torus_dims_has_two_parts():
    (data,) = links("data=16", "v5e", devices((16,), lambda i: tpu(i // 4, i % 4)))
    assert [(n, link.kind) for n, link in data.parts] == [(4, "ici"), (4, "ici")]


def test_every_second_chip_shares_its_links():
    """Axis a of a=2,b=2 on a row of 4 steps over a chip: half the speed, twice the latency."""
    a, b = links("a=2,b=2", "v5e", devices((2, 2), lambda i, j: tpu(2 * i + j, 0)))
    assert (a.bytes_per_s, a.latency_s) == (2.25e10, 2e-6)
    assert (b.bytes_per_s, b.latency_s) == (4.5e10, 1e-6)


def test_slices_are_joined_by_dcn():
    data, model = links(
        "data=4,model=4", "v5e", devices((4, 4), lambda i, j: tpu(i % 2, j, slice_index=i // 2))
    )
    assert [(n, link.kind) for n, link in data.parts] == [(2, "dcn"), (2, "ici")]
    assert data.kind == "dcn" and data.bytes_per_s == 3.125e9
    assert model.kind == "ici" and not model.parts


def test_cores_as_devices_get_half_a_chip():
    at = devices((4, 2), lambda i, j: tpu(i, 0, core=j))
    found = topology(MeshShape.parse("data=4,model=2"), preset("v4"), at)
    assert found.chip.flops_for("bfloat16") == 2.75e14 / 2
    assert found.links[0].bytes_per_s == 4.5e10 / 2
    assert found.links[1].kind == "custom"


def test_devices_in_no_grid_are_taken_at_their_slowest():
    places = [(0, 0), (1, 1), (0, 1), (3, 3)]
    (data,) = links("data=4", "v5e", devices((4,), lambda i: tpu(*places[i])))
    assert not data.parts and data.bytes_per_s == 4.5e10 and not data.wrap


@pytest.mark.parametrize("slice_index", [None, 0])
def test_gpu_hosts_are_joined_by_infiniband(slice_index):
    """Real processes show a host each; compile-only devices have one slice for all hosts."""
    at = devices((2, 8), lambda i, j: gpu(i, slice_index))
    data, model = links("data=2,model=8", "h100", at)
    assert (data.kind, model.kind) == ("infiniband", "nvlink")
    assert not data.parts


def test_hosts_of_unequal_size_are_taken_at_their_slowest():
    (data,) = links("data=4", "h100", devices((4,), lambda i: gpu(int(i == 3))))
    assert data.kind == "infiniband" and data.bytes_per_s == 5e10 and not data.parts


def test_gpus_with_a_process_each_share_a_node_by_slice():
    at = devices((2, 8), lambda i, j: gpu(8 * i + j, i))
    data, model = links("data=2,model=8", "h100", at)
    assert (data.kind, model.kind) == ("infiniband", "nvlink")


@pytest.mark.parametrize(
    "mesh, hardware, kinds",
    [
        ("data=8", "h100", ["nvlink"]),
        ("data=2,model=8", "h100", ["infiniband", "nvlink"]),
        ("data=4,model=4", "h100", ["infiniband+nvlink", "nvlink"]),
        ("data=16", "h100", ["infiniband+nvlink"]),
        ("data=4,model=4", "v5e", ["ici", "ici"]),
        ("data=16", "v5e", ["ici+ici"]),
        ("data=2,model=256", "v5e", ["dcn", "ici+ici"]),
        ("data=4,model=2", "cpu", ["custom", "custom"]),
        ("data=1,model=4", "v5e", ["ici", "ici+ici"]),
        ("model=2", "v7", ["custom"]),
        ("data=4,model=2", "v7", ["ici+ici", "custom"]),
    ],
)
def test_without_devices_the_usual_wiring(mesh, hardware, kinds):
    found = links(mesh, hardware)
    texts = ["+".join(p.kind for _, p in link.parts) or link.kind for link in found]
    ones = [n == "1" for n in (part.split("=")[1] for part in mesh.split(","))]
    assert [t for t, one in zip(texts, ones, strict=True) if not one] == [
        k for k, one in zip(kinds, ones, strict=True) if not one
    ]


def test_default_wiring_equals_that_of_the_same_devices():
    assert links("x=4,y=4", "v5e") == links("x=4,y=4", "v5e", devices((4, 4), tpu))
    assert links("a=2,b=8", "v5e") == links(
        "a=2,b=8", "v5e", devices((2, 8), lambda i, j: tpu((8 * i + j) // 4, j % 4))
    )


@pytest.mark.parametrize(
    "count, dims, shape",
    [(8, 2, (2, 4)), (16, 2, (4, 4)), (128, 2, (8, 16)), (8, 3, (2, 2, 2)), (16, 3, (2, 2, 4)),
     (12, 2, (2, 6)), (1, 2, (1, 1))],
)  # fmt: skip
def test_usual_slices(count, dims, shape):
    assert slice_shape(count, dims) == shape


def test_cpu_devices_stand_for_the_hardware_asked_for():
    at = devices((4, 2), lambda i, j: types.SimpleNamespace(process_index=0, platform="cpu"))
    assert links("a=4,b=2", "v5e", at) == links("a=4,b=2", "v5e")
    assert links("a=4,b=2", "h100", at) == links("a=4,b=2", "h100")


def test_custom_mesh_takes_the_users_links():
    fast, slow = Link("nvlink", 1e11), Link("dcn", 1e9)
    lab = Hardware("lab", preset("h100").chip, axis_links={"data": slow, "model": fast})
    assert topology(MeshShape.parse("model=2,data=4"), lab).links == (fast, slow)
    with pytest.raises(HardwareError, match="no link for mesh axis 'expert'"):
        topology(MeshShape.parse("expert=2,data=4"), lab)


def test_errors():
    with pytest.raises(MeshError, match=r"devices of shape \(8,\) do not fit the mesh x=4,y=2"):
        links("x=4,y=2", "v5e", devices((8,), lambda i: tpu(i, 0)))
    with pytest.raises(HardwareError, match="does not divide over 2 slices or nodes"):
        links("a=3,b=3", "h100")
    box = Hardware("box", preset("a100-40").chip, Fabric(Link("pcie", 2e10), domain_size=4))
    with pytest.raises(HardwareError, match="crosses domains of 'box', which has no link across"):
        topology(MeshShape.parse("a=8"), box)


def test_compile_only_tpus():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2)
    by_slice = sorted(found.devices, key=lambda d: (d.slice_index, d.coords[1], d.coords[0]))
    data, model = links("data=2,model=8", "v5e", np.array(by_slice).reshape(2, 8))
    assert data.kind == "dcn"
    assert [(n, link.kind) for n, link in model.parts] == [(2, "ici"), (4, "ici")]


@pytest.mark.parametrize("shape", [(4, 4), (2, 4)])
def test_a_collective_of_all_devices_costs_the_same_on_any_mesh(shape):
    chips = list(devices(shape, tpu).flat)
    # As `jax.make_mesh` lays out 2x4: a snake, off the grid for all axes but the last.
    snake = (0, 4, 1, 5, 7, 3, 6, 2)
    orders = [tuple(range(len(chips))), *([snake] if len(chips) == len(snake) else [])]
    found = set()
    for order in orders:
        for model in (1, 2, 4):
            mesh = MeshShape.parse(f"data={len(chips) // model},model={model}")
            at = np.array([chips[i] for i in order], dtype=object).reshape(-1, model)
            machine = topology(mesh, preset("v5e"), at)
            reduced = collectives.all_reduce_s(machine, mesh.names, 1e8)
            found.add((round(reduced, 9), collectives.scatters(machine, mesh.names)))
    assert len(found) == 1


def test_axes_along_one_torus_dim_share_its_links():
    mesh = MeshShape.parse("data=2,model=2,rows=4")
    machine = topology(mesh, preset("v5e"), devices((4, 4), tpu).reshape(2, 2, 4))
    assert [n for n, _ in machine.dims(("data", "model", "rows"))] == [4, 4]
    assert machine.dims(("data", "model")) == machine.parts("rows")
