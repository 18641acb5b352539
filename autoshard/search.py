"""Local search on a core: all but a few nodes change at once, exactly, the rest being fixed.

Memory enters through a price for each byte in each memory row: for fixed prices the problem has
only node and edge costs, and nodes with at most two free neighbours can be eliminated exactly, one
after another. When none is left, one is fixed at its present choice. What was eliminated then takes
its best choice given the fixed ones.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autoshard.answer import Answer
from autoshard.reduce import MAX_TABLE, Core

Neighbours = list[list[tuple[int, np.ndarray]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A core as flat arrays. Nodes are renumbered 0..N-1; `V` counts all (node, strategy)."""

    names: np.ndarray  # [N] the core's node
    kept: list[np.ndarray]  # [N] the strategies left of the problem's
    sizes: np.ndarray  # [N] strategies
    start: np.ndarray  # [N+1] the node's first of V
    costs: np.ndarray  # [V]
    neighbours: Neighbours  # for each node (other node, costs [S, S of other]), a penalty for inf
    edge_a: np.ndarray  # [E]
    edge_b: np.ndarray  # [E]
    edge_start: np.ndarray  # [E] into edge_costs
    edge_costs: np.ndarray  # all edges' costs, row by row
    load_node: np.ndarray  # [L]
    load_start: np.ndarray  # [L] into load_bytes
    load_bytes: np.ndarray  # [W]
    load_var: np.ndarray  # [W] into V
    load_of: np.ndarray  # [W] into L
    first: np.ndarray  # [U] memory rows [first, last) of each span of a load
    last: np.ndarray  # [U]
    span_of: np.ndarray  # [U] into L
    room_bytes: np.ndarray  # [R]

    @classmethod
    def of(cls, core: Core) -> "Flat":
        names = core.nodes
        place = {i: n for n, i in enumerate(names)}
        sizes = np.array([len(core.costs[i]) for i in names], np.int64)
        start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        pairs = [(place[i], place[j], m) for i in names for j, m in core.edges[i].items() if i < j]
        neighbours = _with_penalty(pairs, [core.costs[i] for i in names])
        loads = [(place[i], load) for i in names for load in core.loads[i]]
        lengths = np.array([len(load.bytes) for _, load in loads], np.int64)
        load_node = np.array([n for n, _ in loads], np.int64)
        offset = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(offset, lengths)
        counts = [len(load.first) for _, load in loads]
        return cls(
            names=np.array(names, np.int64),
            kept=[core.kept[i] for i in names],
            sizes=sizes,
            start=start,
            costs=_concatenate([core.costs[i] for i in names]),
            neighbours=neighbours,
            edge_a=np.array([a for a, _, _ in pairs], np.int64),
            edge_b=np.array([b for _, b, _ in pairs], np.int64),
            edge_start=np.concatenate([[0], np.cumsum([m.size for _, _, m in pairs])[:-1]]).astype(
                np.int64
            )[: len(pairs)],
            edge_costs=_concatenate([m.ravel() for _, _, m in pairs]),
            load_node=load_node,
            load_start=offset,
            load_bytes=_concatenate([load.bytes for _, load in loads]),
            load_var=np.repeat(start[load_node], lengths) + within,
            load_of=np.repeat(np.arange(len(loads)), lengths),
            first=_concatenate([load.first for _, load in loads]).astype(np.int64),
            last=_concatenate([load.last for _, load in loads]).astype(np.int64),
            span_of=np.repeat(np.arange(len(loads)), counts),
            room_bytes=core.room_bytes,
        )

    def objective(self, x: np.ndarray) -> float:
        """Returns the cost of choices x [N] without the core's constant."""
        place = self.edge_start + x[self.edge_a] * self.sizes[self.edge_b] + x[self.edge_b]
        return float(self.costs[self.start[:-1] + x].sum() + self.edge_costs[place].sum())

    def used(self, x: np.ndarray) -> np.ndarray:
        """Returns the bytes [R] of choices x."""
        return self._filled(self.load_bytes[self.load_start + x[self.load_node]])

    def used_by(self, values: np.ndarray) -> np.ndarray:
        """Returns the bytes [R] of fractional choices, values [V]."""
        weighed = self.load_bytes * values[self.load_var]
        return self._filled(np.bincount(self.load_of, weighed, len(self.load_node)))

    def _filled(self, taken: np.ndarray) -> np.ndarray:
        """Returns the bytes [R] of loads of which each takes so much [L]."""
        taken, rows = taken[self.span_of], len(self.room_bytes)
        change = np.bincount(self.first, taken, rows + 1) - np.bincount(self.last, taken, rows + 1)
        return np.cumsum(change[:rows])

    def live(self, r: int) -> np.ndarray:
        """Returns the bytes [V] that each strategy takes in memory row r."""
        spans = self.span_of[(self.first <= r) & (self.last > r)]
        times = np.bincount(spans, minlength=len(self.load_node))[self.load_of]
        return np.bincount(self.load_var, self.load_bytes * times, len(self.costs))

    def excess(self, x: np.ndarray) -> float:
        """Returns by how many bytes choices x exceed the room, at most 0 if they fit."""
        return float((self.used(x) - self.room_bytes).max(initial=-np.inf))

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Returns the node costs [V] with `prices` [R] per byte added."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        spans = total[self.last] - total[self.first]
        price = np.bincount(self.span_of, spans, len(self.load_node))
        return self.costs + np.bincount(
            self.load_var, self.load_bytes * price[self.load_of], len(self.costs)
        )

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns the parts of `values` [V] of each node."""
        bounds = self.start.tolist()
        return [values[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]

    def restart(self, core: Core, choices: Sequence[int]) -> np.ndarray:
        """Returns x [N] as near to choices of the whole problem as what is left allows."""
        x = np.zeros(len(self.names), np.int64)
        for n, i in enumerate(self.names.tolist()):
            kept = core.kept[i]
            p = int(np.searchsorted(kept, choices[i]))
            if p == len(kept) or kept[p] != choices[i]:
                p = int(np.argmin(core.costs[i]))
            x[n] = p
        return x

    def expand(self, core: Core, x: np.ndarray) -> tuple[int, ...]:
        return core.expand(dict(zip(self.names.tolist(), x.tolist(), strict=True)))


def _with_penalty(pairs: list[tuple[int, int, np.ndarray]], costs: list[np.ndarray]) -> Neighbours:
    """A finite penalty, above all other differences, lets a search pass through forbidden pairs."""
    finite = [m if np.isfinite(m).all() else np.where(np.isfinite(m), m, 0.0) for _, _, m in pairs]
    penalty = 2.0 * (
        sum(float(np.abs(m).max()) for m in finite) + sum(float(np.ptp(c)) for c in costs)
    )
    neighbours: Neighbours = [[] for _ in costs]
    for (a, b, m), low in zip(pairs, finite, strict=True):
        if low is not m:
            low = np.where(np.isfinite(m), m, penalty + 1e-30)
        neighbours[a].append((b, low))
        neighbours[b].append((a, low.T))
    return neighbours


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def improve(
    neighbours: Neighbours,
    costs: list[np.ndarray],
    x: np.ndarray,
    free: np.ndarray,
    rank: np.ndarray,
) -> np.ndarray:
    """Returns the best choices among those that agree with x [N] outside a subset of `free`.

    Args:
      neighbours: of each node, with the costs of their edges.
      costs: node costs [S] of each node, prices included.
      x: choices [N].
      free: nodes that may change.
      rank: [N]; where elimination is stuck the node of highest rank keeps its choice.
    """
    return Elimination(neighbours, costs, x, free).run(rank)


class Elimination:
    """Nodes taken out one by one, each answering its neighbours by its best strategy.

    Attributes:
      costs: [S_i] of each node i left.
      edges: `edges[i][j]` [S_i, S_j] of the nodes left.
      constant: cost of what is decided whatever the nodes left choose.
    """

    def __init__(
        self, neighbours: Neighbours, costs: list[np.ndarray], x: np.ndarray, free: np.ndarray
    ):
        self.x = x.copy()
        self.constant = 0.0
        is_free = np.zeros(len(x), bool)
        is_free[free] = True
        inside = is_free.tolist()
        choice = x.tolist()
        self.costs: dict[int, np.ndarray] = {}
        self.edges: dict[int, dict[int, np.ndarray]] = {}
        for i in free.tolist():
            cost, near = costs[i], {}
            for j, m in neighbours[i]:
                if inside[j]:
                    near[j] = m
                else:
                    cost = cost + m[:, choice[j]]
            self.costs[i] = cost
            self.edges[i] = near
        self._stack: list[tuple[int, tuple[int, ...], Answer]] = []
        self._queue = [i for i, near in self.edges.items() if len(near) <= 2]

    def run(self, rank: np.ndarray) -> np.ndarray:
        """Eliminates all nodes, fixing the one left of highest rank [N] whenever stuck."""
        waiting = sorted((i for i in self.edges if len(self.edges[i]) > 2), key=lambda i: rank[i])
        while True:
            self.eliminate()
            while waiting and waiting[-1] not in self.edges:
                waiting.pop()
            if not waiting:
                break
            self._fix(waiting.pop())
        for i in list(self.edges):
            self._fix(i)
        return self.complete({})

    def eliminate(self) -> None:
        """Takes out nodes with at most two neighbours until none is left."""
        while self._queue:
            i = self._queue.pop()
            if i in self.edges and len(self.edges[i]) <= 2:
                self._eliminate(i)

    def answers(self, left: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Returns the strategies that each node may take, ascending, if those left take `left`."""
        found = dict(left)
        for i, keys, answer in reversed(self._stack):
            found[i] = np.unique(answer.table(tuple(found[j] for j in keys)))
        return found

    def complete(self, left: dict[int, int]) -> np.ndarray:
        """Returns choices [N] from those of the nodes left."""
        x = self.x.tolist()
        for i, p in left.items():
            x[i] = p
        for i, keys, answer in reversed(self._stack):
            x[i] = answer.at(tuple(x[j] for j in keys))
        return np.array(x, np.int64)

    def _fix(self, i: int) -> None:
        p = self.x[i]
        self.constant += float(self.costs.pop(i)[p])
        for j, m in self.edges.pop(i).items():
            self.costs[j] = self.costs[j] + m[p]
            near = self.edges[j]
            del near[i]
            if len(near) <= 2:
                self._queue.append(j)

    def _eliminate(self, i: int) -> None:
        near = self.edges[i]
        keys = tuple(near)
        answer = Answer(self.costs[i], tuple(near.values()))
        if answer.costs.size * math.prod(m.shape[1] for m in answer.edges) > MAX_TABLE:
            return
        best = answer.best()
        if not keys:
            self.constant += float(best)
        elif len(keys) == 1:
            self.costs[keys[0]] = self.costs[keys[0]] + best
        else:
            self._connect(keys[0], keys[1], best)
        self._stack.append((i, keys, answer))
        del self.edges[i], self.costs[i]
        for j in keys:
            del self.edges[j][i]
            if len(self.edges[j]) <= 2:
                self._queue.append(j)

    def _connect(self, j: int, k: int, costs: np.ndarray) -> None:
        old = self.edges[j].get(k)
        if old is not None:
            costs = old + costs
        self.edges[j][k] = costs
        self.edges[k][j] = costs.T


