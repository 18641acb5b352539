"""Random sharding problems and their optimum by trying every choice."""

import itertools
import math

import numpy as np

from autoshard.problem import Edge, Node, ShardingProblem, Usage

MIB = 2.0**20


def random_problem(
    rng: np.random.Generator,
    nodes: int,
    edges: int,
    strategies: int = 4,
    limited: bool = True,
    forbidden: float = 0.2,
    integers: bool = False,
) -> ShardingProblem:
    """Self edges, parallel edges, several usages a node, empty live ranges and ties all occur."""
    sizes = rng.integers(1, strategies + 1, nodes)

    def costs(*shape: int) -> np.ndarray:
        if integers:
            return rng.integers(0, 10, shape).astype(np.float64)
        return rng.random(shape) * rng.choice([1e-6, 1e-3])

    made = []
    for _ in range(edges):
        a, b = (int(i) for i in rng.integers(0, nodes, 2))
        pairs = costs(sizes[a], sizes[b])
        pairs[rng.random(pairs.shape) < forbidden] = np.inf
        made.append(Edge(a, b, pairs))
    usages = []
    for _ in range(int(rng.integers(0, 2 * nodes))):
        i, start = int(rng.integers(nodes)), int(rng.integers(0, 10))
        size = rng.integers(0, 8, sizes[i]) * MIB
        usages.append(Usage(i, start, start + int(rng.integers(0, 6)), size, f"usage of {i}"))
    limit = float(rng.integers(nodes, 5 * nodes)) * MIB if limited else None
    return ShardingProblem(
        tuple(Node(costs(k), f"node {i}") for i, k in enumerate(sizes)),
        tuple(made),
        tuple(usages),
        limit,
    )


def brute_force(problem: ShardingProblem) -> tuple[float, float]:
    """Returns the least cost within the limit and the least peak of any allowed choice."""
    least, lowest = math.inf, math.inf
    for choices in itertools.product(*(range(len(n.costs_s)) for n in problem.nodes)):
        cost = sum(n.costs_s[p] for n, p in zip(problem.nodes, choices, strict=True))
        cost += sum(e.costs_s[choices[e.a], choices[e.b]] for e in problem.edges)
        if cost == math.inf:
            continue
        peak = peak_of(problem, choices)
        lowest = min(lowest, peak)
        if problem.usage_limit_bytes is None or peak <= problem.usage_limit_bytes:
            least = min(least, cost)
    return float(least), float(lowest)


def peak_of(problem: ShardingProblem, choices: tuple[int, ...]) -> float:
    times = range(max((u.end for u in problem.usages), default=0))
    return max(
        (
            sum(u.bytes[choices[u.node]] for u in problem.usages if u.start <= t < u.end)
            for t in times
        ),
        default=0.0,
    )
