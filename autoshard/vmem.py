"""How much HBM a TPU takes for what is alive.

The TPU compiler gives a temporary that lives shortly a place in vector memory, `S(1)` in the
layouts of its HLO, as long as there is room; such a buffer takes nothing of HBM. All others go into
one heap, in which what lives through a whole loop keeps a gap free.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.hardware import Chip

# Shares of the vector memory. Fitted on 75 compiled plans of 13 models: at the time when HBM is
# fullest, a fifth of it holds temporaries that have no copy in HBM (the rest prefetches and
# stages transfers).
HELD = 0.2
LARGEST = 0.25  # of one of them

# In compiled scans and their gradients, `memory_analysis` counts C + T + min(C, T) bytes of heap,
# where C lives through a loop (the stacks for its backward pass, the sums of gradients) and T is
# what else is alive, in the loop or between two (libtpu 0.0.42; v5e, v5p and v6e). In whole models
# C is not as sharp; fitted on the same plans.
LOOP_GAP = 0.75  # of the lesser of the two
GAP_LABEL = "gap in the heap beside what lives through a loop"

Loops = Sequence[tuple[int, int]]  # the first and last time of each


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Takes `size_bytes` at `start <= t < end`; `temporary`: vector memory may hold it; `heap`: it
    is no argument or result."""

    start: int
    end: int
    size_bytes: float
    label: str
    temporary: bool
    heap: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """Many buffers: arrays [B] of what `Buffer` holds."""

    starts: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    temporary: np.ndarray
    heap: np.ndarray
    labels: Sequence[str]

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> "Buffers":
        return cls(
            np.array([b.start for b in buffers], np.int64),
            np.array([b.end for b in buffers], np.int64),
            np.array([b.size_bytes for b in buffers], np.float64),
            np.array([b.temporary for b in buffers], bool),
            np.array([b.heap for b in buffers], bool),
            [b.label for b in buffers],
        )

    def joined(self, other: "Buffers") -> "Buffers":
        return Buffers(
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.ends, other.ends]),
            np.concatenate([self.sizes, other.sizes]),
            np.concatenate([self.temporary, other.temporary]),
            np.concatenate([self.heap, other.heap]),
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
    buffers: Buffers, times: int, vector_memory_bytes: float, loops: Loops = ()
) -> tuple[float, list[tuple[str, float]]]:
    """Returns the most bytes of HBM in use at once, and what is alive then, largest first.

    Without vector memory it is no TPU, and loops leave no gaps.
    """
    starts, ends, sizes = buffers.starts, buffers.ends, buffers.sizes
    used = _alive_bytes(buffers, np.ones(len(sizes), bool), times)
    kept, rest = np.zeros(times), np.zeros(times)
    if vector_memory_bytes and len(loops):
        through = buffers.heap & _through(starts, ends, loops)
        kept = _alive_bytes(buffers, through, times)
        rest = _alive_bytes(buffers, buffers.heap & ~through, times)
    fitting = buffers.temporary & (sizes <= LARGEST * vector_memory_bytes)
    order = np.lexsort((sizes[fitting], (ends - starts)[fitting]))
    first, last, size = (a[fitting][order] for a in (starts, ends, sizes))
    room = HELD * vector_memory_bytes
    most = used + LOOP_GAP * np.minimum(kept, rest)
    best, gap, at = 0.0, 0.0, 0
    for t in np.argsort(-most, kind="stable"):
        if most[t] - (1 + LOOP_GAP) * room <= best and at:
            break
        held = _held(size[(first <= t) & (t < last)], room)
        beside = LOOP_GAP * max(min(float(kept[t]), float(rest[t]) - held), 0.0)
        left = float(used[t]) - held + beside
        if left > best:
            best, gap, at = left, beside, int(t)
    alive = buffers.alive(at)
    if gap:
        alive = sorted([*alive, (GAP_LABEL, gap)], key=lambda item: -item[1])
    return best, alive


def _alive_bytes(buffers: Buffers, which: np.ndarray, times: int) -> np.ndarray:
    """Returns [times] the bytes of some of the buffers."""
    starts, sizes = buffers.starts[which], buffers.sizes[which]
    change = np.zeros(times + 1)
    np.add.at(change, starts, sizes)
    np.add.at(change, np.maximum(starts, buffers.ends[which]), -sizes)
    return np.cumsum(change[:-1])


def _through(starts: np.ndarray, ends: np.ndarray, loops: Loops) -> np.ndarray:
    """Returns which buffers live through at least one whole loop."""
    first, last = np.array(sorted(loops), np.int64).T
    soonest = np.minimum.accumulate(last[::-1])[::-1]  # end of a loop that starts no earlier
    after = np.searchsorted(first, starts)
    return (after < len(first)) & (soonest[np.minimum(after, len(first) - 1)] <= ends)


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
