"""Memory rows for copies that two choices bring about together.

A row can hold what one choice decides. How large the copy of an operand is depends on two: how the
value lies, and how its reader wants it. Around a solution the first is taken as given.
"""

import functools
from collections.abc import Sequence

import numpy as np

from autoshard.cost import Choices, copies
from autoshard.graph import Kind
from autoshard.problem import Usage
from autoshard.stored import moved_bytes


def copy_usages(choices: Choices, solution: Sequence[int]) -> dict[tuple[int, int], Usage]:
    """Returns the usage of each copy that a solution makes, by reader and operand number: exact for
    the solution, and for others as long as they leave the value copied where it is."""
    sizes: dict[tuple, np.ndarray] = {}
    found = {}
    for i, k, buffer in copies(choices, solution):
        value, strategies = choices.ops[i].operands[k], choices.strategies[i]
        if value is None:
            continue
        have = choices.sharding_of(value, solution)
        given = choices.ops[choices.producer[value][0]].kind is Kind.INPUT
        key = (id(strategies), k, value.shape, value.itemsize, have, given)
        if key not in sizes:
            wanted = [s.operands[k] for s in strategies]
            moved = functools.partial(moved_bytes, choices.topology, value, have, given=given)
            stored = {w: moved(want=w) for w in dict.fromkeys(wanted)}
            sizes[key] = np.array([0.0 if w == have else stored[w] for w in wanted])
        size = sizes[key]
        scale = buffer.size_bytes / max(1.0, size[solution[i]])
        if choices.ops[i].kind is Kind.READ and choices.ops[i].results[0] in (
            choices.live.fusion.written
        ):
            size, scale = np.minimum(size, 1.0), buffer.size_bytes  # the value, not its copy
        held = np.ceil(size * scale)
        found[i, k] = Usage(i, buffer.start, buffer.end, held, buffer.label)
    return found
