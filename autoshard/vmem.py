"""How much of what is alive a TPU keeps in the vector memory of its core rather than in HBM.

The TPU compiler gives a temporary that lives shortly a place in vector memory, `S(1)` in the
layouts of its HLO, as long as there is room; such a buffer takes nothing of HBM.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

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
    """Returns the most bytes of HBM in use at once, and what is alive then, largest first.

    Of the small temporaries, those that live shortest go to vector memory.
    """
    change = np.zeros(times + 1)
    for b in buffers:
        change[b.start] += b.size_bytes
        change[max(b.start, b.end)] -= b.size_bytes
    used = np.cumsum(change[:-1])
    small = [
        b for b in buffers
        if b.temporary and 0 < b.size_bytes <= LARGEST * vector_memory_bytes and b.end > b.start
    ]  # fmt: skip
    small.sort(key=lambda b: (b.end - b.start, b.size_bytes))
    starts = np.array([b.start for b in small], np.int64)
    ends = np.array([b.end for b in small], np.int64)
    best, at = 0.0, 0
    for t in np.argsort(-used, kind="stable"):
        if used[t] <= best:
            break
        alive = np.flatnonzero((starts <= t) & (t < ends))
        size = float(used[t]) - _held([small[i].size_bytes for i in alive], vector_memory_bytes)
        if size > best:
            best, at = size, int(t)
    found = [(b.label, b.size_bytes) for b in buffers if b.start <= at < b.end and b.size_bytes > 0]
    return best, sorted(found, key=lambda item: -item[1])


def _held(sizes: Sequence[float], vector_memory_bytes: float) -> float:
    """Returns the bytes in vector memory, given what wants in, in order: what fits, as it fits."""
    room = HELD * vector_memory_bytes
    held = 0.0
    for size in sizes:
        if held + size <= room:
            held += size
    return held
