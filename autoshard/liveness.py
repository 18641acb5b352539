"""Which values exist in memory, and when.

Time is the position among the leaf operations. A loop's scanned operands, constants and stacked
results live as long as the loop; a value inside it only within an iteration. A stored value lives
until the last kernel that reads it, directly or to compute something that is not stored.
"""

import dataclasses
import functools

from autoshard.fusion import (
    ALIASES,
    HEAVY,
    IN_PLACE,
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

ADDING = MATMULS | REDUCTIONS
UNFUSED = (MATMULS | HEAVY) - IN_PLACE  # writes over none of its operands


@dataclasses.dataclass(frozen=True, slots=True)
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
    runs: dict[Op, int]  # when it runs
    ends: dict[Value, int]  # when its last reader is done
    spans: dict[Op, tuple[int, int]]  # first and last time of its loop
    end: int  # number of times
    summed: dict[Op, Total]  # what a loop adds its results up to

    @functools.cached_property
    def loops(self) -> tuple[tuple[int, int], ...]:
        """The first and last time of each loop."""
        return tuple(sorted(set(self.spans.values())))

    def reduction_trips(self, op: Op) -> int:
        """Returns how often the partial sums of an operation are combined in a step, at the least.

        Once for a whole loop that only adds them up: XLA combines the total, as long as it is
        sharded like what is added.
        """
        total = self.summed.get(op)
        return op.trips if total is None else total.carry.operand_trips[0]


def liveness(graph: Graph) -> Liveness:
    """Returns the live ranges of a program."""
    spans: dict[Op, tuple[int, int]] = {}
    leaves: list[Op] = []
    _span(graph, None, leaves, spans)
    ops = tuple(leaves)
    readers = readers_of(ops)
    lives = _Lives(ops, fusion(ops, readers), readers, spans)
    ranges = tuple(lives.ranges())
    return Liveness(ranges, lives.fusion, lives.runs, lives.ends, spans, len(ops), lives.summed())


def _span(graph: Graph, loop: tuple[int, int] | None, leaves: list[Op], spans: dict) -> None:
    """Fills `leaves` in order, and `spans`: first and last time of each operation's loop."""
    for op in graph.ops:
        if not op.bodies:
            leaves.append(op)
            if loop is not None:
                spans[op] = loop
            continue
        before = len(leaves)
        for body in op.bodies:
            _span(body, loop, leaves, spans)
        if op.kind is Kind.LOOP:
            inner = (before, len(leaves))
            for leaf in leaves[before:]:
                if spans.get(leaf, loop) is loop:
                    spans[leaf] = inner


class _Lives:
    def __init__(self, ops: tuple[Op, ...], fused: Fusion, readers: Readers, spans: dict):
        self.ops, self.fusion, self.readers, self.spans = ops, fused, readers, spans
        self.runs: dict[Op, int] = {}
        made = {v: op for op in ops for v in op.results}
        for t, op in enumerate(ops):
            self.runs[op] = self._run(op, t, made) if op in fused.kernels else t
        self.ends = self._ends()
        self.taken = self._taken()

    def _run(self, op: Op, t: int, made: dict[Value, Op]) -> int:
        """Returns when XLA's scheduler runs an operation: one that frees more than it makes, as
        soon as it can."""
        roots = self.fusion.kernels[op].roots
        if not roots or sum(v.size_bytes for v in op.results) >= max(r.size_bytes for r in roots):
            return t
        first = self.spans.get(op, (0, 0))[0]
        return min(t, 1 + max(first, *(self.runs[made[r.value]] for r in roots)))

    def ranges(self):
        for t, op in enumerate(self.ops):
            for k, value in enumerate(op.results):
                if value in self.fusion.written:
                    start, stop = self._range(op, t, value)
                    if stop > start:
                        yield LiveRange(op, k, value, start, stop)
            narrow = self._hoisted(op) if op.kind is Kind.SLICE else None
            if narrow is not None:
                start, stop = self.spans[op]
                yield LiveRange(op, 0, narrow, start, stop, operand=0)

    def _range(self, op: Op, t: int, value: Value) -> tuple[int, int]:
        if op.kind in (Kind.INPUT, Kind.CONST, Kind.OUTPUT):
            return 0, len(self.ops)
        start = self.spans[op][0] if op.kind is Kind.STACK else self.runs[op]
        stop = max(start + 1, self.ends[value])
        if op.kind is Kind.CARRY:
            stop = max(stop, self.spans[op][1])
        if value in self.taken and op.kind in (Kind.LEAF, Kind.READ, Kind.SLICE):
            stop = max(start + 1, stop - 1)
        return start, stop

    def _taken(self) -> set[Value]:
        """Returns the values whose buffer the last reader writes its result into.

        An elementwise kernel, a matmul's with its readers too, may write over an operand of the
        result's form that nobody needs after it; an update, over what it updates.
        """
        found: set[Value] = set()
        for op, kernel in self.fusion.kernels.items():
            if op.kind is not Kind.LEAF or op.primitive in UNFUSED:
                continue
            updates = op.primitive in IN_PLACE
            for result in op.results:
                if result not in self.fusion.written:
                    continue
                form, now = (result.shape, result.itemsize), self.runs[op] + 1
                for root in kernel.roots:
                    value = root.value
                    like = (value.shape, value.itemsize) == form and value not in found
                    if updates and root.operand:
                        continue
                    if like and value in self.fusion.written and self.ends[value] == now:
                        found.add(value)
                        break
        return found

    def _ends(self) -> dict[Value, int]:
        """Returns the time after which nobody needs a value, nor anything computed from it.

        Readers come after what they read, but for the next carry's.
        """
        ends = {v: 0 for op in self.ops for v in op.results}
        for op in self.ops:
            if op.kind is Kind.CARRY and len(op.operands) > 1 and op.operands[1] is not None:
                ends[op.operands[1]] = self.spans[op][1]
        written = self.fusion.written
        for op in reversed(self.ops):
            kind = op.kind
            if kind is Kind.INPUT or kind is Kind.OUTPUT:
                continue  # the result's own buffer is counted there
            if kind is Kind.ENTER or kind is Kind.SLICE:
                last = self.spans[op][1]
            else:
                last = self.runs[op] + (kind not in ALIASES)
                if not is_matmul(op):  # its kernel runs once, whoever writes the result
                    for value in op.results:
                        if value not in written and ends[value] > last:
                            last = ends[value]
            for value in op.operands if kind is not Kind.CARRY else op.operands[:1]:
                if value is not None and ends[value] < last:
                    ends[value] = last
        return ends

    def summed(self) -> dict[Op, Total]:
        """Returns the operations whose results a loop does nothing with but add to a carry."""
        carries = {op.results[0]: op for op in self.ops if op.kind is Kind.CARRY}
        found = {}
        for op in self.ops if carries else ():
            if op.primitive not in ADDING or len(op.results) != 1:
                continue
            total = self._total(op.results[0], carries)
            if total is not None:
                found[op] = total
        return found

    def _total(self, value: Value, carries: dict[Value, Op]) -> Total | None:
        """Returns what a value is added up to, if that is all that happens to it."""
        dims: tuple[int, ...] | None = tuple(range(len(value.shape)))
        for _ in range(8):
            readers = self.readers.get(value, [])
            if len(readers) != 1 or readers[0][0].kind is not Kind.LEAF:
                return None
            reader, k = readers[0]
            if reader.primitive in ("add", "add_any") and len(reader.operands) == 2:
                other = reader.operands[1 - k]
                carry = None if other is None else carries.get(other)
                ends = self.readers.get(reader.results[0], [])
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
        if op.operands[0] is None:
            return None
        (value,) = op.results
        found = [r for r, _ in self.readers.get(value, ())]
        stacked = op.operands[0]
        if len(found) != 1 or found[0].primitive != "convert_element_type":
            return None
        narrow = found[0].results[0].itemsize
        if narrow >= value.itemsize:
            return None
        return Value(stacked.shape, found[0].results[0].dtype, narrow, f"{stacked.name}, converted")
