"""Which operands are read in another sharding than they are made in.

Asked of every known plan and every solution, on programs of some 100,000 operations: hence arrays.
"""

import functools
from collections.abc import Sequence

import numpy as np


class Reads:
    """Every operand that is read, with the numbers of the shardings at both ends."""

    def __init__(self):
        self.ends: list[tuple[int, int, int, int, int]] = []  # node, operand, maker, two offsets
        self.offsets: dict[int, int] = {}
        self.columns: list[np.ndarray] = []
        self.size = 0

    def add(self, node: int, k: int, maker: int, have: int, want: int) -> None:
        """Adds what `node` reads of `maker` as operand `k`; `have`, `want`: offsets of columns."""
        self.ends.append((node, k, maker, have, want))

    def offset(self, column: np.ndarray) -> int:
        """Returns where the sharding's number [S] of each strategy of one end stands."""
        if id(column) not in self.offsets:
            self.offsets[id(column)] = self.size
            self.columns.append(column)
            self.size += len(column)
        return self.offsets[id(column)]

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.array(self.ends, np.int64).reshape(-1, 5).T
        return ends, np.concatenate(self.columns) if self.columns else np.zeros(0, np.int64)

    def moved(self, choices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns which reads are in another sharding than the value's, and both shardings."""
        picked = np.asarray(choices, np.int64)
        (nodes, _, makers, have, want), numbers = self.arrays
        made, wanted = numbers[have + picked[makers]], numbers[want + picked[nodes]]
        differ = np.flatnonzero(made != wanted)
        return differ, made[differ], wanted[differ]
