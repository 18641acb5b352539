"""Memory against time: the fastest plan for each of several memory limits."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard import cost
from autoshard.baselines import Baseline
from autoshard.cost import Choices
from autoshard.errors import InfeasibleError
from autoshard.fitting import fitted, least_peak
from autoshard.problem import Solution, Status


def frontier(
    choices: Choices, known: Sequence[Baseline], points: int, time_limit_s: float
) -> list[tuple[float, Solution]]:
    """Returns (limit in bytes, solution) from ample to the least memory found, at most `points`.

    Along the list the limits and peaks fall and the objectives rise; what two limits share appears
    once, under the larger one's name.

    Raises:
      InfeasibleError: nothing fits the limit of the problem itself.
    """
    ample = fitted(choices, known, time_limit_s)
    least = least_peak(choices, known, 0.0, time_limit_s)
    least_bytes = min(cost.peak(choices, least)[0], ample.peak_bytes)
    limits = np.geomspace(ample.peak_bytes, max(least_bytes, 1.0), max(points, 2))[1:-1]
    found = [(ample.peak_bytes, ample)]
    hints = [*known, _as_known(choices, least), _as_known(choices, ample.choices)]
    for limit in (*limits.tolist(), least_bytes):
        limited = dataclasses.replace(choices.problem, usage_limit_bytes=limit)
        try:
            solution = fitted(dataclasses.replace(choices, problem=limited), hints, time_limit_s)
        except InfeasibleError:
            break
        found.append((limit, solution))
        hints.append(_as_known(choices, solution.choices))
    return _monotone(found)


def _as_known(choices: Choices, picked: Sequence[int]) -> Baseline:
    objective_s = choices.problem.objective_s(picked)
    return Baseline("", tuple(picked), objective_s, cost.peak(choices, picked)[0])


def _monotone(found: Sequence[tuple[float, Solution]]) -> list[tuple[float, Solution]]:
    """A plan that fits in less memory and is no slower replaces those for more."""
    kept: list[tuple[float, Solution]] = []
    for limit, solution in reversed(found):
        if kept and kept[-1][1].objective_s <= solution.objective_s:
            best = kept.pop()[1]
            bound_s = min(solution.bound_s, best.objective_s)
            solution = dataclasses.replace(best, bound_s=bound_s, status=Status.FEASIBLE)
        kept.append((limit, solution))
    return kept[::-1]
