"""The smallest memory limit that some choice keeps, whatever it costs."""

import dataclasses
import math

import numpy as np

from autoshard.bound import Program
from autoshard.clock import Clock
from autoshard.problem import ShardingProblem, Solution, Status
from autoshard.reduce import Core, Infeasible
from autoshard.search import Flat, improve

PROGRAM_PAIRS = 400_000  # edge pairs up to which the engine is asked for the least peak


def smallest_peak(problem: ShardingProblem, *, time_limit_s: float = 30.0) -> Solution:
    """Returns choices of the least peak usage found, whatever they cost and whatever the limit.

    Row weights by multiplicative updates find a low peak, the integer program the lowest. The bound
    is that of the cost, -inf; `stats["peak_bound_bytes"]` is the bound of the peak.
    """
    clock = Clock(time_limit_s)
    most = math.fsum(u.bytes.max() for u in problem.usages) + 1.0
    bare = _without_costs(problem, most)
    try:
        core = Core(bare, every_row=True, expired=clock.expired)
        core.reduce(clock.expired)
        if clock.expired():
            raise TimeoutError
    except Infeasible:
        return Solution((), math.inf, math.inf, Status.INFEASIBLE, math.nan)
    except TimeoutError:
        stats = {"peak_bound_bytes": 0.0, "time_limit_struck": True}
        return Solution((), math.inf, -math.inf, Status.UNKNOWN, math.nan, stats)
    flat = Flat.of(core)
    best, growth = _level(flat, clock)
    bound, proven = -math.inf, not len(flat.sizes)
    if not proven and len(flat.edge_costs) <= PROGRAM_PAIRS and not clock.expired():
        size = most + growth if math.isfinite(growth) else most
        program = Program(flat, size, max(size, 1.0), minimise_peak=True)
        answer = program.solve(clock.left_s(), 2_000, 1e-6)
        if answer.infeasible:
            return Solution((), math.inf, math.inf, Status.INFEASIBLE, math.nan)
        bound, proven = answer.bound, answer.proven
        if answer.choices is not None and not flat.excess(answer.choices) > growth:
            best = answer.choices
    choices = flat.expand(core, best)
    objective = problem.objective_s(choices)
    peak = problem.peak_bytes(choices)
    stats = {"peak_bound_bytes": peak if proven else max(0.0, most + bound)}
    stats["time_limit_struck"] = clock.expired()
    if objective == math.inf:  # every way out of the forbidden pairs was missed
        return Solution((), math.inf, -math.inf, Status.UNKNOWN, math.nan, stats)
    status = Status.OPTIMAL if proven else Status.FEASIBLE
    return Solution(choices, objective, -math.inf, status, peak, stats)


def _without_costs(problem: ShardingProblem, limit_bytes: float) -> ShardingProblem:
    """The same choices, forbidden pairs and usages, all costs 0."""
    nodes = [dataclasses.replace(n, costs_s=np.zeros(len(n.costs_s))) for n in problem.nodes]
    edges = [
        dataclasses.replace(e, costs_s=np.where(np.isinf(e.costs_s), np.inf, 0.0))
        for e in problem.edges
    ]
    return dataclasses.replace(
        problem, nodes=tuple(nodes), edges=tuple(edges), usage_limit_bytes=limit_bytes
    )


def _level(flat: Flat, clock: Clock) -> tuple[np.ndarray, float]:
    """Returns choices of low peak and by how much they exceed the rooms (negative: stay below)."""
    x = np.zeros(len(flat.sizes), np.int64)
    rng = np.random.default_rng(0)
    best, least = x, math.inf
    weights = np.ones(len(flat.room_bytes))
    for _ in range(40):
        if clock.expired() or not len(x):
            break
        costs = flat.split(flat.priced(weights / max(weights.sum(), 1e-30)))
        x = improve(flat.neighbours, costs, x, np.arange(len(x)), rng.random(len(x)))
        over = flat.used(x) - flat.room_bytes
        peak = float(over.max(initial=-math.inf))
        if math.isfinite(flat.objective(x)) and peak < least:
            best, least = x, peak
        if len(over):
            spread = max(float(np.ptp(over)), 1e-30)
            weights = weights * 0.9 + np.exp(8 * (over - peak) / spread)
    return best, least
