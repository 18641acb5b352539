"""How much of what is alive a TPU keeps in the vector memory of its core rather than in HBM.

The TPU compiler gives a temporary that lives shortly a place in vector memory, `S(1)` in the
layouts of its HLO, as long as there is room; such a buffer takes nothing of HBM.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.hardware import Chip

# Shares of the vector memory. Fitted on 48 compiled plans of 14 models: at the time when HBM is
# fullest, about half of it holds temporaries that have no copy in HBM (the rest prefetches and
# stages transfers), none larger than a quarter.
HELD = 0.5
LARGEST = 0.25


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Takes `size_bytes` at `start <= t < end`; `temporary`: vector memory may hold it."""

    start: int
    end: int
    size_bytes: float
    label: str
    temporary: bool


def fullest(
    buffers: Sequence[Buffer], times: int, vector_memory_bytes: float
) -> tuple[float, list[tuple[str, float]]]:
    """Returns the most bytes of HBM in use at once, and what is alive then, largest first."""
    starts = np.array([b.start for b in buffers], np.int64)
    ends = np.array([b.end for b in buffers], np.int64)
    sizes = np.array([b.size_bytes for b in buffers])
    change = np.zeros(times + 1)
    np.add.at(change, starts, sizes)
    np.add.at(change, np.maximum(starts, ends), -sizes)
    used = np.cumsum(change[:-1])
    fitting = np.array([b.temporary for b in buffers], bool)
    fitting &= sizes <= LARGEST * vector_memory_bytes
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
    alive = [(b.label, b.size_bytes) for b in buffers if b.start <= at < b.end and b.size_bytes > 0]
    return best, sorted(alive, key=lambda item: -item[1])


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
