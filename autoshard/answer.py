"""A node's best strategy for each choice of its neighbours, looked up when it is asked for."""

import dataclasses

import numpy as np

SMALL = 2_000  # entries of a result up to which the whole sum is built at once


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The node's costs [S] and those of its edges, [S, S_j] for each neighbour j."""

    costs: np.ndarray
    edges: tuple[np.ndarray, ...]

    def best(self) -> np.ndarray:
        """Returns [S_j, ...] the least cost for each choice of at most two neighbours."""
        if not self.edges:
            return self.costs.min()
        first = self.costs[:, None] + self.edges[0]
        return first.min(axis=0) if len(self.edges) == 1 else min_plus(first, self.edges[1])

    def at(self, choices: tuple[int, ...]) -> int:
        """Returns the best strategy for the neighbours' choices, the first among equals."""
        total = self.costs
        for edge, p in zip(self.edges, choices, strict=True):
            total = total + edge[:, p]
        return int(total.argmin())

    def table(self, kept: tuple[np.ndarray, ...]) -> np.ndarray:
        """Returns the best strategy for each choice [len, ...] among some of each neighbour's."""
        total = self.costs
        for edge, p in zip(self.edges, kept, strict=True):
            total = total[..., None] + edge[:, p].reshape(
                (len(self.costs),) + (1,) * (total.ndim - 1) + (-1,)
            )
        return total.argmin(axis=0)


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns [J, K] the least over s of a [S, J] at (s, j) plus b [S, K] at (s, k)."""
    if a.shape[1] * b.shape[1] <= SMALL:
        return (a[:, :, None] + b[:, None, :]).min(axis=0)
    best = a[0][:, None] + b[0]
    total = np.empty_like(best)
    for column, row in zip(a[1:], b[1:], strict=True):
        np.add(column[:, None], row, out=total)
        np.minimum(best, total, out=best)
    return best
