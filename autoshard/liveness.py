"""Which values exist in memory, and when.

Time is the position among the leaf operations. A loop's scanned operands, constants and stacked
results live as long as the loop; a value inside it only within an iteration. XLA fuses elementwise
operations into their readers, so
that their results are never written: such values are not *materialised*.
"""

import dataclasses

from autoshard.graph import Graph, Kind, Op, Value

# Operations whose result XLA writes to memory and whose operands it reads from there.
HEAVY = frozenset(
    """dot_general ragged_dot ragged_dot_general conv_general_dilated gather scatter scatter-add
    scatter_add scatter_mul scatter_min scatter_max sort top_k approx_top_k cumsum cumprod cummax
    cummin cumlogsumexp fft cholesky triangular_solve lu qr eigh svd schur tridiagonal
    householder_product reduce_window reduce_window_sum reduce_window_max select_and_scatter_add
    select_and_gather_add dynamic_update_slice random_bits threefry2x32 rng_bit_generator
    custom_call ffi_call pallas_call shard_map pure_callback io_callback concatenate""".split()
)
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax argmin".split()
)
RESIDENT = (Kind.INPUT, Kind.CONST, Kind.CARRY, Kind.ENTER)  # their values outlive every reader
ALIASES = (Kind.ENTER, Kind.EXIT, Kind.READ, Kind.JOIN)


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """`value`, defined by `op` as its result number `result`, occupies memory at `start <= t <
    end`."""

    op: Op
    result: int
    value: Value
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.value} live in [{self.start}, {self.end})"


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Live ranges of the materialised values.

    `stored` holds the ids of all values that are read from memory: the materialised ones and their
    aliases.
    """

    ranges: tuple[LiveRange, ...]
    stored: frozenset[int]
    times: dict[int, int]  # id of operation -> its time
    end: int  # number of times


def liveness(graph: Graph, donated: tuple[bool, ...]) -> Liveness:
    """Returns the live ranges of a program; `donated[i]` belongs to its i-th INPUT."""
    spans: dict[int, tuple[int, int]] = {}
    leaves: list[Op] = []
    _span(graph, None, leaves, spans)
    end = len(leaves)
    times = {id(op): t for t, op in enumerate(leaves)}
    readers: dict[int, list[tuple[Op, int]]] = {}
    for op in leaves:
        for k, value in enumerate(op.operands):
            if value is not None:
                readers.setdefault(id(value), []).append((op, k))
    written: set[int] = set()
    resident: set[int] = set()
    stored: set[int] = set()
    for op in leaves:
        if op.kind in RESIDENT:
            resident |= {id(v) for v in op.results}
        written |= {
            id(v) for v in op.results if _is_materialised(op, v, readers, written - resident)
        }
        if op.kind is Kind.SLICE or (
            op.kind in ALIASES and any(id(v) in stored for v in op.operands)
        ):
            stored |= {id(v) for v in op.results}
        stored |= {id(v) for v in op.results} & written
    ranges = []
    for t, op in enumerate(leaves):
        for k, value in enumerate(op.results):
            if id(value) not in written:
                continue
            start, stop = _range(op, t, readers.get(id(value), []), times, spans, end)
            if stop > start:
                ranges.append(LiveRange(op, k, value, start, stop))
    return Liveness(tuple(ranges), frozenset(stored), times, end)


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


def _range(op: Op, t: int, readers, times, spans, end: int) -> tuple[int, int]:
    if op.kind in (Kind.INPUT, Kind.CONST, Kind.OUTPUT):
        return 0, end
    start = spans[id(op)][0] if op.kind is Kind.STACK else t
    stop = start + 1
    for reader, k in readers:
        stop = max(stop, _use_end(reader, k, times, spans))
    if op.kind is Kind.CARRY:
        stop = max(stop, spans[id(op)][1])
    return start, stop


def _use_end(reader: Op, operand: int, times, spans) -> int:
    """Returns the time after which a reader no longer needs the operand."""
    if reader.kind in (Kind.ENTER, Kind.SLICE) or (reader.kind is Kind.CARRY and operand == 1):
        return spans[id(reader)][1]
    if reader.kind in (Kind.INPUT, Kind.OUTPUT):
        return 0  # the result's own buffer is counted there
    return times[id(reader)] + (reader.kind not in ALIASES)


def _is_materialised(op: Op, value: Value, readers, mortal: set[int]) -> bool:
    """Returns whether a result of `op` occupies a buffer of its own.

    An alias takes over the buffer of a value that has no other reader; it owns none where the
    original stays alive.
    """
    if op.kind in (Kind.INPUT, Kind.CONST, Kind.OUTPUT, Kind.STACK, Kind.CARRY):
        return True
    if op.kind in (Kind.EXIT, Kind.JOIN):
        return True
    if op.kind is Kind.READ:
        return id(op.operands[0]) in mortal
    if op.kind is Kind.ENTER:
        return False
    flat = _final_readers(value, readers)
    if op.kind is Kind.SLICE:
        return any(r.primitive in HEAVY for r in flat)
    if op.primitive in HEAVY:
        return True
    if all(v is None or not v.shape for v in op.operands):
        return False  # a broadcast scalar or iota is computed where it is read
    return len(flat) > 1 or not all(is_fusible(r) for r in flat)


def _final_readers(value: Value, readers) -> list[Op]:
    """Returns the operations that read a value, looking through READs."""
    found = []
    for reader, _ in readers.get(id(value), []):
        found += (
            _final_readers(reader.results[0], readers) if reader.kind is Kind.READ else [reader]
        )
    return found


def is_fusible(op: Op) -> bool:
    """Returns whether XLA can compute the operand inside this reader, without writing it first."""
    return op.kind is Kind.STACK or (op.kind is Kind.LEAF and op.primitive not in HEAVY)
