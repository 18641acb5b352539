"""The linear relaxation of a core and the integer program, with the memory rows that matter.

Variables s_ip for each node and strategy, e_pq for each allowed pair of each edge (continuous in
both programs). Rows as stated at the top of `solve.py`; memory rows are added when an answer
exceeds them. Costs are scaled to about `OBJECTIVE`, bytes to the limit, since the engine's
tolerances are absolute.
"""

import dataclasses
import datetime
import math
from collections.abc import Sequence

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autoshard.search import Flat, spread_peaks

OBJECTIVE = 1e4
ROWS_A_ROUND = 30
TOLERANCE = 1e-7  # of the engine, for a row scaled to 1


@dataclasses.dataclass(frozen=True, eq=False)
class Relaxed:
    """The optimum of the relaxation, in the core's unit, without its constant."""

    objective: float
    values: np.ndarray  # [V] in [0, 1]
    node_excess: np.ndarray  # [V] by how much the bound rises if this strategy is taken, at least
    pair_excess: np.ndarray  # like Flat.edge_costs, the same for each pair; inf where forbidden
    prices: np.ndarray  # [R] cost for each byte


@dataclasses.dataclass(frozen=True, eq=False)
class Integer:
    """What the integer program found; bound and choices in the core's unit and numbering."""

    bound: float
    choices: np.ndarray | None  # [N], which may exceed a memory row by the engine's tolerance
    proven: bool
    infeasible: bool = False


