"""Graph + strategies + topology -> ShardingProblem: adds up, has no formula of its own."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard import roofline
from autoshard.coarsen import Fold, folded
from autoshard.copying import Copying
from autoshard.fusion import MATMULS
from autoshard.graph import Graph, Kind, Op, Value
from autoshard.held import Held
from autoshard.liveness import Liveness, LiveRange, liveness
from autoshard.moves import copied, narrowed
from autoshard.overlap import HIDING, NOTHING, Granted, granted, hidden_s
from autoshard.problem import Edge, Node, ShardingProblem, Usage
from autoshard.reads import Reads
from autoshard.reductions import asynchronous_s, differ, reduction_trips, reductions
from autoshard.resharding import ReshardTable, table
from autoshard.sharding import Sharding
from autoshard.sizes import Sizes
from autoshard.strategies import Strategy
from autoshard.topology import Topology
from autoshard.vmem import Buffer, fullest


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """The decisions of a program: one node per operation, in execution order, with its
    strategies."""

    ops: tuple[Op, ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    producer: Mapping[Value, tuple[int, int]]  # (node, result number)
    live: Liveness
    topology: Topology
    problem: ShardingProblem
    node_ties: tuple[np.ndarray, ...]  # [S] of each node, the second objective
    edge_ties: tuple[np.ndarray, ...]  # [S of a, S of b] of each edge
    donated: tuple[bool, ...]  # of each INPUT, in order
    reads: Reads = dataclasses.field(default_factory=Reads)
    granted: Granted = NOTHING  # what collectives hide behind compute
    narrow: frozenset[tuple[Op, int]] = frozenset()  # operation, operand: moved in 2 bytes

    @functools.cached_property
    def fold(self) -> Fold | None:
        """Which operations share a choice, if the program is large and repeats itself."""
        return folded(self.problem)

    @functools.cached_property
    def held(self) -> Held:
        return Held(self.ops, self.problem)

    @functools.cached_property
    def copying(self) -> Copying:
        return Copying(self.ops, self.reads, self.live, self.topology, self.donated, GAPS)

    def reshard_table(self, op: Op, k: int, value: Value) -> ReshardTable:
        """Returns the ways of a value, read as operand `k`, from sharding to sharding."""
        itemsize = 2 if (op, k) in self.narrow else value.itemsize
        return table(value.shape, itemsize, self.topology)

    def sharding_of(self, value: Value, choices: Sequence[int]) -> Sharding:
        """Returns the sharding in which a value is produced."""
        node, k = self.producer[value]
        return self.strategies[node][choices[node]].results[k]


# XLA packs its temporaries into one heap, a little larger than what is alive in it at once. Fitted
# on 75 plans packed as `compiling` asks for; `vmem` adds what loops leave free.
GAPS = 1.05


def build(
    graph: Graph,
    strategies: Sequence[Sequence[Strategy]],
    topology: Topology,
    donated: tuple[bool, ...],
    memory_limit_bytes: float | None,
    name: str = "",
) -> Choices:
    """Prices every strategy and every resharding; `strategies` belong to `graph.leaves()` in
    order."""
    ops = tuple(graph.leaves())
    live = liveness(graph)
    pricing = _Pricing(ops, tuple(tuple(s) for s in strategies), topology, live, donated)
    edges, edge_ties = pricing.edges()
    problem = ShardingProblem(
        nodes=tuple(pricing.node(i) for i in range(len(ops))),
        edges=tuple(edges),
        usages=tuple(pricing.usages()),
        usage_limit_bytes=memory_limit_bytes,
        name=name,
    )
    node_ties = tuple(pricing.node_ties(i) for i in range(len(ops)))
    return Choices(
        ops,
        pricing.strategies,
        pricing.producer,
        pricing.live,
        topology,
        problem,
        node_ties,
        tuple(edge_ties),
        tuple(donated),
        pricing.reads,
        pricing.granted,
        pricing.narrow,
    )


class _PricedEdge(NamedTuple):
    """What edges that are alike have in common."""

    have: int  # offsets in `Reads`
    want: int
    costs: np.ndarray | None  # [S of a, S of b], None if all are 0
    steps: np.ndarray


class _Pricing(Sizes):
    """Arrays over the strategies of one operation have shape [S]."""

    def __init__(self, ops, strategies, topology: Topology, live: Liveness, donated):
        super().__init__(ops, strategies, topology)
        self.live, self.donated = live, donated
        self.copied = copied(ops, live.fusion, donated)
        self.narrow = narrowed(ops) if topology.chip.sublane_bytes else frozenset()
        self.producer = {v: (i, k) for i, op in enumerate(ops) for k, v in enumerate(op.results)}
        self.reads = Reads()
        self._edges: dict[tuple, _PricedEdge] = {}
        self._reduced: dict[int, tuple[np.ndarray, np.ndarray, bool]] = {}
        self._forms: dict[int, tuple[tuple[str, ...], np.ndarray | None]] = {}
        self._relaid: dict[tuple, np.ndarray] = {}
        self._moves: dict[tuple, np.ndarray] = {}
        self._nodes: dict[tuple, np.ndarray] = {}
        self._compute: dict[tuple, np.ndarray] = {}
        self._collective: dict[tuple, np.ndarray] = {}
        self._ties: dict[tuple, np.ndarray] = {}
        self._gapped: dict[int, np.ndarray] = {}
        self._hideable: dict[tuple, dict[str, np.ndarray]] = {}
        self._longest: dict[tuple, dict[str, float]] = {}
        self.granted = self._granted()

    def node(self, i: int) -> Node:
        op, strategies = self.ops[i], self.strategies[i]
        form = self._forms.get(id(strategies))
        if form is None:
            idle = None if self._reduced_of(i)[2] else np.zeros(len(strategies))
            form = self._forms[id(strategies)] = tuple(map(str, strategies)), idle
        texts, costs = form
        kernels = self.live.fusion.kernels
        if costs is None or op in kernels or op.primitive in MATMULS or op in self.copied:
            costs = self._costs_s(i)
        return Node(costs, op.path, texts)

    def _costs_s(self, i: int) -> np.ndarray:
        """Returns [S] the seconds of an operation in a step; the same object for many alike."""
        op = self.ops[i]
        compute_s, collective_s = self._compute_s(i), self._collective_s(i)
        move_s, hides_s = self._move_s(i), self.granted.sums.get(i, ())
        key = (op.trips, id(compute_s), id(collective_s), id(move_s), hides_s)
        if key not in self._nodes:
            costs = op.trips * compute_s + collective_s
            for link, seconds in hides_s:
                costs = costs - op.trips * hidden_s(self._hideable_s(i)[link], seconds)
            self._nodes[key] = costs if move_s is None else costs + op.trips * move_s
        return self._nodes[key]

    def _is_idle(self, i: int) -> bool:
        """Whether an operation costs nothing, whatever its strategy."""
        op = self.ops[i]
        if op in self.live.fusion.kernels or op in self.copied or op.primitive in MATMULS:
            return False
        return not self._reduced_of(i)[2]

    def _granted(self) -> Granted:
        """Returns what collectives may hide behind the least compute of any plan."""
        names = self.topology.mesh.names
        links = [link for axis in names for _, link in self.topology.parts(axis)]
        if not any(HIDING.intersection(link.overlaps) for link in links):
            return NOTHING
        pipelined = {link.kind for link in links if link.pipelined}
        least_s = [
            0.0 if self._is_idle(i) else float(self._compute_s(i).min())
            for i in range(len(self.ops))
        ]

        def sum_s(i: int) -> dict[str, tuple[float, float]]:
            if not self._reduced_of(i)[2] or self.ops[i] in self.live.summed:
                return {}
            return {
                link: (float(found[found > 0].min()), float(found.max()))
                for link, found in self._hideable_s(i).items()
                if found.any()  # arrays without items take no time
            }

        return granted(self.ops, self.live, least_s, self._longest_gather_s, sum_s, pipelined)

    def _hideable_s(self, i: int) -> dict[str, np.ndarray]:
        """Returns by kind of link [S] the seconds of a trip that partial sums are combined
        asynchronously."""
        op, strategies = self.ops[i], self.strategies[i]
        key = (id(strategies), tuple((v.shape, v.itemsize) for v in op.results))
        if key not in self._hideable:
            found = [asynchronous_s(op, strategy, self.topology) for strategy in strategies]
            links = dict.fromkeys(link for seconds in found for link in seconds)
            self._hideable[key] = {
                link: np.array([seconds.get(link, 0.0) for seconds in found]) for link in links
            }
        return self._hideable[key]

    def _moved_itemsize(self, i: int, k: int, value: Value) -> float:
        """Returns the bytes of an item of an operand on its way to the operation."""
        narrow = value.itemsize > 2 and (self.ops[i], k) in self.narrow
        return 2 if narrow else value.itemsize

    def _longest_gather_s(self, i: int, k: int, value: Value) -> dict[str, float]:
        """Returns by kind of link the seconds of the longest asynchronous gather that an operand
        may need."""
        a, r = self.producer[value]
        itemsize = self._moved_itemsize(i, k, value)
        key = (id(self.strategies[a]), r, id(self.strategies[i]), k, value.shape, itemsize)
        if key not in self._longest:
            ways = table(value.shape, itemsize, self.topology)
            place = np.ix_(
                self.indices(a, "results", r, value), self.indices(i, "operands", k, value)
            )
            self._longest[key] = {
                link: float((ways.seconds[place] * found[place]).max())
                for link, found in ways.beside.items()
            }
        return self._longest[key]

    def _move_s(self, i: int) -> np.ndarray | None:
        """Returns [S] the seconds in which a border copies what passes it, in one trip."""
        role = self.copied.get(self.ops[i])
        if role is None:
            return None
        (value,) = getattr(self.ops[i], role)[:1]
        key = (id(self.strategies[i]), role, value.shape, value.itemsize)
        if key not in self._moves:
            chip, mesh = self.topology.chip, self.topology.mesh
            local = [s.local_shape(value.shape, mesh) for s in self.table(value).shardings]
            moved = np.array([chip.move_s(shape, value.itemsize) for shape in local])
            self._moves[key] = moved[self.indices(i, role, 0, value)]
        return self._moves[key]

    def _compute_s(self, i: int) -> np.ndarray:
        """Returns [S] the seconds of a trip; the same object for operations that are alike."""
        op, fusion = self.ops[i], self.live.fusion
        reads, writes = tuple(roofline.reads(op, fusion)), tuple(roofline.writes(op, fusion))
        vector_ops = roofline.vector_ops(op, fusion)
        values = tuple(v and (v.shape, v.dtype) for v in (*op.operands, *op.results))
        numbers = op.eqn and op.eqn.params.get("dimension_numbers")
        if op.primitive != "dot_general":
            numbers = numbers and str(numbers)
        form = (op.kind, op.primitive, numbers)
        key = (id(self.strategies[i]), form, values, reads, writes, vector_ops)
        if key not in self._compute:
            self._compute[key] = self._priced_compute_s(i, reads, writes, vector_ops)
        return self._compute[key]

    def _priced_compute_s(self, i: int, reads, writes, vector_counts) -> np.ndarray:
        op, strategies = self.ops[i], self.strategies[i]
        traffic = np.zeros(len(strategies))
        for k, size in reads:
            value = op.operands[k]
            if value is not None and value.size_bytes:
                traffic += self.moved_bytes(i, "operands", k, value) * (size / value.size_bytes)
        for k in writes:
            traffic += self.moved_bytes(i, "partial", k, op.results[k])
        vector_ops = np.zeros(len(strategies))
        for k, count in vector_counts:
            value = op.operands[k]
            if count and value is not None and value.size_bytes:
                vector_ops += self.local_bytes(i, "operands", k, value) * count / value.size_bytes
        shards = np.array([s.shards for s in strategies], dtype=np.float64)
        if op.primitive == "dot_general":
            shards *= [self._tile_use(op, s) for s in strategies]
        return roofline.seconds(op, shards, traffic, self.topology.chip, vector_ops)

    def _tile_use(self, op: Op, strategy: Strategy) -> float:
        lhs, rhs = (
            sharding.local_shape(v.aval.shape, self.topology.mesh)
            for v, sharding in zip(op.eqn.invars, strategy.operands, strict=True)
        )
        return roofline.tile_use(op, lhs, rhs, self.topology.chip)

    def _collective_s(self, i: int) -> np.ndarray:
        op, strategies = self.ops[i], self.strategies[i]
        values = tuple((v.shape, v.itemsize) for v in op.results)
        key = (id(strategies), values, op.trips, self.live.reduction_trips(op))
        if key not in self._collective:
            total = np.zeros(len(strategies))
            for p, strategy in enumerate(strategies):
                if strategy.reduced:
                    trips = reduction_trips(op, strategy, self.live)
                    total[p] = trips * sum(
                        seconds for _, _, _, seconds in reductions(op, strategy, self.topology)
                    )
            self._collective[key] = total
        return self._collective[key]

    def node_ties(self, i: int) -> np.ndarray:
        """Returns [S] the collectives of each strategy, and a little for each axis at a border."""
        strategies, border = self.strategies[i], self.ops[i].kind in (Kind.INPUT, Kind.OUTPUT)
        key = (id(strategies), border)
        if key not in self._ties:
            axes = 0.01 if border else 0.0
            self._ties[key] = np.array(
                [
                    bool(s.reduced) + bool(s.scattered) + axes * sum(len(r.axes) for r in s.results)
                    for s in strategies
                ]
            )
        return self._ties[key]

    def edges(self) -> tuple[list[Edge], list[np.ndarray]]:
        """Returns the edges and their ties, the number of resharding steps."""
        found, ties = [], []
        free = self.live.fusion.free
        for i, op in enumerate(self.ops):
            for k, value in enumerate(op.operands):
                if value is None or not value.shape or value in free:
                    continue
                a, r = self.producer[value]
                donated = op.kind is Kind.INPUT and self.donated[int(op.path.removeprefix("in"))]
                edge = self._edge(a, r, i, k, value, op.operand_trips[k], donated)
                self.reads.add(i, k, a, edge.have, edge.want)
                if edge.costs is not None and a != i:
                    found.append(Edge(a, i, edge.costs))
                    ties.append(edge.steps)
        for edge in self._totals():
            found.append(edge)
            ties.append(np.zeros(edge.costs_s.shape))
        return found, ties

    def _totals(self) -> Iterator[Edge]:
        """Yields what it costs more to combine partial sums in every trip of a loop.

        XLA combines the total after the loop, unless the loop slices each sum into the sharding of
        the total.
        """
        for i, op in enumerate(self.ops):
            total = self.live.summed.get(op)
            if total is None:
                continue
            c, _ = self.producer[total.carry.results[0]]
            once, each = self.live.reduction_trips(op), op.trips
            kept = np.array([not s.scattered for s in self.strategies[i]])
            more_s = kept * self._collective_s(i) * (each / once - 1)
            if not more_s.any():
                continue
            own, own_at = _distinct(self.strategies[i])
            totals, totals_at = _distinct(self.strategies[c])
            unlike = np.array([[differ(total, s, t) for t in totals] for s in own])
            if unlike.any():
                yield Edge(i, c, more_s[:, None] * unlike[np.ix_(own_at, totals_at)])

    def _copy_s(self, i: int, k: int, value: Value) -> np.ndarray:
        """Returns [S] the seconds to copy a donated argument that a collective writes anew.

        XLA copies it first, since others still read it while the collective runs.
        """
        return 2 * self.local_bytes(i, "operands", k, value) / self.topology.chip.hbm_bytes_per_s

    def _edge(
        self, a: int, r: int, b: int, k: int, value: Value, trips: int, donated: bool
    ) -> "_PricedEdge":
        """Returns the price of reading a value; the same objects wherever they are equal."""
        ends = self.strategies[a], self.strategies[b]
        itemsize, hides_s = (
            self._moved_itemsize(b, k, value),
            self.granted.operands.get((b, k), ()),
        )
        key = (id(ends[0]), r, id(ends[1]), k, value.shape, itemsize, trips, donated, hides_s)
        found = self._edges.get(key)
        if found is None:
            have = self.indices(a, "results", r, value)
            want = self.indices(b, "operands", k, value)
            place = np.ix_(have, want)
            ways = table(value.shape, itemsize, self.topology)
            seconds = ways.seconds[place]
            beside_s = [
                ways.beside[link][place] * hidden_s(seconds, granted_s)
                for link, granted_s in hides_s
            ]
            costs = (seconds - sum(beside_s)) * trips
            if donated:
                costs = costs + (costs > 0) * self._copy_s(b, k, value)
            offsets = self.reads.offset(have), self.reads.offset(want)
            priced = costs if costs.any() else None
            found = self._edges[key] = _PricedEdge(*offsets, priced, ways.step_counts[place])
        return found

    def usages(self) -> list[Usage]:
        found = []
        position = {op: i for i, op in enumerate(self.ops)}
        inputs = iter(self.donated)
        for live in self.live.ranges:
            i = position[live.op]
            size = self._range_bytes(i, live)
            if live.op.kind is Kind.INPUT:
                kept = not next(inputs) and live.op.operands
                # The next state gets a buffer of its own.
                size = size * 2 if kept else size + self._relaid_bytes(i, live.value, size)
            elif live.op.kind is not Kind.OUTPUT:
                if id(size) not in self._gapped:
                    self._gapped[id(size)] = np.ceil(size * GAPS)
                size = self._gapped[id(size)]
            found.append(Usage(i, live.start, live.end, size, live.value.name))
        for i in range(len(self.ops)):
            if self._reduced_of(i)[2]:
                found += self._partial_usages(i)
        return found

    def _relaid_bytes(self, i: int, value: Value, size: np.ndarray) -> np.ndarray:
        """Returns [S] the bytes of a state's copy in another layout, 0 where there is none.

        A state comes in the layout that JAX gives it, minor dim last. Where the dim before that
        leaves tiles part empty, the TPU compiler computes on a copy in an order that fills them;
        not where a loop only takes slices of it.
        """
        rows, lanes = self.topology.chip.tile(4)
        if len(value.shape) < 3 or not self.ops[i].operands or self.ops[i] in self.copied:
            return np.zeros(len(size))
        key = (id(self.strategies[i]), value.shape)
        if key not in self._relaid:
            shardings = [s.results[0] for s in self.strategies[i]]
            local = [s.local_shape(value.shape, self.topology.mesh) for s in shardings]
            part = [1 < shape[-2] < rows and shape[-1] >= lanes for shape in local]
            self._relaid[key] = np.array(part, bool)
        return size * self._relaid[key]

    def _partial_usages(self, i: int) -> list[Usage]:
        """Partial sums: until they are combined, or scattered, which waits for the loop's end."""
        op, live = self.ops[i], self.live
        start = live.runs[op]
        end = live.spans.get(op, (start, start + 1))[1]
        reduced, scattered, _ = self._reduced_of(i)
        found = []
        for k, value in enumerate(op.results):
            if not value.shape:
                continue
            size = self.stored_bytes(i, "partial", k, value)
            for which, stop in ((reduced & ~scattered, start + 1), (scattered, end)):
                if which.any():
                    held = np.ceil(size * which * GAPS)
                    found.append(Usage(i, start, stop, held, f"{value.name}, partial"))
        return found

    def _reduced_of(self, i: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns [S] which strategies reduce, [S] which scatter, and whether any reduces."""
        strategies = self.strategies[i]
        found = self._reduced.get(id(strategies))
        if found is None:
            reduced = np.array([bool(s.reduced) for s in strategies])
            scattered = np.array([bool(s.scattered) for s in strategies])
            found = self._reduced[id(strategies)] = (reduced, scattered, bool(reduced.any()))
        return found

    def _range_bytes(self, i: int, live: LiveRange) -> np.ndarray:
        if live.operand is not None:
            return self.stored_bytes(i, "operands", live.operand, live.value)
        return self.stored_bytes(i, "results", live.result, live.value)


def _distinct(strategies: Sequence[Strategy]) -> tuple[list[Sharding], np.ndarray]:
    """Returns the distinct shardings of the first result, and [S] which one each strategy has."""
    places: dict[Sharding, int] = {}
    at = [places.setdefault(s.results[0], len(places)) for s in strategies]
    return list(places), np.array(at, np.int64)


def peak(choices: Choices, solution: Sequence[int]) -> tuple[float, list[tuple[str, float]]]:
    """Returns the peak bytes of a solution and what is alive there, largest first.

    Beside the usages of the problem, which depend on one choice each, it counts what depends on
    two: copies of operands brought into another sharding.
    """
    _, moved = choices.copying.buffers(solution)
    buffers = choices.held.buffers(solution).joined(moved)
    held_bytes = choices.topology.chip.vector_memory_bytes
    return fullest(buffers, choices.live.end, held_bytes, choices.live.loops)


def copies(choices: Choices, solution: Sequence[int]) -> Iterator[tuple[int, int, Buffer]]:
    """Yields (node, operand number, buffer) of each copy that two choices together call for."""
    moved, b = choices.copying.buffers(solution)
    columns = [a.tolist() for a in (moved, b.starts, b.ends, b.sizes, b.temporary)]
    for r, start, end, size, temporary, label in zip(*columns, b.labels, strict=True):
        i, k = choices.reads.ends[r][:2]
        yield i, k, Buffer(start, end, size, label, temporary)
