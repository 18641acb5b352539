"""The buffers of copies that two choices bring about together: operands in another sharding.

Asked of every known plan and every solution, on programs of some 100,000 operations: hence arrays.
"""

import functools
from collections.abc import Sequence

import numpy as np

from autoshard import collectives
from autoshard.fusion import is_matmul
from autoshard.graph import Kind, Op, Value
from autoshard.liveness import Liveness
from autoshard.packed import numbered
from autoshard.reads import Reads
from autoshard.resharding import table
from autoshard.sharding import Sharding
from autoshard.stored import moved_bytes, stored_bytes
from autoshard.topology import Topology
from autoshard.vmem import Buffers

COPIED = frozenset((Kind.LEAF, Kind.SLICE, Kind.ENTER, Kind.READ))  # and donated inputs


class Copying:
    """What each operand of `reads` takes when it is brought into another sharding.

    Arrays over the reads [N]; `gaps`: bytes of the heap for each byte of a temporary.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        reads: Reads,
        live: Liveness,
        topology: Topology,
        donated: Sequence[bool],
        gaps: float,
    ):
        self.reads, self.topology, self._ops = reads, topology, ops
        (nodes, operands, makers, *_), _ = reads.arrays
        start, end, early, by_have, temporary = _spans(ops, live)
        inputs = [op.kind is Kind.INPUT for op in ops]
        kept = np.array([op.kind in COPIED for op in ops], bool)
        kept[inputs] = donated
        self._kept, self._by_have, self._temporary = kept[nodes], by_have[nodes], temporary[nodes]
        self._start, self._end, self._early = start[nodes], end[nodes], early[nodes]
        self._scale = np.where(self._temporary, gaps, 1.0)
        self._argument = np.array(inputs, bool)[makers] & ~self._by_have
        self._places(nodes.tolist(), operands.tolist())

    def _places(self, nodes: list[int], operands: list[int]) -> None:
        """Finds for each read its value, and where the sizes under each sharding of it begin."""
        self._values: list[Value] = []
        sizes, places, count = [np.zeros(0)], {}, 0
        at = []
        for i, k in zip(nodes, operands, strict=True):
            value = self._ops[i].operands[k]
            assert value is not None
            form = (value.shape, value.itemsize)
            if form not in places:
                sizes.append(_stored(self.topology, value))
                places[form] = count
                count += len(sizes[-1])
            self._values.append(value)
            at.append(places[form])
        self._place = np.array(at, np.int64)
        self._sizes = np.concatenate(sizes)

    def _copy_label(self, r: int) -> str:
        return f"copy of {self._ops[self.reads.ends[r][0]].results[0].name}"

    def __str__(self) -> str:
        return f"{len(self._values)} operands, {np.count_nonzero(self._kept)} of them copied"

    def buffers(self, choices: Sequence[int]) -> tuple[np.ndarray, Buffers]:
        """Returns which reads [B] are copied under the choices, and the buffers of the copies."""
        moved, have, want = self.reads.moved(choices)
        kept = self._kept[moved]
        moved, have, want = moved[kept], have[kept], want[kept]
        size = self._sizes[self._place[moved] + np.where(self._by_have[moved], have, want)]
        for b in np.flatnonzero(self._argument[moved]).tolist():
            size[b] = self._gathered_bytes(moved[b], have[b], want[b])
        starts = self._start[moved]
        starts = np.where(self._is_early(moved, have, want), self._early[moved], starts)
        temporary, scale = self._temporary[moved], self._scale[moved]
        labels = [
            f"{self._values[r].name}, resharded" if short else self._copy_label(r)
            for r, short in zip(moved.tolist(), temporary.tolist(), strict=True)
        ]
        return moved, Buffers(starts, self._end[moved], size * scale, temporary, temporary, labels)

    def _is_early(self, moved: np.ndarray, have: np.ndarray, want: np.ndarray) -> np.ndarray:
        """Returns [B] whether a copy is made as early as a collective can run beside compute."""
        count = max(have.max(initial=0), want.max(initial=0)) + 1
        kinds, first = numbered((self._place[moved] * count + have) * count + want)
        kind = [a[first].tolist() for a in (moved, have, want)]
        gathered = [self._is_gathered(*one) for one in zip(*kind, strict=True)]
        return (self._early[moved] < self._start[moved]) & np.array(gathered, bool)[kinds]

    def _is_gathered(self, r: int, have: int, want: int) -> bool:
        shardings = table(*self._form(r), self.topology).shardings
        return _is_gathered(shardings[have], shardings[want], self.topology)

    def _gathered_bytes(self, r: int, have: int, want: int) -> float:
        shardings = table(*self._form(r), self.topology).shardings
        return moved_bytes(self.topology, self._values[r], shardings[have], shardings[want], True)

    def _form(self, r: int) -> tuple[tuple[int, ...], float]:
        return self._values[r].shape, self._values[r].itemsize


def _spans(ops: Sequence[Op], live: Liveness) -> tuple[np.ndarray, ...]:
    """Returns for each operation when copies of its operands begin and end, when they begin if a
    collective can run beside compute, whether they lie as the value does, and whether they are
    temporary."""
    runs = np.array([live.runs[op] for op in ops], np.int64)
    start, end, early = runs.copy(), runs + 1, runs.copy()
    by_have, temporary = np.zeros(len(ops), bool), np.ones(len(ops), bool)
    before = _matmuls_before(ops, live)
    for i, op in enumerate(ops):
        if op.kind is Kind.INPUT:
            # What a collective makes cannot be written over an argument still being read.
            start[i], end[i], early[i], temporary[i] = 0, live.end, 0, False
        elif op.kind in (Kind.SLICE, Kind.ENTER):
            start[i], end[i] = live.spans[op]
            early[i] = start[i]
        elif op.kind is Kind.READ:
            by_have[i] = op.results[0] in live.fusion.written
            if not by_have[i]:
                end[i] = max(end[i], live.ends[op.results[0]])
        elif i in before:
            early[i] = before[i]
    return start, end, early, by_have, temporary


def _matmuls_before(ops: Sequence[Op], live: Liveness) -> dict[int, int]:
    """Returns when the last matmul before each matmul runs, in the same loop if in one.

    An asynchronous gather starts then: the compiler hides it behind that matmul.
    """
    last: dict[tuple[int, int] | None, int] = {}
    found = {}
    for i, op in enumerate(ops):
        if is_matmul(op):
            t, span = live.runs[op], live.spans.get(op)
            found[i] = min(t, last.get(span, t))
            last[span] = t
    return found


@functools.lru_cache(maxsize=65536)
def _is_gathered(have: Sharding, want: Sharding, topology: Topology) -> bool:
    """Whether the way to a sharding is a gather that can run beside compute."""
    axes = tuple(a for a in have.axes if a not in want.axes)
    kind = collectives.Kind.ALL_GATHER
    return bool(axes) and collectives.overlaps(kind, topology, axes)


def _stored(topology: Topology, value: Value) -> np.ndarray:
    """Returns what one device's block of a value takes in memory, for each of its shardings."""
    shardings = table(value.shape, value.itemsize, topology).shardings
    return np.array([stored_bytes(topology, value, s) for s in shardings])
