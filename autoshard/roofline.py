"""Seconds that one operation computes on one device: the larger of arithmetic and memory traffic.

Elementwise work rides on memory traffic: XLA fuses it into its reader, so only operands that are
read from memory and results that are written to it count. "How to Scale Your Model", chapter 1: T
= max(flops / peak, bytes / bandwidth).
"""

import math

import numpy as np

from autoshard.fusion import IN_PLACE, Fusion, is_matmul
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


def seconds(
    op: Op,
    shards: np.ndarray,
    traffic_bytes: np.ndarray,
    chip: Chip,
    vector_ops: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Returns the seconds of one trip under each strategy.

    Args:
      shards: [S] devices that share the arithmetic, less what the matrix unit's tile wastes.
      traffic_bytes: [S] bytes read and written per device.
      vector_ops: [S] elementwise operations per device.
    """
    arithmetic = flops(op) / shards / chip.flops_for(_matmul_dtype(op))
    memory = traffic_bytes / chip.hbm_bytes_per_s
    found = np.maximum(arithmetic, memory)
    if chip.vector_ops_per_s is None:
        return found
    return np.maximum(found, vector_ops / chip.vector_ops_per_s)


def tile_use(op: Op, lhs: tuple[int, ...], rhs: tuple[int, ...], chip: Chip) -> float:
    """Returns the share of the matrix unit that a matmul of local blocks keeps busy.

    The unit holds a tile of contracted by output dims: a contraction over 64 on a unit of 128 x 128
    takes as long as one over 128.
    """
    if op.primitive != "dot_general":
        return 1.0
    ((contract, rhs_contract), (_, rhs_batch)) = op.eqn.params["dimension_numbers"]
    inner = math.prod(lhs[d] for d in contract)
    kept = math.prod(n for d, n in enumerate(rhs) if d not in (*rhs_contract, *rhs_batch))
    batch = math.prod(rhs[d] for d in rhs_batch)
    outer = math.prod(lhs) // max(1, inner * batch)
    rows, columns = chip.matmul_tile
    # The larger of the outer dims streams through; the other one is held, with the inner dim.
    held = min(outer, kept)
    return _use(inner, rows) * _use(held, columns)


def _use(size: int, tile: int) -> float:
    return size / (math.ceil(size / tile) * tile) if size else 1.0


def reads(op: Op, fusion: Fusion) -> list[tuple[int, float]]:
    """Returns what the kernel of an operation reads from memory: (operand number, bytes of the
    whole value), one entry a pass; nothing where it is computed inside another kernel."""
    numbers = WINDOWED.get(op.primitive)
    kernel = fusion.kernels.get(op)
    roots = kernel.roots if kernel else ()
    if numbers is None:
        return [(root.operand, root.size_bytes) for root in roots]
    sizes = [(root.operand, root.size_bytes) for root in roots]
    return [(k, size) for number in numbers for k, size in sizes if k == number]


def majors(op: Op, role: str, k: int) -> tuple[int, ...]:
    """Returns the dims of an operand or result that a TPU keeps outside its tiles.

    A batched matmul runs block after block, so it wants the other dims in the tiles, however small:
    f32[32768, 14, 8] in a layout of {1, 2, 0} takes 9 times its bytes. Gathered rows lie one after
    another, f32[32768, 8] in 16 times its bytes. `role`: as in Strategy.
    """
    if op.primitive == "gather" and role != "operands":
        rank = len(op.results[0].shape)
        rows = op.eqn.params["dimension_numbers"].offset_dims == (rank - 1,) and rank > 1
        return tuple(range(rank - 1)) if rows else ()
    if op.primitive != "dot_general" or not is_matmul(op):
        return ()
    _, (lhs, rhs) = op.eqn.params["dimension_numbers"]
    return tuple((lhs, rhs)[k]) if role == "operands" else tuple(range(len(lhs)))


def vector_ops(op: Op, fusion: Fusion) -> tuple[tuple[int, float], ...]:
    """Returns the elementwise operations in a kernel: (operand number, count on whole arrays)."""
    kernel = fusion.kernels.get(op)
    return kernel.vector_ops if kernel else ()


def writes(op: Op, fusion: Fusion) -> list[int]:
    """Returns the result numbers whose local bytes are written to memory."""
    if op.kind is not Kind.LEAF or op.primitive in IN_PLACE:
        return []
    return [k for k, v in enumerate(op.results) if v in fusion.stored or v in fusion.ended]


def _matmul_dtype(op: Op) -> str:
    values = [v for v in op.operands if v is not None and v.shape]
    return max(values, key=lambda v: v.itemsize).dtype if values else "float32"
