"""A lower bound of a problem from messages between the classes of a fold.

All edges of one kind (same classes, same costs) carry the same messages, so that a pass costs as
much as one over the folded problem. The bound is then worked out for the whole problem: each node's
costs with its messages are dealt out evenly to its edges, and each edge takes its least (tree
reweighting with edges as trees; Wainwright, Jaakkola and Willsky, "MAP estimation via agreement on
trees", 2005). Memory rows only raise the optimum, so the bound holds with them too.
"""

import collections

import numpy as np

from autoshard.coarsen import Fold, digests
from autoshard.problem import ShardingProblem

PASSES = 10  # up and down; the bound is worked out after every other one


def lifted_bound(problem: ShardingProblem, fold: Fold) -> float:
    """Returns a lower bound in seconds of `problem`'s objective."""
    messages = _Messages(problem, fold)
    bounds = []
    for k in range(PASSES):
        messages.sweep()
        if k % 2:
            bounds.append(messages.bound())
    return max(bounds)


class _Messages:
    """`sent[g][0]` [S_a] and `sent[g][1]` [S_b] are what edges of kind g tell their ends."""

    def __init__(self, problem: ShardingProblem, fold: Fold):
        classes = fold.classes.tolist()
        known = digests(edge.costs_s for edge in problem.edges)
        numbers: dict[tuple[int, int, int], int] = {}
        kinds = [
            numbers.setdefault((classes[e.a], classes[e.b], known[id(e.costs_s)]), len(numbers))
            for e in problem.edges
        ]
        self.matrices: list[np.ndarray] = [np.zeros(0)] * len(numbers)
        ends: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]  # (kind, side) of each node
        for kind, edge in zip(kinds, problem.edges, strict=True):
            self.matrices[kind] = edge.costs_s
            ends[edge.a].append((kind, 0))
            ends[edge.b].append((kind, 1))
        self.sent = [[np.zeros(n) for n in m.shape] for m in self.matrices]
        self.costs = [problem.nodes[i].costs_s for i in fold.members.tolist()]
        self._directions(numbers, kinds, fold)
        views: dict[tuple, int] = {}  # of nodes with the same class and edges
        view = [
            views.setdefault((classes[i], tuple(sorted(near))), len(views))
            for i, near in enumerate(ends)
        ]
        self.views = list(views)
        self.view_counts = collections.Counter(view)
        self.edge_counts = collections.Counter(
            (kind, view[e.a], view[e.b]) for kind, e in zip(kinds, problem.edges, strict=True)
        )

    def _directions(self, numbers, kinds: list[int], fold: Fold) -> None:
        """For each class its kinds of edges to later and to earlier nodes, and how many a node."""
        counts, sizes = np.bincount(kinds, minlength=len(numbers)), np.bincount(fold.classes)
        self.ahead: list[list[tuple[int, float]]] = [[] for _ in sizes]
        self.behind: list[list[tuple[int, float]]] = [[] for _ in sizes]
        for (a, b, _), kind in numbers.items():
            self.ahead[a].append((kind, float(counts[kind] / sizes[a])))
            self.behind[b].append((kind, float(counts[kind] / sizes[b])))

    def sweep(self) -> None:
        for i in range(len(self.costs)):
            self._pass(i, self.ahead[i], 0)
        for i in reversed(range(len(self.costs))):
            self._pass(i, self.behind[i], 1)

    def _pass(self, i: int, kinds: list[tuple[int, float]], side: int) -> None:
        """Sends what class i's members know over the edges of which they are at `side`."""
        belief = self.costs[i].copy()
        for at, near in enumerate((self.ahead[i], self.behind[i])):
            for kind, count in near:
                belief += count * self.sent[kind][at]
        degrees = [sum(count for _, count in near) for near in (self.ahead[i], self.behind[i])]
        belief /= max(1.0, *degrees)
        for kind, _ in kinds:
            costs = self.matrices[kind] if side == 0 else self.matrices[kind].T
            message = ((belief - self.sent[kind][side])[:, None] + costs).min(axis=0)
            self.sent[kind][1 - side] = message - message.min()

    def bound(self) -> float:
        total, shares = 0.0, []
        for k, (i, ends) in enumerate(self.views):
            belief = self.costs[i] + sum((self.sent[kind][side] for kind, side in ends), 0.0)
            if not ends:
                total += self.view_counts[k] * float(belief.min())
            shares.append(belief / max(1, len(ends)))
        for (kind, a, b), count in self.edge_counts.items():
            rows, columns = shares[a] - self.sent[kind][0], shares[b] - self.sent[kind][1]
            total += count * float((self.matrices[kind] + rows[:, None] + columns).min())
        return total
