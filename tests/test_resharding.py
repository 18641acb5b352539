"""Resharding tables: every sequence executed on 8 devices, and against a brute-force search."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autoshard.collectives import Kind, linear, wire_bytes
from autoshard.errors import MeshError
from autoshard.hardware import Hardware, Link, preset
from autoshard.resharding import ReshardTable, Step, table
from autoshard.sharding import MeshShape, Sharding, all_shardings
from autoshard.topology import topology

CUBE = MeshShape.parse("a=2,b=2,c=2")


def build(shape, mesh="a=2,b=2,c=2", hardware="v5e", itemsize=4) -> ReshardTable:
    return table(shape, itemsize, topology(MeshShape.parse(mesh), preset(hardware)))


def sharding(*dims) -> Sharding:
    return Sharding(tuple(tuple(d) for d in dims))


# --- Executing steps: each device holds a block, a step is one collective under shard_map.


def block_of(s: Sharding, mesh: MeshShape, position: dict[str, int]) -> tuple[int, ...]:
    """Returns the block's number along each dim that a device at `position` holds."""
    block = []
    for axes in s.dims:
        number = 0
        for axis in axes:
            number = number * mesh.size(axis) + position[axis]
        block.append(number)
    return tuple(block)


def run_slice(x, step: Step, mesh: MeshShape):
    for d, (old, new) in enumerate(zip(step.before.dims, step.after.dims, strict=True)):
        for axis in new[len(old) :]:
            size = x.shape[d] // mesh.size(axis)
            start = jax.lax.axis_index(axis) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=d)
    return x


def run_all_gather(x, step: Step, mesh: MeshShape):
    (d,) = (d for d, axes in enumerate(step.after.dims) if axes != step.before.dims[d])
    gathered = step.before.dims[d][len(step.after.dims[d]) :]
    return jax.lax.all_gather(x, gathered, axis=d, tiled=True)


def run_all_to_all(x, step: Step, mesh: MeshShape):
    pairs = list(zip(step.before.dims, step.after.dims, strict=True))
    (source,) = (d for d, (old, new) in enumerate(pairs) if len(new) < len(old))
    (target,) = (d for d, (old, new) in enumerate(pairs) if len(new) > len(old))
    moved = pairs[source][0][len(pairs[source][1]) :]
    return jax.lax.all_to_all(x, moved, split_axis=target, concat_axis=source, tiled=True)


def run_permute(x, step: Step, mesh: MeshShape):
    """Pairs holders and takers of each block, among devices that differ in the step's axes only."""
    others = [a for a in mesh.names if a not in step.axes]
    pairs = []
    for rest in itertools.product(*(range(mesh.size(a)) for a in others)):
        holders: dict[tuple, list[int]] = {}
        takers: dict[tuple, list[int]] = {}
        moving = itertools.product(*(range(mesh.size(a)) for a in step.axes))
        for number, indices in enumerate(moving):
            at = dict(zip(others, rest, strict=True)) | dict(zip(step.axes, indices, strict=True))
            holders.setdefault(block_of(step.before, mesh, at), []).append(number)
            takers.setdefault(block_of(step.after, mesh, at), []).append(number)
        assert holders.keys() == takers.keys()
        found = [p for block in holders for p in zip(holders[block], takers[block], strict=True)]
        pairs.append(sorted(found))
    assert all(p == pairs[0] for p in pairs)
    return jax.lax.ppermute(x, step.axes, pairs[0])


RUN = {
    Kind.SLICE: run_slice,
    Kind.ALL_GATHER: run_all_gather,
    Kind.ALL_TO_ALL: run_all_to_all,
    Kind.PERMUTE: run_permute,
}


def devices_mesh(mesh: MeshShape) -> Mesh:
    sizes = tuple(n for _, n in mesh.axes)
    return Mesh(np.array(jax.devices()[: mesh.device_count]).reshape(sizes), mesh.names)


def run(steps: list[Step], arrays: list[jax.Array], mesh: MeshShape) -> list[jax.Array]:
    """Applies each step to its own array, some dozens in one program to compile fewer."""

    def one(step: Step, x):
        body = functools.partial(RUN[step.kind], step=step, mesh=mesh)
        before, after, on = step.before.to_spec(), step.after.to_spec(), devices_mesh(mesh)
        return jax.shard_map(body, mesh=on, in_specs=before, out_specs=after, check_vma=False)(x)

    results = []
    for i in range(0, len(steps), 50):
        now = steps[i : i + 50]
        program = jax.jit(lambda xs, now=now: [one(s, x) for s, x in zip(now, xs, strict=True)])
        results += program(arrays[i : i + 50])
    return results


