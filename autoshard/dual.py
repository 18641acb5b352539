"""A lower bound by passing messages along edges, and strategies that it rules out.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", PAMI 2006): the nodes in order are covered by chains along which the order
rises; each chain's optimum is exact, their sum is a bound, and each message makes the chains agree
more about a node. Memory enters through prices for bytes (see `prices.py`).
"""

import dataclasses

import numpy as np

from autoshard.reduce import Core
from autoshard.search import Flat


@dataclasses.dataclass(frozen=True, eq=False)
class _Edge:
    """One direction of an edge."""

    other: int
    costs: np.ndarray  # [S, S of other]
    sent: int  # number of the message to the other end
    received: int  # number of the message from there


class Dual:
    """Messages over a core, with prices for its memory rows.

    Attributes:
      prices: cost for each byte in each row [R].
      bound: the best bound so far, without the core's constant.
      last_bound: the bound after the last sweep, -inf since the prices changed.
      excess: [V] by how much taking a strategy raises the bound found last, at least.
      excess_bound: the bound to which `excess` adds.
    """

    def __init__(self, flat: Flat, prices: np.ndarray):
        self.flat = flat
        self.prices = prices.copy()
        self.bound = -np.inf
        self.excess = np.zeros(len(flat.costs))
        self.excess_bound = -np.inf
        self.last_bound = -np.inf
        self.messages = [np.zeros(0)] * (2 * len(flat.edge_a))
        self._ahead: list[list[_Edge]] = [[] for _ in flat.sizes]
        self._behind: list[list[_Edge]] = [[] for _ in flat.sizes]
        for k, (a, b) in enumerate(zip(flat.edge_a.tolist(), flat.edge_b.tolist(), strict=True)):
            start = flat.edge_start[k]
            shape = (int(flat.sizes[a]), int(flat.sizes[b]))
            costs = flat.edge_costs[start : start + shape[0] * shape[1]].reshape(shape)
            self.messages[2 * k] = np.zeros(shape[1])
            self.messages[2 * k + 1] = np.zeros(shape[0])
            up = _Edge(b, costs, 2 * k, 2 * k + 1)
            down = _Edge(a, np.ascontiguousarray(costs.T), 2 * k + 1, 2 * k)
            (self._ahead if a < b else self._behind)[a].append(up)
            (self._behind if a < b else self._ahead)[b].append(down)
        self._share = [
            1.0 / max(len(x), len(y), 1) for x, y in zip(self._ahead, self._behind, strict=True)
        ]
        self.reprice(self.prices)

    def reprice(self, prices: np.ndarray) -> None:
        """Changes the prices [R], keeping the messages."""
        self.prices = prices
        self._costs = self.flat.split(self.flat.priced(prices))
        self._paid = float(prices @ self.flat.room_bytes)
        self.last_bound = -np.inf

    def sweep(self) -> float:
        """Passes messages up and down the order; returns the bound for the present prices."""
        count = len(self._costs)
        for i in range(count):
            self._pass(i, self._belief(i), self._ahead[i])
        total = -self._paid
        excess = []
        for i in range(count - 1, -1, -1):
            belief = self._belief(i)
            least = float(belief.min())
            belief = belief - least
            excess.append(belief)
            total += least + self._pass(i, belief, self._behind[i])
        if excess and self.last_bound > -np.inf:  # the bound only rises during a sweep
            self.excess = np.concatenate(excess[::-1])
            self.excess_bound = self.last_bound
        self.last_bound = total
        self.bound = max(self.bound, total)
        return total

    def inherit(self, old: "Dual", old_names: dict, names: dict) -> None:
        """Takes over the messages of edges that are still there.

        Args:
          old: the messages before strategies were removed.
          old_names: for each ordered pair of nodes of the problem the number of the message between
            them and the receiver's strategies.
          names: the same for this.
        """
        for pair, (k, kept) in names.items():
            if pair in old_names:
                j, before = old_names[pair]
                self.messages[k] = old.messages[j][np.searchsorted(before, kept)]

    def names(self, core: Core) -> dict:
        """See `inherit`."""
        found = {}
        node = self.flat.names
        for k, (a, b) in enumerate(zip(self.flat.edge_a, self.flat.edge_b, strict=True)):
            i, j = int(node[a]), int(node[b])
            found[i, j] = (2 * k, core.kept[j])
            found[j, i] = (2 * k + 1, core.kept[i])
        return found

    def decode(self) -> np.ndarray:
        """Returns choices [N], each best given those before it and the messages from behind."""
        x = np.zeros(len(self._costs), np.int64)
        for i, costs in enumerate(self._costs):
            belief = costs
            for edge in self._ahead[i]:
                belief = belief + self.messages[edge.received]
            for edge in self._behind[i]:
                belief = belief + edge.costs[:, x[edge.other]]
            x[i] = int(np.argmin(belief))
        return x

    def _belief(self, i: int) -> np.ndarray:
        belief = self._costs[i]
        for edge in self._ahead[i]:
            belief = belief + self.messages[edge.received]
        for edge in self._behind[i]:
            belief = belief + self.messages[edge.received]
        return belief

    def _pass(self, i: int, belief: np.ndarray, edges: list[_Edge]) -> float:
        """Sends node i's messages over some edges; returns what they add to the bound."""
        total = 0.0
        part = belief * self._share[i]
        for edge in edges:
            rest = part - self.messages[edge.received]
            message = (rest[:, None] + edge.costs).min(axis=0)
            least = float(message.min())
            self.messages[edge.sent] = message - least
            total += least
        return total
