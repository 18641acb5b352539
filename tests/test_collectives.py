"""Collectives against the worked numbers of "How to Scale Your Model" and against simulated rings.

The book rounds (n-1)/n to 1 and takes latency and bandwidth apart; the tolerances say where.
"""

import itertools

import numpy as np
import pytest

from autoshard import collectives
from autoshard.collectives import Kind, Linear, linear, seconds, wire_bytes
from autoshard.errors import MeshError
from autoshard.hardware import Hardware, Link, preset
from autoshard.sharding import MeshShape
from autoshard.topology import Topology, topology


def on(hardware: str, mesh: str) -> Topology:
    return topology(MeshShape.parse(mesh), preset(hardware))


def with_link(n: int, link: Link) -> Topology:
    lab = Hardware("lab", preset("h100").chip, axis_links={"x": link})
    return topology(MeshShape.parse(f"x={n}"), lab)


H100, V5E = on("h100", "x=8"), on("v5e", "x=8,y=4")
CUBE = on("v4", "x=4,y=4,z=4")
BARRIER_S = 2e-6  # before every collective of a TPU; the book leaves it out


def test_all_gather_without_a_ring():
    """Part 3, pop quiz 2: bf16[2048, 8192] over 4 of a v5e 8x4: 3 hops of 8.4 MB, 560 us."""
    assert collectives.all_gather_s(V5E, ("y",), 2 * 2048 * 8192) == pytest.approx(560e-6, rel=0.01)
    # bf16[256, 256]: latency, 3 hops of 1 us; the book lets the 0.7 us of each overlap.
    assert collectives.all_gather_s(V5E, ("y",), 2 * 256 * 256) == pytest.approx(
        BARRIER_S + 3e-6 + 2.2e-6, 0.01
    )


def test_all_gather_over_one_and_two_rings():
    """Part 3, question 2 on a v4 4x4x4: 23 us over X, 46 us over X and Y, for (n-1)/n = 1."""
    one = linear(Kind.ALL_GATHER, CUBE, ("x",))
    assert one.s_per_byte * 2 * 1024 * 1024 == pytest.approx(23e-6 * 3 / 4, rel=0.02)
    two = linear(Kind.ALL_GATHER, CUBE, ("x", "y"))
    assert two.s_per_byte * 2 * 1024 * 4096 == pytest.approx(46e-6 * 15 / 16, rel=0.02)
    # Part 3, question 2.3: an all-reduce takes twice as long, 190 us over Z.
    both = linear(Kind.ALL_REDUCE, CUBE, ("z",))
    assert both.s_per_byte * 2 * 1024 * 4096 == pytest.approx(190e-6 * 3 / 4, rel=0.02)


def test_tiny_all_gather_is_two_hops():
    """Part 3, question 3: 256 bytes over a ring of 4: 2 us."""
    assert collectives.all_gather_s(CUBE, ("x",), 256) == pytest.approx(BARRIER_S + 2e-6, rel=0.01)


def test_an_all_reduce_is_launched_once():
    both = (
        collectives.all_gather_s(CUBE, ("x",), 1e6),
        collectives.reduce_scatter_s(CUBE, ("x",), 1e6),
    )
    assert collectives.all_reduce_s(CUBE, ("x",), 1e6) == pytest.approx(sum(both) - BARRIER_S)
    launch_s = preset("h100").links.inside.start_s
    both = (
        collectives.all_gather_s(H100, ("x",), 1e6),
        collectives.reduce_scatter_s(H100, ("x",), 1e6),
    )
    assert collectives.all_reduce_s(H100, ("x",), 1e6) == pytest.approx(sum(both) - launch_s)


def test_all_gather_in_a_gpu_node():
    """Part 12, pop quiz 1: bf16[1024, 16384] over 8 H100: 65 us; quiz 2, question 3: 1.04 ms."""
    cost = linear(Kind.ALL_GATHER, H100, ("x",))
    assert cost.s_per_byte * 2 * 1024 * 16384 == pytest.approx(65e-6, rel=0.01)
    assert cost.s_per_byte * 2 * 4096 * 65536 == pytest.approx(1.04e-3, rel=0.01)


def test_all_gather_across_gpu_nodes():
    """Part 12: min(450 * 8/7, 400 * 32/31) = 413 GB/s over 32 nodes of 8."""
    flat, split = on("h100", "x=256"), on("h100", "n=32,g=8")
    for cost in (linear(Kind.ALL_GATHER, flat, ("x",)), linear(Kind.ALL_GATHER, split, ("n", "g"))):
        assert 1 / cost.s_per_byte == pytest.approx(413e9, rel=0.001)
    # Pop quiz 3: over the nodes alone, arrays sharded 8 ways inside: 31/32 at 400 GB/s.
    across = linear(Kind.ALL_GATHER, split, ("n",))
    assert across.s_per_byte / 8 == pytest.approx(31 / 32 / 400e9)


