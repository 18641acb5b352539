"""Bytes of operands and results under every strategy of an operation."""

import functools

import numpy as np

from autoshard import roofline
from autoshard.graph import Op, Value
from autoshard.resharding import ReshardTable, table
from autoshard.stored import stored_bytes
from autoshard.strategies import Strategy
from autoshard.topology import Topology


class Sizes:
    """Arrays [S] over the strategies of an operation; `role` is the field of Strategy that says how
    an operand or result is sharded, k its number."""

    def __init__(
        self,
        ops: tuple[Op, ...],
        strategies: tuple[tuple[Strategy, ...], ...],
        topology: Topology,
    ):
        self.ops, self.strategies, self.topology = ops, strategies, topology
        self._indices: dict[tuple, np.ndarray] = {}
        self._local: dict[tuple, np.ndarray] = {}
        self._stored: dict[tuple, np.ndarray] = {}
        self._held: dict[tuple, np.ndarray] = {}

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

    def stored_bytes(self, i: int, role: str, k: int, value: Value) -> np.ndarray:
        """Returns [S] the bytes that an operand or result takes in memory, padded to tiles."""
        majors = roofline.majors(self.ops[i], role, k)
        form = (value.shape, value.itemsize, majors)
        key = (id(self.strategies[i]), role, k, form)
        if key in self._held:
            return self._held[key]
        if form not in self._stored:
            size = functools.partial(stored_bytes, self.topology, value, majors=majors)
            self._stored[form] = np.array([size(s) for s in self.table(value).shardings])
        found = self._held[key] = self._stored[form][self.indices(i, role, k, value)]
        return found

    def moved_bytes(self, i: int, role: str, k: int, value: Value) -> np.ndarray:
        """Returns [S] the bytes that an operand or result is read or written in.

        Padding counts where an operation leaves the compiler no other order of the dims.
        """
        if roofline.majors(self.ops[i], role, k):
            return self.stored_bytes(i, role, k, value)
        return self.local_bytes(i, role, k, value)

    def __str__(self) -> str:
        return f"sizes of {len(self.ops)} operations on {self.topology.mesh}"
