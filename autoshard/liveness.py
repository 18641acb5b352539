"""Which values exist in memory, and when.

Time is the position among the leaf operations. A loop's scanned operands, constants and stacked
results live as long as the loop; a value inside it only within an iteration. A stored value lives
until the last kernel that reads it, directly or to compute something that is not stored.
"""

import dataclasses

from autoshard.fusion import (
    ALIASES,
    MATMULS,
    RECASTS,
    REDUCTIONS,
    Fusion,
    Readers,
    fusion,
    is_matmul,
    readers_of,
)
from autoshard.graph import Graph, Kind, Op, Value


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """`value`, defined by `op` as its result number `result`, occupies memory at `start <= t <
    end`.

    `operand`: it lies as that operand of `op` does, not as the result (a copy of a loop's input).
    """

    op: Op
    result: int
    value: Value
    start: int
    end: int
    operand: int | None = None

    def __str__(self) -> str:
        return f"{self.value} live in [{self.start}, {self.end})"


@dataclasses.dataclass(frozen=True)
class Total:
    """What a loop adds an operation's results up to.

    `dims`: dim d of the total is dim `dims[d]` of a result; None: the result is reshaped between.
    """

    carry: Op
    dims: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Live ranges of the values that have buffers."""

    ranges: tuple[LiveRange, ...]
    fusion: Fusion
    runs: dict[int, int]  # id of operation -> when it runs
    ends: dict[int, int]  # id of value -> when its last reader is done
    spans: dict[int, tuple[int, int]]  # id of operation -> first and last time of its loop
    end: int  # number of times
    summed: dict[int, Total]  # id of operation -> what a loop adds its results up to

    def reduction_trips(self, op: Op) -> int:
        """Returns how often the partial sums of an operation are combined in a step, at the least.

        Once for a whole loop that only adds them up: XLA combines the total, as long as it is
        sharded like what is added.
        """
        total = self.summed.get(id(op))
        return op.trips if total is None else total.carry.operand_trips[0]


def liveness(graph: Graph) -> Liveness:
    """Returns the live ranges of a program."""
    spans: dict[int, tuple[int, int]] = {}
    leaves: list[Op] = []
    _span(graph, None, leaves, spans)
    ops = tuple(leaves)
    readers = readers_of(ops)
    lives = _Lives(ops, fusion(ops, readers), readers, spans)
    ranges = tuple(lives.ranges())
    ends = {id(v): lives.last_use(v) for op in ops for v in op.results}
    return Liveness(ranges, lives.fusion, lives.runs, ends, spans, len(ops), lives.summed())


def _span(graph: Graph, loop: tuple[int, int] | None, leaves: list[Op], spans: dict) -> None:
    """Fills `leaves` in order, and `spans`: id of operation -> first and last time of its loop."""
    for op in graph.ops:
        if not op.bodies:
            leaves.append(op)
            if loop is not None:
                spans[id(op)] = loop
            continue
        before = len(leaves)
        for body in op.bodies:
            _span(body, loop, leaves, spans)
        if op.kind is Kind.LOOP:
            inner = (before, len(leaves))
            for leaf in leaves[before:]:
                if spans.get(id(leaf), loop) is loop:
                    spans[id(leaf)] = inner


class _Lives:
    def __init__(self, ops: tuple[Op, ...], fused: Fusion, readers: Readers, spans: dict):
        self.ops, self.fusion, self.readers, self.spans = ops, fused, readers, spans
        self.times = {id(op): t for t, op in enumerate(ops)}
        self._ends: dict[int, int] = {}
        self.runs: dict[int, int] = {}  # id of operation -> when it runs
        made = {id(v): op for op in ops for v in op.results}
        for t, op in enumerate(ops):
            self.runs[id(op)] = self._run(op, t, made)

    def _run(self, op: Op, t: int, made: dict[int, Op]) -> int:
        """Returns when XLA's scheduler runs an operation: one that frees more than it makes, as
        soon as it can."""
        kernel = self.fusion.kernels.get(id(op))
        roots = kernel.roots if kernel else ()
        if not roots or sum(v.size_bytes for v in op.results) >= max(r.size_bytes for r in roots):
            return t
        first = self.spans.get(id(op), (0, 0))[0]
        return min(t, 1 + max(first, *(self.runs[id(made[id(r.value)])] for r in roots)))

    def ranges(self):
        for t, op in enumerate(self.ops):
            for k, value in enumerate(op.results):
                if id(value) in self.fusion.written:
                    start, stop = self._range(op, t, value)
                    if stop > start:
                        yield LiveRange(op, k, value, start, stop)
            narrow = self._hoisted(op)
            if narrow is not None:
                start, stop = self.spans[id(op)]
                yield LiveRange(op, 0, narrow, start, stop, operand=0)

    def _range(self, op: Op, t: int, value: Value) -> tuple[int, int]:
        if op.kind in (Kind.INPUT, Kind.CONST, Kind.OUTPUT):
            return 0, len(self.ops)
        start = self.spans[id(op)][0] if op.kind is Kind.STACK else self.runs[id(op)]
        stop = max(start + 1, self.last_use(value))
        if op.kind is Kind.CARRY:
            stop = max(stop, self.spans[id(op)][1])
        return start, stop

    def last_use(self, value: Value) -> int:
        """Returns the time after which nobody needs the value, nor anything computed from it."""
        if id(value) not in self._ends:
            self._ends[id(value)] = 0
            uses = [self._use(r, k, value) for r, k in self.readers.get(id(value), ())]
            self._ends[id(value)] = max(uses, default=0)
        return self._ends[id(value)]

    def _use(self, reader: Op, k: int, value: Value) -> int:
        if reader.kind in (Kind.ENTER, Kind.SLICE) or (reader.kind is Kind.CARRY and k == 1):
            return self.spans[id(reader)][1]
        if reader.kind in (Kind.INPUT, Kind.OUTPUT):
            return 0  # the result's own buffer is counted there
        now = self.runs[id(reader)] + (reader.kind not in ALIASES)
        fused = [v for v in reader.results if id(v) not in self.fusion.written]
        if is_matmul(reader):
            fused = []  # its kernel runs once, whoever writes the result
        return max([now, *(self.last_use(v) for v in fused)])

    def summed(self) -> dict[int, Total]:
        """Returns the operations whose results a loop does nothing with but add to a carry."""
        carries = {id(op.results[0]): op for op in self.ops if op.kind is Kind.CARRY}
        found = {}
        for op in self.ops:
            if op.primitive not in MATMULS | REDUCTIONS or len(op.results) != 1:
                continue
            total = self._total(op.results[0], carries)
            if total is not None:
                found[id(op)] = total
        return found

    def _total(self, value: Value, carries: dict[int, Op]) -> Total | None:
        """Returns what a value is added up to, if that is all that happens to it."""
        dims: tuple[int, ...] | None = tuple(range(len(value.shape)))
        for _ in range(8):
            readers = self.readers.get(id(value), [])
            if len(readers) != 1 or readers[0][0].kind is not Kind.LEAF:
                return None
            reader, k = readers[0]
            if reader.primitive in ("add", "add_any") and len(reader.operands) == 2:
                carry = carries.get(id(reader.operands[1 - k]))
                ends = self.readers.get(id(reader.results[0]), [])
                only = len(ends) == 1 and ends[0] == (carry, 1)
                return Total(carry, dims) if carry is not None and only else None
            if reader.primitive not in RECASTS:
                return None
            if reader.primitive == "transpose":
                dims = dims and tuple(dims[d] for d in reader.eqn.params["permutation"])
            elif reader.primitive not in ("convert_element_type", "copy"):
                dims = None
            value = reader.results[0]
        return None

    def _hoisted(self, op: Op) -> Value | None:
        """Returns the copy in a narrower dtype that XLA makes of a scanned operand before the loop.

        It does where the first thing that the loop does with a slice is to convert it.
        """
        if op.kind is not Kind.SLICE or op.operands[0] is None:
            return None
        (value,) = op.results
        found = [r for r, _ in self.readers.get(id(value), ())]
        stacked = op.operands[0]
        if len(found) != 1 or found[0].primitive != "convert_element_type":
            return None
        narrow = found[0].results[0].itemsize
        if narrow >= value.itemsize:
            return None
        return Value(stacked.shape, found[0].results[0].dtype, narrow, f"{stacked.name}, converted")
