"""When things run in a compiled program: its schedule, and a simulation of it in seconds.

A schedule is a tree. Its leaves are computations with the compiler's own estimate of cycles, and
transfers (collectives, copies between memories): blocking, or started here and awaited there. Its
inner nodes are loops with trip counts and branches.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from autoshard.hlo import Computation, Instruction, Module
from autoshard.hlo_loops import Scope, trip_count

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OPCODES = {k: k for k in KINDS} | {
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}
# What a send over the data center network is part of, by its attribute.
_ACROSS_SLICES = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "COLLECTIVE_PERMUTE": "collective-permute",
    "ONE_TO_ONE": "collective-permute",
}
_UNKNOWN = 2**63 - 1  # what the compiler says of cycles where its estimate overflows
_DONE = {f"{k}-done" for k in _OPCODES} | {"recv-done", "async-done", "copy-done", "slice-done"}


@dataclasses.dataclass(frozen=True)
class Clock:
    """What turns the cycles and bytes of one device into seconds."""

    cycles_per_s: float
    hbm_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective or a copy as it stands in the program."""

    kind: str  # one of KINDS, or "copy"
    instruction: Instruction
    computation: Computation
    trips: int
    asynchronous: bool
    wrappers: tuple[tuple[Computation, Instruction], ...] = ()
    """The fusions or async wrappers it stands in, outermost first, each where it stands."""

    @property
    def across_slices(self) -> bool:
        """Whether TPU slices, each with a program of its own, exchange it through their hosts."""
        return "_xla_megascale_transfer_type" in self.instruction.attributes


@dataclasses.dataclass(frozen=True)
class Compute:
    cycles: int
    source: str | None = None  # file and line that it comes from
    hbm_bytes: float = 0.0  # instead of cycles, where the compiler has no estimate: what it writes


@dataclasses.dataclass(frozen=True)
class Blocking:
    transfer: int  # index in Schedule.transfers


@dataclasses.dataclass(frozen=True)
class Start:
    transfer: int
    key: str


@dataclasses.dataclass(frozen=True)
class Done:
    key: str


@dataclasses.dataclass(frozen=True)
class Loop:
    trips: int
    body: "tuple[Node, ...]"


@dataclasses.dataclass(frozen=True)
class Branches:
    bodies: "tuple[tuple[Node, ...], ...]"


Node = Compute | Blocking | Start | Done | Loop | Branches


