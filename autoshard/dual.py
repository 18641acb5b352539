"""A lower bound by passing messages along edges, and strategies that it rules out.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", PAMI 2006): the nodes in order are covered by chains along which the order
rises; each chain's optimum is exact, their sum is a bound, and each message makes the chains agree
more about a node. Memory enters through prices for bytes (see `prices.py`); for given prices nodes
with at most two neighbours are eliminated first.
"""

import dataclasses
import math

import numpy as np

from autoshard.problem import ShardingProblem
from autoshard.reduce import Core
from autoshard.search import Elimination, Flat

Pair = tuple[int, int]
Told = dict[Pair, tuple[np.ndarray, np.ndarray]]  # for i, j: strategies of j, message to them


@dataclasses.dataclass(frozen=True, eq=False)
class _Edge:
    """One direction of an edge."""

    other: int
    costs: np.ndarray  # [S, S of other]
    sent: Pair  # keys of the messages to the other end and from there
    received: Pair


class Messages:
    """Messages between nodes that have costs on themselves and on pairs.

    Attributes:
      sent: `sent[i, j]` [S_j] is what node i tells node j.
      beliefs: [S_i] for each node i as of the last sweep down, the least of each being 0.
    """

    def __init__(self):
        self.sent: dict[Pair, np.ndarray] = {}
        self.beliefs: dict[int, np.ndarray] = {}
        self._costs: dict[int, np.ndarray] = {}

    def load(self, costs: dict[int, np.ndarray], edges: dict[int, dict[int, np.ndarray]]) -> None:
        """Sets costs [S_i] and `edges[i][j]` [S_i, S_j], keeping messages that have their sizes."""
        self._costs = costs
        self._order = sorted(costs)
        self._ahead: dict[int, list[_Edge]] = {}
        self._behind: dict[int, list[_Edge]] = {}
        for i in self._order:
            near = [_Edge(j, m, (i, j), (j, i)) for j, m in edges[i].items()]
            self._ahead[i] = [e for e in near if e.other > i]
            self._behind[i] = [e for e in near if e.other < i]
            for j, m in edges[i].items():
                old = self.sent.get((i, j))
                if old is None or len(old) != m.shape[1]:
                    self.sent[i, j] = np.zeros(m.shape[1])

    def sweep(self) -> float:
        """Passes messages up and down the order; returns the bound."""
        for i in self._order:
            self._pass(i, self._belief(i), self._ahead[i])
        total = 0.0
        for i in reversed(self._order):
            belief = self._belief(i)
            least = float(belief.min())
            belief = belief - least
            self.beliefs[i] = belief
            total += least + self._pass(i, belief, self._behind[i])
        return total

    def decode(self) -> dict[int, int]:
        """Returns choices, each best given those before it and the messages from behind."""
        x: dict[int, int] = {}
        for i in self._order:
            belief = self._costs[i]
            for edge in self._ahead[i]:
                belief = belief + self.sent[edge.received]
            for edge in self._behind[i]:
                belief = belief + edge.costs[:, x[edge.other]]
            x[i] = int(np.argmin(belief))
        return x

    def _belief(self, i: int) -> np.ndarray:
        belief = self._costs[i]
        for edge in self._ahead[i]:
            belief = belief + self.sent[edge.received]
        for edge in self._behind[i]:
            belief = belief + self.sent[edge.received]
        return belief

    def _pass(self, i: int, belief: np.ndarray, edges: list[_Edge]) -> float:
        """Sends node i's messages over some edges; returns what they add to the bound."""
        total = 0.0
        part = belief / max(len(self._ahead[i]), len(self._behind[i]), 1)
        for edge in edges:
            rest = part - self.sent[edge.received]
            message = (rest[:, None] + edge.costs).min(axis=0)
            least = float(message.min())
            self.sent[edge.sent] = message - least
            total += least
        return total


class Dual:
    """The bound of a core for given prices of its memory rows.

    Attributes:
      prices: cost for each byte in each row [R].
      last_bound: the bound after the last sweep, without the core's constant; -inf since the prices
        changed.
      excess: [V] by how much taking a strategy raises `excess_bound`, at least.
    """

    def __init__(self, flat: Flat, prices: np.ndarray):
        self.flat = flat
        self.excess = np.zeros(len(flat.costs))
        self.excess_bound = -np.inf
        self.messages = Messages()
        self.reprice(prices)

    def reprice(self, prices: np.ndarray) -> None:
        """Changes the prices [R], keeping the messages."""
        flat = self.flat
        self.prices = prices.copy()
        every = np.arange(len(flat.sizes))
        nothing = np.zeros(len(flat.sizes), np.int64)
        costs = flat.split(flat.priced(prices))
        self._elimination = Elimination(flat.neighbours, costs, nothing, every)
        self._elimination.eliminate()
        self._constant = self._elimination.constant - float(prices @ flat.room_bytes)
        self.messages.load(self._elimination.costs, self._elimination.edges)
        self.last_bound = -np.inf

    def sweep(self) -> float:
        """Passes messages up and down; returns the bound for the present prices."""
        bound = self._constant + self.messages.sweep()
        if self.last_bound > -np.inf:  # the bound only rises during a sweep
            self.excess = np.zeros(len(self.flat.costs))
            for i, belief in self.messages.beliefs.items():
                start = self.flat.start[i]
                self.excess[start : start + len(belief)] = belief
            self.excess_bound = self.last_bound
        self.last_bound = bound
        return bound

    def decode(self) -> np.ndarray:
        """Returns choices [N] read off the messages."""
        return self._elimination.complete(self.messages.decode())

    def promising(self, count: int) -> list[np.ndarray]:
        """Returns the strategies of each node [N] that the messages like best, about `count`."""
        best = {
            i: np.sort(np.argpartition(belief, count)[:count])
            if len(belief) > count
            else np.arange(len(belief))
            for i, belief in self.messages.beliefs.items()
            if i in self._elimination.costs
        }
        found = self._elimination.answers(best)
        return [found[i] for i in range(len(self.flat.sizes))]

    def told(self) -> Told:
        """Returns the messages by the nodes and strategies of the problem."""
        names, kept = self.flat.names.tolist(), self.flat.kept
        sent = self.messages.sent.items()
        return {(names[a], names[b]): (kept[b], message) for (a, b), message in sent}

    def inherit(self, told: Told, core: Core) -> None:
        """Takes over messages of the same nodes, of which other strategies may have been left.

        Any message is sound; a strategy that has none gets the worst.
        """
        place = {int(i): n for n, i in enumerate(self.flat.names)}
        for (i, j), (had, message) in told.items():
            pair = (place.get(i, -1), place.get(j, -1))
            if pair in self.messages.sent:
                at = np.minimum(np.searchsorted(had, core.kept[j]), len(had) - 1)
                known = had[at] == core.kept[j]
                self.messages.sent[pair] = np.where(known, message[at], message.max())


def trivial_bound(problem: ShardingProblem) -> float:
    """Returns what the cheapest strategies and pairs cost, each by itself."""
    least = [node.costs_s.min() for node in problem.nodes]
    return math.fsum(least + [edge.costs_s.min() for edge in problem.edges])
