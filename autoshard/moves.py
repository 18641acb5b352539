"""Which arrays are copied from one buffer into another, without being computed with.

A loop's slice is copied out of its stack where an operation updates it or reads it whole from
memory, and copied back where it is stacked. A donated state that a loop reads and writes anew is
copied once more at the step's end: the loop cannot write over what it still reads.
Seen in the TPU compiler's schedules of a decode step, whose cache is all of its time.
"""

from collections.abc import Sequence

from autoshard.fusion import Fusion
from autoshard.graph import Kind, Op


def copied(ops: Sequence[Op], fusion: Fusion, donated: Sequence[bool]) -> dict[int, str]:
    """Returns the borders that copy: id of operation -> the role that is copied, "operands" or
    "results", each its number 0."""
    made = {id(v): op for op in ops for v in op.results}
    found: dict[int, str] = {}
    inputs = iter(donated)
    for op in ops:
        source = op.operands[0] if op.operands else None
        if op.kind is Kind.SLICE and id(op.results[0]) in fusion.written:
            found[id(op)] = "results"
        elif op.kind is Kind.STACK and source is not None and id(source) in fusion.written:
            found[id(op)] = "operands"
        elif op.kind is Kind.INPUT and next(inputs) and source is not None:
            if _is_of_loop(source, op, made, ops):
                found[id(op)] = "results"
    return found


def _is_of_loop(value, state: Op, made: dict[int, Op], ops: Sequence[Op]) -> bool:
    """Whether a state's next value is what a loop stacks that has the state's slices as input."""
    stack = made[id(value)]
    while stack.kind in (Kind.EXIT, Kind.READ) and stack.operands[0] is not None:
        stack = made[id(stack.operands[0])]
    if stack.kind is not Kind.STACK:
        return False
    loop = stack.path.rpartition(".")[0]
    sources = {id(state.results[0])}
    for op in ops:
        if op.kind is Kind.READ and id(op.operands[0]) in sources:
            sources.add(id(op.results[0]))
        if op.kind is Kind.SLICE and id(op.operands[0]) in sources:
            if op.path.rpartition(".")[0] == loop:
                return True
    return False