class Program:
    """The relaxation and integer program of `flat`.

    Args:
      flat: the core.
      objective: a cost of the right size, to scale by.
      limit_bytes: a usage of the right size, to scale by.
      minimise_peak: instead of the cost minimise by how many bytes the rooms must grow (negative:
        may shrink).
    """

    def __init__(
        self, flat: Flat, objective: float, limit_bytes: float, minimise_peak: bool = False
    ):
        self.flat = flat
        self.minimise_peak = minimise_peak
        self.limit = limit_bytes or 1.0
        self.scale = (
            OBJECTIVE / self.limit if minimise_peak else OBJECTIVE / (abs(objective) or 1.0)
        )
        self.rows: list[int] = []
        self.room_bytes = flat.room_bytes.copy()
        self.pairs = np.flatnonzero(np.isfinite(flat.edge_costs))
        self._link()

    def _link(self) -> None:
        """Rows: one-hot, then for each edge `sum_q e_pq - s_p = 0` and `sum_p e_pq - s_q = 0`."""
        flat = self.flat
        rows, columns = flat.sizes[flat.edge_a], flat.sizes[flat.edge_b]
        edge = np.repeat(np.arange(len(rows)), rows * columns)[self.pairs]
        within = self.pairs - flat.edge_start[edge]
        base = len(flat.sizes) + np.cumsum(rows + columns) - (rows + columns)
        s, e = np.arange(len(flat.costs)), len(flat.costs) + np.arange(len(self.pairs))
        ends_a, at_a = _ranges(rows)
        ends_b, at_b = _ranges(columns)
        node = np.repeat(np.arange(len(flat.sizes)), flat.sizes)
        parts = [
            (node, s, 1.0),
            (base[edge] + within // columns[edge], e, 1.0),
            (base[edge] + rows[edge] + within % columns[edge], e, 1.0),
            (base[ends_a] + at_a, flat.start[flat.edge_a[ends_a]] + at_a, -1.0),
            (base[ends_b] + rows[ends_b] + at_b, flat.start[flat.edge_b[ends_b]] + at_b, -1.0),
        ]
        self.row = np.concatenate([p[0] for p in parts]).astype(np.int64)
        self.column = np.concatenate([p[1] for p in parts]).astype(np.int64)
        self.value = np.concatenate([np.full(len(p[0]), p[2]) for p in parts])
        self.right = np.zeros(len(flat.sizes) + int((rows + columns).sum()))
        self.right[: len(flat.sizes)] = 1.0

    def _model(self, integer: bool) -> mathopt.Model:
        flat = self.flat
        count, links = len(flat.costs) + len(self.pairs), len(self.right)
        row, column, value = [self.row], [self.column], [self.value]
        for k, r in enumerate(self.rows):
            sizes = flat.live(r) / self.limit
            live = np.flatnonzero(sizes)
            row.append(np.full(len(live), links + k))
            column.append(live)
            value.append(sizes[live])
            if self.minimise_peak:
                row.append(np.array([links + k]))
                column.append(np.array([count]))
                value.append(np.array([-1.0]))
        proto = model_pb2.ModelProto()
        least = self.room_bytes.min() if len(self.room_bytes) else 0.0
        peak = int(self.minimise_peak)
        total = count + peak
        proto.variables.ids.extend(range(total))
        proto.variables.lower_bounds.extend([0.0] * count + [-float(least)] * peak)
        proto.variables.upper_bounds.extend([1.0] * count + [math.inf] * peak)
        proto.variables.integers.extend(
            [integer] * len(flat.costs) + [False] * (total - len(flat.costs))
        )
        room = (self.room_bytes[self.rows] / self.limit).tolist()
        rows = proto.linear_constraints
        rows.ids.extend(range(links + len(room)))
        rows.lower_bounds.extend(self.right.tolist() + [-math.inf] * len(room))
        rows.upper_bounds.extend(self.right.tolist() + room)
        every = [np.concatenate(x) for x in (row, column, value)]
        order = np.lexsort((every[1], every[0]))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(every[0][order].tolist())
        matrix.column_ids.extend(every[1][order].tolist())
        matrix.coefficients.extend(every[2][order].tolist())
        costs = np.concatenate([flat.costs, flat.edge_costs[self.pairs]]) * self.scale
        if self.minimise_peak:
            costs = np.append(np.zeros(count), self.limit * self.scale)
        used = np.flatnonzero(costs)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend(costs[used].tolist())
        return mathopt.Model.from_model_proto(proto)

    def add_rows(self, used: np.ndarray) -> bool:
        """Adds memory rows that `used` [R] exceeds most, spread out; returns whether any."""
        excess = (used - self.room_bytes) / self.limit
        if self.minimise_peak:  # the rooms may grow by the same for all rows
            excess -= max((excess[r] for r in self.rows), default=-math.inf)
            if not self.rows and len(excess):
                excess = (np.arange(len(excess)) == np.argmax(used - self.room_bytes)) * 1.0
        excess[self.rows] = 0.0
        added = spread_peaks(excess, TOLERANCE, ROWS_A_ROUND)
        self.rows += added
        return bool(added)

    def relax(self, seconds: float) -> Relaxed | None:
        """Solves the relaxation, rows added as needed; None when the time is up."""
        clock = _Clock(seconds)
        while True:
            result = self._run(self._model(False), clock.left())
            reason = result.termination.reason
            if reason == mathopt.TerminationReason.INFEASIBLE:
                empty = np.zeros(0)
                return Relaxed(math.inf, empty, empty, empty, empty)
            if reason != mathopt.TerminationReason.OPTIMAL:
                return None
            values = np.fromiter(result.variable_values().values(), float)
            s = values[: len(self.flat.costs)]
            if not self.add_rows(self.flat.used_by(s)):
                return self._relaxed(result, s)

    def _relaxed(self, result: mathopt.SolveResult, s: np.ndarray) -> Relaxed:
        reduced = np.fromiter(result.reduced_costs().values(), float) / self.scale
        duals = np.fromiter(result.dual_values().values(), float)[len(self.right) :]
        prices = np.zeros(len(self.room_bytes))
        prices[self.rows] = np.maximum(-duals, 0.0) / self.scale / self.limit
        pair = np.full(len(self.flat.edge_costs), np.inf)
        pair[self.pairs] = np.maximum(reduced[len(s) : len(s) + len(self.pairs)], 0.0)
        node = np.maximum(reduced[: len(s)], 0.0)
        return Relaxed(result.objective_value() / self.scale, s, node, pair, prices)

    def solve(self, seconds: float, nodes: int | None, gap: float) -> Integer:
        """Solves the integer program; `nodes` limits the search tree, `gap` is relative."""
        clock = _Clock(seconds)
        bound = -math.inf
        best: np.ndarray | None = None
        while True:
            result = self._run(self._model(True), clock.left(), nodes, gap)
            reason = result.termination.reason
            if reason == mathopt.TerminationReason.INFEASIBLE:
                return Integer(math.inf, None, True, infeasible=True)
            found = result.termination.objective_bounds.dual_bound / self.scale
            bound = max(bound, found) if math.isfinite(found) else bound
            if not result.has_primal_feasible_solution():
                return Integer(bound, best, False)
            values = np.fromiter(result.variable_values().values(), float)
            s = values[: len(self.flat.costs)]
            x = np.array([int(np.argmax(v)) for v in self.flat.split(s)], np.int64)
            best = x
            proven = reason == mathopt.TerminationReason.OPTIMAL
            if not self.add_rows(self.flat.used(x)) or clock.left() <= 0:
                return Integer(bound, best, proven)

    def _run(
        self,
        model: mathopt.Model,
        seconds: float,
        nodes: int | None = None,
        gap: float | None = None,
    ) -> mathopt.SolveResult:
        limits = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=max(seconds, 0.01)),
            node_limit=nodes,
            relative_gap_tolerance=gap,
            random_seed=1,
        )
        return mathopt.solve(model, mathopt.SolverType.HIGHS, params=limits)


def _ranges(lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each item of consecutive ranges which range it is in and its place there."""
    lengths = np.asarray(lengths, np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class _Clock:
    def __init__(self, seconds: float):
        self.end = datetime.datetime.now() + datetime.timedelta(seconds=min(seconds, 1e6))

    def left(self) -> float:
        return (self.end - datetime.datetime.now()).total_seconds()
