"""A lower bound of a problem from messages between the classes of a fold.

All edges of one kind (same classes, same costs) carry the same messages, so that a pass costs as
much as one over the folded problem. The bound is then worked out for the whole problem: each node's
costs with its messages are dealt out evenly to its edges, and each edge takes its least (tree
reweighting with edges as trees; Wainwright, Jaakkola and Willsky, "MAP estimation via agreement on
trees", 2005). Memory rows only raise the optimum, so the bound holds with them too.
"""

import numpy as np

from autoshard.coarsen import Fold, digests
from autoshard.packed import numbered
from autoshard.problem import ShardingProblem

PASSES = 40  # up and down, at most
ROUND = 4  # passes after which the bound is worked out
GAIN = 5e-4  # of the bound, by which another round has to raise it to be worth its time
LEVEL_GAIN = 1e-4  # the same of a levelling
LEVELS = 4  # times that the messages are levelled in the end
STEP = 0.7  # of the way


def lifted_bound(problem: ShardingProblem, fold: Fold, enough_s: float = np.inf) -> float:
    """Returns a lower bound in seconds of `problem`'s objective; one of `enough_s` will do."""
    messages = _Messages(problem, fold)
    best = -np.inf
    for k in range(PASSES):
        messages.sweep()
        if k % ROUND == ROUND - 1:
            before, bound = best, messages.bound()
            best = max(best, bound)
            if best >= enough_s or bound < before + GAIN * abs(before):
                break
    for _ in range(LEVELS):
        if best >= enough_s:
            break
        messages.level()
        before, best = best, max(best, messages.bound())
        if best < before + LEVEL_GAIN * abs(before):
            break
    return best


class _Messages:
    """`sent[g][0]` [S_a] and `sent[g][1]` [S_b] are what edges of kind g tell their ends."""

    def __init__(self, problem: ShardingProblem, fold: Fold):
        a, b = problem.ends
        contents, _ = numbered(digests(problem.edge_costs))
        pair = fold.classes[a] * len(fold.members) + fold.classes[b]
        kinds, first = numbered(pair * (contents.max(initial=0) + 1) + contents)
        self.matrices = [problem.edges[k].costs_s for k in first.tolist()]
        self.sent = [[np.zeros(n) for n in m.shape] for m in self.matrices]
        self.costs = [problem.nodes[i].costs_s for i in fold.members.tolist()]
        self._directions(fold.classes[a[first]], fold.classes[b[first]], kinds, fold)
        view, self.views = _views(a, b, kinds, fold)
        self.view_counts = np.bincount(view)
        code, first = numbered((kinds * len(self.views) + view[a]) * len(self.views) + view[b])
        ends = (kinds[first].tolist(), view[a[first]].tolist(), view[b[first]].tolist())
        keys = zip(*ends, strict=True)
        self.edge_counts = list(zip(keys, np.bincount(code).tolist(), strict=True))

    def _directions(self, a: np.ndarray, b: np.ndarray, kinds: np.ndarray, fold: Fold) -> None:
        """For each class its kinds of edges to later and to earlier nodes, and how many a node."""
        counts, sizes = np.bincount(kinds, minlength=len(a)), np.bincount(fold.classes)
        self.ahead: list[list[tuple[int, float]]] = [[] for _ in sizes]
        self.behind: list[list[tuple[int, float]]] = [[] for _ in sizes]
        for kind, (i, j) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            self.ahead[i].append((kind, float(counts[kind] / sizes[i])))
            self.behind[j].append((kind, float(counts[kind] / sizes[j])))

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
        shares, total = self._shares()
        for (kind, a, b), count in self.edge_counts:
            total += count * float(self._reduced(kind, shares[a], shares[b]).min())
        return total

    def level(self) -> None:
        """Moves every node's costs from edges that cost more than its others to those that cost
        less; in many steps, the bound would only rise (min-sum diffusion)."""
        shares, _ = self._shares()
        sums = [[np.zeros(n) for n in m.shape] for m in self.matrices]
        counts = np.zeros(len(self.matrices))
        for (kind, a, b), count in self.edge_counts:
            costs = self._reduced(kind, shares[a], shares[b])
            sums[kind][0] += count * costs.min(axis=1)
            sums[kind][1] += count * costs.min(axis=0)
            counts[kind] += count
        for i in range(len(self.costs)):
            near = [(*end, 0) for end in self.ahead[i]] + [(*end, 1) for end in self.behind[i]]
            least = [sums[kind][side] / counts[kind] for kind, _, side in near]
            weights = [count for _, count, _ in near]
            mean = sum(w * m for w, m in zip(weights, least, strict=True)) / sum(weights, 1e-300)
            for (kind, _, side), own in zip(near, least, strict=True):
                self.sent[kind][side] = self.sent[kind][side] + STEP * (own - mean)

    def _reduced(self, kind: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the costs of an edge of a kind with what its ends' shares put on it."""
        rows, columns = a - self.sent[kind][0], b - self.sent[kind][1]
        return self.matrices[kind] + rows[:, None] + columns

    def _shares(self) -> tuple[list[np.ndarray], float]:
        """Returns what each view's nodes put on each of their edges, and the cost of those without
        any."""
        total, shares = 0.0, []
        for k, (i, ends) in enumerate(self.views):
            belief = self.costs[i] + sum((self.sent[kind][side] for kind, side in ends), 0.0)
            if not ends:
                total += self.view_counts[k] * float(belief.min())
            shares.append(belief / max(1, len(ends)))
        return shares, total


def _views(
    a: np.ndarray, b: np.ndarray, kinds: np.ndarray, fold: Fold
) -> tuple[np.ndarray, list[tuple[int, list[tuple[int, int]]]]]:
    """Returns a number [N] for each node, equal for nodes with the same class and edges, and for
    each number the class and the (kind, side) of each edge."""
    nodes, ends = np.concatenate([a, b]), np.concatenate([2 * kinds, 2 * kinds + 1])
    order = np.lexsort((ends, nodes))
    ends = ends[order]
    stops = np.cumsum(np.bincount(nodes, minlength=len(fold.classes))).tolist()
    views: dict[tuple[int, bytes], int] = {}
    view, found, start = [], [], 0
    for stop, own in zip(stops, fold.classes.tolist(), strict=True):
        near = ends[start:stop]
        key = (own, near.tobytes())
        if key not in views:
            views[key] = len(views)
            found.append((own, [divmod(end, 2) for end in near.tolist()]))
        view.append(views[key])
        start = stop
    return np.array(view, np.int64), found