@dataclasses.dataclass(frozen=True)
class Schedule:
    nodes: tuple[Node, ...]
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]  # what could not be read exactly
    has_cycles: bool  # whether the compiler gave any estimate


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step on one device: step = compute + exposed."""

    compute_s: float
    exposed_comm_s: float  # the core waits for a collective
    exposed_copy_s: float  # the core waits for a copy from or to HBM

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_comm_s + self.exposed_copy_s

    def __str__(self) -> str:
        return (
            f"step {self.step_s * 1e3:.3f} ms: compute {self.compute_s * 1e3:.3f}, exposed "
            f"collectives {self.exposed_comm_s * 1e3:.3f}, copies {self.exposed_copy_s * 1e3:.3f}"
        )


def read(module: Module) -> Schedule:
    """Returns the schedule of a module, every transfer once for each place that starts it."""
    reader = _Reader(module)
    nodes = tuple(reader.body(Scope(module, module.entry), 1))
    return Schedule(nodes, tuple(reader.transfers), tuple(reader.notes), reader.has_cycles)


def simulate(
    schedule: Schedule,
    clock: Clock,
    seconds: Callable[[int], float],
    links: Callable[[int], tuple[str, ...]],
) -> Times:
    """Runs the schedule: what stands between start and done overlaps with the transfer.

    A transfer occupies its links, one after another: two collectives over different mesh axes run
    side by side, two over the same axis do not. Of the branches of a conditional the longest runs.

    Args:
      schedule: what `read` gave.
      clock: of the device.
      seconds: of a transfer alone, by its index.
      links: what a transfer occupies, by its index: mesh axes, or "hbm".
    """
    core = _Core(schedule, clock, seconds, links)
    core.run(schedule.nodes)
    return Times(core.compute_s, core.exposed_comm_s, core.exposed_copy_s)


class _Reader:
    """Walks a module in the order it runs."""

    def __init__(self, module: Module):
        self.module = module
        self.transfers: list[Transfer] = []
        self.notes: list[str] = []
        self.has_cycles = False

    def body(self, scope: Scope, trips: int) -> Iterator[Node]:
        computation = scope.computation
        started: dict[str, str] = {}  # instruction -> key of the transfer it carries
        for i in computation.instructions:
            if i.opcode == "while":
                yield self._loop(scope, i, trips)
            elif i.opcode == "conditional":
                yield self._branches(i, trips)
            elif i.opcode == "call":
                called = self.module.computations[i.called["to_apply"][0]]
                yield from self.body(Scope(self.module, called), trips)
            elif i.opcode in ("send", "recv"):
                yield from self._message(computation, i, trips, started)
            elif i.opcode in _DONE:
                key = next((started[o] for o in i.operands if o in started), None)
                if key is not None:
                    yield Done(key)
            elif i.opcode == "async-update":
                started.update((i.name, started[o]) for o in i.operands if o in started)
            elif i.opcode == "async-start" or i.opcode.removesuffix("-start") in _OPCODES:
                yield from self._collective(computation, i, trips, started)
            elif i.opcode in ("copy-start", "slice-start"):
                if "cross_program_prefetch" not in i.attributes:
                    started[i.name] = f"{computation.name}/{i.name}"
                    index = self._add("copy", i, computation, trips, True)
                    yield Start(index, started[i.name])
            else:
                yield from self._compute(computation, i, trips)

    def _loop(self, scope: Scope, loop: Instruction, trips: int) -> Node:
        count = trip_count(self.module, loop, scope)
        if count is None:
            count = 1
            where = self.module.source(loop) or "source unknown"
            self.notes.append(
                f"loop %{loop.name} ({where}): no constant trip count, its body is counted once"
            )
        nodes: list[Node] = []
        for part in ("condition", "body"):
            computation = self.module.computations[loop.called[part][0]]
            inside = Scope(self.module, computation, scope.invariants(loop))
            nodes += self.body(inside, trips * count)
        return Loop(count, tuple(nodes))

    def _branches(self, conditional: Instruction, trips: int) -> Node:
        names = [
            name
            for a in ("branch_computations", "true_computation", "false_computation")
            for name in conditional.called.get(a, ())
        ]
        before = len(self.transfers)
        bodies = tuple(
            tuple(self.body(Scope(self.module, self.module.computations[name]), trips))
            for name in names
        )
        if len(self.transfers) > before:
            where = self.module.source(conditional) or "source unknown"
            self.notes.append(
                f"conditional %{conditional.name} ({where}): collectives of all {len(names)} "
                "branches are counted, one branch runs"
            )
        return Branches(bodies)

    def _message(self, computation, i, trips, started) -> Iterator[Node]:
        """A collective that begins where its data is sent and ends where data is received."""
        across = i.text("_xla_megascale_transfer_type")
        kind = _ACROSS_SLICES.get(across or "")
        if across is None and "source_target_pairs" in i.attributes:
            kind = "collective-permute"
        if kind is None:
            return
        name = i.text("_xla_host_transfer_rendezvous") or f"channel {i.integer('channel_id')}"
        if i.opcode == "recv":
            started[i.name] = name
        else:
            yield Start(self._add(kind, i, computation, trips, True), name)

    def _collective(self, computation, i, trips, started) -> Iterator[Node]:
        """A collective of its own, or one in an async wrapper."""
        kind = i.opcode.removesuffix("-start")
        inner, instruction, wrappers = computation, i, ()
        if i.opcode == "async-start":
            wrapped = self.module.computations[i.called["calls"][0]]
            found = next(self._inside(wrapped, None, ((computation, i),)), None)
            if found is None:
                return
            inner, instruction, kind, _, wrappers = found
        blocking = i.opcode in _OPCODES
        asynchronous = not blocking and '"is_sync":true' not in i.attributes
        index = self._add(_OPCODES[kind], instruction, inner, trips, asynchronous, wrappers)
        if blocking:
            yield Blocking(index)
        else:
            started[i.name] = f"{computation.name}/{i.name}"
            yield Start(index, started[i.name])

    def _compute(self, computation, i, trips) -> Iterator[Node]:
        """An instruction with cycles; a fusion may start, carry or end collectives as well."""
        found = []
        if i.opcode in ("fusion", "custom-call"):
            names = i.called.get("calls") or i.called.get("called_computations") or ()
            for name in names:
                found += self._inside(self.module.computations[name], None, ((computation, i),))
        cycles = i.integer("estimated_cycles")
        self.has_cycles |= cycles is not None
        for inner, instruction, kind, phase, wrappers in found:
            if phase in (None, "AsyncCollectiveStart"):
                index = self._add(kind, instruction, inner, trips, phase is not None, wrappers)
                yield Start(index, _chain(instruction)) if phase else Blocking(index)
        if cycles == _UNKNOWN:
            source = self.module.source(i)
            where = f"%{i.name} ({source or 'source unknown'})"
            self.notes.append(f"{where}: no estimate of cycles, it lasts as long as its writes")
            yield Compute(0, source, sum(a.bytes for a in i.arrays))
        elif cycles:
            yield Compute(cycles, self.module.source(i))
        for _, instruction, _, phase, _ in found:
            if phase == "AsyncCollectiveDone":
                yield Done(_chain(instruction))

    def _inside(self, computation, phase, wrappers) -> Iterator[tuple]:
        """Yields the collectives in a fused computation: where, what, kind, phase, wrappers.

        The TPU compiler spreads one asynchronous collective over several fusions that all name it:
        the phase tells the one that starts it, those that carry it along and the one that ends it.
        """
        for i in computation.instructions:
            users = computation.users.get(i.name, ())
            targets = [u.text("custom_call_target") for u in users]
            own = next((t for t in targets if t and t.startswith("AsyncCollective")), phase)
            kind = _OPCODES.get(i.opcode.removesuffix("-start"))
            if kind is not None:
                if own is None and "async_collective_fusion_config" in i.attributes:
                    own = "carried"
                if kind == "all-reduce" and _is_scattered(computation, i):
                    kind = "reduce-scatter"
                yield computation, i, kind, own, wrappers
            elif i.opcode == "fusion":
                called = self.module.computations[i.called["calls"][0]]
                yield from self._inside(called, own, (*wrappers, (computation, i)))

    def _add(self, kind, instruction, computation, trips, asynchronous, wrappers=()) -> int:
        transfer = Transfer(kind, instruction, computation, trips, asynchronous, wrappers)
        self.transfers.append(transfer)
        return len(self.transfers) - 1


def _chain(instruction: Instruction) -> str:
    return f"channel {instruction.integer('channel_id')}"


def _is_scattered(computation: Computation, all_reduce: Instruction) -> bool:
    """Whether a fused all-reduce is a reduce-scatter: each device keeps its slice of the sum."""
    if re.match(r"all-reduce-scatter", computation.name):
        return True
    users = computation.users.get(all_reduce.name, ())
    return bool(users) and all(u.opcode == "dynamic-slice" for u in users)


class _Core:
    """One device: a core that computes, and links that transfer beside it."""

    def __init__(self, schedule: Schedule, clock: Clock, seconds, links):
        self.schedule, self.clock, self.seconds, self.links = schedule, clock, seconds, links
        self.now_s = self.compute_s = self.exposed_comm_s = self.exposed_copy_s = 0.0
        self.free_s: dict[str, float] = {}  # link -> when its last transfer ends
        self.flying: dict[str, tuple[int, float]] = {}  # key -> transfer, when it ends

    def run(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case Compute(cycles):
                    seconds = cycles / self.clock.cycles_per_s
                    seconds += node.hbm_bytes / self.clock.hbm_bytes_per_s
                    self.compute_s += seconds
                    self.now_s += seconds
                case Blocking(transfer):
                    self._wait(transfer, self._begin(transfer))
                case Start(transfer, key):
                    self.flying[key] = transfer, self._begin(transfer)
                case Done(key):
                    if key in self.flying:
                        self._wait(*self.flying.pop(key))
                case Loop(trips, body):
                    self._loop(trips, body)
                case Branches(bodies):
                    self._branches(bodies)

    def _begin(self, transfer: int) -> float:
        """Returns when a transfer that starts now ends."""
        links = self.links(transfer)
        begin = max([self.now_s, *(self.free_s.get(link, 0.0) for link in links)])
        end = begin + self.seconds(transfer)
        self.free_s.update(dict.fromkeys(links, end))
        return end

    def _wait(self, transfer: int, until_s: float) -> None:
        wait = max(0.0, until_s - self.now_s)
        self.now_s += wait
        if self.schedule.transfers[transfer].kind == "copy":
            self.exposed_copy_s += wait
        else:
            self.exposed_comm_s += wait

    def _loop(self, trips: int, body: tuple[Node, ...]) -> None:
        """Runs two iterations; the others are as the second, which starts as the first left off."""
        if trips > 0:
            self.run(body)
        if trips < 2:
            return
        before = self._totals()
        self.run(body)
        after = self._totals()
        skipped = [(trips - 2) * (b - a) for a, b in zip(before, after, strict=True)]
        self._set([a + s for a, s in zip(after, skipped, strict=True)])
        self.free_s = {k: v + skipped[0] for k, v in self.free_s.items()}
        self.flying = {k: (t, v + skipped[0]) for k, (t, v) in self.flying.items()}

    def _branches(self, bodies: tuple[tuple[Node, ...], ...]) -> None:
        start, free, flying = self._totals(), dict(self.free_s), dict(self.flying)
        longest: tuple[float, tuple[Node, ...]] = (-math.inf, ())
        for body in bodies:
            self.run(body)
            longest = max(longest, (self.now_s, body), key=lambda pair: pair[0])
            self._set(start)
            self.free_s, self.flying = dict(free), dict(flying)
        self.run(longest[1])

    def _totals(self) -> list[float]:
        return [self.now_s, self.compute_s, self.exposed_comm_s, self.exposed_copy_s]

    def _set(self, totals: list[float]) -> None:
        self.now_s, self.compute_s, self.exposed_comm_s, self.exposed_copy_s = totals
