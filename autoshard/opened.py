"""Values that are left to the partitioner, so that XLA may do away with the reshapes around them.

A GroupNorm splits [B, Y, X, C] into groups of channels, computes, and merges them again. XLA moves
such reshapes through elementwise operations and reductions, but not across a constraint: with one
on every result each lies in memory as it is written, few channels to a register, and a step of a
U-Net takes five times as long. Between a reshape that splits dims and what follows it nothing is
sharded otherwise than the reshape's operand, so the partitioner has no choice either.
"""

from collections.abc import Sequence

from autoshard.cost import Choices
from autoshard.fusion import HEAVY, MATMULS, WINDOWS
from autoshard.graph import Kind, Op, Value

_KEPT = MATMULS | HEAVY | WINDOWS | {"sharding_constraint", "optimization_barrier"}


def opened(choices: Choices, solution: Sequence[int]) -> frozenset[Value]:
    """Returns the results that need no constraint, because reshapes split their dims and all that
    reads them follows their sharding."""
    inside: set[Value | None] = set()
    for i, op in enumerate(choices.ops):
        within = not inside.isdisjoint(op.operands) and not _merges(op)
        if (within or _splits(op)) and _follows(choices, solution, i, op):
            inside.update(op.results)
    for i, op in reversed(list(enumerate(choices.ops))):
        if inside.isdisjoint(op.operands):
            continue
        handed_on = op.kind is Kind.READ and op.results[0] not in inside
        if handed_on or not _follows(choices, solution, i, op):
            inside.difference_update(op.operands)
    return frozenset(v for v in inside if v is not None)


def _follows(choices: Choices, solution: Sequence[int], i: int, op: Op) -> bool:
    """Whether an operation has its sharding from its operands alone, and nothing is moved."""
    if op.kind not in (Kind.LEAF, Kind.READ) or op.primitive in _KEPT:
        return False
    strategy = choices.strategies[i][solution[i]]
    read = [(k, v) for k, v in enumerate(op.operands) if v is not None and v.shape]
    return (
        bool(read)
        and not strategy.reduced
        and all(choices.sharding_of(v, solution) == strategy.operands[k] for k, v in read)
    )


def _splits(op: Op) -> bool:
    return op.primitive == "reshape" and _rank(op.results[0]) > _rank(op.operands[0])


def _merges(op: Op) -> bool:
    return op.primitive == "reshape" and _rank(op.results[0]) < _rank(op.operands[0])


def _rank(value: Value | None) -> int:
    return sum(n > 1 for n in value.shape) if value is not None else 0
