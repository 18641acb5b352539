"""What XLA writes to memory, and what each kernel reads from there.

Elementwise operations are computed where they are read, matmuls included, as often as they are
read. A matmul is computed once: an elementwise reader joins it and its result is written instead,
unless the value has several readers. So every value is one of

    stored    it has a buffer, or is an alias of one that has
    pending   a matmul's result on its way to the one operation that will write it
    pure      computed from stored values by whoever reads it

A stored value that several readers want in a narrower dtype is kept in that form too (the bfloat16
copy of a weight).
The new state is written by kernels that compute all of it at once: what they read, they read once.

Seen in the schedules of the TPU compiler; `tests/test_fusion.py` has examples.
"""

import dataclasses
import math
from typing import NamedTuple

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
# Of these, those that write into their first operand.
IN_PLACE = frozenset(p for p in HEAVY if p.startswith("scatter") or p == "dynamic_update_slice")
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax argmin".split()
)
_KERNELS = REDUCTIONS | HEAVY  # what no matmul's kernel computes
_MOVES = frozenset("slice pad reshape".split())  # some of them move elements within tiles
RECASTS = frozenset("convert_element_type broadcast_in_dim reshape transpose copy".split())
# Operations that read only a window of what they are given.
WINDOWS = frozenset("slice dynamic_slice".split())
ENDS = frozenset(
    (Kind.STACK, Kind.OUTPUT, Kind.INPUT, Kind.CARRY)
)  # have buffers for what they read
ALIASES = frozenset((Kind.ENTER, Kind.EXIT, Kind.READ, Kind.JOIN))

# Vector operations for an element; 1 where not listed. Of the TPU compiler's estimates for softmax.
SLOW = (
    "exp exp2 log log1p expm1 tanh logistic erf erfc erf_inv pow sqrt rsqrt cbrt sin cos tan div "
    "atan2 rem"
)
MOVES = "reshape squeeze expand_dims broadcast_in_dim slice iota copy"
VECTOR_OPS: dict[str, float] = {str(name): 20.0 for name in SLOW.split()}
VECTOR_OPS |= {str(name): 0.0 for name in MOVES.split()}
MAX_WORK = 64  # operations that several readers would each repeat

Readers = dict[Value, list[tuple[Op, int]]]  # operations and operand numbers


class Root(NamedTuple):
    """A stored value that an operation reads from memory, through its operand number `operand`."""

    value: Value
    operand: int
    size_bytes: float  # of the whole value, or of the window read