def blocks(array: jax.Array) -> list[tuple[object, np.ndarray]]:
    return [(shard.device, np.asarray(shard.data)) for shard in array.addressable_shards]


@pytest.mark.parametrize(
    "shape, mesh",
    [
        ((8, 8), "a=2,b=2,c=2"),
        ((4, 2, 3), "a=2,b=2,c=2"),
        ((8, 8), "a=4,b=2"),
        ((2, 8), "a=2,b=4"),
    ],
)
def test_every_pair_executed_equals_the_target(shape, mesh):
    """Steps chain from first to last sharding, and each leaves its array as the next has it."""
    found, mesh = build(shape, mesh), MeshShape.parse(mesh)
    distinct: dict[Step, None] = {}
    for before, after in itertools.product(found.shardings, repeat=2):
        steps = found.steps(before, after)
        chain = [before, *(step.after for step in steps)]
        assert [step.before for step in steps] == chain[:-1] and chain[-1] == after
        distinct.update(dict.fromkeys(steps))
    steps = list(distinct)
    assert {s.kind for s in steps} >= {Kind.SLICE, Kind.ALL_GATHER, Kind.ALL_TO_ALL}
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    on = devices_mesh(mesh)
    placed = {s: jax.device_put(array, NamedSharding(on, s.to_spec())) for s in found.shardings}
    results = run(steps, [placed[s.before] for s in steps], mesh)
    for step, result in zip(steps, results, strict=True):
        got, want = blocks(result), blocks(placed[step.after])
        assert [device for device, _ in got] == [device for device, _ in want]
        for (_, g), (_, w) in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=str(step))


# --- The numbers.


def neighbours(s: Sharding, legal: tuple[Sharding, ...], mesh: MeshShape):
    """Says by definition which single steps leave `s`: (kind, axes, to)."""
    for t in legal:
        if s == t:
            continue
        moved = [d for d in range(len(s.dims)) if s.dims[d] != t.dims[d]]
        gone = tuple(a for a in mesh.names if a in s.axes and a not in t.axes)
        new = tuple(a for a in mesh.names if a in t.axes and a not in s.axes)
        if all(t.dims[d][: len(s.dims[d])] == s.dims[d] for d in moved):
            yield Kind.SLICE, new, t
        elif len(moved) == 1 and s.dims[moved[0]][: len(t.dims[moved[0]])] == t.dims[moved[0]]:
            yield Kind.ALL_GATHER, gone, t
        elif s.local_shape((16,) * len(s.dims), mesh) == t.local_shape((16,) * len(s.dims), mesh):
            yield Kind.PERMUTE, tuple(a for d in moved for a in s.dims[d] + t.dims[d]), t
        elif len(moved) == 2 and sorted(s.axes) == sorted(t.axes):
            i, j = sorted(moved, key=lambda d: len(t.dims[d]) - len(s.dims[d]))
            cut = len(t.dims[i])
            tail = s.dims[i][cut:]
            if s.dims[i][:cut] == t.dims[i] and t.dims[j] == s.dims[j] + tail:
                yield Kind.ALL_TO_ALL, tail, t


