"""How much of what is alive a TPU keeps in the vector memory of its core rather than in HBM.

The TPU compiler gives a temporary that lives shortly a place in vector memory, `S(1)` in the
layouts of its HLO, as long as there is room; such a buffer takes nothing of HBM.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.hardware import Chip

# Shares of the vector memory. Fitted on 70 compiled plans of 13 models: at the time when HBM is
# fullest, a quarter of it holds temporaries that have no copy in HBM (the rest prefetches and
# stages transfers), none larger than an eighth.
HELD = 0.25
LARGEST = 0.125


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Takes `size_bytes` at `start <= t < end`; `temporary`: vector memory may hold it."""

    start: int
    end: int
    size_bytes: float
    label: str
    temporary: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """Many buffers: arrays [B] of what `Buffer` holds."""

    starts: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    temporary: np.ndarray
    labels: Sequence[str]

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> "Buffers":
        return cls(
            np.array([b.start for b in buffers], np.int64),
            np.array([b.end for b in buffers], np.int64),
            np.array([b.size_bytes for b in buffers], np.float64),
            np.array([b.temporary for b in buffers], bool),
            [b.label for b in buffers],
        )

    def joined(self, other: "Buffers") -> "Buffers":
        return Buffers(
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.ends, other.ends]),
            np.concatenate([self.sizes, other.sizes]),
            np.concatenate([self.temporary, other.temporary]),
            [*self.labels, *other.labels],
        )

    def alive(self, time: int) -> list[tuple[str, float]]:
        """Returns (label, bytes) of what is alive at a time, largest first."""
        there = (self.starts <= time) & (time < self.ends) & (self.sizes > 0)
        found = [(self.labels[k], float(self.sizes[k])) for k in np.flatnonzero(there).tolist()]
        return sorted(found, key=lambda item: -item[1])

    def __str__(self) -> str:
        return f"{len(self.labels)} buffers of {self.sizes.sum():.6g} bytes in all"


def fullest(
    buffers: Buffers, times: int, vector_memory_bytes: float
) -> tuple[float, list[tuple[str, float]]]:
    """Returns the most bytes of HBM in use at once, and what is alive then, largest first."""
    starts, ends, sizes = buffers.starts, buffers.ends, buffers.sizes
    change = np.zeros(times + 1)
    np.add.at(change, starts, sizes)
    np.add.at(change, np.maximum(starts, ends), -sizes)
    used = np.cumsum(change[:-1])
    fitting = buffers.temporary & (sizes <= LARGEST * vector_memory_bytes)
    order = np.lexsort((sizes[fitting], (ends - starts)[fitting]))
    first, last, size = (a[fitting][order] for a in (starts, ends, sizes))
    room = HELD * vector_memory_bytes
    best, at = 0.0, 0
    for t in np.argsort(-used, kind="stable"):
        if used[t] - room <= best and at:
            break
        left = float(used[t]) - _held(size[(first <= t) & (t < last)], room)
        if left > best:
            best, at = left, int(t)
    return best, buffers.alive(at)


def held_bytes(chip: Chip) -> float:
    """Returns the most bytes that vector memory saves HBM."""
    return HELD * chip.vector_memory_bytes


def _held(sizes: np.ndarray, room_bytes: float) -> float:
    """Returns the bytes in vector memory of buffers in the order in which they are tried."""
    total = float(sizes.sum())
    if total <= room_bytes:
        return total
    held = 0.0
    for size in sizes.tolist():
        if held + size <= room_bytes:
            held += size
    return held
