"""ShardingProblem -> Solution."""

import math
from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from autoshard.problem import ShardingProblem, Solution, Status, live_rows

OBJECTIVE_RANGE = 2.0**46


def solve(
    problem: ShardingProblem,
    *,
    time_limit_s: float = 60.0,
    hints: Sequence[Sequence[int]] = (),
    deterministic: bool = True,
) -> Solution:
    return _solve_model(problem, time_limit_s, hints, minimise_peak=False)


def smallest_peak(problem: ShardingProblem, *, time_limit_s: float = 30.0) -> Solution:
    return _solve_model(problem, time_limit_s, (), minimise_peak=True)


def _solve_model(problem, time_limit_s, hints, minimise_peak) -> Solution:
    model = cp_model.CpModel()
    s = [[model.new_bool_var("") for _ in node.costs_s] for node in problem.nodes]
    for row in s:
        model.add_exactly_one(row)
    costs, variables = [], []
    for node, row in zip(problem.nodes, s, strict=True):
        costs += node.costs_s.tolist()
        variables += row
    for edge in problem.edges:
        if edge.a == edge.b:
            for p, c in enumerate(np.diag(edge.costs_s).tolist()):
                if c == math.inf:
                    model.add(s[edge.a][p] == 0)
                else:
                    costs.append(c)
                    variables.append(s[edge.a][p])
            continue
        e = {}
        for (p, q), c in np.ndenumerate(edge.costs_s):
            if c < math.inf:
                e[p, q] = model.new_bool_var("")
                costs.append(float(c))
                variables.append(e[p, q])
        for p in range(edge.costs_s.shape[0]):
            model.add(sum(v for (i, _), v in e.items() if i == p) == s[edge.a][p])
        for q in range(edge.costs_s.shape[1]):
            model.add(sum(v for (_, j), v in e.items() if j == q) == s[edge.b][q])
    first, last = live_rows(problem.usages)
    limit = problem.usage_limit_bytes
    peak = model.new_int_var(0, 2**60, "")
    for r in range(int(last.max(initial=0))):
        terms = [
            int(math.ceil(b)) * v
            for u, f, n in zip(problem.usages, first, last, strict=True)
            if f <= r < n
            for b, v in zip(u.bytes.tolist(), s[u.node], strict=True)
            if b > 0
        ]
        if minimise_peak:
            model.add(sum(terms) <= peak)
        elif limit is not None:
            model.add(sum(terms) <= int(limit))
    scale = 1.0
    if minimise_peak:
        model.minimize(peak)
    else:
        largest = max((abs(c) for c in costs), default=1.0) or 1.0
        count = len(problem.nodes) + len(problem.edges)
        scale = OBJECTIVE_RANGE / largest / max(count, 1) ** 0.5
        model.minimize(sum(math.floor(c * scale) * v for c, v in zip(costs, variables, strict=True)))
    for hint in hints[:1]:
        for row, p in zip(s, hint, strict=True):
            for q, v in enumerate(row):
                model.add_hint(v, q == p)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 2
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Solution((), math.inf, math.inf, Status.INFEASIBLE, math.nan)
    bound = -math.inf if minimise_peak else solver.best_objective_bound / scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution((), math.inf, bound, Status.UNKNOWN, math.nan)
    choices = tuple(next(p for p, v in enumerate(row) if solver.boolean_value(v)) for row in s)
    objective = problem.objective_s(choices)
    found = Status.OPTIMAL if status == cp_model.OPTIMAL else Status.FEASIBLE
    return Solution(choices, objective, min(bound, objective), found, problem.peak_bytes(choices))
