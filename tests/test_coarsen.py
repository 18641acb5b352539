"""Folded problems: the same costs as the whole ones, as many classes at any depth, a true bound."""

import dataclasses

import jax
import numpy as np
import pytest

import autoshard
from autoshard import coarsen, fitting
from autoshard.coarsen import fold
from autoshard.lifted import lifted_bound
from autoshard.problem import Edge, Node, ShardingProblem
from autoshard.solve import solve
from models import gpt
from tests.random_problems import brute_force

SIZES = dataclasses.replace(gpt.SIZES["tiny"], layers=4, scan=False)
MESH = {"data": 4, "model": 2}


def stack(seed: int, layers: int, width: int = 3) -> ShardingProblem:
    """`layers` equal blocks of a chain of nodes with a skip edge, between a head and a tail."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 4, width)
    block = [Node(rng.random(n), f"block {i}") for i, n in enumerate(sizes)]
    inner = [rng.random((sizes[i], sizes[i + 1])) for i in range(width - 1)]
    skip, onward = rng.random((sizes[0], sizes[-1])), rng.random((sizes[-1], sizes[0]))
    ends = [Node(rng.random(3), "head"), Node(rng.random(3), "tail")]
    nodes, edges = [ends[0]], [Edge(0, 1, rng.random((3, sizes[0])))]
    for k in range(layers):
        first = len(nodes)
        nodes += block
        edges += [Edge(first + i, first + i + 1, costs) for i, costs in enumerate(inner)]
        edges.append(Edge(first, first + width - 1, skip))
        if k + 1 < layers:
            edges.append(Edge(first + width - 1, first + width, onward))
    edges.append(Edge(len(nodes) - 1, len(nodes), rng.random((sizes[-1], 3))))
    return ShardingProblem((*nodes, ends[1]), tuple(edges), (), None)


@pytest.mark.parametrize("seed", range(5))
def test_any_choice_of_the_folded_problem_costs_the_same_in_the_whole_one(seed):
    problem = stack(seed, 12)
    found = fold(problem, rounds=2)
    assert found is not None
    small = found.problem(problem)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choices = tuple(int(rng.integers(len(n.costs_s))) for n in small.nodes)
        assert small.objective_s(choices) == pytest.approx(
            problem.objective_s(found.unfold(choices))
        )
        assert found.fold(found.unfold(choices)) == choices


def test_classes_do_not_grow_with_depth():
    found = [fold(stack(0, layers), rounds=2) for layers in (12, 24, 48)]
    counts = [len(f.members) for f in found if f is not None]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2] < 24


def test_what_differs_is_not_folded():
    problem = stack(0, 12)
    nodes = [
        dataclasses.replace(n, costs_s=n.costs_s + i) if n.label == "block 1" else n
        for i, n in enumerate(problem.nodes)
    ]
    assert fold(dataclasses.replace(problem, nodes=tuple(nodes)), rounds=2) is None


@pytest.mark.parametrize("seed", range(30))
def test_the_lifted_bound_is_one_of_the_whole_problem(seed):
    problem = stack(seed, 3)
    found = fold(problem, rounds=seed % 2)
    if found is None:
        pytest.fail("the blocks should have been folded")
    least, _ = brute_force(problem)
    bound = lifted_bound(problem, found)
    assert bound <= least + 1e-9
    assert bound > 0.8 * least


def test_the_lifted_bound_is_the_optimum_of_a_long_chain_of_equal_blocks():
    problem = stack(3, 40, width=2)
    exact = solve(problem)
    found = fold(problem)
    assert found is not None
    bound = lifted_bound(problem, found)
    assert 0.98 * exact.objective_s < bound <= exact.objective_s + 1e-9


def planned(sizes, monkeypatch, folded: bool) -> autoshard.Plan:
    monkeypatch.setattr(coarsen, "FOLDED_NODES", 0 if folded else 10**9)
    return autoshard.plan(
        gpt.train_step, *gpt.example_arguments(sizes), mesh=MESH, hardware="v5e", donate_argnums=0
    )


def test_folding_finds_the_plan_of_the_whole_problem(monkeypatch):
    whole = planned(SIZES, monkeypatch, folded=False)
    found = planned(SIZES, monkeypatch, folded=True)
    assert found.objective_s == pytest.approx(whole.objective_s, rel=2 * fitting.GAP)
    assert found.bound_s <= whole.objective_s


def test_layers_far_from_the_ends_get_the_same_specs(monkeypatch):
    deep = dataclasses.replace(SIZES, layers=16)
    plan = planned(deep, monkeypatch, folded=True)
    layers = plan.in_shardings[0].params["layers"]
    specs = [jax.tree.leaves(layers[k], is_leaf=lambda x: x is None) for k in range(16)]
    assert specs[8] and all(s == specs[8] for s in specs[5:11])