def test_all_to_all_on_a_switch_and_across_nodes():
    """Part 12, B an array: B (N-1) / (W N^2) in a node, B (M-1) / (M^2 400e9) over M nodes."""
    array = 1e9
    inside = linear(Kind.ALL_TO_ALL, H100, ("x",)).s_per_byte * array / 8
    assert inside == pytest.approx(array * 7 / (450e9 * 64))
    nodes = linear(Kind.ALL_TO_ALL, on("h100", "x=16"), ("x",)).s_per_byte * array / 16
    assert nodes == pytest.approx(array * 1 / (4 * 400e9))


def test_all_to_all_is_a_quarter_of_an_all_gather_on_a_ring():
    """Part 3, question 10: a quarter on large rings in both directions, a half in one."""
    pod = on("v5e", "x=16,y=16")
    gather = linear(Kind.ALL_GATHER, pod, ("x",)).s_per_byte * 16 / 15
    assert linear(Kind.ALL_TO_ALL, pod, ("x",)).s_per_byte / 16 == pytest.approx(gather / 4)
    one_way = with_link(16, Link("ici", 1e9, wrap=True, both_ways=False))
    gather = linear(Kind.ALL_GATHER, one_way, ("x",)).s_per_byte
    assert linear(Kind.ALL_TO_ALL, one_way, ("x",)).s_per_byte / 16 == pytest.approx(gather / 2)


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("wrap", [False, True])
def test_all_to_all_is_the_load_of_the_busiest_link(n, wrap):
    """Each device sends 1/n byte to each other one, the shortest way, half each way at a tie."""
    if wrap and n == 2:
        return
    load = np.zeros((n, 2))  # [link to the right of a device, direction]
    for source, target in itertools.permutations(range(n), 2):
        right = (target - source) % n
        ways = (
            [(right, 1), (n - right, 0)] if wrap else [(abs(target - source), int(target > source))]
        )
        shortest = min(hops for hops, _ in ways)
        ways = [w for w in ways if w[0] == shortest]
        for hops, direction in ways:
            for h in range(hops):
                link = (source + h) % n if direction else (source - 1 - h) % n
                load[link, direction] += 1 / n / len(ways)
    cost = linear(Kind.ALL_TO_ALL, with_link(n, Link("ici", 1.0, wrap=wrap)), ("x",))
    assert cost.s_per_byte == pytest.approx(load.max())


def test_permute():
    assert linear(Kind.PERMUTE, H100, ("x",)).s_per_byte == pytest.approx(1 / 450e9)
    ring = on("v5e", "x=16,y=16")
    far, near = (
        linear(Kind.PERMUTE, ring, ("x",)),
        collectives.permute_s(ring, ("x",), 1e6, shift=True),
    )
    assert far.s_per_byte == pytest.approx(2 / 4.5e10)
    assert near == pytest.approx(BARRIER_S + 1e-6 + 1e6 / 4.5e10)


def test_slow_links_carry_a_share():
    """All-reduce of B over 2 slices of 16 chips: the DCN sees B/16, not B."""
    lab = Hardware(
        "lab",
        preset("v5e").chip,
        axis_links={"slice": Link("dcn", 1e9, latency_s=0), "x": Link("ici", 1e11, latency_s=0)},
    )
    two = topology(MeshShape.parse("slice=2,x=16"), lab)
    expected = 2 * (1 / 2) * (1 / 16) / 1e9
    assert linear(Kind.ALL_REDUCE, two, ("slice", "x")).s_per_byte == pytest.approx(expected)
    assert linear(Kind.ALL_REDUCE, two, ("slice",)).s_per_byte == pytest.approx(expected * 16)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name, mesh", [("h100", "a=4,b=2,c=4"), ("v5e", "a=4,b=2,c=4"),
                                        ("v7", "a=2,b=2,c=2"), ("cpu", "a=2,b=2,c=2")])  # fmt: skip
def test_sane(kind, name, mesh):
    """No cost falls with bytes, or with more axes for the same local bytes; axes have no order."""
    top = on(name, mesh)
    sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
    subsets = [s for r in range(4) for s in itertools.combinations("abc", r)]
    for axes in subsets:
        times = seconds(kind, top, axes, sizes)
        assert (np.diff(times) >= 0).all() and times.shape == sizes.shape
        assert [seconds(kind, top, axes[::-1], s) for s in sizes] == list(times)
        if kind is Kind.ALL_REDUCE:
            continue  # one over a slow axis alone is dearer than one that halves the bytes first
        full = kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        times = seconds(kind, top, axes, sizes * (top.mesh.size(axes) if full else 1))
        for more in subsets:
            if set(axes) < set(more):
                local = sizes * (top.mesh.size(more) if full else 1)
                assert (seconds(kind, top, more, local) >= times * (1 - 1e-12)).all()


@pytest.mark.parametrize("name, mesh", [("h100", "a=4,b=2,c=4"), ("v5e", "a=4,b=2,c=4"),
                                        ("v4", "a=4,b=4,c=4"), ("cpu", "a=2,b=2,c=2")])  # fmt: skip
