"""The solver against brute force, against the plain integer program, and against the clock."""

import dataclasses
import itertools
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from autoshard.bound import Program
from autoshard.dual import Dual
from autoshard.errors import ProblemError
from autoshard.problem import Edge, Node, ShardingProblem, Status, Usage, read
from autoshard.reduce import Core, Infeasible
from autoshard.search import Flat
from autoshard.solve import smallest_peak, solve
from tests.random_problems import MIB, brute_force, random_problem

DATA = pathlib.Path(__file__).parent / "data"


def small_problems(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    for k in range(count):
        limited, integers = k % 3 > 0, k % 2 == 0
        yield random_problem(
            rng, int(rng.integers(1, 7)), int(rng.integers(0, 9)), 4, limited, integers=integers
        )


def test_equals_brute_force():
    seen = {status: 0 for status in Status}
    for problem in small_problems(300):
        least, _ = brute_force(problem)
        solution = solve(problem)
        seen[solution.status] += 1
        if least == math.inf:
            assert solution.status is Status.INFEASIBLE and solution.choices == ()
            continue
        assert solution.status is Status.OPTIMAL
        assert problem.is_feasible(solution.choices)
        assert solution.objective_s == problem.objective_s(solution.choices)
        assert solution.peak_bytes == problem.peak_bytes(solution.choices)
        assert solution.objective_s == pytest.approx(least, rel=1e-9, abs=1e-18)
        assert solution.bound_s <= solution.objective_s
    assert seen[Status.OPTIMAL] > 100 and seen[Status.INFEASIBLE] > 20


def test_smallest_peak_equals_brute_force():
    for problem in small_problems(120, seed=1):
        _, lowest = brute_force(problem)
        solution = smallest_peak(problem)
        if lowest == math.inf:
            assert solution.status is Status.INFEASIBLE
            continue
        assert solution.peak_bytes == lowest
        assert solution.stats["peak_bound_bytes"] <= lowest
        assert solution.objective_s == problem.objective_s(solution.choices) < math.inf


def larger_problem(seed: int, tight: float) -> ShardingProblem:
    """40 nodes in a band, so that elimination alone does not solve it; costs in microseconds."""
    rng = np.random.default_rng(seed)
    count = 40
    sizes = rng.integers(2, 6, count)
    edges = []
    for i in range(count):
        for j in rng.integers(i + 1, i + 5, 2).tolist():
            if j < count:
                costs = rng.random((sizes[i], sizes[j])) * 1e-6
                costs[rng.random(costs.shape) < 0.1] = np.inf
                edges.append(Edge(i, j, costs))
    usages = [
        Usage(i, i, i + int(rng.integers(2, 12)), rng.integers(1, 40, sizes[i]) * MIB)
        for i in range(count)
    ]
    problem = ShardingProblem(
        tuple(Node(rng.random(k) * 1e-6) for k in sizes), tuple(edges), tuple(usages), None
    )
    least = smallest_peak(problem).peak_bytes
    most = solve(problem).peak_bytes
    return dataclasses.replace(problem, usage_limit_bytes=least + tight * (most - least))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tight", [0.05, 0.4, 1.0])
def test_equals_the_plain_integer_program(seed, tight):
    problem = larger_problem(seed, tight)
    flat = Flat.of(Core(problem))  # nothing reduced
    plain = Program(flat, 1e-5, problem.usage_limit_bytes or 1.0).solve(60.0, None, 1e-9)
    assert plain.proven and plain.choices is not None
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert problem.is_feasible(solution.choices)
    assert solution.objective_s == pytest.approx(flat.objective(plain.choices), rel=1e-6)


def test_messages_bound_and_rule_out_correctly():
    """With any prices the bound stays below the optimum, and no optimal choice is ruled out."""
    rng = np.random.default_rng(2)
    tried = 0
    for _ in range(200):
        problem = random_problem(rng, 6, 14, forbidden=0.1)
        core = Core(problem)
        try:
            core.reduce()
        except Infeasible:
            continue
        flat = Flat.of(core)
        every = [np.array(x, np.int64) for x in itertools.product(*(range(k) for k in flat.sizes))]
        fitting = [x for x in every if flat.excess(x) <= 0]
        least, best = min(((flat.objective(x), tuple(x)) for x in fitting), default=(math.inf, ()))
        if len(flat.sizes) < 2 or least == math.inf:
            continue
        dual = Dual(flat, rng.random(len(flat.room_bytes)) * least / 1e8)
        limit = least + 1e-9 * abs(least)
        for _ in range(4):
            assert dual.sweep() <= limit
        taken = flat.start[:-1] + np.array(best)
        assert np.all(dual.excess_bound + dual.excess[taken] <= limit)
        tried += 1
    assert tried > 30


@pytest.mark.parametrize("name, cost", [("B", 532_843), ("G", 217_039)])
def test_contest_instances_are_proven_optimal(name, cost):
    """The costs are those of the unreduced integer program; the gap is the proof."""
    problem = read(DATA / f"{name}.json.gz")
    solution = solve(problem, time_limit_s=600)
    assert solution.status is Status.OPTIMAL and solution.gap < 1e-3
    assert problem.is_feasible(solution.choices)
    assert solution.objective_s == cost
    assert not solution.stats["time_limit_struck"]


@pytest.mark.parametrize("limit_s", [0.0, 0.1, 0.5, 1.0])
def test_time_limit_is_kept(limit_s):
    problem = read(DATA / "B.json.gz")
    start = time.monotonic()
    solution = solve(problem, time_limit_s=limit_s, deterministic=False)
    assert time.monotonic() - start < limit_s + 2
    assert solution.bound_s <= 532_843
    if solution.choices:
        assert problem.is_feasible(solution.choices)
        assert solution.objective_s >= 532_843
    else:
        assert solution.status is Status.UNKNOWN and solution.objective_s == math.inf
        assert "none found yet" in str(solution)
    if solution.status is not Status.OPTIMAL:
        assert solution.stats["time_limit_struck"]


def test_hints_are_taken():
    problem = larger_problem(0, 0.4)
    best = solve(problem)
    again = solve(problem, time_limit_s=0.0, hints=[best.choices])
    assert again.objective_s == best.objective_s
    assert again.status in (Status.FEASIBLE, Status.OPTIMAL)
    with pytest.raises(ProblemError, match="choices"):
        solve(problem, hints=[(0, 0)])
    over = dataclasses.replace(problem, usage_limit_bytes=best.peak_bytes - 1)
    assert over.is_feasible(solve(over, hints=[best.choices]).choices)


def test_infeasible_by_memory_and_by_forbidden_pairs():
    problem = ShardingProblem(
        (Node(np.zeros(2)), Node(np.zeros(2))),
        (Edge(0, 1, np.array([[np.inf, 0.0], [0.0, np.inf]])),),
        (Usage(0, 0, 2, np.array([1.0, 5.0])), Usage(1, 1, 3, np.array([1.0, 5.0]))),
        6.0,
    )
    assert solve(problem).peak_bytes == 6
    small = dataclasses.replace(problem, usage_limit_bytes=5.0)
    assert solve(small).status is Status.INFEASIBLE
    assert solve(small).bound_s == math.inf
    assert smallest_peak(small).peak_bytes == 6
    odd = dataclasses.replace(problem, edges=(Edge(0, 1, np.full((2, 2), np.inf)),))
    assert solve(odd).status is Status.INFEASIBLE
    assert smallest_peak(odd).status is Status.INFEASIBLE


def test_empty_and_memoryless_problems():
    empty = ShardingProblem((), (), (), None)
    assert solve(empty).status is Status.OPTIMAL and solve(empty).objective_s == 0
    one = ShardingProblem((Node(np.array([3.0, 2.0])),), (), (), 0.0)
    assert solve(one).choices == (1,)
    assert smallest_peak(one).peak_bytes == 0


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_units_do_not_matter(unit):
    problem = larger_problem(1, 0.4)
    scaled = dataclasses.replace(
        problem,
        nodes=tuple(Node(n.costs_s * unit) for n in problem.nodes),
        edges=tuple(Edge(e.a, e.b, e.costs_s * unit) for e in problem.edges),
    )
    want = solve(problem).objective_s * unit
    assert solve(scaled).objective_s == pytest.approx(want, rel=1e-6)


def test_reduce_raises_only_when_infeasible():
    with pytest.raises(Infeasible):
        Core(
            ShardingProblem((Node(np.zeros(1)),), (Edge(0, 0, np.full((1, 1), np.inf)),), (), None)
        ).reduce()


def test_same_answer_in_every_process():
    program = (
        "from tests.test_solve import larger_problem; from autoshard.solve import solve;"
        "print([solve(larger_problem(s, 0.2)).choices for s in range(2)])"
    )
    answers = set()
    for seed in ("0", "1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=pathlib.Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1