@pytest.mark.parametrize("hardware", ["v5e", "h100", "cpu"])
@pytest.mark.parametrize("itemsize", [1, 4096])
def test_table_equals_brute_force(hardware, itemsize):
    shape, mesh = (8, 4), CUBE
    top = topology(mesh, preset(hardware))
    found = table(shape, itemsize, top)
    legal = all_shardings(shape, mesh)
    order = {s: i for i, s in enumerate(found.shardings)}
    assert found.shardings == legal
    best = np.full((len(order), len(order)), np.inf)
    for s in legal:
        best[order[s], order[s]] = 0
        for kind, axes, t in neighbours(s, legal, mesh):
            end = t if kind in (Kind.ALL_GATHER, Kind.SLICE) else s
            size = end.local_bytes(shape, itemsize, mesh)
            cost = float(linear(kind, top, tuple(dict.fromkeys(axes)))(size))
            if kind is Kind.ALL_TO_ALL:
                cost += 2 * size / top.chip.hbm_bytes_per_s
            best[order[s], order[t]] = cost
    for k in range(len(order)):
        best = np.minimum(best, best[:, k, None] + best[None, k])
    np.testing.assert_allclose(found.seconds, best, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("mesh, shape", [("a=2,b=2,c=2", (8, 8, 8)), ("a=4,b=3", (12, 24)),
                                         ("a=2,b=2", (6, 5)), ("a=1,b=2", (4,))])  # fmt: skip
def test_a_metric_that_its_steps_add_up_to(mesh, shape):
    found = build(shape, mesh)
    n = len(found.shardings)
    assert np.isfinite(found.seconds).all() and (np.diag(found.seconds) == 0).all()
    for k in range(n):
        through = found.seconds[:, k, None] + found.seconds[None, k]
        assert (found.seconds <= through + 1e-15).all()
    for i, j in itertools.product(range(n), repeat=2):
        steps = found.steps(found.shardings[i], found.shardings[j])
        assert sum(s.seconds for s in steps) == pytest.approx(found.seconds[i, j], abs=1e-15)
        assert len(steps) <= 4


def test_full_bytes_are_what_the_collective_is_priced_by():
    top = topology(MeshShape.parse("a=2,b=2,c=2"), preset("h100"))
    found, shape = table((64, 64), 4, top), (64, 64)
    for before, after in itertools.product(found.shardings, repeat=2):
        for step in found.steps(before, after):
            end = step.after if step.kind in (Kind.ALL_GATHER, Kind.SLICE) else step.before
            assert step.full_bytes == end.local_bytes(shape, 4, top.mesh)
            floor = float(linear(step.kind, top, step.axes)(step.full_bytes))
            assert step.seconds >= floor * (1 - 1e-6) - 1e-12


def test_sequence_to_heads_is_one_all_to_all_of_the_local_bytes():
    """DeepSpeed-Ulysses (Jacobs et al., 2023): [batch, sequence, heads, width], 1/n each."""
    found = build((2, 1024, 16, 64), "x=8", "h100", itemsize=2)
    (step,) = found.steps(sharding("", "x", "", ""), sharding("", "", "x", ""))
    total = 2 * 1024 * 16 * 64 * 2
    assert (step.kind, step.axes, step.full_bytes) == (Kind.ALL_TO_ALL, ("x",), total / 8)
    sent = wire_bytes(step.kind, MeshShape.parse("x=8"), step.axes, step.full_bytes)
    assert sent == total / 8 * 7 / 8


def test_slices_are_nearly_free_and_gathers_are_not():
    found = build((1024, 1024), "a=4,b=2")
    whole, split = Sharding.replicated(2), sharding("a", "b")
    (step,) = found.steps(whole, split)
    assert step.kind is Kind.SLICE and step.axes == ("a", "b")
    down, up = (
        found.seconds[found.index(whole), found.index(split)],
        found.seconds[found.index(split), found.index(whole)],
    )
    assert down < up / 10


def test_both_axes_of_a_dim_are_gathered_at_once():
    (step,) = build((64, 64), "a=4,b=2").steps(sharding("ab", ""), Sharding.replicated(2))
    assert (step.kind, step.axes) == (Kind.ALL_GATHER, ("a", "b"))


def test_swapping_axes_is_a_permute():
    (step,) = build((1024, 1024), "a=4,b=2", "h100").steps(sharding("ab", ""), sharding("ba", ""))
    assert step.kind is Kind.PERMUTE


def test_a_slow_axis_is_crossed_with_few_bytes():
    """From rows over the slow axis to columns over the fast: split first, gather what is left."""
    lab = Hardware(
        "lab",
        preset("v5e").chip,
        axis_links={"slow": Link("dcn", 1e9, latency_s=0), "fast": Link("ici", 1e11, latency_s=0)},
    )
    found = table((4096, 4096), 4, topology(MeshShape.parse("slow=2,fast=8"), lab))
    first, second = found.steps(sharding(["slow"], []), sharding([], ["fast"]))
    assert (first.kind, first.axes) == (Kind.SLICE, ("fast",))
    assert (second.kind, second.axes) == (Kind.ALL_GATHER, ("slow",))
    assert second.full_bytes == 4096 * 4096 * 4 / 8


def test_tables_are_shared_by_shapes_of_one_pattern_and_size():
    assert build((16, 64)) is build((32, 32))
    assert build((16, 64)) is not build((16, 64), itemsize=2)
    assert build((6, 64)).shardings == all_shardings((6, 64), CUBE)


def test_shapes_without_choices():
    for shape in ((), (3, 5), (0, 4), (1,)):
        found = build(shape, "a=2")
        assert found.shardings == all_shardings(shape, MeshShape.parse("a=2"))
        assert found.steps(found.shardings[0], found.shardings[0]) == ()


def test_unknown_shardings():
    found = build((8, 3))
    with pytest.raises(MeshError, match=r"no sharding \[-,a\] on a=2,b=2,c=2"):
        found.index(sharding("", "a"))
    ones = build((8, 4), "a=1,b=2")
    assert ones.index(sharding("ab", "")) == ones.index(sharding("b", ""))
