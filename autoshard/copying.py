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
from autoshard.reads import Reads
from autoshard.resharding import table
from autoshard.sharding import Sharding
from autoshard.stored import moved_bytes, stored_bytes
from autoshard.topology import Topology
from autoshard.vmem import Buffers

COPIED = (Kind.LEAF, Kind.SLICE, Kind.ENTER, Kind.READ)  # and donated inputs


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
        self.reads, self.topology = reads, topology
        given = {op: d for op, d in zip(_inputs(ops), donated, strict=True)}
        arguments = {op.results[0] for op in _inputs(ops)}
        before = _matmuls_before(ops, live)
        rows, self._values, self.labels, sizes = [], [], [], []
        places: dict[tuple, int] = {}
        count = 0
        for i, k, *_ in reads.ends:
            op = ops[i]
            value = op.operands[k]
            assert value is not None
            form = (value.shape, value.itemsize)
            if form not in places:
                sizes.append(_stored(topology, value))
                places[form] = count
                count += len(sizes[-1])
            self._values.append(value)
            t = live.runs[op]
            start, end, early, by_have = t, t + 1, t, False
            temporary, label = True, f"{value.name}, resharded"
            if op.kind is Kind.INPUT:
                # What a collective makes cannot be written over an argument still being read.
                start, end, early, temporary = 0, live.end, 0, False
                label = f"copy of {op.results[0].name}"
            elif op.kind in (Kind.SLICE, Kind.ENTER):
                start, end = live.spans[op]
                early = start
            elif op.kind is Kind.READ:
                by_have = op.results[0] in live.fusion.written
                end = end if by_have else max(end, live.ends[op.results[0]])
            elif is_matmul(op):
                early = before[i]
            kept = op.kind in COPIED or given.get(op, False)
            scale = gaps if temporary else 1.0
            rows.append((kept, start, end, early, by_have, temporary, places[form], scale))
            self.labels.append(label)
        columns = np.array(rows, np.float64).reshape(-1, 8).T
        self._scale = columns[-1]
        kept, start, end, early, by_have, temporary, place = columns[:-1].astype(np.int64)
        self._kept, self._by_have, self._temporary = kept > 0, by_have > 0, temporary > 0
        self._start, self._end, self._early, self._place = start, end, early, place
        self._sizes = np.concatenate([np.zeros(0), *sizes])
        self._argument = np.array([v in arguments for v in self._values], bool) & ~self._by_have

    def __str__(self) -> str:
        return f"{len(self.labels)} operands, {np.count_nonzero(self._kept)} of them copied"

    def buffers(self, choices: Sequence[int]) -> tuple[np.ndarray, Buffers]:
        """Returns which reads [B] are copied under the choices, and the buffers of the copies."""
        moved, have, want = self.reads.moved(choices)
        kept = self._kept[moved]
        moved, have, want = moved[kept], have[kept], want[kept]
        size = self._sizes[self._place[moved] + np.where(self._by_have[moved], have, want)]
        for b in np.flatnonzero(self._argument[moved]).tolist():
            size[b] = self._gathered_bytes(moved[b], have[b], want[b])
        starts = self._start[moved]
        for b in np.flatnonzero(self._early[moved] < starts).tolist():
            shardings = table(*self._form(moved[b]), self.topology).shardings
            if _is_gathered(shardings[have[b]], shardings[want[b]], self.topology):
                starts[b] = self._early[moved[b]]
        labels = [self.labels[r] for r in moved.tolist()]
        temporary, scale = self._temporary[moved], self._scale[moved]
        return moved, Buffers(starts, self._end[moved], size * scale, temporary, labels)

    def _gathered_bytes(self, r: int, have: int, want: int) -> float:
        shardings = table(*self._form(r), self.topology).shardings
        return moved_bytes(self.topology, self._values[r], shardings[have], shardings[want], True)

    def _form(self, r: int) -> tuple[tuple[int, ...], float]:
        return self._values[r].shape, self._values[r].itemsize


def _inputs(ops: Sequence[Op]) -> list[Op]:
    return [op for op in ops if op.kind is Kind.INPUT]


def _matmuls_before(ops: Sequence[Op], live: Liveness) -> list[int]:
    """Returns when the last matmul before each operation runs, in the same loop if in one.

    An asynchronous gather starts then: the compiler hides it behind that matmul.
    """
    last: dict[tuple[int, int] | None, int] = {}
    found = []
    for op in ops:
        t, span = live.runs[op], live.spans.get(op)
        found.append(min(t, last.get(span, t)))
        if is_matmul(op):
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
