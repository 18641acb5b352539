"""Repeated blocks folded: nodes that look alike from near share one choice.

Layers of an unrolled model, forward, backward and optimizer copies alike, differ only in how far
they are from the ends. Nodes get colours, refined by those of their neighbours as often as a block
is told apart from the next kind of block, but too few times for the ends to be seen from within
(Weisfeiler and Leman, 1968). A colour is then one node, whose costs are its members' sum.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from autoshard.packed import Packed, numbered, packed
from autoshard.problem import Edge, ShardingProblem, Usage

ROUNDS = 6  # how far a node looks
FOLDED_NODES = 2_000  # above which repeated blocks are folded
WORTH = 0.7  # of the nodes left, up to which folding is worth it


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """Which nodes share a choice.

    Attributes:
      classes: [N] the class of each node, numbered by first members.
      members: the first node of each class.
    """

    classes: np.ndarray
    members: np.ndarray

    def __str__(self) -> str:
        return f"{len(self.classes)} nodes in {len(self.members)} classes"

    def problem(self, problem: ShardingProblem) -> ShardingProblem:
        """Returns the problem in which every class is one node."""
        costs = self.node_sums([node.costs_s for node in problem.nodes])
        nodes = [
            dataclasses.replace(problem.nodes[i], costs_s=total)
            for i, total in zip(self.members.tolist(), costs, strict=True)
        ]
        usages = self.usages(problem.usages)
        edges = self.edge_sums(problem.edges, [edge.costs_s for edge in problem.edges])
        return dataclasses.replace(problem, nodes=tuple(nodes), edges=edges, usages=usages)

    def usages(self, usages: Sequence[Usage]) -> tuple[Usage, ...]:
        """Returns the same usages, each of its node's class."""
        classes = self.classes.tolist()
        return tuple([Usage(classes[u.node], u.start, u.end, u.bytes, u.label) for u in usages])

    def node_sums(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sum [S] of each class; equal classes hold equal arrays."""
        counts = np.bincount(self.classes)
        return [n * arrays[i] for i, n in zip(self.members.tolist(), counts.tolist(), strict=True)]

    def edge_sums(self, edges: Sequence[Edge], matrices: Sequence[np.ndarray]) -> tuple[Edge, ...]:
        """Returns one edge for each pair of classes, the sum of `matrices`, one for each edge."""
        a = self.classes[np.array([edge.a for edge in edges], np.int64)]
        b = self.classes[np.array([edge.b for edge in edges], np.int64)]
        held = packed(matrices)
        code = (a * len(self.members) + b) * len(held.distinct) + held.numbers
        kinds, first = numbered(code)
        counts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for k, count in zip(first.tolist(), np.bincount(kinds).tolist(), strict=True):
            counts.setdefault((int(a[k]), int(b[k])), []).append((count, k))
        total: dict[tuple[int, int], np.ndarray] = {}
        for (a, b), same in counts.items():
            for count, k in same:
                costs = count * matrices[k]
                pair = (a, b) if a <= b else (b, a)
                costs = costs if a <= b else costs.T
                total[pair] = total[pair] + costs if pair in total else costs
        return tuple(Edge(a, b, costs) for (a, b), costs in total.items())

    def fold(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Returns the choice of each class's first member."""
        return tuple(choices[i] for i in self.members.tolist())

    def unfold(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Returns the choices [N] of all nodes from those of the classes."""
        return tuple(np.asarray(choices, np.int64)[self.classes].tolist())


def folded(problem: ShardingProblem) -> Fold | None:
    """Returns the fold of a large problem, None if it is small or has few nodes that look alike."""
    return fold(problem) if len(problem.nodes) > FOLDED_NODES else None


def fold(problem: ShardingProblem, rounds: int = ROUNDS) -> Fold | None:
    """Returns the classes of nodes that look alike from near, None if they are hardly fewer."""
    colours = _colours(problem, rounds)
    classes, members = numbered(colours)
    return Fold(classes, members) if len(members) <= WORTH * len(colours) else None


def _colours(problem: ShardingProblem, rounds: int) -> np.ndarray:
    """Returns a number for each node, equal where `rounds` steps around show no difference."""
    nodes, (a, b) = problem.nodes, problem.ends
    texts = {id(n.strategies): n.strategies for n in nodes}
    named = {key: _digest("\n".join(text).encode()) for key, text in texts.items()}
    colours = _mix(digests(problem.node_costs))
    colours = _mix(colours + np.array([named[id(n.strategies)] for n in nodes], np.uint64))
    matrix = digests(problem.edge_costs)
    for _ in range(rounds):
        near = np.zeros(len(nodes), np.uint64)
        np.add.at(near, a, _mix(colours[b] + _mix(matrix + np.uint64(1))))
        np.add.at(near, b, _mix(colours[a] + _mix(matrix + np.uint64(2))))
        colours = _mix(colours * np.uint64(3) + _mix(near))
    return colours


def digests(arrays: Packed) -> np.ndarray:
    """Returns a number [N] for the content of each array."""
    found = [
        _digest(f"{a.shape} ".encode() + np.ascontiguousarray(a).tobytes()) for a in arrays.distinct
    ]
    return np.array(found, np.uint64)[arrays.numbers]


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """Scatters the bits of 64-bit numbers (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
