"""A matmul whose result has one dim before all others.

The TPU compiler keeps a reduce-scatter onto the outermost dim of a result as one. Onto a dim in the
middle it makes an all-reduce, at twice the bytes, and slices; a transpose behind the matmul does
not help, since it merges with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp


def leading(
    params: Mapping[str, Any], operands: Sequence[Any], d: int
) -> tuple[dict[str, Any], list[Any], tuple[int, ...]] | None:
    """Returns what makes dim `d` of a `dot_general` result the first one.

    Returns:
      New parameters and operands, and the order in which the old dims then stand; None where other
      batch dims come first, whatever one does.
    """
    (contract, (lhs_batch, rhs_batch)) = params["dimension_numbers"]
    lhs, rhs = operands
    rank = lhs.ndim + rhs.ndim - 2 * len(contract[0]) - len(lhs_batch)
    if d < len(lhs_batch):
        first = lambda dims: (dims[d], *dims[:d], *dims[d + 1 :])  # noqa: E731
        numbers = (contract, (first(lhs_batch), first(rhs_batch)))
        order = (d, *(k for k in range(rank) if k != d))
        return {**params, "dimension_numbers": numbers}, [lhs, rhs], order
    if lhs_batch:
        return None
    lhs_free = [k for k in range(lhs.ndim) if k not in contract[0]]
    rhs_free = [k for k in range(rhs.ndim) if k not in contract[1]]
    if d < len(lhs_free):
        moved, dims = _first(lhs, contract[0], lhs_free[d])
        numbers = ((dims, contract[1]), ((), ()))
        order = (d, *(k for k in range(rank) if k != d))
        return {**params, "dimension_numbers": numbers}, [moved, rhs], order
    moved, dims = _first(rhs, contract[1], rhs_free[d - len(lhs_free)])
    numbers = ((dims, contract[0]), ((), ()))
    of_rhs = [k for k in range(len(lhs_free), rank) if k != d]
    swapped = {**params, "dimension_numbers": numbers}
    if isinstance(params.get("precision"), tuple):
        swapped["precision"] = params["precision"][::-1]
    return swapped, [moved, lhs], (d, *of_rhs, *range(len(lhs_free)))


def _first(x: Any, contracted: Sequence[int], d: int) -> tuple[Any, tuple[int, ...]]:
    """Moves dim `d` to the front; returns the contracted dims where they are then."""
    return jnp.moveaxis(x, d, 0), tuple(k + (k < d) for k in contracted)
