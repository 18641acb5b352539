"""When memory is held, and how much, as arrays over the usages of a problem."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autoshard.packed import Packed, packed


class Span(Protocol):
    """Memory that a node holds at the times `start <= t < end`."""

    @property
    def node(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def bytes(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """U usages: `nodes`, `starts`, `ends` [U], and the bytes of each under each strategy."""

    nodes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    bytes: Packed

    @classmethod
    def of(cls, usages: Sequence[Span]) -> "Spans":
        return cls(
            np.array([u.node for u in usages], np.int64),
            np.array([u.start for u in usages], np.int64),
            np.array([u.end for u in usages], np.int64),
            packed(u.bytes for u in usages),
        )

    def __str__(self) -> str:
        return f"{len(self.nodes)} usages"

    def taken(self, choices: Sequence[int]) -> np.ndarray:
        """Returns [U] the bytes of each usage under one strategy a node."""
        picked = np.asarray(choices, np.int64)[self.nodes]
        return self.bytes.values[self.bytes.starts + picked]

    def used(self, choices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times [T] at which the usage changes and the bytes [T] from then on."""
        times, first, last = self._changes
        change, taken = np.zeros(len(times) + 1), self.taken(choices)
        np.add.at(change, first, taken)
        np.subtract.at(change, last, taken)
        return times, np.cumsum(change[:-1])

    @functools.cached_property
    def _changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The times at which the usage changes, and where each usage starts and ends in them."""
        ends = np.maximum(self.ends, self.starts)
        times = np.unique(np.concatenate([self.starts, ends]))
        return times, np.searchsorted(times, self.starts), np.searchsorted(times, ends)

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each usage the memory rows [first, last) in which it counts, in order of
        time.

        A row is a maximal live set: a moment at which something starts just before something ends.
        Usages that are never live or always zero get an empty range.
        """
        some = np.array([a.max(initial=0.0) > 0 for a in self.bytes.distinct], bool)
        counts = (self.ends > self.starts) & some[self.bytes.numbers]
        starts, ends = np.unique(self.starts[counts]), np.unique(self.ends[counts])
        # A start is a row's time when an end follows before the next start does.
        next_end = ends[np.searchsorted(ends, starts, side="right")] if len(starts) else starts
        next_start = np.append(starts[1:], np.iinfo(np.int64).max)[: len(starts)]
        times = starts[next_end <= next_start]
        first = np.where(counts, np.searchsorted(times, self.starts), 0)
        last = np.where(counts, np.searchsorted(times, self.ends), 0)
        return first, last
