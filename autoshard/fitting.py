"""Solves until the plan fits.

The problem's memory rows hold what one choice alone decides. Copies that two choices bring about
together (an operand gathered for its reader) are counted after the solve; where they break the
limit, they become usages and the problem is solved again.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard import cost
from autoshard.baselines import Baseline
from autoshard.coarsen import Fold
from autoshard.copies import copy_usages
from autoshard.cost import Choices
from autoshard.errors import InfeasibleError, NoSolutionError
from autoshard.explain import VALUES_SHOWN, bytes_text, seconds_text
from autoshard.lifted import lifted_bound
from autoshard.problem import ShardingProblem, Solution, Status, Usage
from autoshard.solve import Run, smallest_peak
from autoshard.vmem import held_bytes

TIES = 1e-6  # of the objective, for the second one
GAP = 1e-4  # between cost and bound, as integer programs are commonly solved to
AGAIN_GAP = 1e-3  # of the solves after the first, whose bounds prove nothing
ROUGH_GAP = 5e-3  # of the first one where it is folded: it shows what is copied
LOWER = 0.8  # of the least peak found, what the search for less asks for
COUNTS = 6  # solves, each with the copies of those before counted in
TRIES = 4  # solves with a lower limit


def fitted(
    choices: Choices,
    known: Sequence[Baseline],
    time_limit_s: float,
    cutoff_s: float = np.inf,
) -> Solution:
    """Returns the fastest plan found that fits, never slower than the best known one that does.

    `peak_bytes` of the solution counts everything; `bound_s` is proven for the problem's own rows.
    A bound above `cutoff_s` ends the search: such a plan is of no use to the caller.

    Raises:
      InfeasibleError: with the smallest limit that would fit and what fills it.
      NoSolutionError: the time limit struck before anything was found.
    """
    limit = choices.problem.usage_limit_bytes
    fitting = sorted(
        (b for b in known if limit is None or b.peak_bytes <= limit), key=lambda b: b.objective_s
    )
    hints = [b.choices for b in fitting]
    solution = Solution((), np.inf, 0.0, Status.UNKNOWN, np.nan)
    bound_s, struck = 0.0, False
    for model in _models(choices):
        solution, bound_s = _tightened(model, hints, limit, time_limit_s, cutoff_s)
        struck = struck or model.struck
        if solution.choices:
            break
    if fitting and (not solution.choices or fitting[0].objective_s < solution.objective_s):
        solution = _taken(choices, fitting[0].choices, bound_s)
    if solution.choices or not choices.problem.nodes:
        return _told(solution, struck)
    if solution.status is Status.UNKNOWN:
        raise NoSolutionError(
            f"no feasible plan for {choices.problem.name} found in the time limit; the proven "
            f"lower bound so far is {seconds_text(solution.bound_s)}: raise time_limit_s"
        )
    return _told(_smallest(choices, known, bound_s, time_limit_s), struck)


def _told(solution: Solution, struck: bool) -> Solution:
    """Returns a solution that says whether the time limit struck on the way to it."""
    return dataclasses.replace(solution, stats={**solution.stats, "time_limit_struck": struck})


class _Model:
    """A problem of seconds with its second objective, folded or not."""

    def __init__(self, choices: Choices, fold: Fold | None):
        self.choices, self.fold = choices, fold
        self.struck = False  # the time limit, in any solve
        self._run: Run | None = None  # the latest, and what the second objective may cost in it
        self._ties_s = 0.0
        self._lifted_s: float | None = None
        self.problem = choices.problem if fold is None else fold.problem(choices.problem)
        if fold is None:
            self.node_ties: Sequence[np.ndarray] = choices.node_ties
            self.edge_ties: Sequence[np.ndarray] = choices.edge_ties
        else:
            self.node_ties = fold.node_sums(choices.node_ties)
            sums = fold.edge_sums(choices.problem.edges, choices.edge_ties)
            self.edge_ties = [edge.costs_s for edge in sums]

    def lifted_bound_s(self, fold: Fold, objective_s: float) -> float:
        if self._lifted_s is None:
            enough_s = (1 - AGAIN_GAP) * objective_s
            self._lifted_s = lifted_bound(self.choices.problem, fold, enough_s)
        return self._lifted_s

    def solve(
        self,
        limit: float | None,
        hints: Sequence[Sequence[int]],
        time_limit_s: float,
        cutoff_s: float = np.inf,
        copied: Sequence[Usage] = (),
        gap: float = AGAIN_GAP,
        learned: Mapping[str, Any] | None = None,
    ) -> Solution:
        """Solves for seconds, then for the second objective, in one solve.

        The ties weigh TIES of a known objective in all, so they cost the plan at most that much;
        the bound is lowered by it, so that it stays one of the first objective. `learned`: the
        stats of an earlier solution; what it ruled out is not looked at.
        """
        learned = learned or {}
        problem = self.problem
        if self.fold is not None:
            hints = [self.fold.fold(hint) for hint in hints]
        start = hints[0] if hints else [int(np.argmin(n.costs_s)) for n in problem.nodes]
        ties = sum(float(t.max(initial=0)) for t in (*self.node_ties, *self.edge_ties))
        weight_s = TIES * problem.objective_s(start) / max(ties, 1.0)
        if self.fold is not None:
            copied = self.fold.usages(copied)
        tied = dataclasses.replace(
            self._tied(weight_s, learned.get("ruled_out", {})),
            usage_limit_bytes=limit,
            usages=(*problem.usages, *copied),
        )
        fitting = [h for h in hints if limit is None or problem.peak_bytes(h) <= limit]
        self._run = Run(tied, time_limit_s, fitting, told=learned.get("told"))
        self._ties_s = weight_s * ties
        return self.closer(gap, cutoff_s)

    def closer(self, gap: float, cutoff_s: float) -> Solution:
        """Goes on with the latest solve to a smaller gap."""
        if self._run is None:
            raise ValueError(
                "closer() goes on with a solve, and there was none: call solve() first"
            )
        solution = self._run.solve(gap, cutoff_s, prove=gap <= GAP)
        self.struck = self.struck or bool(solution.stats.get("time_limit_struck"))
        if not solution.choices:
            return solution
        objective_s = self.problem.objective_s(solution.choices)
        bound_s = max(min(solution.bound_s - self._ties_s, objective_s), 0.0)
        found = dataclasses.replace(solution, objective_s=objective_s, bound_s=bound_s)
        return found if self.fold is None else self._unfolded(found, self.fold)

    def peak_bytes(self, choices: Sequence[int], usages: tuple[Usage, ...]) -> float:
        """Returns the most bytes in any row of the whole problem with further usages."""
        problem = self.choices.problem
        return dataclasses.replace(problem, usages=problem.usages + usages).peak_bytes(choices)

    def _tied(self, weight_s: float, ruled_out: Mapping[int, Sequence[int]]) -> ShardingProblem:
        """Returns the problem with the second objective, steps and then sharded axes, added.

        Ties between equally fast plans go to fewer collectives, then to simpler specs; at a small
        enough weight nothing else changes.
        """
        costs = [
            node.costs_s + weight_s * ties
            for node, ties in zip(self.problem.nodes, self.node_ties, strict=True)
        ]
        for i, positions in ruled_out.items():
            costs[i][positions] = np.inf
        nodes = (
            dataclasses.replace(node, costs_s=total)
            for node, total in zip(self.problem.nodes, costs, strict=True)
        )
        edges = (
            dataclasses.replace(edge, costs_s=edge.costs_s + weight_s * ties)
            for edge, ties in zip(self.problem.edges, self.edge_ties, strict=True)
        )
        return dataclasses.replace(self.problem, nodes=tuple(nodes), edges=tuple(edges))

    def _unfolded(self, solution: Solution, fold: Fold) -> Solution:
        """The bound of the folded problem is none of the whole: nodes may differ there."""
        bound_s = min(self.lifted_bound_s(fold, solution.objective_s), solution.objective_s)
        proven = solution.objective_s - bound_s <= GAP * solution.objective_s
        return dataclasses.replace(
            solution,
            choices=fold.unfold(solution.choices),
            bound_s=bound_s,
            status=Status.OPTIMAL if proven else Status.FEASIBLE,
        )


def _models(choices: Choices) -> Iterator[_Model]:
    """Yields the folded problem, if it is much smaller, and then the whole one."""
    if choices.fold is not None:
        yield _Model(choices, choices.fold)
    yield _Model(choices, None)


def _tightened(
    model: _Model,
    hints: Sequence[Sequence[int]],
    limit: float | None,
    time_limit_s: float,
    cutoff_s: float = np.inf,
) -> tuple[Solution, float]:
    """Returns the first solution that fits, or one without choices, and the bound.

    While too much is copied, the copies made so far become usages of the problem. Should nothing
    fit with those, the rows' limit goes down instead. A folded problem is solved roughly first: its
    bound is none of the whole, so it need only show what is copied, and what costs more than its
    choices.
    """
    most = None if limit is None else limit + held_bytes(model.choices.topology.chip)
    rough, learned = limit is not None and model.fold is not None, {}
    solution = model.solve(most, hints, time_limit_s, cutoff_s, gap=ROUGH_GAP if rough else GAP)
    bound_s = solution.bound_s if solution.choices else 0.0
    if not solution.choices:
        return solution, bound_s
    first, status = solution, solution.status
    counted: dict[tuple[int, int], Usage] = {}
    for attempt in range(COUNTS):
        size = cost.peak(model.choices, solution.choices)[0]
        if rough:
            learned = solution.stats
        if limit is None or most is None or size <= limit or bound_s > cutoff_s:
            if rough and bound_s <= cutoff_s:
                rough, solution = False, model.closer(GAP, cutoff_s)
                first, status = solution, solution.status
                continue
            found = dataclasses.replace(solution, peak_bytes=size, status=status, bound_s=bound_s)
            return found, bound_s
        if attempt == COUNTS - 1:
            break
        counted |= copy_usages(model.choices, solution.choices)
        usages = tuple(counted.values())
        held = model.peak_bytes(solution.choices, usages) - size  # in vector memory
        tight = min(limit + held, most)
        solution = model.solve(tight, hints, time_limit_s, copied=usages, learned=learned)
        status, rough = Status.FEASIBLE, False
        if not solution.choices:
            break
    return _lowered(model, first, hints, limit or 0.0, time_limit_s, bound_s), bound_s


def _lowered(
    model: _Model,
    solution: Solution,
    hints: Sequence[Sequence[int]],
    limit: float,
    time_limit_s: float,
    bound_s: float,
) -> Solution:
    """Lowers the rows' limit by what a solution is over, then halfway back where nothing is left,
    until one fits."""
    tight, too_tight = limit + held_bytes(model.choices.topology.chip), None
    size = cost.peak(model.choices, solution.choices)[0]
    for _ in range(TRIES):
        if solution.choices:
            loose = min(tight, solution.peak_bytes)
            tight = loose - (size - limit) if too_tight is None else (loose + too_tight) / 2
        else:
            too_tight, tight = tight, (tight + loose) / 2
        solution = model.solve(max(tight, 0.0), hints, time_limit_s)
        if solution.choices:
            size = cost.peak(model.choices, solution.choices)[0]
            if size <= limit:
                return dataclasses.replace(
                    solution, peak_bytes=size, status=Status.FEASIBLE, bound_s=bound_s
                )
    status = solution.status if not solution.choices else Status.INFEASIBLE
    return Solution((), np.inf, solution.bound_s, status, np.nan)


def _taken(choices: Choices, picked: Sequence[int], bound_s: float) -> Solution:
    objective_s = choices.problem.objective_s(picked)
    size = cost.peak(choices, picked)[0]
    return Solution(tuple(picked), objective_s, min(bound_s, objective_s), Status.FEASIBLE, size)


def least_peak(
    choices: Choices, known: Sequence[Baseline], enough_bytes: float, time_limit_s: float
) -> tuple[int, ...]:
    """Returns the choices of the lowest peak found, or the first ones that need no more than
    `enough_bytes`."""
    rows = smallest_peak(dataclasses.replace(choices.problem, usage_limit_bytes=None))
    tried = [b.choices for b in known] + ([rows.choices] if rows.choices else [])
    least = min(tried, key=lambda picked: cost.peak(choices, picked)[0])
    model = _Model(choices, None)
    while True:
        size = cost.peak(choices, least)[0]
        if size <= enough_bytes:
            break
        lower, _ = _tightened(model, (), LOWER * size, time_limit_s)
        if not lower.choices:
            break
        least = lower.choices
    return tuple(least)


def _smallest(
    choices: Choices, known: Sequence[Baseline], bound_s: float, time_limit_s: float
) -> Solution:
    """Returns the plan with the lowest peak found, if that fits.

    Raises:
      InfeasibleError: it does not.
    """
    problem = choices.problem
    limit = problem.usage_limit_bytes or 0.0
    least = least_peak(choices, known, limit, time_limit_s)
    size, live = cost.peak(choices, least)
    if size <= limit:
        return _taken(choices, least, bound_s)
    sources = {op.results[0].name: op.source for op in choices.ops if op.results}
    largest = "; ".join(
        f"{name} {bytes_text(held)}" + (f" ({sources[name]})" if sources.get(name) else "")
        for name, held in live[:VALUES_SHOWN]
    )
    raise InfeasibleError(
        f"no plan for {problem.name} fits {bytes_text(limit)} per device: the smallest limit that "
        f"would is {bytes_text(size)} ({int(np.ceil(size))} bytes). Largest live values at that "
        f"peak: {largest}. Raise memory_limit_bytes, use more devices, shrink the batch, or "
        "rematerialise."
    )
