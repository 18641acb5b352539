"""What XLA writes to memory, and what each kernel reads from there.

Elementwise operations are computed where they are read, matmuls included, as often as they are
read. A matmul is computed once: an elementwise reader joins it and its result is written instead,
unless the value has several readers. So every value is one of

    stored    it has a buffer, or is an alias of one that has
    pending   a matmul's result on its way to the one operation that will write it
    pure      computed from stored values by whoever reads it

Seen in the schedules of the TPU compiler; `tests/test_fusion.py` has examples.
"""

import dataclasses

from autoshard.graph import Kind, Op, Value

MATMULS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())

# Operations that read and write memory themselves: nothing is fused into them.
HEAVY = frozenset(
    """gather scatter scatter-add scatter_add scatter_mul scatter_min scatter_max sort top_k
    approx_top_k cumsum cumprod cummax cummin cumlogsumexp fft cholesky triangular_solve lu qr eigh
    svd schur tridiagonal householder_product reduce_window reduce_window_sum reduce_window_max
    select_and_scatter_add select_and_gather_add dynamic_update_slice random_bits threefry2x32
    rng_bit_generator custom_call ffi_call pallas_call shard_map pure_callback io_callback
    concatenate""".split()
)
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax argmin".split()
)
# Free to repeat, so that a value is kept in the form before them.
RECASTS = frozenset("convert_element_type reshape squeeze expand_dims transpose copy".split())
# Operations that read only a window of what they are given.
WINDOWS = frozenset("slice dynamic_slice".split())
ALIASES = (Kind.ENTER, Kind.EXIT, Kind.READ, Kind.JOIN)

Readers = dict[int, list[tuple[Op, int]]]  # id of a value -> operations and operand numbers


@dataclasses.dataclass(frozen=True)
class Root:
    """A stored value that an operation reads from memory, through its operand number `operand`."""

    value: Value
    operand: int
    size_bytes: float  # of the whole value, or of the window read


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How values come to be.

    Attributes:
      stored: ids of the values that stand in memory, aliases included.
      written: ids of the values that have a buffer of their own.
      roots: id of operation -> what its kernel reads; only operations that write something.
    """

    stored: frozenset[int]
    written: frozenset[int]
    roots: dict[int, tuple[Root, ...]]


def readers_of(ops: tuple[Op, ...]) -> Readers:
    found: Readers = {}
    for op in ops:
        for k, value in enumerate(op.operands):
            if value is not None:
                found.setdefault(id(value), []).append((op, k))
    return found


def fusion(ops: tuple[Op, ...], readers: Readers) -> Fusion:
    """Returns how the values of `ops`, leaves and borders in execution order, come to be."""
    analysis = _Analysis(readers)
    for op in ops:
        analysis.visit(op)
    roots = {id(op): analysis.read(op) for op in ops if op.kind is Kind.LEAF}
    return Fusion(
        frozenset(analysis.stored), frozenset(analysis.written), {i: r for i, r in roots.items() if r}
    )


def final_readers(value: Value, readers: Readers) -> list[Op]:
    """Returns the distinct operations that read a value, looking through READs."""
    found: dict[int, Op] = {}
    for reader, _ in readers.get(id(value), ()):
        if reader.kind is Kind.READ:
            found |= {id(r): r for r in final_readers(reader.results[0], readers)}
        else:
            found[id(reader)] = reader
    return list(found.values())


class _Analysis:
    def __init__(self, readers: Readers):
        self.readers = readers
        self.stored: set[int] = set()
        self.written: set[int] = set()
        self.resident: set[int] = set()  # outlives every reader
        self.pending: set[int] = set()
        self.maker: dict[int, Op] = {}

    def visit(self, op: Op) -> None:
        for value in op.results:
            self.maker[id(value)] = op
            if op.kind is Kind.LEAF:
                self._leaf(op, value)
            else:
                self._border(op, value)

    def _border(self, op: Op, value: Value) -> None:
        source = op.operands[0] if op.operands else None
        if op.kind in (Kind.INPUT, Kind.CONST, Kind.CARRY):
            self.resident.add(id(value))
            self._write(value)
        elif op.kind in (Kind.OUTPUT, Kind.STACK, Kind.EXIT, Kind.JOIN):
            self._write(value)
        elif op.kind is Kind.SLICE:
            self.stored.add(id(value))
            if any(r.primitive in HEAVY for r in final_readers(value, self.readers)):
                self.written.add(id(value))
        elif op.kind is Kind.ENTER:
            self.stored.add(id(value))
            self.resident.add(id(value))
        elif op.kind is Kind.READ and source is not None:
            if id(source) in self.stored:
                self.stored.add(id(value))
                if id(source) in self.written - self.resident:
                    self.written.add(id(value))
            elif id(source) in self.pending:
                self.pending.add(id(value))

    def _write(self, value: Value) -> None:
        self.stored.add(id(value))
        self.written.add(id(value))

    def _leaf(self, op: Op, value: Value) -> None:
        if op.primitive in HEAVY or op.primitive in REDUCTIONS:
            self._write(value)
            return
        found = final_readers(value, self.readers)
        if any(not _takes(r, value) for r in found):
            self._write(value)
        elif op.primitive in MATMULS or any(self._is_pending(v) for v in op.operands):
            if len(found) == 1 and _joins(found[0]):
                self.pending.add(id(value))
            elif len(found) > 1 and self._keeps_operand(op):
                self._write(op.operands[0])  # type: ignore[arg-type]
            else:
                self._write(value)

    def _is_pending(self, value: Value | None) -> bool:
        return value is not None and id(value) in self.pending

    def _keeps_operand(self, op: Op) -> bool:
        """Whether the operand of a recast is to be written instead of its result."""
        source = op.operands[0] if op.operands else None
        if op.primitive not in RECASTS or source is None or id(source) not in self.pending:
            return False
        if source.itemsize > op.results[0].itemsize:
            return False
        self.pending.discard(id(source))
        return True

    def read(self, op: Op) -> tuple[Root, ...]:
        """Returns what the kernel of an operation reads, each stored value once."""
        if not any(id(v) in self.stored for v in op.results):
            return ()
        found: dict[int, Root] = {}
        for k, value in enumerate(op.operands):
            if value is not None:
                self._roots(value, k, float("inf"), found, set())
        return tuple(found.values())

    def _roots(self, value: Value, k: int, window: float, found: dict, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if id(value) in self.stored:
            found.setdefault(id(value), Root(value, k, min(window, value.size_bytes)))
            return
        op = self.maker[id(value)]
        if op.primitive in WINDOWS:
            window = min(window, value.size_bytes)
        for operand in op.operands:
            if operand is not None:
                self._roots(operand, k, window, found, seen)


def _takes(reader: Op, value: Value) -> bool:
    """Whether a reader can compute the value itself, without finding it in memory."""
    if reader.kind in (Kind.STACK, Kind.OUTPUT, Kind.INPUT, Kind.EXIT):
        return True
    if reader.kind is Kind.CARRY:
        return value is reader.operands[1]
    return reader.kind is Kind.LEAF and reader.primitive not in HEAVY


def _joins(reader: Op) -> bool:
    """Whether a reader is computed in the kernel of the matmul before it."""
    if reader.kind in (Kind.STACK, Kind.OUTPUT, Kind.INPUT, Kind.CARRY):
        return True
    plain = reader.primitive not in MATMULS | REDUCTIONS | HEAVY
    return reader.kind is Kind.LEAF and plain
