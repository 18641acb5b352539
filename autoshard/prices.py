"""Prices for memory rows, by cutting planes.

For prices y >= 0 the least of cost(x) + y . (used(x) - room) over all choices x bounds the optimum
from below; as a function of y it is concave. Each x seen gives a plane above it. The next y is the
highest point under all planes within a box around the present one (Kelley 1960, with a trust
region).
"""

import math

import numpy as np
from ortools.math_opt.python import mathopt

from autoshard.search import Flat, spread_peaks

PLANES = 80


class Prices:
    """The planes seen so far.

    Attributes:
      values: the present prices, cost for each byte in each row [R].
    """

    def __init__(self, flat: Flat, limit_bytes: float, cost: float, values: np.ndarray):
        self.flat = flat
        self.limit_bytes = limit_bytes
        self.cost = cost  # a cost of the right size, to scale by
        self.values = values.copy()
        self._rows: dict[int, None] = dict.fromkeys(np.flatnonzero(values).tolist())
        self._planes: list[tuple[float, np.ndarray]] = []

    def lagrangian(self, x: np.ndarray) -> float:
        """Returns the cost of x with the present prices, less what the rooms are worth."""
        over = self.flat.used(x) - self.flat.room_bytes
        return self.flat.objective(x) + float(self.values @ over)

    def learn(self, x: np.ndarray) -> None:
        objective = self.flat.objective(x)
        if not math.isfinite(objective):
            return
        over = (self.flat.used(x) - self.flat.room_bytes) / self.limit_bytes
        self._rows.update(dict.fromkeys(spread_peaks(over, 0.0, 10)))
        self._planes = [*self._planes[1 - PLANES :], (objective / self.cost, over)]

    def move(self) -> float:
        """Moves to the highest point under the planes; returns its height."""
        rows = np.array(sorted(self._rows), np.int64)
        if not len(rows) or not self._planes:
            return math.inf
        model = mathopt.Model()
        height = model.add_variable(lb=-1e6, ub=1e6)
        present = self.values[rows] * self.limit_bytes / self.cost
        low = np.where(present < 0.04, 0.0, present / 2)
        high = np.maximum(present * 2, 0.05)
        prices = [
            model.add_variable(lb=a, ub=b) for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ]
        for objective, over in self._planes:
            slope = over[rows].tolist()
            rise = mathopt.fast_sum(g * v for g, v in zip(slope, prices, strict=True))
            model.add_linear_constraint(height <= objective + rise)
        model.maximize(height)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return math.inf
        values = np.array([result.variable_values(v) for v in prices])
        self.values = np.zeros(len(self.values))
        self.values[rows] = np.maximum(values, 0.0) * self.cost / self.limit_bytes
        return result.objective_value() * self.cost