def test_gathering_at_once_is_no_dearer_than_one_after_another(name, mesh):
    top = on(name, mesh)
    for axes in itertools.permutations("abc", 2):
        for size in (1e2, 1e6, 1e9):
            after = size / top.mesh.size(axes[0])
            apart = collectives.all_gather_s(top, axes[1:], after)
            apart += collectives.all_gather_s(top, axes[:1], size)
            assert collectives.all_gather_s(top, axes, size) <= apart * (1 + 1e-12)


def test_axes_of_size_one_are_free():
    top = on("v5e", "a=1,b=4")
    moves = [k for k in Kind if k is not Kind.SLICE]
    assert all(seconds(k, top, ("a",), 1e9) == 0.0 for k in moves)
    assert all(seconds(k, top, ("a", "b"), 1e9) == seconds(k, top, ("b",), 1e9) for k in moves)


def test_zero_3_moves_half_again_as_much_as_data_parallel():
    """ZeRO (Rajbhandari et al., 2020), section 7: two gathers, a reduce-scatter: 1.5 times."""
    size, axes, mesh = 1e9, ("x",), H100.mesh
    zero_3 = 2 * wire_bytes(Kind.ALL_GATHER, mesh, axes, size)
    zero_3 += wire_bytes(Kind.REDUCE_SCATTER, mesh, axes, size)
    assert zero_3 / wire_bytes(Kind.ALL_REDUCE, mesh, axes, size) == pytest.approx(1.5)
    cost = linear(Kind.ALL_GATHER, H100, axes) * 2 + linear(Kind.REDUCE_SCATTER, H100, axes)
    assert cost.s_per_byte / linear(Kind.ALL_REDUCE, H100, axes).s_per_byte == pytest.approx(1.5)


@pytest.mark.parametrize(
    "kind, hardware, expected",
    [
        (Kind.ALL_GATHER, "v5e", True),
        (Kind.PERMUTE, "v5e", True),
        (Kind.ALL_REDUCE, "v5e", False),
        (Kind.ALL_TO_ALL, "v5e", False),
        (Kind.REDUCE_SCATTER, "v5e", False),
        (Kind.ALL_GATHER, "v5p", False),
        (Kind.PERMUTE, "v5p", True),
        (Kind.ALL_REDUCE, "h100", True),
        (Kind.ALL_GATHER, "cpu", False),
    ],
)
def test_what_overlaps(kind, hardware, expected):
    assert collectives.overlaps(kind, on(hardware, "x=8"), ("x",)) is expected


def test_wire_bytes():
    mesh = MeshShape.parse("a=4,b=1")
    sent = {k: wire_bytes(k, mesh, ("a",), 4.0) for k in Kind}
    assert sent == {
        Kind.ALL_GATHER: 3.0,
        Kind.REDUCE_SCATTER: 3.0,
        Kind.ALL_REDUCE: 6.0,
        Kind.ALL_TO_ALL: 3.0,
        Kind.PERMUTE: 4.0,
        Kind.SLICE: 0.0,
    }
    assert all(wire_bytes(k, mesh, ("b",), 4.0) == 0.0 for k in Kind)


def test_unknown_axis():
    with pytest.raises(MeshError, match="unknown mesh axis 'q'"):
        linear(Kind.ALL_GATHER, H100, ("q",))


def test_linear():
    cost = Linear(1e-6, 1e-9) + Linear(1e-6, 1e-9)
    assert cost == Linear(1e-6, 1e-9) * 2
    assert str(cost) == "2 us + bytes at 0.5 GB/s" and str(Linear(1e-6)) == "1 us"


@pytest.mark.parametrize(
    ("mesh", "hardware", "axes", "scattered"),
    [
        ("a=4,b=4", "v5e", ("a", "b"), False),  # the whole of a square slice
        ("a=16", "v5e", ("a",), False),
        ("a=4,b=4", "v5e", ("a",), True),
        ("a=8", "v5e", ("a",), True),  # 2 x 4
        ("a=2,b=8", "v5e", ("b",), True),
        ("a=8", "v5p", ("a",), False),  # 2 x 2 x 2
        ("a=4,b=2", "v5p", ("a",), True),
        ("a=8", "h100", ("a",), True),
    ],
)
def test_what_the_compiler_scatters(mesh, hardware, axes, scattered):
    """As compiled ahead of time; `tests/test_conformance.py` compiles some of them."""
    assert collectives.scatters(on(hardware, mesh), axes) is scattered


def test_a_small_all_reduce_takes_one_step():
    """A number: as long as gathering 8; a mebibyte: as long as scattering and gathering it."""
    small = collectives.all_reduce_s(V5E, ("x",), 4)
    assert small == pytest.approx(collectives.all_gather_s(V5E, ("x",), 8 * 4))
    assert small < collectives.all_gather_s(V5E, ("x",), 2**20)
    large = collectives.all_reduce_s(V5E, ("x",), 2**20)
    assert large == pytest.approx(linear(Kind.ALL_REDUCE, V5E, ("x",))(2**20))
    both = collectives.all_reduce_s(V5E, ("x",), np.array([4, 2**20]))
    assert both == pytest.approx(np.array([small, large]))
