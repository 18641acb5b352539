"""Planned collectives set beside compiled ones, on both sides by hand."""

import dataclasses

import pytest

from autoshard.emit import PlannedCollective
from autoshard.hlo_collectives import CompiledCollective
from autoshard.inspect import CompiledStep, unplanned
from autoshard.schedule import Schedule
from autoshard.sharding import MeshShape

MESH = MeshShape.parse("data=4,model=2")
MIB = float(1 << 20)


def planned(kind, axes, nbytes=MIB, trips=1, source="m.py:1 (f)"):
    return PlannedCollective(kind, tuple(axes.split()), nbytes, trips, 0.0, "w", source, "reshard")


def compiled(kind, axes, nbytes=MIB, trips=1, source="m.py:1 (f)"):
    names = tuple(axes.split())
    c = CompiledCollective(
        kind, nbytes, names, MESH.size(names), trips, 1, source, "", False, "", ""
    )
    return dataclasses.replace(c, dtype="f32", shape="f32[1]")


def compare(have, want, **options):
    step = CompiledStep(tuple(have), None, MESH, (), None, Schedule((), (), (), False), ())
    return unplanned(step, want, **options)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ([compiled("all-gather", "data")], [planned("all-gather", "data")]),
        # Combined, and counted by trips.
        ([compiled("all-reduce", "data", 6 * MIB)], [planned("all-reduce", "data", MIB, 6)]),
        (
            [compiled("all-reduce", "data", 3 * MIB)],
            [planned("all-reduce", "data"), planned("all-reduce", "data", 2 * MIB)],
        ),
        # An all-reduce is a reduce-scatter and an all-gather, either way round.
        (
            [compiled("reduce-scatter", "data"), compiled("all-gather", "data")],
            [planned("all-reduce", "data")],
        ),
        (
            [compiled("all-reduce", "data")],
            [planned("all-gather", "data"), planned("reduce-scatter", "data")],
        ),
        # A gather over two axes is one over each, the second of all.
        (
            [compiled("all-gather", "data model")],
            [planned("all-gather", "data", MIB / 2), planned("all-gather", "model")],
        ),
        # A windowed matmul: three permutes of a quarter.
        ([compiled("collective-permute", "data", MIB / 4, 3)], [planned("all-gather", "data")]),
        ([compiled("collective-permute", "model", MIB / 2)], [planned("all-to-all", "model")]),
    ],
)
def test_what_is_equivalent_is_explained(have, want):
    c = compare(have, want)
    assert c.unplanned == () and c.missing == ()
    assert c.unplanned_bytes == pytest.approx(0) and c.compiled_bytes == c.planned_bytes


def test_what_stands_alone_is_named():
    gather, other = compiled("all-gather", "data"), compiled("all-gather", "model", 3 * MIB, 2)
    lost = planned("all-to-all", "data", MIB)
    c = compare([gather, other], [planned("all-gather", "data"), lost])
    assert c.unplanned == ((other, 3 * MIB),)
    assert c.missing == ((lost, 0.75 * MIB),)
    assert c.unplanned_fraction == pytest.approx(3 / 3.75)


@pytest.mark.parametrize(
    ("have", "want", "left"),
    [
        (compiled("all-gather", "data"), planned("all-gather", "model"), 0.75),
        (compiled("all-gather", "data"), planned("reduce-scatter", "data"), 0.75),
        (compiled("all-gather", "data"), planned("all-to-all", "data"), 0.75),
        (compiled("all-reduce", "data"), planned("reduce-scatter", "data"), 0.75),
        (compiled("all-gather", "data", 2 * MIB), planned("all-gather", "data"), 0.75),
        (compiled("all-gather", "data", MIB, 6), planned("all-gather", "data", MIB, 2), 3.0),
    ],
)
def test_what_differs_leaves_its_bytes(have, want, left):
    ((found, nbytes),) = compare([have], [want]).unplanned
    assert found == have and nbytes == pytest.approx(left * MIB)


def test_bytes_go_to_the_collective_of_the_same_line_first():
    mine = compiled("all-gather", "data", source="m.py:2 (g)")
    theirs = compiled("all-gather", "data", source="m.py:3 (h)")
    want = planned("all-gather", "data", source="m.py:3 (h)")
    assert compare([mine, theirs], [want]).unplanned == ((mine, 0.75 * MIB),)


def test_small_collectives_count_but_are_not_named():
    loss = compiled("all-reduce", "data model", 4)
    c = compare([loss], [])
    assert c.unplanned == () and c.unplanned_bytes == 7
    assert compare([loss], [], small_bytes=1).unplanned == ((loss, 7),)


def test_text():
    have = [compiled("all-reduce", "data", MIB, 2), compiled("all-to-all", "model", MIB)]
    want = [planned("reduce-scatter", "data", MIB, 2), planned("all-gather", "data", MIB, 2)]
    assert str(compare(have, want)).splitlines() == [
        "axes   kind            predicted           compiled",
        "data   all-gather            2 x  2.0 MiB                    -",
        "data   reduce-scatter        2 x  2.0 MiB                    -",
        "data   all-reduce                       -       2 x    2.0 MiB",
        "model  all-to-all                       -       1 x    1.0 MiB",
        "data   sent in all                3.0 MiB              3.0 MiB",
        "model  sent in all                    0 B            512.0 KiB",
        "not planned, 512.0 KiB sent: all-to-all over model: 1 x 1.0 MiB f32[1] at m.py:1 (f)",
        "512.0 KiB of 3.5 MiB sent (14.3%) was not planned",
    ]
