"""Reductions keep the optimum: with each of them on or off, on problems small enough to try all."""

import itertools
import math

import numpy as np
import pytest

from autoshard.loads import Load, merged
from autoshard.problem import Edge, Node, ShardingProblem, Usage
from autoshard.reduce import Core, Infeasible
from tests.random_problems import brute_force, random_problem

OFF = {
    "none": (),
    "dominated": ("_undominated",),
    "separable": ("_remove_separable",),
    "follower": ("_merge",),
    "degree": ("_eliminate",),
    "row": ("_reduce_rows",),
    "all but constant": (
        "_undominated",
        "_remove_separable",
        "_merge",
        "_eliminate",
        "_reduce_rows",
    ),
}


def least_of_core(problem: ShardingProblem, core: Core) -> float:
    """The least cost of the problem over what the core leaves."""
    nodes = core.nodes
    least = math.inf
    for places in itertools.product(*(range(len(core.costs[i])) for i in nodes)):
        choices = core.expand(dict(zip(nodes, places, strict=True)))
        if problem.is_feasible(choices):
            least = min(least, problem.objective_s(choices))
    return least


def cost_in_core(core: Core, x: dict[int, int]) -> float:
    own = sum(core.costs[i][p] for i, p in x.items())
    pairs = sum(m[x[i], x[j]] for i in x for j, m in core.edges[i].items() if i < j)
    return core.constant_s + own + pairs


def fits_in_core(core: Core, x: dict[int, int]) -> bool:
    used = np.zeros(len(core.room_bytes))
    for i, p in x.items():
        for load in core.loads[i]:
            used += load.bytes[p] * load.rows(len(used))
    return bool(np.all(used <= core.room_bytes))


@pytest.mark.parametrize("off", OFF)
def test_optimum_is_kept(off, monkeypatch):
    for method in OFF[off]:
        if method == "_undominated":
            monkeypatch.setattr(Core, method, lambda self, i: np.ones(len(self.costs[i]), bool))
        else:
            monkeypatch.setattr(Core, method, lambda self, *args: False)
    rng = np.random.default_rng(3)
    for k in range(120):
        problem = random_problem(
            rng, int(rng.integers(1, 7)), 7, limited=k % 3 > 0, integers=k % 2 == 0
        )
        least, _ = brute_force(problem)
        core = Core(problem)
        try:
            core.reduce()
        except Infeasible:
            assert least == math.inf
            continue
        assert least_of_core(problem, core) == pytest.approx(least, rel=1e-12)


def test_core_agrees_with_the_problem():
    """Cost and memory of what is left are those of the problem, choice by choice."""
    rng = np.random.default_rng(5)
    seen = 0
    for _ in range(300):
        problem = random_problem(rng, 6, 9, forbidden=0.1)
        core = Core(problem)
        try:
            core.reduce()
        except Infeasible:
            continue
        for places in itertools.islice(
            itertools.product(*(range(len(core.costs[i])) for i in core.nodes)), 30
        ):
            x = dict(zip(core.nodes, places, strict=True))
            cost = cost_in_core(core, x)
            choices = core.expand(x)
            if cost < math.inf:
                assert problem.objective_s(choices) == pytest.approx(cost, rel=1e-12)
                limit = problem.usage_limit_bytes
                assert limit is not None
                assert (problem.peak_bytes(choices) <= limit) == fits_in_core(core, x)
                seen += 1
    assert seen > 200


def chain(lengths: int, forbidden: bool) -> ShardingProblem:
    """Nodes in a row that must agree (or, allowed to differ, pay for it), each with its memory."""
    same = np.where(np.eye(3, dtype=bool), 0.0, np.inf if forbidden else 1.0)
    return ShardingProblem(
        tuple(Node(np.array([3.0, 2.0, 1.0]) * (i == 0)) for i in range(lengths)),
        tuple(Edge(i, i + 1, same) for i in range(lengths - 1)),
        tuple(Usage(i, i, i + 2, np.array([1.0, 2.0, 3.0])) for i in range(lengths)),
        2.0 * 2,
    )


def test_followers_merge_and_hand_over_their_memory():
    core = Core(chain(50, forbidden=True))
    core.reduce()
    # 49 follow the 50th; two live at a time, so strategy 2 with 6 bytes does not fit in 4
    assert core.removed["follower"] == 49
    x = {i: 1 for i in core.nodes}
    assert cost_in_core(core, x) == 2 and fits_in_core(core, x)
    assert core.expand(x) == (1,) * 50
    assert not fits_in_core(core, {i: 2 for i in core.nodes})


def test_long_chains_take_linear_time():
    """A hub that swallows thousands of followers, each with memory, is not moved each time."""
    core = Core(chain(20_000, forbidden=True))
    core.reduce()
    assert core.removed["follower"] == 19_999


def test_degree_two_is_exact_without_memory():
    rng = np.random.default_rng(0)
    count = 40  # a ring with chords to one hub: two nodes are left and then none
    edges = [Edge(i, (i + 1) % count, rng.random((3, 3))) for i in range(count)]
    problem = ShardingProblem(
        tuple(Node(rng.random(3)) for _ in range(count)), tuple(edges), (), None
    )
    core = Core(problem)
    core.reduce()
    assert core.nodes == []
    # The same by dynamic programming around the ring, once for each choice of node 0.
    least = math.inf
    for p in range(3):
        best = np.where(np.arange(3) == p, problem.nodes[0].costs_s, np.inf)
        for i in range(count - 1):
            best = (best[:, None] + edges[i].costs_s).min(axis=0) + problem.nodes[i + 1].costs_s
        least = min(least, float((best + edges[-1].costs_s[:, p]).min()))
    assert problem.objective_s(core.expand({})) == pytest.approx(least, rel=1e-12)
    assert core.constant_s == pytest.approx(least, rel=1e-12)


def test_memory_row_that_cannot_bind_is_dropped():
    problem = chain(5, forbidden=False)
    roomy = ShardingProblem(problem.nodes, problem.edges, problem.usages, 100.0)
    core = Core(roomy)
    core.reduce()
    assert len(core.room_bytes) == 0 and core.nodes == []


def test_impossible_memory_is_found():
    problem = chain(5, forbidden=False)
    tight = ShardingProblem(problem.nodes, problem.edges, problem.usages, 1.0)
    with pytest.raises(Infeasible):
        Core(tight).reduce()


def dense(loads: list[Load], rows: int, strategies: int) -> np.ndarray:
    """The bytes of each strategy in each row."""
    held = np.zeros((strategies, rows))
    for load in loads:
        for first, last in zip(load.first, load.last, strict=True):
            held[:, first:last] += load.bytes[:, None]
    return held


@pytest.mark.parametrize("seed", range(10))
def test_merged_loads_hold_the_same_with_no_span_or_bytes_twice(seed):
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, (3, 4)).astype(float)
    loads = []
    for _ in range(6):
        first = rng.integers(0, 4, 5)
        loads.append(Load(kinds[rng.integers(3)], first, first + rng.integers(1, 3, 5)))
    found = merged(loads)
    assert np.array_equal(dense(found, 6, 4), dense(loads, 6, 4))
    spans = [s for load in found for s in zip(load.first, load.last, strict=True)]
    assert len(spans) == len(set(spans))
    assert len({load.bytes.tobytes() for load in found}) == len(found)
    for load in found:
        assert np.array_equal(load.rows(6) * load.bytes[0], dense([load], 6, 4)[0])
