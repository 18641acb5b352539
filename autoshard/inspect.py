"""What XLA really compiled, on one device: collectives, memory and time; and how it was planned."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard import collectives, hardware, hlo, hlo_collectives
from autoshard.errors import HardwareError, MeshError
from autoshard.hlo_collectives import CompiledCollective, axes_text, bytes_text, wire_bytes
from autoshard.schedule import KINDS, Clock, Schedule, Times, simulate
from autoshard.schedule import read as read_schedule
from autoshard.sharding import Axes, MeshShape
from autoshard.topology import Topology

Price = Callable[[CompiledCollective], float]  # seconds of one run of it, alone


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler reports them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of outputs that reuse donated arguments
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        return (
            f"peak {bytes_text(self.peak_bytes)}: arguments {bytes_text(self.argument_bytes)}, "
            f"outputs {bytes_text(self.output_bytes)}, of which in place "
            f"{bytes_text(self.alias_bytes)}, temporaries {bytes_text(self.temp_bytes)}"
        )


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one call of a compiled function does on one device."""

    collectives: tuple[CompiledCollective, ...]  # distinct channels, in the order they first run
    memory: Memory | None
    mesh: MeshShape
    notes: tuple[str, ...]  # what could not be read exactly, one line each
    clock: Clock | None  # None: not a device whose compiler estimates cycles
    schedule: Schedule = dataclasses.field(repr=False)
    runs: tuple[CompiledCollective | None, ...] = dataclasses.field(repr=False)
    """By transfer of the schedule: the collective as run there; None for a copy."""

    @property
    def compute_s(self) -> float | None:
        """The compiler's own estimate of compute, None where it gives none (CPU, GPU)."""
        times = self.times(lambda _: 0.0)
        return times and times.compute_s

    def exposed_comm_s(self, price: Price) -> float | None:
        """Seconds the core waits for collectives; None where compute is not known."""
        times = self.times(price)
        return times and times.exposed_comm_s

    def step_s(self, price: Price) -> float | None:
        """Seconds of a step: compute, and what of collectives and copies it waits for."""
        times = self.times(price)
        return times and times.step_s

    def times(self, price: Price) -> Times | None:
        """Simulates the schedule with collectives that last as `price` says."""
        if self.clock is None or not self.schedule.has_cycles:
            return None
        transfers, hbm_bytes_per_s = self.schedule.transfers, self.clock.hbm_bytes_per_s

        def seconds(i: int) -> float:
            run = self.runs[i]
            if run is None:
                return hlo_collectives.copied_bytes(transfers[i]) / hbm_bytes_per_s
            return price(run)

        def links(i: int) -> Axes:
            run = self.runs[i]
            if run is None:
                return ("hbm",)
            return ("dcn",) if transfers[i].across_slices else run.axes

        return simulate(self.schedule, self.clock, seconds, links)

    def __str__(self) -> str:
        lines = [str(self.memory)] if self.memory else []
        if self.compute_s is not None:
            lines.append(f"compute {self.compute_s * 1e3:.3f} ms")
        lines += [str(c) for c in self.collectives] or ["no collectives"]
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def inspect(compiled: jax.stages.Compiled, mesh: Mesh) -> CompiledStep:
    """Reads what XLA made of a function compiled for a mesh of real or ahead-of-time devices.

    Raises:
      MeshError: the program was compiled for another number of devices.
    """
    shape = MeshShape(tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True)))
    return from_text(
        compiled.as_text() or "",
        shape,
        device_ids=positions(compiled, mesh),
        slice_ids=[getattr(d, "slice_index", None) or 0 for d in mesh.devices.flat],
        device_kind=mesh.devices.flat[0].device_kind,
        memory=_memory(compiled),
    )


def from_text(
    text: str,
    mesh: MeshShape,
    device_ids: Sequence[int] | None = None,
    *,
    slice_ids: Sequence[int] | None = None,
    device_kind: str | None = None,
    memory: Memory | None = None,
) -> CompiledStep:
    """Reads the text of a compiled module.

    Args:
      text: as `compiled.as_text()` gives it.
      mesh: the axes to name groups by.
      device_ids: for each partition of the program, the position of its device in the mesh counted
        row by row; None: the same order.
      slice_ids: for each position in the mesh, the TPU slice of its device. The text of a program
        for several slices is that of one, which must have the same collectives as the others;
        None: slice after slice.
      device_kind: as JAX names it ("TPU v5 lite"); tells the clock.
      memory: as the compiler reported it.
    """
    module = hlo.parse(text)
    order = device_ids if device_ids is not None else range(mesh.device_count)
    slices = hlo_collectives.slices(module, mesh, order, slice_ids)
    schedule = read_schedule(module)
    runs = tuple(hlo_collectives.read(module, mesh, slices, t) for t in schedule.transfers)
    return CompiledStep(
        collectives=hlo_collectives.distinct(runs),
        memory=memory,
        mesh=mesh,
        notes=schedule.notes,
        clock=_clock(device_kind),
        schedule=schedule,
        runs=runs,
    )


