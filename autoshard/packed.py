"""Many arrays as one: a program of many layers has few that differ, held as the same objects."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """N arrays, each object held once.

    Attributes:
      distinct: the objects, by first appearance.
      numbers: [N] which of them each array is.
      values: all their elements, one object's after another's, row by row.
      starts: [N] where each array begins in `values`.
    """

    distinct: tuple[np.ndarray, ...]
    numbers: np.ndarray
    values: np.ndarray
    starts: np.ndarray

    def __str__(self) -> str:
        return f"{len(self.numbers)} arrays, {len(self.distinct)} of them different"


def packed(arrays: Iterable[np.ndarray]) -> Packed:
    arrays = list(arrays)
    ids = list(map(id, arrays))
    held = dict(zip(ids, arrays, strict=True))
    place = {key: number for number, key in enumerate(held)}
    numbers = np.array(list(map(place.__getitem__, ids)), np.int64)
    sizes = np.array([array.size for array in held.values()], np.int64)
    values = np.concatenate([np.zeros(0), *(array.ravel() for array in held.values())])
    return Packed(tuple(held.values()), numbers, values, (np.cumsum(sizes) - sizes)[numbers])


def numbered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a number [N] for each key, by first appearance, and where each first appears."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[which], first[order]
