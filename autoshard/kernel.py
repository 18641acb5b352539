"""The integer program over a few promising strategies of each node: choices, but no bound."""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.bound import Program
from autoshard.clock import Clock
from autoshard.reduce import Core, Infeasible
from autoshard.search import Flat

GAP = 1e-3


def solve_kernel(
    core: Core,
    keep: dict[int, np.ndarray],
    best: Sequence[int] | None,
    limit_bytes: float,
    clock: Clock,
    share: float,
    nodes: int,
) -> list[tuple[int, ...]]:
    """Returns choices of the whole problem.

    Args:
      core: what to choose in; not changed.
      keep: for each of its nodes where a strategy [S] is promising.
      best: choices of the whole problem to scale by and start from.
      limit_bytes: the memory limit.
      clock: the time limit.
      share: of the time left, what the relaxation may take, and then the integer program.
      nodes: limit of the search tree.
    """
    core = core.copy()
    try:
        for i, part in keep.items():
            if not part.all():
                core.restrict(i, part)
        core.reduce(clock.expired)
    except Infeasible:
        return []
    flat = Flat.of(core)
    if not len(flat.sizes):
        return [core.expand({})]
    x = np.array([int(np.argmin(c)) for c in flat.split(flat.costs)], np.int64)
    if best is not None:
        x = flat.restart(core, best)
    scale = flat.objective(x)
    program = Program(flat, scale if math.isfinite(scale) else 1.0, limit_bytes)
    relaxed = program.relax(clock.left_s() * share)
    if relaxed is None or relaxed.objective == math.inf:
        return []
    answer = program.solve(clock.left_s() * share, nodes, GAP)
    return [] if answer.choices is None else [flat.expand(core, answer.choices)]