def price_on(topology: Topology) -> Price:
    """Returns the price of a compiled collective on a topology.

    A group that spans part of an axis (the devices of one slice) is priced as if it spanned all.
    """

    def price(c: CompiledCollective) -> float:
        if not c.axes:
            return 0.0
        if c.kind == "collective-permute":
            return collectives.permute_s(topology, c.axes, c.bytes, c.shift)
        return collectives.seconds(collectives.Kind(c.kind), topology, c.axes, c.bytes)

    return price


def _clock(device_kind: str | None) -> Clock | None:
    try:
        chip = hardware.from_device_kind(device_kind or "").chip
    except HardwareError:
        return None
    return Clock(chip.clock_hz, chip.hbm_bytes_per_s) if chip.clock_hz else None


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )


def positions(compiled: jax.stages.Compiled, mesh: Mesh) -> list[int] | None:
    """Returns where in the mesh the device of each partition is.

    Partitions count in the order of the mesh that the function was compiled with, which may list
    the same devices in another order.
    """
    position = {d: i for i, d in enumerate(mesh.devices.flat)}
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            found = [position.get(d) for d in sharding.mesh.devices.flat]
            if None in found or len(found) != len(position):
                raise MeshError(
                    f"the function was compiled for the devices of {sharding.mesh}, which are not "
                    f"those of {mesh}: pass the mesh that it was compiled for"
                )
            return [p for p in found if p is not None]
    return None