class Narrow:
    """Some strategies of each node, ascending: elimination takes the cube of their number."""

    def __init__(self, flat: Flat, kept: list[np.ndarray]):
        self.flat, self.kept = flat, kept
        self._place = np.full(len(flat.costs), -1)
        self._neighbours: Neighbours = [[] for _ in kept]
        self._set(range(len(kept)))

    def _set(self, nodes: Iterable[int]) -> None:
        """Reads off what has changed with the strategies kept of some nodes."""
        stale = dict.fromkeys(nodes)
        for i in list(stale):
            start = self.flat.start[i]
            self._place[start + self.kept[i]] = np.arange(len(self.kept[i]))
            stale |= dict.fromkeys(j for j, _ in self.flat.neighbours[i])
        cut: dict[tuple[int, int], np.ndarray] = {}
        for i in stale:
            self._neighbours[i] = []
            for j, m in self.flat.neighbours[i]:
                part = cut.get((j, i))
                part = m[self.kept[i][:, None], self.kept[j]] if part is None else part.T
                cut[i, j] = part
                self._neighbours[i].append((j, part))

    def improve(
        self, costs: list[np.ndarray], x: np.ndarray, free: np.ndarray, rank: np.ndarray
    ) -> np.ndarray:
        start = self.flat.start[:-1]
        new = np.flatnonzero(self._place[start + x] < 0).tolist()
        for i in new:
            self.kept[i] = np.union1d(self.kept[i], x[i : i + 1])
        if new:
            self._set(new)
        costs = [c[k] for c, k in zip(costs, self.kept, strict=True)]
        found = improve(self._neighbours, costs, self._place[start + x], free, rank)
        return np.array([k[p] for k, p in zip(self.kept, found.tolist(), strict=True)], np.int64)


