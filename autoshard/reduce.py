"""Exact reductions: a smaller problem with the same optimum, and the way back.

Every step keeps at least one optimal choice, memory included. `Core.expand` turns choices of what
is left into choices of the whole problem. The steps, by the names that `Core.removed` counts:

  forbidden   a strategy that has no allowed partner over some edge
  dominated   a strategy that another one beats whatever the neighbours choose, in cost and usages
  constant    a node with one strategy left
  separable   an edge whose costs are a sum of one term for each end
  follower    a node with one allowed strategy for each strategy of a neighbour
  degree0..2  a node with at most two neighbours, whose best answer to each of their choices has the
              least usage too; if that varies, it must with one neighbour only, who takes it over
  row         a memory row that cannot be exceeded, or that another row implies
"""

import collections
import copy
import math
from collections.abc import Callable, Iterable

import numpy as np

from autoshard.answer import Answer
from autoshard.loads import Load, merged
from autoshard.problem import ShardingProblem

MAX_TABLE = 4_000_000  # entries of the largest table built while eliminating or comparing
MAX_COMPARED = 300  # strategies of a node up to which they are compared for dominance
BIG = 1e200


class Infeasible(Exception):
    """No choice avoids every forbidden pair or no choice keeps the limit."""


class Core:
    """What is left of a problem. `S_i` is the number of strategies left of node i.

    Attributes:
      costs: [S_i] for each node.
      kept: [S_i] the problem's strategies that are left, ascending.
      edges: `edges[i][j]` is [S_i, S_j]; `edges[j][i]` is its transpose.
      loads: for each node the bytes [S_i] over spans of rows, the least of them being 0.
      room_bytes: [rows] what the limit leaves in each memory row for `loads`.
      row_names: [rows] the memory rows left, ascending.
      constant_s: cost of what is already decided.
      removed: how often each reduction applied.

    Args:
      problem: what to reduce.
      memory: whether its limit counts.
      every_row: keep memory rows that cannot be exceeded, to find out how low the limit can be.
      expired: asked now and then; a TimeoutError follows when true.
    """

    def __init__(
        self,
        problem: ShardingProblem,
        memory: bool = True,
        every_row: bool = False,
        expired: Callable[[], bool] = lambda: False,
    ):
        self.costs = [node.costs_s.copy() for node in problem.nodes]
        self._here = [True] * len(problem.nodes)
        self.kept = [np.arange(len(node.costs_s)) for node in problem.nodes]
        self.edges: list[dict[int, np.ndarray]] = [{} for _ in problem.nodes]
        self.loads: list[list[Load]] = [[] for _ in problem.nodes]
        self.constant_s = 0.0
        self._every_row = every_row
        self.removed: dict[str, int] = {}
        self._undo: list[tuple[int, np.ndarray, tuple[tuple[int, np.ndarray], ...], Answer]] = []
        self._queue = collections.deque(range(len(problem.nodes)))
        self._queued = [True] * len(problem.nodes)
        limit = problem.usage_limit_bytes if memory else None
        first, last = problem.spans.rows()
        rows = int(last.max(initial=0)) if limit is not None else 0
        self.row_names = np.arange(rows)
        self.room_bytes = np.full(rows, 0.0 if limit is None else limit)
        if limit is not None:
            for i, loads in _loads(problem, first, last).items():
                if i % 1000 == 0 and expired():
                    raise TimeoutError
                self._add_loads(i, loads)
        for k, edge in enumerate(problem.edges):
            if k % 1000 == 0 and expired():
                raise TimeoutError
            self._add_edge(edge.a, edge.b, edge.costs_s)

    @property
    def nodes(self) -> list[int]:
        """The nodes left, ascending."""
        return [i for i, here in enumerate(self._here) if here]

    def copy(self) -> "Core":
        """Returns a core that can be changed on its own."""
        other = copy.copy(self)
        other.costs, other.kept, other._here = list(self.costs), list(self.kept), list(self._here)
        other.edges = [dict(near) for near in self.edges]
        other.loads = list(self.loads)
        other.room_bytes, other.removed = self.room_bytes.copy(), dict(self.removed)
        other._undo, other._queue = list(self._undo), self._queue.copy()
        other._queued = list(self._queued)
        return other

    def expand(self, choices: dict[int, int]) -> tuple[int, ...]:
        """Returns choices of the whole problem from indices into what is left of each node left."""
        found = {i: int(self.kept[i][p]) for i, p in choices.items()}
        for i, kept, keys, answer in reversed(self._undo):
            place = tuple(int(np.searchsorted(had, found[j])) for j, had in keys)
            found[i] = int(kept[answer.at(place)])
        return tuple(found[i] for i in range(len(self.costs)))

    def restrict(self, i: int, keep: np.ndarray) -> None:
        """Keeps the strategies of node i where `keep` [S_i] holds."""
        if not keep.any():
            raise Infeasible
        self.costs[i] = self.costs[i][keep]
        self.kept[i] = self.kept[i][keep]
        for j, costs in list(self.edges[i].items()):
            self._set_edge(i, j, costs[keep])
        loads, self.loads[i] = self.loads[i], []
        self._add_loads(i, [load.taking(load.bytes[keep]) for load in loads])
        self._touch(i, *self.edges[i])

    def forbid(self, i: int, j: int, pairs: np.ndarray) -> None:
        """Forbids the pairs [S_i, S_j] of an edge."""
        self._set_edge(i, j, np.where(pairs, np.inf, self.edges[i][j]))
        self._touch(i, j)

    def reduce(self, expired: Callable[[], bool] = lambda: False) -> None:
        """Applies every reduction until none applies or `expired`, which leaves a sound core too.

        Raises:
          Infeasible: there is no choice.
        """
        self._reduce_rows()  # without rows most of the rest is easier
        while self._queue:
            while self._queue:
                if expired():
                    return
                i = self._queue.popleft()
                self._queued[i] = False
                if self._here[i]:
                    self._reduce_node(i)
            self._reduce_rows()

    def _reduce_node(self, i: int) -> None:
        keep = np.isfinite(self.costs[i])
        for costs in self.edges[i].values():
            keep &= np.isfinite(costs).any(axis=1)
        if not keep.all():
            self._count("forbidden", int(np.count_nonzero(~keep)))
            self.restrict(i, keep)
        for j in list(self.edges[i]):
            self._remove_separable(i, j)
        if len(self.costs[i]) == 1:
            return self._remove_constant(i)
        waiting = list(self.edges[i])
        while waiting:
            j = waiting.pop()
            if j in self.edges[i]:
                beyond = list(self.edges[j])
                if self._merge(i, j):
                    return
                if not self._here[j]:
                    waiting += beyond
        if len(self.edges[i]) <= 2 and self._eliminate(i):
            return
        keep = self._undominated(i)
        if not keep.all():
            self._count("dominated", int(np.count_nonzero(~keep)))
            self.restrict(i, keep)

    def _count(self, name: str, times: int = 1) -> None:
        self.removed[name] = self.removed.get(name, 0) + times

    def _touch(self, *nodes: int) -> None:
        for i in nodes:
            if not self._queued[i]:
                self._queued[i] = True
                self._queue.append(i)

    def _set_edge(self, i: int, j: int, costs: np.ndarray) -> None:
        self.edges[i][j] = costs
        self.edges[j][i] = costs.T

    def _add_edge(self, i: int, j: int, costs: np.ndarray) -> None:
        if i == j:
            self.costs[i] = self.costs[i] + np.diagonal(costs)
        else:
            old = self.edges[i].get(j)
            self._set_edge(i, j, costs if old is None else old + costs)

    def _drop_edge(self, i: int, j: int) -> None:
        del self.edges[i][j], self.edges[j][i]

    def _add_loads(self, i: int, loads: Iterable[Load]) -> None:
        """The part that every strategy takes comes off the room at once."""
        added = [self._varying(load) for load in loads]
        found = merged([*self.loads[i], *(load for load in added if load is not None)])
        varying = [self._varying(load) for load in found]
        self.loads[i] = [load for load in varying if load is not None]

    def _varying(self, load: Load) -> Load | None:
        least = load.bytes.min()
        if least:
            self.room_bytes -= least * load.rows(len(self.room_bytes))
            load = load.taking(load.bytes - least)
        return load if load.bytes.any() else None

    def _remove(self, i: int, kept: np.ndarray, keys: tuple[int, ...], answer: Answer) -> None:
        """Takes node i out; its answer to the choices of `keys` is a place in `kept`."""
        for j in list(self.edges[i]):
            self._drop_edge(i, j)
        self._undo.append((i, kept, tuple((j, self.kept[j]) for j in keys), answer))
        self._here[i] = False
        self.loads[i] = []
        self._touch(*keys)

    def _remove_constant(self, i: int) -> None:
        self.constant_s += float(self.costs[i][0])
        for j, costs in self.edges[i].items():
            self.costs[j] = self.costs[j] + costs[0]
            self._touch(j)
        self._remove(i, self.kept[i], (), Answer(self.costs[i], ()))
        self._count("constant")

    def _remove_separable(self, i: int, j: int) -> None:
        costs = self.edges[i][j]
        column, row = costs[:, 0], costs[0]
        if not (np.isfinite(column).all() and np.isfinite(row).all()):
            return
        row = row - row[0]
        if np.array_equal(column[:, None] + row, costs):
            self.costs[i] = self.costs[i] + column
            self.costs[j] = self.costs[j] + row
            self._drop_edge(i, j)
            self._touch(j)
            self._count("separable")

    def _merge(self, i: int, j: int) -> bool:
        """Merges i and j if one follows the other; returns whether i is gone."""
        allowed = np.isfinite(self.edges[i][j])
        i_follows = bool(np.all(np.count_nonzero(allowed, axis=0) == 1))
        j_follows = bool(np.all(np.count_nonzero(allowed, axis=1) == 1))
        if (
            i_follows and j_follows
        ):  # the one with less to move, so that long chains take linear time
            i_follows = self._weight(i) <= self._weight(j)
        if i_follows:
            self._follow(i, j, np.argmax(allowed, axis=0))
        elif j_follows:
            self._follow(j, i, np.argmax(allowed, axis=1))
        return i_follows

    def _weight(self, i: int) -> int:
        return len(self.edges[i]) + _span_count(self.loads[i])

    def _follow(self, i: int, j: int, choice: np.ndarray) -> None:
        """Merges node i into j, where `choice` [S_j] is what each strategy of j allows i."""
        costs = self.edges[i][j]
        self.costs[j] = (
            self.costs[j] + self.costs[i][choice] + costs[choice, np.arange(len(choice))]
        )
        for k, other in list(self.edges[i].items()):
            if k != j:
                self._add_edge(j, k, other[choice])
                self._touch(k)
        self._add_loads(j, [load.taking(load.bytes[choice]) for load in self.loads[i]])
        forced = np.where(choice == np.arange(len(self.costs[i]))[:, None], 0.0, np.inf)
        self._remove(i, self.kept[i], (j,), Answer(np.zeros(len(forced)), (forced,)))
        self._count("follower")

    def _eliminate(self, i: int) -> bool:
        """Answers each choice of at most two neighbours by what is best in cost and in usage."""
        neighbours = tuple(self.edges[i])
        weight = np.zeros(len(self.costs[i]))
        for load in self.loads[i]:
            weight += len(load.first) * load.bytes
        order = np.argsort(weight, kind="stable")  # so that ties go to the least usage
        edges = tuple(self.edges[i][j][order] for j in neighbours)
        answer = Answer(self.costs[i][order], edges)
        if len(order) * math.prod(edge.shape[1] for edge in edges) > MAX_TABLE:
            return False
        best = answer.best()
        taken = self._loads_taken(i, answer, order)
        if taken is None:
            return False
        for axis, load in taken:
            self._add_loads(neighbours[axis], [load])
        if not np.isfinite(best).any():
            raise Infeasible
        if not neighbours:
            self.constant_s += float(best)
        elif len(neighbours) == 1:
            self.costs[neighbours[0]] = self.costs[neighbours[0]] + best
        else:
            self._add_edge(neighbours[0], neighbours[1], best)
        self._remove(i, self.kept[i][order], neighbours, answer)
        self._count(f"degree{len(neighbours)}")
        return True

    def _loads_taken(
        self, i: int, answer: Answer, order: np.ndarray
    ) -> list[tuple[int, Load]] | None:
        """Which neighbour (axis of the answers) takes each load over, with its bytes; None if
        none."""
        taken: list[tuple[int, Load]] = []
        if not self.loads[i]:
            return taken
        table = answer.table(tuple(np.arange(edge.shape[1]) for edge in answer.edges))
        allowed = np.ones(len(order), bool).reshape((-1,) + (1,) * table.ndim)
        for axis, edge in enumerate(answer.edges):
            shape = [len(order)] + [1] * table.ndim
            shape[axis + 1] = edge.shape[1]
            allowed = allowed & np.isfinite(edge).reshape(shape)
        allowed = np.broadcast_to(allowed, (len(order), *table.shape))
        possible = allowed.any(axis=0)
        for load in self.loads[i]:
            size = load.bytes[order]
            chosen = size[table]
            sorted_size = size.reshape((-1,) + (1,) * table.ndim)
            least = np.where(allowed, sorted_size, np.inf).min(axis=0)
            if np.any(chosen[possible] > least[possible]):
                return None
            found = None
            for axis in range(max(table.ndim, 1)):
                others = tuple(a for a in range(table.ndim) if a != axis)
                highest = np.max(np.where(possible, chosen, 0.0), axis=others)
                lowest = np.min(np.where(possible, chosen, np.inf), axis=others)
                if np.all((lowest == highest) | (lowest == np.inf)):
                    found = (axis, highest)
                    break
            if found is None:
                return None
            if table.ndim:
                taken.append((found[0], load.taking(found[1])))
        return taken

    def _undominated(self, i: int) -> np.ndarray:
        """Returns where a strategy [S_i] is not made useless by another one that is kept."""
        costs = np.where(np.isfinite(self.costs[i]), self.costs[i], BIG)
        count = len(costs)
        width = sum(edge.shape[1] for edge in self.edges[i].values())
        if count > MAX_COMPARED or count * count * width > MAX_TABLE:
            return np.ones(count, bool)
        # better[p, q]: q uses no more than p in any span, and may cost no more; narrowed below
        better = ~np.eye(count, dtype=bool)
        for load in self.loads[i]:
            better &= load.bytes <= load.bytes[:, None]
        edges = [
            (np.where(finite, edge, BIG), np.where(finite, edge, 3 * BIG))
            for edge in self.edges[i].values()
            for finite in (np.isfinite(edge),)
        ]
        excess = costs - costs[:, None]
        for high, low in edges:  # a few columns rule out most pairs
            columns = range(0, high.shape[1], max(1, high.shape[1] // 4))
            excess += np.max([high[:, c] - low[:, c, None] for c in columns], axis=0)
        better &= excess <= 0
        p, q = np.nonzero(better)
        if len(p) * max((high.shape[1] for high, _ in edges), default=0) > MAX_TABLE * 4:
            return np.ones(count, bool)
        total = costs[q] - costs[p]
        for high, low in edges:
            total += (high[q] - low[p]).max(axis=1, initial=-math.inf)
        better[p, q] = total <= 0
        keep = np.ones(count, bool)
        for p in reversed(np.flatnonzero(better.any(axis=1)).tolist()):
            keep[p] = not np.any(better[p] & keep)
        return keep

    def _reduce_rows(self) -> None:
        """Drops the rows that cannot be exceeded or that a neighbouring row implies."""
        rows = len(self.room_bytes)
        if not rows:
            return
        if np.any(self.room_bytes < 0):
            raise Infeasible
        held = [(i, load) for i, loads in enumerate(self.loads) for load in loads]
        spans = [len(load.first) for _, load in held]
        first = np.concatenate([np.zeros(0, np.int64), *(load.first for _, load in held)])
        last = np.concatenate([np.zeros(0, np.int64), *(load.last for _, load in held)])
        size = np.repeat([float(load.bytes.max()) for _, load in held], spans)
        most = np.bincount(first, size, rows + 1) - np.bincount(last, size, rows + 1)
        starts, ends = np.bincount(first, minlength=rows), np.bincount(last, minlength=rows)
        # The sum of differences rounds; a row is dropped only when it is well clear.
        peak = np.cumsum(most[:-1])
        alive = np.flatnonzero((peak * (1 + 1e-9) > self.room_bytes) | self._every_row)
        started, ended = np.cumsum(starts), np.cumsum(ends)
        kept: list[int] = []
        for r in alive.tolist():
            while kept:
                k = kept[-1]
                if ended[r] == ended[k] and self.room_bytes[k] >= self.room_bytes[r]:
                    kept.pop()  # everything live at k is live at r
                else:
                    break
            if kept and started[r] == started[kept[-1]]:
                if self.room_bytes[r] >= self.room_bytes[kept[-1]]:
                    continue  # everything live at r was live at k
            kept.append(r)
        if len(kept) == rows:
            return
        self._count("row", rows - len(kept))
        place = np.searchsorted(np.array(kept, np.int64), np.arange(rows + 1))
        self.room_bytes = self.room_bytes[kept]
        self.row_names = self.row_names[kept]
        for i in dict.fromkeys(i for i, _ in held):
            loads, self.loads[i] = self.loads[i], []
            self._add_loads(i, [load.moved(place) for load in loads])
            if _span_count(self.loads[i]) < _span_count(loads):
                self._touch(i)


def _span_count(loads: list[Load]) -> int:
    return sum(len(load.first) for load in loads)


def _loads(problem: ShardingProblem, first: np.ndarray, last: np.ndarray) -> dict[int, list[Load]]:
    """Returns the loads of each node; usage k counts in the memory rows [first[k], last[k])."""
    spans = problem.spans
    contents: dict[bytes, int] = {}
    same = [contents.setdefault(a.tobytes(), len(contents)) for a in spans.bytes.distinct]
    keys = spans.nodes * (len(contents) + 1) + np.array(same, np.int64)[spans.bytes.numbers]
    alike: dict[int, list[int]] = {}
    for k in np.flatnonzero(first < last).tolist():
        alike.setdefault(int(keys[k]), []).append(k)
    found: dict[int, list[Load]] = {}
    for which in alike.values():
        usage = problem.usages[which[0]]
        found.setdefault(usage.node, []).append(Load(usage.bytes, first[which], last[which]))
    return found