class Kernel(NamedTuple):
    """What an operation reads, and the elementwise operations that it computes on the way.

    `vector_ops`: through each operand number, their count over the whole arrays.
    """

    roots: tuple[Root, ...]
    vector_ops: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How values come to be.

    Attributes:
      stored: values that stand in memory, aliases included.
      written: values that have a buffer of their own.
      ended: values that are computed right into the buffer of a border: a result, a
        stack, the next carry.
      free: values that are a scalar or an index all over, or computed elementwise from
        such that depend on no argument (masks): never worth a buffer, and each reader has its own.
      kernels: only of operations that have one.
    """

    stored: frozenset[Value]
    written: frozenset[Value]
    ended: frozenset[Value]
    free: frozenset[Value]
    kernels: dict[Op, Kernel]


def readers_of(ops: tuple[Op, ...]) -> Readers:
    found: Readers = {}
    for op in ops:
        for k, value in enumerate(op.operands):
            if value in found:
                found[value].append((op, k))
            elif value is not None:
                found[value] = [(op, k)]
    return found


def fusion(ops: tuple[Op, ...], readers: Readers) -> Fusion:
    """Returns how the values of `ops`, leaves and borders in execution order, come to be."""
    analysis = _Analysis(ops, readers)
    for op in ops:
        analysis.visit(op)
    kernels = {op: analysis.kernel(op) for op in ops if op.kind is Kind.LEAF}
    return Fusion(
        stored=frozenset(analysis.stored),
        written=frozenset(analysis.written),
        ended=frozenset(analysis.ended),
        free=frozenset(analysis.free),
        kernels={op: k for op, k in kernels.items() if k is not None},
    )


def is_matmul(op: Op) -> bool:
    """Whether an operation runs on the matrix unit; a dot that sums nothing is a product."""
    if op.primitive != "dot_general":
        return op.primitive in MATMULS
    return op.contracted > 1


def final_readers(value: Value, readers: Readers) -> list[Op]:
    """Returns the distinct operations that read a value, looking through READs."""
    direct = readers.get(value, ())
    if len(direct) == 1:
        ((reader, _),) = direct
        return final_readers(reader.results[0], readers) if reader.kind is Kind.READ else [reader]
    found: dict[Op, None] = {}
    for reader, _ in direct:
        if reader.kind is Kind.READ:
            found |= dict.fromkeys(final_readers(reader.results[0], readers))
        else:
            found[reader] = None
    return list(found)


class _Analysis:
    def __init__(self, ops: tuple[Op, ...], readers: Readers):
        self.readers = readers
        self.order = {op: t for t, op in enumerate(ops)}
        self.wanted, self.last = _wanted(ops)
        self.inside: set[Value] = set()  # between a matmul and where its readers run together
        self.back: set[Value] = set()  # where what a reshape parted is whole again
        self.origin: dict[Value, Value] = {}  # of a pending value: the matmul's result
        self.stored: set[Value] = set()
        self.written: set[Value] = set()
        self.resident: set[Value] = set()  # outlives every reader
        self.pending: set[Value] = set()
        self.chain: dict[Value, tuple[Value, ...]] = {}
        self.work: dict[Value, int] = {}  # operations to compute a pure value
        self.free: set[Value] = set()
        self.constant: set[Value] = set()  # depends on no argument
        self.filled: set[Value] = set()  # one scalar or index all over
        self.ended: set[Value] = set()
        self.updates: dict[Value, Root] = {}  # what the kernels of the new state read so far
        self.maker: dict[Value, Op] = {}

    def visit(self, op: Op) -> None:
        for value in op.results:
            self.maker[value] = op
            if op.kind is Kind.LEAF:
                self._leaf(op, value)
            else:
                self._border(op, value)

    def _border(self, op: Op, value: Value) -> None:
        source = op.operands[0] if op.operands else None
        if op.kind in (Kind.INPUT, Kind.CONST, Kind.CARRY):
            self.resident.add(value)
            self._write(value)
        elif op.kind in (Kind.ENTER, Kind.READ) and source is not None and source in self.free:
            self.free.add(value)
            if source in self.filled:
                self.filled.add(value)
            if op.kind is Kind.READ and source in self.constant:
                self.constant.add(value)
        elif op.kind in (Kind.OUTPUT, Kind.STACK, Kind.EXIT, Kind.JOIN):
            self._write(value)
        elif op.kind is Kind.SLICE:
            self.stored.add(value)
            if any(r.primitive in HEAVY for r in final_readers(value, self.readers)):
                self.written.add(value)
        elif op.kind is Kind.ENTER and source is not None and source in self.stored:
            self.stored.add(value)
            self.resident.add(value)
        elif op.kind is Kind.READ and source is not None:
            self.work[value] = self.work.get(source, 0)
            if source in self.stored:
                self.stored.add(value)
                if source in self.written and source not in self.resident:
                    self.written.add(value)
            elif source in self.pending:
                self.pending.add(value)
                self.chain[value] = (*self.chain[source], value)
                self.origin[value] = self.origin[source]

    def _write(self, value: Value) -> None:
        self.stored.add(value)
        self.written.add(value)

    def _leaf(self, op: Op, value: Value) -> None:
        moves = op.primitive in _MOVES and value not in self.back and _moves_elements(op)
        if op.primitive in _KERNELS or (moves and not self._returns(op, value)):
            self._write(value)
            return
        operands = [v for v in op.operands if v is not None]
        constant = self.constant.issuperset(operands)
        if constant:
            self.constant.add(value)
        if self._fills(op, operands):
            self.filled.add(value)
            self.free.add(value)
            return
        if constant and self._masks(op, value, operands):
            self.free.add(value)
            return
        waits = not self.pending.isdisjoint(operands)
        if waits:
            self._part(op, operands)
            waits = not self.pending.isdisjoint(operands)
        if value in self.wanted:
            self._write(value)
        elif value in self.inside:
            self._carry(value, operands)
        elif waits or is_matmul(op):
            self._carry(value, operands)
            self.chain[value] = self._chain(value, operands)
            found = final_readers(value, self.readers)
            if not (len(found) == 1 and _joins(found[0])) and not self._rejoins(value):
                self._keep(value)
        else:
            self._compute(op, value, operands)
        if value in self.last and value not in self.stored:
            self.ended.add(value)

    def _returns(self, op: Op, value: Value) -> bool:
        """Whether all that is computed from a reshape is reduced, or reshaped back.

        XLA then computes it in the shape before, as in a group norm.
        """
        if op.primitive != "reshape" or op.operands[0] is None:
            return False
        ahead, region, back = [value], {value}, set()
        while ahead and len(region) <= MAX_WORK:
            for reader in final_readers(ahead.pop(), self.readers):
                if reader.primitive in REDUCTIONS:
                    continue
                (result, *more) = reader.results
                if reader.primitive == "reshape" and result.shape == op.operands[0].shape:
                    back.add(result)
                elif more or result.shape != value.shape or not _joins(reader):
                    return False
                elif reader.kind is not Kind.LEAF or reader.primitive in _MOVES:
                    return False
                elif result not in region:
                    region.add(result)
                    ahead.append(result)
        if not ahead:
            self.back |= back
        return not ahead

    def _compute(self, op: Op, value: Value, operands: list[Value]) -> None:
        """Leaves a value to its readers to compute, unless several would do so at a high cost."""
        work = 1
        for v in operands:
            work += self.work.get(v, 0)
        direct = self.readers.get(value, ())
        if len(direct) > 1 or (direct and direct[0][0].kind is Kind.READ):
            found = final_readers(value, self.readers)
            if len(found) > 1 and (
                self._is_narrower(op) or self._is_costly(value, found) or work > MAX_WORK
            ):
                self._write(value)
                return
        self.work[value] = work

    def _carry(self, value: Value, operands: list[Value]) -> None:
        """Marks a result as still on its way, and notes which matmul it comes from."""
        self.pending.add(value)
        self.chain.setdefault(value, (value,))
        sources = [v for v in operands if v in self.pending]
        self.origin[value] = self.origin[sources[-1]] if sources else value

    def _rejoins(self, value: Value) -> bool:
        """Whether all that is computed from a value runs together again in one elementwise result.

        Then one kernel computes it, and only that result may need a buffer.
        """
        left = {value: final_readers(value, self.readers)}
        inside: list[Value] = []
        for _ in range(MAX_WORK):
            ahead = [r for readers in left.values() for r in readers]
            if not ahead or not all(_joins(r) and r.kind is Kind.LEAF for r in ahead):
                return False
            if any(len(r.results) > 1 for r in ahead):
                return False
            reader = min(ahead, key=lambda r: self.order[r])
            for source, readers in list(left.items()):
                left[source] = [r for r in readers if r is not reader]
                if not left[source]:
                    del left[source]
            (result,) = reader.results
            if not left:
                self.inside |= set(inside)
                return True
            inside.append(result)
            left[result] = final_readers(result, self.readers)
        return False

    def _part(self, op: Op, operands: list[Value]) -> None:
        """Writes all but the last of several matmuls that an operation would join.

        All of them before a product of a `dot_general`: rather than that, which is larger.
        """
        waiting = {self.origin[v]: v for v in operands if v in self.pending}
        for value in list(waiting.values())[:-1]:
            self._keep(value)
        if op.primitive == "dot_general" and not is_matmul(op):
            for value in operands:
                if value in self.pending:
                    self._keep(value)

    def _keep(self, value: Value) -> None:
        """Writes a matmul's result, or the form of it that is worth a buffer."""
        chain = self.chain[value]
        self.pending.difference_update(chain)
        self._write(chain[0])

    def _chain(self, value: Value, operands: list[Value]) -> tuple[Value, ...]:
        """Returns the values from the one to write, should a buffer be needed, to `value`.

        That is an earlier and narrower one if only casts and scalars stand between.
        """
        arrays = [v for v in operands if v.shape and v not in self.filled]
        if len(arrays) != 1 or arrays[0] not in self.pending:
            return (value,)
        before = self.chain.get(arrays[0], (arrays[0],))
        narrower = before[0].size_bytes < value.size_bytes
        return (*before, value) if narrower else (value,)

    def _fills(self, op: Op, operands: list[Value]) -> bool:
        """Whether an operation only fills an array with a scalar or an index."""
        for v in operands:
            if v.shape:
                return op.primitive in RECASTS and op.operands[0] in self.filled
        return True

    def _masks(self, op: Op, value: Value, operands: list[Value]) -> bool:
        """Whether a constant follows from scalars and indices alone, for readers that compute it.

        Shardy then computes it anew for each reader, in the sharding that this one wants.
        """
        if is_matmul(op) or value in self.wanted:
            return False
        return all([not v.shape or v in self.free for v in operands])

    def _is_costly(self, value: Value, found: list[Op]) -> bool:
        """Whether a matmul and others would each compute the value from several large arrays.

        A residual chain's gradient is one: else every layer would read all layers after it.
        """
        if not any(is_matmul(r) for r in found):
            return False
        roots: dict[Value, Root] = {}
        self._roots(value, 0, math.inf, roots, {value})
        return sum(r.size_bytes >= value.size_bytes for r in roots.values()) > 1

    def _is_narrower(self, op: Op) -> bool:
        """Whether an operation converts a stored array to a narrower dtype."""
        source = op.operands[0] if op.operands else None
        if op.primitive != "convert_element_type" or source is None:
            return False
        return source in self.stored and op.results[0].itemsize < source.itemsize

    def kernel(self, op: Op) -> Kernel | None:
        """Returns the kernel of an operation, which reads each stored value once."""
        matmul = is_matmul(op)
        if not matmul and not any([v in self.stored or v in self.ended for v in op.results]):
            return None
        found: dict[Value, Root] = {}
        vector_ops: list[tuple[int, float]] = []
        seen: set[Value] = set()
        for k, value in enumerate(op.operands):
            if value is None:
                continue
            count = 0.0
            if value not in seen:
                seen.add(value)
                if value in self.stored:
                    found[value] = Root(value, k, value.size_bytes)
                else:
                    count = self._roots(value, k, math.inf, found, seen)
            vector_ops.append((k, count + _vector_ops(op, value, k)))
        if not matmul and self.ended.issuperset(op.results):
            found = {v: root for v, root in found.items() if v not in self.updates}
            self.updates |= found
        return Kernel(tuple(found.values()), tuple(vector_ops))

    def _roots(
        self, value: Value, k: int, window: float, found: dict[Value, Root], seen: set[Value]
    ) -> float:
        """Finds the roots of a value that is not stored, as far as they are not yet seen, and
        returns the vector operations between them and it."""
        op = self.maker[value]
        if is_matmul(op):
            return 0.0  # its own kernel reads them
        if op.primitive in WINDOWS:
            window = min(window, value.size_bytes)
        count = 0.0
        for v in op.operands:
            if v is None or v in seen:
                continue
            seen.add(v)
            if v in self.stored:
                found[v] = Root(v, k, min(window, v.size_bytes))
            else:
                count += self._roots(v, k, window, found, seen)
        return count + VECTOR_OPS.get(op.primitive, 1.0) * math.prod(value.shape)


