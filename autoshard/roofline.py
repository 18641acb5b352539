"""Seconds that one operation computes on one device: the larger of arithmetic and memory traffic.

Elementwise work rides on memory traffic: XLA fuses it into its reader, so only operands that are
read from memory and results that are written to it count. "How to Scale Your Model", chapter 1: T
= max(flops / peak, bytes / bandwidth).
"""

import math

import numpy as np

from autoshard.graph import Kind, Op
from autoshard.hardware import Chip

# Operations that read or write only a window of their first operand: operand numbers whose bytes
# count.
WINDOWED = {
    "gather": (1,),
    "dynamic_slice": (),
    "slice": (),
    "dynamic_update_slice": (1, 1),
    "scatter": (1, 2, 2),
    "scatter-add": (1, 2, 2),
    "scatter_add": (1, 2, 2),
    "scatter_mul": (1, 2, 2),
    "scatter_min": (1, 2, 2),
    "scatter_max": (1, 2, 2),
}
IN_PLACE = frozenset(name for name in WINDOWED if name.startswith("scatter") or "update" in name)


def flops(op: Op) -> float:
    """Returns the floating-point operations of the whole, unsharded operation in one trip; 0 but
    for matmuls."""
    if op.kind is not Kind.LEAF:
        return 0.0
    if op.primitive == "dot_general":
        ((lhs_contract, _), _) = op.eqn.params["dimension_numbers"]
        contracted = math.prod(op.eqn.invars[0].aval.shape[d] for d in lhs_contract)
        return 2.0 * math.prod(op.results[0].shape) * contracted
    if op.primitive == "conv_general_dilated":
        kernel = op.eqn.invars[1].aval.shape
        numbers = op.eqn.params["dimension_numbers"]
        return (
            2.0
            * math.prod(op.results[0].shape)
            * math.prod(kernel)
            / max(1, kernel[numbers.rhs_spec[0]])
        )
    if op.primitive in ("ragged_dot", "ragged_dot_general"):
        lhs = op.eqn.invars[0].aval.shape
        return 2.0 * math.prod(op.results[0].shape) * lhs[-1]
    return 0.0


def seconds(op: Op, shards: np.ndarray, traffic_bytes: np.ndarray, chip: Chip) -> np.ndarray:
    """Returns the seconds of one trip under each strategy.

    Args:
      shards: [S] devices that share the arithmetic.
      traffic_bytes: [S] bytes read and written per device.
    """
    dtype = _matmul_dtype(op)
    return np.maximum(
        flops(op) / shards / chip.flops_for(dtype), traffic_bytes / chip.hbm_bytes_per_s
    )


def traffic_operands(op: Op, stored: frozenset[int]) -> list[int]:
    """Returns the operand numbers whose local bytes are read from memory, one entry a pass."""
    numbers = WINDOWED.get(op.primitive, range(len(op.operands))) if op.kind is Kind.LEAF else ()
    found = []
    for k in numbers:
        value = op.operands[k] if k < len(op.operands) else None
        if value is not None and id(value) in stored:
            found.append(k)
    return found


def traffic_results(op: Op, stored: frozenset[int]) -> list[int]:
    """Returns the result numbers whose local bytes are written to memory."""
    if op.kind is not Kind.LEAF or op.primitive in IN_PLACE:
        return []
    return [k for k, value in enumerate(op.results) if id(value) in stored]


def _matmul_dtype(op: Op) -> str:
    values = [v for v in op.operands if v is not None and v.shape]
    return max(values, key=lambda v: v.itemsize).dtype if values else "float32"
