"""A solution -> the constraints that make the partitioner do it, and what they imply."""

import dataclasses
from collections.abc import Sequence

from autoshard import collectives
from autoshard.apply import Constraints, Scatter
from autoshard.cost import Choices
from autoshard.graph import Kind, Op
from autoshard.opened import opened
from autoshard.overlap import hidden_s
from autoshard.reductions import reduction_trips, reductions
from autoshard.resharding import Step
from autoshard.sharding import Axes, Sharding
from autoshard.strategies import Strategy

# Operations whose parameters do not depend on the shapes, so that they run on blocks as they are.
LOCAL = frozenset(("dot_general", "reduce_sum"))
UNCONSTRAINED = frozenset((Kind.READ, Kind.CONST, Kind.OUTPUT))
GATHERS = (collectives.Kind.ALL_GATHER, collectives.Kind.ALL_TO_ALL)


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan; `bytes` as `autoshard.collectives` counts them for its kind."""

    kind: str
    axes: Axes
    bytes: float
    trips: int
    seconds: float  # of all trips
    value: str  # what moves
    source: str  # who needs it
    reason: str  # "reshard" | "partial sums"
    hidden_s: float = 0.0  # of `seconds`, beside compute

    def __str__(self) -> str:
        trips = f" x{self.trips}" if self.trips > 1 else ""
        return (
            f"{self.kind}({','.join(self.axes)}) of {self.value}: {self.bytes:.4g} bytes{trips}, "
            f"{self.seconds * 1e6:.4g} us, {self.reason} at {self.source or 'the border'}"
        )


def constraints(choices: Choices, solution: Sequence[int]) -> Constraints:
    """Returns one constraint on every result, and a chain on every operand that is resharded."""
    operands: dict[tuple[str, int], tuple[Sharding, ...]] = {}
    results: dict[tuple[str, int], tuple[Sharding, ...]] = {}
    scatters: dict[str, Scatter] = {}
    again: set[tuple[str, int]] = set()
    gathered: set[tuple] = set()
    reshards = _reshards(choices, solution)
    free = choices.live.fusion.free | opened(choices, solution)
    for i, op in enumerate(choices.ops):
        strategy = choices.strategies[i][solution[i]]
        if op.kind not in UNCONSTRAINED:
            for k, value in enumerate(op.results):
                if value in free:
                    continue  # left open, Shardy computes it anew for each reader
                if value.shape and _can_constrain(value.dtype):
                    results[op.path, k] = reached(op, strategy, k)
        for k, steps in reshards.get(i, ()):
            operands[op.path, k] = tuple(step.after for step in steps)
            if op.kind is Kind.LEAF and any(step.kind in GATHERS for step in steps):
                what = id(op.operands[k]), op.path.rpartition("/")[0], operands[op.path, k]
                if what in gathered:
                    again.add((op.path, k))
                gathered.add(what)
        by_hand = scatter(op, strategy) if strategy.scattered else None
        if by_hand is not None:
            scatters[op.path] = by_hand
    return Constraints(operands, results, scatters, frozenset(again))


def reached(op: Op, strategy: Strategy, k: int) -> tuple[Sharding, ...]:
    """Returns the chain of a result: combined first where XLA is to scatter it.

    Asked for both at once, XLA 0.10.2 sums wrongly where a scattered dim is already sharded.
    """
    if strategy.scattered and op.primitive not in LOCAL:
        return strategy.partial[k], strategy.results[k]
    return (strategy.results[k],)


def scatter(op: Op, strategy: Strategy) -> Scatter | None:
    """Returns how to reduce-scatter an operation's result by hand, or None to leave it to XLA.

    Asked for by constraints alone, the TPU partitioner makes either a loop of permutes (a windowed
    einsum, whose compute costs a quarter more) or a whole all-reduce, at twice the bytes.
    """
    if not strategy.scattered or op.primitive not in LOCAL:
        return None
    (partial,), (result,) = strategy.partial, strategy.results
    dims = tuple(
        after[len(before) :] for before, after in zip(partial.dims, result.dims, strict=True)
    )
    summed = tuple(a for a in strategy.reduced if a not in strategy.scattered)
    return Scatter(strategy.operands, result, dims, summed)


def planned_collectives(choices: Choices, solution: Sequence[int]) -> list[PlannedCollective]:
    """Returns every collective that the solution pays for, in execution order."""
    found = []
    reshards = _reshards(choices, solution)
    for i, op in enumerate(choices.ops):
        for k, steps in reshards.get(i, ()):
            value = op.operands[k]
            hidden = _hidden_share(choices, i, k, steps)
            for step in steps:
                if step.kind.value == "slice" or value is None:
                    continue
                trips = op.operand_trips[k]
                found.append(
                    PlannedCollective(
                        step.kind.value, step.axes, step.full_bytes, trips, step.seconds * trips,
                        value.name, op.source or op.path, "reshard", hidden * step.seconds * trips,
                    )
                )  # fmt: skip
        strategy = choices.strategies[i][solution[i]]
        if not strategy.reduced:
            continue
        summed = choices.live.summed.get(op)
        total = summed and choices.sharding_of(summed.carry.results[0], solution)
        trips = reduction_trips(op, strategy, choices.live, total)
        hides_s = dict(choices.granted.sums.get(i, ()))
        for kind, axes, size, seconds in reductions(op, strategy, choices.topology):
            link = collectives.beside(kind, choices.topology, axes)
            left_s = hides_s.get(link, 0.0)
            beside_s = float(hidden_s(seconds, left_s))
            hides_s[link] = left_s - min(seconds, left_s)
            found.append(
                PlannedCollective(
                    kind.value, axes, size, trips, seconds * trips,
                    op.results[0].name, op.source or op.path, "partial sums", beside_s * trips,
                )
            )  # fmt: skip
    return found


def _hidden_share(choices: Choices, i: int, k: int, steps: Sequence[Step]) -> float:
    """Returns which part of the seconds of bringing an operand along `steps` is hidden."""
    value, hides_s = choices.ops[i].operands[k], dict(choices.granted.operands.get((i, k), ()))
    total_s = sum(step.seconds for step in steps)
    if value is None or not hides_s or not total_s:
        return 0.0
    ways = choices.reshard_table(choices.ops[i], k, value)
    link = ways.hides(steps[0].before, steps[-1].after)
    return float(hidden_s(total_s, hides_s.get(link, 0.0))) / total_s


def _reshards(
    choices: Choices, solution: Sequence[int]
) -> dict[int, list[tuple[int, tuple[Step, ...]]]]:
    """Returns for each node whose operands are not all as its strategy wants them (operand number,
    steps) of those that are not."""
    found: dict[int, list[tuple[int, tuple[Step, ...]]]] = {}
    ways: dict[tuple, tuple[Step, ...]] = {}
    columns = [a.tolist() for a in choices.reads.moved(solution)]
    for r, *ends in zip(*columns, strict=True):
        i, k = choices.reads.ends[r][:2]
        op, value = choices.ops[i], choices.ops[i].operands[k]
        assert value is not None
        key = (value.shape, value.itemsize, (op, k) in choices.narrow, *ends)
        if key not in ways:
            want = choices.strategies[i][solution[i]].operands[k]
            have = choices.sharding_of(value, solution)
            ways[key] = choices.reshard_table(op, k, value).steps(have, want)
        found.setdefault(i, []).append((k, ways[key]))
    return found


def _can_constrain(dtype: str) -> bool:
    return not dtype.startswith("float0")