def _vector_ops(op: Op, value: Value, k: int) -> float:
    """Returns the vector operations of `op` itself, counted through its first operand."""
    if k or is_matmul(op) or op.primitive in HEAVY:
        return 0.0
    return VECTOR_OPS.get(op.primitive, 1.0) * math.prod(value.shape)


def _moves_elements(op: Op) -> bool:
    """Whether elements change places within tiles: the minor dim splits or merges, or a stride."""
    if op.primitive == "slice":
        return any(stride != 1 for stride in op.eqn.params["strides"] or ())
    if op.primitive == "pad":
        return any(interior for _, _, interior in op.eqn.params["padding_config"])
    if op.primitive != "reshape" or op.operands[0] is None:
        return False
    before, after = ([n for n in v.shape if n > 1] for v in (op.operands[0], op.results[0]))
    return bool(before and after) and before[-1] != after[-1]


def _wanted(ops: tuple[Op, ...]) -> tuple[set[Value | None], set[Value | None]]:
    """Returns the values that some reader wants in memory, since it cannot compute them itself,
    and those that are computed into the buffer of a border."""
    wanted: set[Value | None] = set()
    last: set[Value | None] = set()
    for op in ops:
        if op.kind in ENDS:
            last.update(op.operands)
            if op.kind is Kind.CARRY:
                wanted.update(op.operands[:1])
        elif op.kind is not Kind.READ and (op.kind is not Kind.LEAF or op.primitive in HEAVY):
            wanted.update(op.operands)
    for op in reversed(ops):
        if op.kind is Kind.READ:
            for found in (wanted, last):
                if op.results[0] in found:
                    found.update(op.operands)
    return wanted, last


def _joins(reader: Op) -> bool:
    """Whether a reader is computed in the kernel of the matmul before it."""
    if reader.kind in ENDS:
        return True
    if reader.kind is not Kind.LEAF or reader.primitive in _KERNELS:
        return False
    return not is_matmul(reader)
