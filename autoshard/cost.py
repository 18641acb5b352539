"""Graph + strategies + topology -> ShardingProblem: adds up, has no formula of its own."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard import collectives, roofline
from autoshard.graph import Graph, Kind, Op, Value
from autoshard.liveness import Liveness, liveness
from autoshard.problem import Edge, Node, ShardingProblem, Usage
from autoshard.resharding import ReshardTable, table
from autoshard.sharding import Sharding
from autoshard.strategies import Strategy
from autoshard.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """The decisions of a program: one node per operation, in execution order, with its
    strategies."""

    ops: tuple[Op, ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    producer: Mapping[int, tuple[int, int]]  # id of value -> (node, result number)
    live: Liveness
    topology: Topology
    problem: ShardingProblem
    node_ties: tuple[np.ndarray, ...]  # [S] of each node, the second objective
    edge_ties: tuple[np.ndarray, ...]  # [S of a, S of b] of each edge

    def with_ties(self, weight_s: float) -> ShardingProblem:
        """Returns the problem with the second objective, steps and then sharded axes, added.

        Ties between equally fast plans go to fewer collectives, then to simpler specs; at a small
        enough weight nothing else changes.
        """
        problem = self.problem
        nodes = (
            dataclasses.replace(node, costs_s=node.costs_s + weight_s * ties)
            for node, ties in zip(problem.nodes, self.node_ties, strict=True)
        )
        edges = (
            dataclasses.replace(edge, costs_s=edge.costs_s + weight_s * ties)
            for edge, ties in zip(problem.edges, self.edge_ties, strict=True)
        )
        return dataclasses.replace(problem, nodes=tuple(nodes), edges=tuple(edges))

    def sharding_of(self, value: Value, choices: Sequence[int]) -> Sharding:
        """Returns the sharding in which a value is produced."""
        node, k = self.producer[id(value)]
        return self.strategies[node][choices[node]].results[k]


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
    pricing = _Pricing(ops, tuple(tuple(s) for s in strategies), topology, liveness(graph, donated))
    edges, edge_ties = pricing.edges()
    problem = ShardingProblem(
        nodes=tuple(pricing.node(i) for i in range(len(ops))),
        edges=tuple(edges),
        usages=tuple(pricing.usages(donated)),
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
    )


class _Pricing:
    """Arrays over the strategies of one operation have shape [S]."""

    def __init__(self, ops: tuple[Op, ...], strategies, topology: Topology, live: Liveness):
        self.ops, self.strategies, self.topology, self.live = ops, strategies, topology, live
        self.producer = {
            id(v): (i, k) for i, op in enumerate(ops) for k, v in enumerate(op.results)
        }
        self._indices: dict[tuple, np.ndarray] = {}
        self._matrices: dict[tuple, np.ndarray] = {}
        self._texts: dict[int, tuple[str, ...]] = {}
        self._local: dict[tuple, np.ndarray] = {}

    def table(self, value: Value) -> ReshardTable:
        return table(value.shape, value.itemsize, self.topology)

    def indices(self, i: int, role: str, k: int, value: Value) -> np.ndarray:
        """Returns [S] the positions of an operand's or result's shardings in its table."""
        key = (id(self.strategies[i]), role, k, value.shape)
        if key not in self._indices:
            index = self.table(value).index
            column = [index(getattr(s, role)[k]) for s in self.strategies[i]]
            self._indices[key] = np.array(column, dtype=np.int64)
        return self._indices[key]

    def local_bytes(self, i: int, role: str, k: int, value: Value) -> np.ndarray:
        """Returns [S] the bytes per device of an operand or result."""
        key = (value.shape, value.itemsize)
        if key not in self._local:
            shardings, mesh = self.table(value).shardings, self.topology.mesh
            counts = np.array([s.shard_count(mesh) for s in shardings], dtype=np.float64)
            self._local[key] = value.size_bytes / counts
        return self._local[key][self.indices(i, role, k, value)]

    def node(self, i: int) -> Node:
        op = self.ops[i]
        texts = self._texts.get(id(self.strategies[i]))
        if texts is None:
            texts = self._texts[id(self.strategies[i])] = tuple(map(str, self.strategies[i]))
        return Node(op.trips * (self._compute_s(i) + self._collective_s(i)), op.path, texts)

    def _compute_s(self, i: int) -> np.ndarray:
        op, strategies = self.ops[i], self.strategies[i]
        traffic = np.zeros(len(strategies))
        for k in roofline.traffic_operands(op, self.live.stored):
            value = op.operands[k]
            if value is not None:
                traffic += self.local_bytes(i, "operands", k, value)
        for k in roofline.traffic_results(op, self.live.stored):
            traffic += self.local_bytes(i, "partial", k, op.results[k])
        shards = np.array([s.shards for s in strategies], dtype=np.float64)
        return roofline.seconds(op, shards, traffic, self.topology.chip)

    def _collective_s(self, i: int) -> np.ndarray:
        op, strategies = self.ops[i], self.strategies[i]
        total = np.zeros(len(strategies))
        for p, strategy in enumerate(strategies):
            if strategy.reduced:
                total[p] = sum(
                    seconds for _, _, _, seconds in reductions(op, strategy, self.topology)
                )
        return total

    def node_ties(self, i: int) -> np.ndarray:
        """Returns [S] the collectives of each strategy, and a little for each axis at a border."""
        border = self.ops[i].kind in (Kind.INPUT, Kind.OUTPUT)
        axes = 0.01 if border else 0.0
        return np.array(
            [
                bool(s.reduced) + bool(s.scattered) + axes * sum(len(r.axes) for r in s.results)
                for s in self.strategies[i]
            ]
        )

    def edges(self) -> tuple[list[Edge], list[np.ndarray]]:
        """Returns the edges and their ties, the number of resharding steps."""
        found, ties = [], []
        for i, op in enumerate(self.ops):
            for k, value in enumerate(op.operands):
                if value is None or not value.shape:
                    continue
                a, r = self.producer[id(value)]
                if a == i:
                    continue
                costs = self._edge_costs(a, r, i, k, value, op.operand_trips[k])
                if costs.any():
                    found.append(Edge(a, i, costs))
                    rows = self.indices(a, "results", r, value)
                    columns = self.indices(i, "operands", k, value)
                    ties.append(self.table(value).step_counts[np.ix_(rows, columns)])
        return found, ties

    def _edge_costs(self, a: int, r: int, b: int, k: int, value: Value, trips: int) -> np.ndarray:
        key = (
            id(self.strategies[a]),
            r,
            id(self.strategies[b]),
            k,
            value.shape,
            value.itemsize,
            trips,
        )
        if key not in self._matrices:
            rows = self.indices(a, "results", r, value)
            columns = self.indices(b, "operands", k, value)
            self._matrices[key] = self.table(value).seconds[np.ix_(rows, columns)] * trips
        return self._matrices[key]

    def usages(self, donated: tuple[bool, ...]) -> list[Usage]:
        found = []
        position = {id(op): i for i, op in enumerate(self.ops)}
        inputs = iter(donated)
        for live in self.live.ranges:
            i = position[id(live.op)]
            size = self.local_bytes(i, "results", live.result, live.value)
            if live.op.kind is Kind.INPUT:
                kept = not next(inputs) and live.op.operands
                size = size * 2 if kept else size  # the next state gets a buffer of its own
            found.append(Usage(i, live.start, live.end, size, live.value.name))
        return found


@functools.lru_cache(maxsize=65536)
def _reduction(kind: collectives.Kind, axes, size: float, topology: Topology) -> float:
    return float(collectives.seconds(kind, topology, axes, size))


def reductions(op: Op, strategy: Strategy, topology: Topology):
    """Yields (kind, axes, bytes, seconds) of each collective that combines a strategy's partial
    sums."""
    if not strategy.reduced:
        return
    mesh = topology.mesh
    for value, partial, result in zip(op.results, strategy.partial, strategy.results, strict=True):
        size = partial.local_bytes(value.shape, value.itemsize, mesh)
        if strategy.scattered:
            kind = collectives.Kind.REDUCE_SCATTER
            yield (
                kind,
                strategy.scattered,
                size,
                _reduction(kind, strategy.scattered, size, topology),
            )
        rest = tuple(a for a in strategy.reduced if a not in strategy.scattered)
        if rest:
            kind = collectives.Kind.ALL_REDUCE
            size = result.local_bytes(value.shape, value.itemsize, mesh)
            yield kind, rest, size, _reduction(kind, rest, size, topology)
