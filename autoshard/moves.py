"""Which arrays are copied from one buffer into another, and which travel in a narrower dtype.

A loop's slice is copied out of its stack where an operation updates it or reads it whole from
memory, and copied back where it is stacked. A donated state that a loop reads and writes anew is
copied once more at the step's end: the loop cannot write over what it still reads.
Seen in the TPU compiler's schedules of a decode step, whose cache is all of its time.
"""

from collections.abc import Sequence

import jax

from autoshard.fusion import Fusion, is_matmul, readers_of
from autoshard.graph import Kind, Op, Value

PASSES = (Kind.READ, Kind.ENTER, Kind.SLICE)  # the value or a part of it, unchanged


def copied(ops: Sequence[Op], fusion: Fusion, donated: Sequence[bool]) -> dict[Op, str]:
    """Returns the borders that copy: the role of each that is copied, "operands" or
    "results", each its number 0."""
    made = {v: op for op in ops for v in op.results}
    found: dict[Op, str] = {}
    inputs = iter(donated)
    for op in ops:
        source = op.operands[0] if op.operands else None
        if op.kind is Kind.SLICE and op.results[0] in fusion.written:
            found[op] = "results"
        elif op.kind is Kind.STACK and source is not None and source in fusion.written:
            found[op] = "operands"
        elif op.kind is Kind.INPUT and next(inputs) and source is not None:
            if _is_of_loop(source, op, made, ops):
                found[op] = "results"
    return found


def _is_of_loop(value, state: Op, made: dict[Value, Op], ops: Sequence[Op]) -> bool:
    """Whether a state's next value is what a loop stacks that has the state's slices as input."""
    stack = made[value]
    while stack.kind in (Kind.EXIT, Kind.READ) and stack.operands[0] is not None:
        stack = made[stack.operands[0]]
    if stack.kind is not Kind.STACK:
        return False
    loop = stack.path.rpartition(".")[0]
    sources = {state.results[0]}
    for op in ops:
        if op.kind is Kind.READ and op.operands[0] in sources:
            sources.add(op.results[0])
        if op.kind is Kind.SLICE and op.operands[0] in sources:
            if op.path.rpartition(".")[0] == loop:
                return True
    return False


def narrowed(ops: Sequence[Op]) -> frozenset[tuple[Op, int]]:
    """Returns the reads, (operation, operand number), that a TPU moves as bfloat16.

    At default precision a matmul takes float32 as bfloat16. Where nothing but matmuls want what a
    collective brings of an argument or of a matmul's result, XLA converts before it: of twelve
    small v5e programs, f32 moved in that width after arithmetic and for other readers alone.
    """
    readers = readers_of(tuple(ops))
    made = {v: op for op in ops for v in op.results}
    wanted: dict[Value, bool] = {}

    def by_matmuls(op: Op) -> bool:
        if op.kind is Kind.LEAF:
            return is_matmul(op) and _takes_bfloat16(op)
        if op.kind not in PASSES:
            return False
        value = op.results[0]
        if value not in wanted:
            found = [r for r, _ in readers.get(value, ())]
            wanted[value] = bool(found) and all(map(by_matmuls, found))
        return wanted[value]

    return frozenset(
        (op, k)
        for op in ops
        for k, value in enumerate(op.operands)
        if value is not None
        and value.dtype == "float32"
        and by_matmuls(op)
        and _is_raw(value, made)
    )


def _is_raw(value: Value, made: dict[Value, Op]) -> bool:
    """Whether a value is an argument or a matmul's result, or a part of one."""
    op = made[value]
    while op.kind in PASSES and op.operands[0] is not None:
        op = made[op.operands[0]]
    return op.kind is Kind.INPUT or (op.kind is Kind.LEAF and is_matmul(op))


def _takes_bfloat16(op: Op) -> bool:
    precision = op.eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in pair)
