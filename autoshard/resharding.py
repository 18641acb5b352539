"""Cheapest ways from one sharding of an array to another, as collectives.

All legal shardings are states. One step between two of them is
  slice       every dim keeps its axes and may get more, minor-most: each device keeps a part;
  all-gather  one dim loses its minor-most axes;
  all-to-all  the minor-most axes of one dim become the minor-most of another;
  permute     the local shape stays, other devices hold the blocks.
Every pair is connected (gather all, then slice), so no cost is infinite; the table holds the
shortest paths. A step costs `start_s + s_per_byte * bytes`, linear in the size of the array, and
which steps exist depends only on which axes divide which dims: both are kept, so that a table is
one sum and the paths.

Times are whole picoseconds and the number of steps breaks ties: a table is the same on any machine.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from autoshard.collectives import Kind, beside, linear
from autoshard.errors import MeshError
from autoshard.sharding import Axes, MeshShape, Sharding, all_shardings
from autoshard.topology import Topology

_KINDS = tuple(Kind)
_STEPS = 1000  # a cost is picoseconds * _STEPS + number of steps
_UNREACHED = np.int64(2**61)
_PICOSECOND = 1e-12


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective of a resharding."""

    kind: Kind
    axes: Axes
    before: Sharding
    after: Sharding
    full_bytes: float  # as the function of that collective has it: all-gather after, others before
    seconds: float

    def __str__(self) -> str:
        axes = ",".join(self.axes)
        return f"{self.kind}({axes}) {self.before} -> {self.after} {self.seconds * 1e6:.3g} us"


