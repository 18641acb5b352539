"""What the usages of a problem hold, for any choices."""

from collections.abc import Sequence

import numpy as np

from autoshard.graph import Kind, Op
from autoshard.problem import ShardingProblem
from autoshard.vmem import Buffers

# What vector memory may hold.
TEMPORARY = frozenset((Kind.LEAF, Kind.SLICE, Kind.ENTER, Kind.READ))
OUTSIDE = frozenset((Kind.INPUT, Kind.OUTPUT, Kind.CONST))  # of the heap


class Held:
    """The usages of a problem whose nodes are `ops`."""

    def __init__(self, ops: Sequence[Op], problem: ShardingProblem):
        usages, self.spans = problem.usages, problem.spans
        self.temporary = np.array([ops[u.node].kind in TEMPORARY for u in usages], bool)
        self.heap = np.array([ops[u.node].kind not in OUTSIDE for u in usages], bool)
        self.labels = [u.label for u in usages]

    def buffers(self, solution: Sequence[int]) -> Buffers:
        sizes = self.spans.taken(solution)
        spans = self.spans
        return Buffers(spans.starts, spans.ends, sizes, self.temporary, self.heap, self.labels)

    def __str__(self) -> str:
        return f"{len(self.labels)} usages"
