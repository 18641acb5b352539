"""What runs beside compute: how long each collective can hide.

A region is the body of a loop, or the program without its loops. In it a core computes and a link
transfers side by side. A gather of what is known early (an argument, its slice in a loop, what is
computed elementwise of these) may start as soon as that stands, and must end before the first
operation that needs it; so may a combination of partial sums, between the operation that makes them
and the first that reads the total.

Beside the least compute that any plan has, each kind of link is dealt out once, first to whoever
must end first. A collective costs what it lasts beyond what it was granted, whatever else a plan
does: the grants of a plan fit beside its compute together.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from autoshard.fusion import MATMULS, Readers, readers_of
from autoshard.graph import Kind, Op, Value
from autoshard.liveness import Liveness

# Of a hidden collective, what its kernels take from those they run beside: exposed shares of
# asynchronous gathers in compiled v5e programs are 0 to 24 %, most of them 7 to 13.
EXPOSED = 0.1
HIDING = frozenset(("all-gather", "reduce-scatter", "all-reduce"))
_DIGITS = 2  # of what is granted, so that repeated layers are granted the same

Region = tuple[int, int] | None
Seconds = tuple[tuple[str, float], ...]  # by kind of link


@dataclasses.dataclass(frozen=True)
class Granted:
    """Seconds of a trip that a collective may hide: of an operand brought into another sharding,
    by node and operand number; of partial sums, by node."""

    operands: Mapping[tuple[int, int], Seconds]
    sums: Mapping[int, Seconds]

    def __str__(self) -> str:
        every = [*self.operands.values(), *self.sums.values()]
        total_s = sum(seconds for some in every for _, seconds in some)
        return f"{len(every)} collectives may hide {total_s:.3g} s"


NOTHING = Granted({}, {})


@dataclasses.dataclass(frozen=True)
class Wish:
    """A collective of at most `seconds` that may run from `start_s` to `end_s` of its region; it
    has a claim to `claim_s`.

    `of`: what it is of. A value may be gathered as it is, or once it is converted, or where it is
    read: a plan does one of those that are of the same and end alike.
    """

    end_s: float
    start_s: float
    node: int
    operand: int | None
    seconds: float
    claim_s: float
    of: Value | int

    def __str__(self) -> str:
        window = f"{self.start_s:.3g} to {self.end_s:.3g} s"
        return f"node {self.node}: {self.claim_s:.3g} to {self.seconds:.3g} s from {window}"


def granted(
    ops: Sequence[Op],
    live: Liveness,
    compute_s: Sequence[float],
    longest_gather_s: Callable[[int, int, Value], Mapping[str, float]],
    sum_s: Callable[[int], Mapping[str, tuple[float, float]]],
    pipelined: Collection[str] = (),
) -> Granted:
    """Deals out the compute of each region.

    Args:
      ops: all operations in execution order.
      live: of these.
      compute_s: [N] the least seconds of a trip of each.
      longest_gather_s: of (node, operand number, value), the longest asynchronous collective there,
        by kind of link.
      sum_s: of a node, the shortest and the longest asynchronous combination of its partial sums.
        Some strategies combine what no plan would: only the shortest has a claim, if it can hide.
      pipelined: the kinds of link on which what a loop stacks may be combined during its next trip.
    """
    times = _Times(ops, live, compute_s)
    wishes: dict[tuple[str, Region], list[Wish]] = {}
    for i, op in enumerate(ops):
        if op.kind not in (Kind.LEAF, Kind.READ):
            continue
        region = times.regions[i]
        for k, value in enumerate(op.operands):
            if value is None or value not in times.early:
                continue
            start_s, end_s = times.ready_s[value], times.due_s[i]
            if end_s > start_s:
                for link, seconds in longest_gather_s(i, k, value).items():
                    wish = Wish(end_s, start_s, i, k, seconds, seconds, times.origin[value])
                    wishes.setdefault((link, region), []).append(wish)
        start_s = times.begins_s[i] + compute_s[i]
        for link, (least_s, seconds) in sum_s(i).items():
            end_s = times.read_s(op)
            if region and link in pipelined and times.is_stacked(op):
                end_s = times.now_s[region] + start_s
            claim_s = least_s if least_s <= end_s - start_s else 0.0
            wish = Wish(end_s, start_s, i, None, seconds, claim_s, i)
            wishes.setdefault((link, region), []).append(wish)
    operands: dict[tuple[int, int], Seconds] = {}
    sums: dict[int, Seconds] = {}
    for (link, region), asked in wishes.items():
        for wish, seconds in dealt(asked, times.now_s[region]):
            if wish.operand is None:
                sums[wish.node] = (*sums.get(wish.node, ()), (link, seconds))
            else:
                place = wish.node, wish.operand
                operands[place] = (*operands.get(place, ()), (link, seconds))
    return Granted(operands, sums)


def dealt(asked: Sequence[Wish], length_s: float) -> Iterator[tuple[Wish, float]]:
    """Yields what a link has time for in a region of `length_s`, in the order of ends: first to
    those that have a claim, then to all in the time that is left between."""
    same: dict[tuple[float, Value | int], list[Wish]] = {}
    for wish in asked:
        if wish.seconds > 0:
            same.setdefault((wish.end_s, wish.of), []).append(wish)
    order = sorted(same.values(), key=lambda some: (some[0].end_s, some[0].node))
    starts_s = [max(w.start_s for w in wishes) for wishes in order]
    ends_s = [wishes[0].end_s for wishes in order]
    claims_s = [min(w.claim_s for w in wishes) for wishes in order]
    claims_s = _in_turn(starts_s, ends_s, claims_s, [length_s] * len(order))
    by_s, left_s, limits_s = math.inf, length_s, [length_s] * len(order)
    for n in reversed(range(len(order))):  # those after it keep their claims
        ends_s[n], limits_s[n] = min(ends_s[n], by_s), left_s
        if claims_s[n]:
            by_s, left_s = ends_s[n] - claims_s[n], left_s - claims_s[n]
    most_s = [min(w.seconds for w in wishes) for wishes in order]
    for wishes, seconds in zip(order, _in_turn(starts_s, ends_s, most_s, limits_s), strict=True):
        if seconds > 0:
            yield from ((wish, seconds) for wish in wishes)


def _in_turn(
    starts_s: Sequence[float],
    ends_s: Sequence[float],
    wanted_s: Sequence[float],
    limits_s: Sequence[float],
) -> list[float]:
    """Returns what each of those that use a link one after the other gets of what it wants, with
    those before it at most its limit."""
    found, free_s, used_s = [], 0.0, 0.0
    for start_s, end_s, seconds, limit_s in zip(starts_s, ends_s, wanted_s, limits_s, strict=True):
        start_s = max(free_s, start_s)
        seconds = _rounded(min(seconds, end_s - start_s, limit_s - used_s))
        found.append(seconds)
        if seconds > 0:
            free_s, used_s = start_s + seconds, used_s + seconds
    return found


def hidden_s(seconds, granted_s: float):
    """Returns of the `seconds` [...] of a collective those that cost nothing."""
    return (1 - EXPOSED) * np.minimum(seconds, granted_s)


class _Times:
    """When operations run in their region, in seconds of compute alone.

    Attributes:
      regions: [N] of each operation.
      begins_s: [N] when it runs in execution order.
      due_s: [N] when it must run at the latest: all but matmuls wait for their first reader.
      early: the values that are known early.
      ready_s: when they are.
      origin: of each, the first value of the chain of operations on one array that makes it.
    """

    def __init__(self, ops: Sequence[Op], live: Liveness, compute_s: Sequence[float]):
        self.ops, self.compute_s = ops, compute_s
        self.regions: list[Region] = [live.spans.get(op) for op in ops]
        self.place = {op: i for i, op in enumerate(ops)}
        self.begins_s: list[float] = []
        self.now_s: dict[Region, float] = {}
        for i, region in enumerate(self.regions):
            self.begins_s.append(self.now_s.get(region, 0.0))
            self.now_s[region] = self.begins_s[i] + compute_s[i]
        self.early: set[Value] = set()
        self.ready_s: dict[Value, float] = {}
        self.origin: dict[Value, Value] = {}
        for i, op in enumerate(ops):
            self._mark_early(i, op)
        self.readers: Readers = readers_of(tuple(ops))
        self.due_s = list(self.begins_s)
        for i in range(len(ops) - 1, -1, -1):
            if ops[i].kind in (Kind.LEAF, Kind.READ) and ops[i].primitive not in MATMULS:
                self.due_s[i] = self.read_s(ops[i])

    def _mark_early(self, i: int, op: Op) -> None:
        arrays = [v for v in op.operands if v is not None and v.shape]
        if op.kind is Kind.INPUT:
            early = True
        elif op.kind in (Kind.SLICE, Kind.ENTER, Kind.READ, Kind.LEAF):
            early = all(v in self.early for v in arrays) and op.primitive not in MATMULS
        else:
            early = False
        if not early:
            return
        ready_s = 0.0
        if op.kind in (Kind.LEAF, Kind.READ):
            ready_s = max((self.ready_s[v] for v in arrays), default=0.0) + self.compute_s[i]
        for value in op.results:
            self.early.add(value)
            self.ready_s[value] = ready_s
            chained = len(arrays) == 1 and op.kind in (Kind.LEAF, Kind.READ)
            self.origin[value] = self.origin[arrays[0]] if chained else value

    def read_s(self, op: Op) -> float:
        """Returns when the first reader of an operation's results needs them, at the latest."""
        i = self.place[op]
        first_s = math.inf
        for value in op.results:
            for reader, _ in self.readers.get(value, ()):
                r = self.place[reader]
                same = self.regions[r] == self.regions[i]
                if same and r > i:
                    first_s = min(first_s, self.due_s[r])
        if first_s < math.inf:
            return max(first_s, self.begins_s[i])
        return self.now_s[self.regions[i]] if self._leaves(op) else self.begins_s[i]

    def _leaves(self, op: Op) -> bool:
        """Whether results of an operation are read at the end of its region only."""
        ends = (Kind.STACK, Kind.CARRY, Kind.INPUT, Kind.OUTPUT)
        found = [r for v in op.results for r, _ in self.readers.get(v, ())]
        return bool(found) and all(r.kind in ends for r in found)

    def is_stacked(self, op: Op) -> bool:
        """Whether all that is made of an operation's results is what its loop stacks."""
        todo, seen, stacked = [op], {op}, False
        while todo:
            for reader in {r for v in todo.pop().results for r, _ in self.readers.get(v, ())}:
                if reader.kind is Kind.STACK:
                    stacked = True
                elif reader.kind not in (Kind.LEAF, Kind.READ) or reader.primitive in MATMULS:
                    return False
                elif reader not in seen:
                    seen.add(reader)
                    todo.append(reader)
        return stacked


def _rounded(seconds: float) -> float:
    """Returns the seconds rounded down to a few digits."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(seconds)) + 1 - _DIGITS)
    return math.floor(seconds / unit * (1 + 1e-12)) * unit
