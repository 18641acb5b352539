"""Which arrays are copied from one buffer into another, and which travel in a narrower dtype.

A loop's slice is copied out of its stack where an operation updates it or reads it whole from
memory, and copied back where it is stacked. A donated state that a loop reads and writes anew is
copied once more at the step's end: the loop cannot write over what it still reads.
Seen in the TPU compiler's schedules of a decode step, whose cache is all of its time.
"""

from collections.abc import Sequence

import jax

from autoshard.fusion import Fusion, is_matmul
from autoshard.graph import Kind, Op, Value

PASSES = frozenset((Kind.READ, Kind.ENTER, Kind.SLICE))  # the value or a part of it, unchanged


def copied(ops: Sequence[Op], fusion: Fusion, donated: Sequence[bool]) -> dict[Op, str]:
    """Returns the borders that copy: the role of each that is copied, "operands" or
    "results", each its number 0."""
    found: dict[Op, str] = {}
    if not any([op.kind is Kind.SLICE or op.kind is Kind.STACK for op in ops]):
        return found
    made = {v: op for op in ops for v in op.results}
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
    found: list[tuple[Op, int]] = []
    by_matmuls: set[Value | None] = set()  # read by one, or passed on to such
    by_others: set[Value | None] = set()
    for op in ops:
        if op.kind in (Kind.CARRY, Kind.INPUT):  # they read what is defined later
            by_others.update(op.operands)
    for op in reversed(ops):
        if op.kind in PASSES:
            wants = op.results[0] in by_matmuls and op.results[0] not in by_others
        else:
            wants = op.kind is Kind.LEAF and is_matmul(op) and _takes_bfloat16(op)
        if wants:
            by_matmuls.update(op.operands)
            found += [(op, k) for k, v in enumerate(op.operands) if v and v.dtype == "float32"]
        else:
            by_others.update(op.operands)
    made = {v: op for op in ops for v in op.results} if found else {}
    return frozenset((op, k) for op, k in found if _is_raw(op, k, made))


def _is_raw(op: Op, k: int, made: dict[Value, Op]) -> bool:
    """Whether an operand is an argument or a matmul's result, or a part of one."""
    value = op.operands[k]
    while value is not None:
        op = made[value]
        if op.kind not in PASSES:
            return op.kind is Kind.INPUT or (op.kind is Kind.LEAF and is_matmul(op))
        value = op.operands[0]
    return False


def _takes_bfloat16(op: Op) -> bool:
    precision = op.eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in pair)