class Planned(Protocol):
    """What is compared of a planned collective, whoever made it."""

    @property
    def kind(self) -> str: ...  # one of KINDS; "permute" and "slice" are understood
    @property
    def axes(self) -> Axes: ...
    @property
    def bytes(self) -> float: ...
    @property
    def trips(self) -> int: ...
    @property
    def source(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Planned against compiled. Bytes here are those each device sends in a step."""

    mesh: MeshShape
    planned: tuple[Planned, ...]
    compiled: tuple[CompiledCollective, ...]
    unplanned: tuple[tuple[CompiledCollective, float], ...]  # with the bytes that no plan explains
    missing: tuple[tuple[Planned, float], ...]  # with the bytes never compiled
    planned_bytes: float
    compiled_bytes: float
    unplanned_bytes: float  # of all collectives, those too small to name as well

    @property
    def unplanned_fraction(self) -> float:
        return self.unplanned_bytes / self.compiled_bytes if self.compiled_bytes else 0.0

    def sent_bytes(self) -> dict[Axes, tuple[float, float]]:
        """Returns what a device sends in a step, (planned, compiled), by the axes it spans."""
        sent: dict[Axes, tuple[float, float]] = {}
        for c in self.planned:
            axes, nbytes = _in_order(c.axes, self.mesh), _planned_wire_bytes(c, self.mesh)
            planned, compiled = sent.get(axes, (0.0, 0.0))
            sent[axes] = planned + nbytes, compiled
        for c in self.compiled:
            planned, compiled = sent.get(c.axes, (0.0, 0.0))
            sent[c.axes] = planned, compiled + c.wire_bytes
        return dict(sorted(sent.items(), key=lambda item: _axes_key(item[0], self.mesh)))

    def table(self) -> str:
        """Returns predicted against compiled: runs and bytes in all, by mesh axes and kind."""
        cells: dict[tuple[Axes, str], list[float]] = {}
        for column, group in enumerate((self.planned, self.compiled)):
            for c in group:
                cell = cells.setdefault((_in_order(c.axes, self.mesh), _kind(c)), [0.0] * 4)
                cell[2 * column] += c.trips
                cell[2 * column + 1] += c.bytes * c.trips
        rows: list[tuple[str, ...]] = [("axes", "kind", "predicted", "", "compiled", "")]
        order = sorted(cells, key=lambda k: (_axes_key(k[0], self.mesh), KINDS.index(k[1])))
        for axes, kind in order:
            runs, nbytes, compiled_runs, compiled_bytes = cells[axes, kind]
            predicted = (f"{runs:.0f} x", bytes_text(nbytes)) if runs else ("", "-")
            found = (f"{compiled_runs:.0f} x", bytes_text(compiled_bytes))
            rows.append(
                (axes_text(axes), kind, *predicted, *(found if compiled_runs else ("", "-")))
            )
        for axes, (planned, compiled) in self.sent_bytes().items():
            row = (axes_text(axes), "sent in all", "", bytes_text(planned))
            rows.append((*row, "", bytes_text(compiled)))
        widths = [max(len(row[c]) for row in rows) for c in range(6)]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if c < 2 else cell.rjust(w)
                for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def __str__(self) -> str:
        lines = [self.table()]
        lines += [f"not planned, {bytes_text(n)} sent: {c}" for c, n in self.unplanned]
        lines += [f"planned, not compiled, {bytes_text(n)} sent: {c}" for c, n in self.missing]
        lines.append(
            f"{bytes_text(self.unplanned_bytes)} of {bytes_text(self.compiled_bytes)} sent "
            f"({self.unplanned_fraction:.1%}) was not planned"
        )
        return "\n".join(lines)


def unplanned(
    compiled: CompiledStep,
    planned: Sequence[Planned],
    *,
    tolerance: float = 0.05,
    small_bytes: float = 4096,
) -> Comparison:
    """Sets what was compiled beside what was planned, and names what stands alone.

    XLA combines, splits and rewrites collectives, so bytes are matched rather than instructions:
    each side is taken apart into gathers, scatters, exchanges and permutes with the bytes that a
    device sends in them, and planned bytes explain compiled bytes in the order of `_RULES`. An
    all-reduce is a reduce-scatter and an all-gather; a gather over two axes is one over each; a
    chain of permutes (a windowed matmul) is whatever else was planned over its axes.

    Args:
      compiled: what `inspect` gave.
      planned: all collectives of the plan.
      tolerance: share of a collective's bytes that may stay unexplained before it is named.
      small_bytes: sent in a step, below which a collective is not named (losses, counters).
    """
    planned = [c for c in planned if c.kind != "slice"]  # moves nothing
    have = [p for i, c in enumerate(planned) for p in _planned_pieces(i, c, compiled.mesh)]
    want = [p for i, c in enumerate(compiled.collectives) for p in _compiled_pieces(i, c)]
    for rule in _RULES:
        for w in want:
            for h in have:
                if h.left_bytes > 0 and w.left_bytes > 0 and rule(w, h):
                    explained = min(h.left_bytes, w.left_bytes)
                    h.left_bytes -= explained
                    w.left_bytes -= explained
    alone = _alone(want, compiled.collectives, tolerance, small_bytes)
    missing = _alone(have, tuple(planned), tolerance, small_bytes)
    return Comparison(
        mesh=compiled.mesh,
        planned=tuple(planned),
        compiled=compiled.collectives,
        unplanned=alone,
        missing=missing,
        planned_bytes=sum(h.bytes for h in have),
        compiled_bytes=sum(w.bytes for w in want),
        unplanned_bytes=sum(w.left_bytes for w in want),
    )


@dataclasses.dataclass
class _Piece:
    """Part of a collective, with what each device sends in it in a step."""

    owner: int  # index of the collective
    kind: str  # one of KINDS, never all-reduce
    axes: frozenset[str]
    source: str
    bytes: float
    left_bytes: float  # not matched so far

    def same(self, other: "_Piece") -> bool:
        return self.kind == other.kind and self.axes == other.axes

    def equals(self, other: "_Piece") -> bool:
        return self.same(other) and abs(self.bytes - other.bytes) <= 0.02 * other.bytes

    def nested(self, other: "_Piece") -> bool:
        return self.axes <= other.axes or other.axes <= self.axes


# When planned bytes (second) explain compiled bytes (first): the surest grounds first.
_RULES: tuple[Callable[[_Piece, _Piece], bool], ...] = (
    lambda c, p: c.equals(p) and c.source == p.source,
    lambda c, p: c.equals(p),
    lambda c, p: c.same(p) and c.source == p.source,
    lambda c, p: c.same(p),
    lambda c, p: c.kind == p.kind and c.nested(p),
    lambda c, p: "collective-permute" in (c.kind, p.kind) and c.axes == p.axes,
    lambda c, p: "collective-permute" in (c.kind, p.kind) and c.nested(p),
)


def _planned_pieces(owner: int, c: Planned, mesh: MeshShape) -> list[_Piece]:
    return _pieces(owner, _kind(c), c.axes, c.source, _planned_wire_bytes(c, mesh))


def _compiled_pieces(owner: int, c: CompiledCollective) -> list[_Piece]:
    return _pieces(owner, c.kind, c.axes, c.source, c.wire_bytes)


def _pieces(owner: int, kind: str, axes: Axes, source: str, sent: float) -> list[_Piece]:
    kinds = ("reduce-scatter", "all-gather") if kind == "all-reduce" else (kind,)
    part = sent / len(kinds)
    return [_Piece(owner, k, frozenset(axes), source, part, part) for k in kinds]


def _planned_wire_bytes(c: Planned, mesh: MeshShape) -> float:
    return wire_bytes(_kind(c), c.bytes, mesh.size(c.axes)) * c.trips


def _kind(c: Planned | CompiledCollective) -> str:
    return "collective-permute" if c.kind == "permute" else c.kind


def _alone(pieces, owners, tolerance: float, small_bytes: float):
    """Returns the collectives with bytes left unmatched, most bytes first."""
    left, whole = [0.0] * len(owners), [0.0] * len(owners)
    for p in pieces:
        left[p.owner] += p.left_bytes
        whole[p.owner] += p.bytes
    found = [
        (owner, left[i])
        for i, owner in enumerate(owners)
        if left[i] > max(small_bytes, tolerance * whole[i])
    ]
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def _in_order(axes: Axes, mesh: MeshShape) -> Axes:
    return tuple(name for name in mesh.names if name in axes)


def _axes_key(axes: Axes, mesh: MeshShape) -> tuple[int, ...]:
    return (len(axes), *(mesh.names.index(a) for a in axes))