@dataclasses.dataclass(frozen=True, eq=False)
class ReshardTable:
    """Seconds between all n shardings of an array: `seconds` [n, n], from row to column."""

    shardings: tuple[Sharding, ...]
    seconds: np.ndarray
    beside: Mapping[str, np.ndarray]  # kind of link: [n, n] whether a gather hides while it uses it
    _moves: "_Moves"
    _direct: np.ndarray  # [n, n] cost of one step
    _best: np.ndarray  # [n, n] cost of the cheapest steps
    _total_bytes: float

    def index(self, sharding: Sharding) -> int:
        """Returns the row of a sharding; axes of size 1 do not count.

        Raises:
          MeshError: the array cannot be sharded so.
        """
        found = self._moves.index.get(sharding.dims)
        if found is None:
            found = self._moves.index.get(self._moves.without_units(sharding.dims))
        if found is None:
            raise MeshError(
                f"an array of this shape has no sharding {sharding} on {self._moves.mesh}: each dim"
                " must be divisible by its axes, and an axis shards one dim"
            )
        return found

    def hides(self, before: Sharding, after: Sharding) -> str:
        """Returns the kind of link on which the whole way can run beside compute, or ""."""
        place = self.index(before), self.index(after)
        return next((link for link, found in self.beside.items() if found[place]), "")

    @property
    def step_counts(self) -> np.ndarray:
        """The number of steps of each cheapest way, [n, n]."""
        return self._best % _STEPS

    def steps(self, before: Sharding, after: Sharding) -> tuple[Step, ...]:
        """Returns the cheapest steps from one sharding to another; none if they are the same."""
        at, end, steps = self.index(before), self.index(after), []
        while at != end:
            through = self._direct[at] + self._best[:, end]
            through[at] = _UNREACHED
            to = int(np.argmin(through))
            steps.append(self._step(at, to))
            at = to
        return tuple(steps)

    def _step(self, at: int, to: int) -> Step:
        moves = self._moves
        kind = _KINDS[moves.kind[at, to]]
        return Step(
            kind,
            moves.axes[moves.axes_index[at, to]],
            self.shardings[at],
            self.shardings[to],
            float(moves.share[at, to] * self._total_bytes),
            float(self._direct[at, to] // _STEPS) * _PICOSECOND,
        )

    def __str__(self) -> str:
        return f"{len(self.shardings)} shardings, at most {self.seconds.max() * 1e6:.4g} us apart"


def table(shape: tuple[int, ...], itemsize: float, topology: Topology) -> ReshardTable:
    """Returns the cheapest resharding of an array between any two of its shardings."""
    count = topology.mesh.device_count
    # A product of axes divides n exactly if it divides gcd(n, count): few patterns, many shapes.
    pattern = tuple(math.gcd(n, count) if n else 1 for n in shape)
    return _table(pattern, float(math.prod(shape) * itemsize), topology)


@functools.lru_cache(maxsize=256)
def _table(pattern: tuple[int, ...], total_bytes: float, topology: Topology) -> ReshardTable:
    moves = _moves(pattern, topology.mesh)
    start_s, s_per_byte = _costs(pattern, topology)
    seconds = start_s + s_per_byte * total_bytes
    direct = np.full(seconds.shape, _UNREACHED)
    picoseconds = np.rint(seconds[moves.exists] / _PICOSECOND).astype(np.int64)
    direct[moves.exists] = picoseconds * _STEPS + 1
    np.fill_diagonal(direct, 0)
    best = _shortest(direct, moves.successors)
    return ReshardTable(
        moves.shardings,
        (best // _STEPS) * _PICOSECOND,
        _beside(pattern, topology),
        moves,
        direct,
        best,
        total_bytes,
    )


@functools.lru_cache(maxsize=1024)
def _beside(pattern: tuple[int, ...], topology: Topology) -> Mapping[str, np.ndarray]:
    """Returns by kind of link [n, n] whether one sharding is gathered from another beside compute.

    A gather goes where a slice comes from.
    """
    moves = _moves(pattern, topology.mesh)
    slices = moves.exists & (moves.kind == _KINDS.index(Kind.SLICE))
    found: dict[str, np.ndarray] = {}
    for n, axes in enumerate(moves.axes):
        if link := beside(Kind.ALL_GATHER, topology, axes):
            mine = found.setdefault(link, np.zeros(slices.shape, bool))
            mine |= (slices & (moves.axes_index == n)).T
    return found


def _shortest(direct: np.ndarray, successors: tuple[np.ndarray, ...]) -> np.ndarray:
    """All-pairs shortest paths, [n, n] -> [n, n], by relaxing whole rows until nothing changes.

    Paths are a few steps long and a state has far fewer successors than there are states: several
    times less work than Floyd and Warshall's.
    """
    best, changed = direct.copy(), True
    while changed:
        changed = False
        for row, after in enumerate(successors):
            through = (best[after] + direct[row, after, None]).min(0)
            if (through < best[row]).any():
                np.minimum(best[row], through, out=best[row])
                changed = True
    return best


@dataclasses.dataclass(frozen=True, eq=False)
class _Moves:
    """The steps between n shardings: matrices [n, n] from row to column."""

    mesh: MeshShape
    shardings: tuple[Sharding, ...]
    index: dict[tuple[Axes, ...], int]
    axes: tuple[Axes, ...]
    exists: np.ndarray  # bool
    kind: np.ndarray  # index into _KINDS
    axes_index: np.ndarray  # index into axes
    share: np.ndarray  # bytes that the collective is priced by, as a share of the whole array

    @functools.cached_property
    def successors(self) -> tuple[np.ndarray, ...]:
        return tuple(
            np.flatnonzero(row) for row in self.exists | np.eye(len(self.exists), dtype=bool)
        )

    def without_units(self, dims: tuple[Axes, ...]) -> tuple[Axes, ...]:
        return tuple(tuple(a for a in d if self.mesh.size(a) > 1) for d in dims)


@functools.lru_cache(maxsize=1024)
def _moves(pattern: tuple[int, ...], mesh: MeshShape) -> _Moves:
    shardings = all_shardings(pattern, mesh)
    index = {s.dims: i for i, s in enumerate(shardings)}
    local = [1 / s.shard_count(mesh) for s in shardings]
    n = len(shardings)
    exists = np.zeros((n, n), bool)
    kinds, axes_index = np.zeros((n, n), np.int8), np.zeros((n, n), np.int32)
    share = np.zeros((n, n))
    all_axes: dict[Axes, int] = {}

    def add(i: int, j: int, kind: Kind, axes: tuple[str, ...]):
        exists[i, j] = True
        kinds[i, j] = _KINDS.index(kind)
        axes = tuple(a for a in mesh.names if a in axes)
        axes_index[i, j] = all_axes.setdefault(axes, len(all_axes))
        share[i, j] = local[j] if kind in (Kind.ALL_GATHER, Kind.SLICE) else local[i]

    for i, sharding in enumerate(shardings):
        for kind, axes, dims in _single_dim_moves(sharding.dims):
            if dims in index:
                add(i, index[dims], kind, axes)
        for dims in _prefixes(sharding.dims):
            if dims != sharding.dims:
                kept = {a for d in dims for a in d}
                add(index[dims], i, Kind.SLICE, tuple(a for a in sharding.axes if a not in kept))
    for i, j in _same_local_shape(shardings, mesh):
        differing = zip(shardings[i].dims, shardings[j].dims, strict=True)
        add(i, j, Kind.PERMUTE, tuple(a for p, q in differing if p != q for a in p + q))
    return _Moves(mesh, shardings, index, tuple(all_axes), exists, kinds, axes_index, share)


def _single_dim_moves(dims: tuple[Axes, ...]) -> Iterator[tuple[Kind, Axes, tuple[Axes, ...]]]:
    """The minor-most axes of one dim: gathered, or moved to each other dim."""
    for d, axes in enumerate(dims):
        for keep in range(len(axes)):
            moved = axes[keep:]
            without = (*dims[:d], axes[:keep], *dims[d + 1 :])
            yield Kind.ALL_GATHER, moved, without
            for e in range(len(dims)):
                if e != d:
                    yield (
                        Kind.ALL_TO_ALL,
                        moved,
                        (*without[:e], without[e] + moved, *without[e + 1 :]),
                    )


def _prefixes(dims: tuple[Axes, ...]) -> Iterator[tuple[Axes, ...]]:
    """Every sharding from which this one is a slice, itself included."""
    if not dims:
        yield ()
        return
    for rest in _prefixes(dims[1:]):
        for keep in range(len(dims[0]) + 1):
            yield (dims[0][:keep], *rest)


def _same_local_shape(
    shardings: tuple[Sharding, ...], mesh: MeshShape
) -> Iterator[tuple[int, int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, s in enumerate(shardings):
        groups.setdefault(tuple(mesh.size(d) for d in s.dims), []).append(i)
    for group in groups.values():
        yield from ((i, j) for i in group for j in group if i != j)


@functools.lru_cache(maxsize=1024)
def _costs(pattern: tuple[int, ...], topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each step as start [n, n] and per byte of the whole array [n, n]."""
    moves = _moves(pattern, topology.mesh)
    start_s, s_per_byte = np.zeros(moves.share.shape), np.zeros(moves.share.shape)
    # An all-to-all cuts and joins its blocks along other dims, which is a copy in HBM.
    copy_s_per_byte = {Kind.ALL_TO_ALL: 2 / topology.chip.hbm_bytes_per_s}
    groups = moves.kind.astype(np.int64) * len(moves.axes) + moves.axes_index
    for group in np.unique(groups[moves.exists]):
        kind, axes = _KINDS[group // len(moves.axes)], moves.axes[group % len(moves.axes)]
        cost = linear(kind, topology, axes)
        here = moves.exists & (groups == group)
        start_s[here] = cost.start_s
        s_per_byte[here] = (cost.s_per_byte + copy_s_per_byte.get(kind, 0.0)) * moves.share[here]
    return start_s, s_per_byte