@dataclasses.dataclass
class Search:
    """The best choices so far and the prices that led to them.

    Attributes:
      x: choices [N] to go on from; may exceed the memory.
      prices: cost for each byte of each memory row [R].
      best: the cheapest choices that fit, or None.
    """

    flat: Flat
    x: np.ndarray
    prices: np.ndarray
    rng: np.random.Generator
    limit_bytes: float
    expired: Callable[[], bool]
    best: np.ndarray | None = None
    best_objective: float = np.inf
    _narrow: Narrow | None = None

    def narrow(self, kept: list[np.ndarray]) -> None:
        """From now on looks at these strategies of each node only, and at those it comes from."""
        self._narrow = Narrow(self.flat, kept)

    def improve(
        self, costs: list[np.ndarray], x: np.ndarray, free: np.ndarray, rank: np.ndarray
    ) -> np.ndarray:
        if self._narrow is None:
            return improve(self.flat.neighbours, costs, x, free, rank)
        return self._narrow.improve(costs, x, free, rank)

    def offer(self, x: np.ndarray) -> bool:
        """Takes x if it fits and costs less than the best."""
        objective = self.flat.objective(x)
        if objective >= self.best_objective or self.flat.excess(x) > 0:
            return False
        self.best, self.best_objective = x.copy(), objective
        return True

    def fit(self, sweeps: int) -> None:
        """Moves all nodes; prices rise where the memory is exceeded and fall while it is not."""
        flat = self.flat
        every = np.arange(len(self.x))
        scale = self._byte_price()
        step, feasible = 0.05, 0
        self.offer(self.x)
        for k in range(sweeps):
            if self.expired():
                return
            costs = flat.split(flat.priced(self.prices))
            self.x = self.improve(costs, self.x, every, self.rank(k))
            if not len(flat.room_bytes):
                self.offer(self.x)
                continue
            over = (flat.used(self.x) - flat.room_bytes) / self.limit_bytes
            if over.max() <= 0:
                self.offer(self.x)
                feasible += 1
                step *= 0.7
                self.prices = self.prices * 0.9
            else:
                rows = spread_peaks(over, 0.0, 10)
                self.prices[rows] += step * scale * np.minimum(over[rows] + 0.01, 1.0)
                step *= 1.1

    def polish(self, rounds: int) -> int:
        """Improves the best choices region by region, within the limit; returns how often."""
        if self.best is None:
            return 0
        flat, gains = self.flat, 0
        for k in range(rounds):
            if self.expired():
                break
            size = int(len(self.x) * self.rng.choice([0.02, 0.1, 0.3, 1.0])) + 30
            region = self._region(min(size, len(self.x)))
            factor = self.rng.choice([0.0, 0.7, 1.0, 1.0, 1.5])
            costs = flat.split(flat.priced(self.prices * factor))
            gains += self.offer(self.improve(costs, self.best, region, self.rank(k)))
        return gains

    def _byte_price(self) -> float:
        """A price at which the whole limit costs about as much as the choices do."""
        value = self.flat.objective(self.x)
        if not np.isfinite(value):
            value = float(np.abs(self.flat.costs).max(initial=0.0)) * len(self.x)
        return max(abs(value), 1e-30) / self.limit_bytes

    def rank(self, k: int) -> np.ndarray:
        rank = self.rng.random(len(self.x))
        return rank * np.array([len(near) for near in self.flat.neighbours]) if k % 2 else rank

    def _region(self, size: int) -> np.ndarray:
        """Returns `size` nodes, breadth first from a random one."""
        count = len(self.x)
        if size >= count:
            return np.arange(count)
        seen = np.zeros(count, bool)
        found: list[int] = []
        while len(found) < size:
            start = int(self.rng.integers(count))
            if seen[start]:
                start = int(np.flatnonzero(~seen)[0])
            seen[start] = True
            ring = [start]
            while ring and len(found) < size:
                found += ring
                near = [j for i in ring for j, _ in self.flat.neighbours[i]]
                ring = [j for j in dict.fromkeys(near) if not seen[j]]
                seen[ring] = True
        return np.array(sorted(found[:size]), np.int64)


def spread_peaks(excess: np.ndarray, threshold: float, count: int) -> list[int]:
    """Returns at most `count` places, apart, with `excess` above the threshold, highest first."""
    left = excess.copy()
    below = np.flatnonzero(excess <= threshold)
    found: list[int] = []
    while len(found) < count and left.max(initial=-np.inf) > threshold:
        k = int(left.argmax())
        found.append(k)
        at = int(np.searchsorted(below, k))
        low = int(below[at - 1]) if at else -1
        high = int(below[at]) if at < len(below) else len(excess)
        width = max(1, (high - low) // 8)
        left[max(low + 1, k - width) : min(high, k + width + 1)] = -np.inf
    return found
