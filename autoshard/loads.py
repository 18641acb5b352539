"""What a node holds in memory: bytes for each strategy, and the memory rows where they count.

In a folded problem one node stands for a block of every layer: it holds the same bytes over many
spans of rows, so bytes and spans are kept apart.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """`bytes` [S] are held in each of the spans of rows `first[k] <= row < last[k]`."""

    bytes: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def __str__(self) -> str:
        return f"{self.bytes.max(initial=0):g} bytes at most, in {len(self.first)} spans"

    def taking(self, bytes_: np.ndarray) -> "Load":
        """Returns other bytes in the same spans."""
        return Load(bytes_, self.first, self.last)

    def rows(self, count: int) -> np.ndarray:
        """Returns [count] how many of the spans each row is in."""
        change = np.bincount(self.first, minlength=count + 1)
        return np.cumsum(change - np.bincount(self.last, minlength=count + 1))[:count]

    def moved(self, place: np.ndarray) -> "Load":
        """Returns the load after row r has become row `place[r]`; spans left empty are gone."""
        first, last = place[self.first], place[self.last]
        kept = first < last
        return Load(self.bytes, first[kept], last[kept])


def merged(loads: Iterable[Load]) -> list[Load]:
    """Returns the same loads with no span twice, and no bytes twice."""
    loads = _same_bytes(loads)
    if not loads:
        return loads
    spans = np.concatenate([(load.first << 32) + load.last for load in loads])
    order = np.argsort(spans, kind="stable")
    spans = spans[order]
    starts = np.flatnonzero(np.diff(spans, prepend=-1))
    if len(starts) == len(spans):
        return loads
    owner = np.repeat(np.arange(len(loads)), [len(load.first) for load in loads])[order]
    counts = np.diff(starts, append=len(spans))
    alone = starts[counts == 1]
    found = [_load(loads[n].bytes, spans[alone[owner[alone] == n]]) for n in range(len(loads))]
    owners: dict[tuple[int, ...], list[int]] = {}
    for start, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        group = tuple(owner[start : start + count].tolist())
        owners.setdefault(group, []).append(int(spans[start]))
    for group, same in owners.items():
        total = sum((loads[n].bytes for n in group[1:]), loads[group[0]].bytes)
        found.append(_load(total, same))
    return _same_bytes(found)


def _load(bytes_: np.ndarray, spans: Sequence[int] | np.ndarray) -> Load:
    keys = np.asarray(spans, np.int64)
    return Load(bytes_, keys >> 32, keys & 0xFFFFFFFF)


def _same_bytes(loads: Iterable[Load]) -> list[Load]:
    found: dict[bytes, list[Load]] = {}
    for load in loads:
        if len(load.first):
            found.setdefault(load.bytes.tobytes(), []).append(load)
    return [same[0] if len(same) == 1 else _joined(same) for same in found.values()]


def _joined(loads: Sequence[Load]) -> Load:
    first = np.concatenate([load.first for load in loads])
    return Load(loads[0].bytes, first, np.concatenate([load.last for load in loads]))
