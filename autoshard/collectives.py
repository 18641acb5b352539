"""Seconds and bytes of one collective over some axes of a topology.

Each is a launch, hops, and seconds per byte, from three facts about a group of n devices:
  all-gather and reduce-scatter move (n-1)/n of the full size into each device; an all-reduce is
  both, launched once, or on a torus where that is faster a gather of what all devices have;
  a switch or a ring carries this at the full speed of the link, a closed ring in both directions;
  an all-to-all moves n times less than an all-gather on a switch, 4 times less on a closed ring,
  where data for far devices passes through the links between.
Several axes: those on one torus work jointly and their bandwidths add; those on one switch form one
group; where speeds differ, the fast level reduces first, so that the slow one moves only a share of
the bytes (reduce-scatter inside, all-reduce across, all-gather inside). Levels are pipelined: the
slowest decides.
Formulas: "How to Scale Your Model", parts 3 (tori) and 12 (switches); NCCL's ring and tree.
"""

import dataclasses
import enum
import functools
import math
from typing import Any

import numpy as np

from autoshard.hardware import Link
from autoshard.sharding import Axes, MeshShape
from autoshard.topology import Topology


class Kind(enum.Enum):
    """A collective; SLICE keeps a part of what a device holds, nothing moves between devices."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "permute"
    SLICE = "slice"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Linear:
    """A cost in seconds, `start_s + s_per_byte * bytes`."""

    start_s: float = 0.0
    s_per_byte: float = 0.0

    def __add__(self, other: "Linear") -> "Linear":
        return Linear(self.start_s + other.start_s, self.s_per_byte + other.s_per_byte)

    def __mul__(self, factor: float) -> "Linear":
        return Linear(self.start_s * factor, self.s_per_byte * factor)

    def __call__(self, size_bytes):
        return self.start_s + self.s_per_byte * np.asarray(size_bytes, dtype=float)

    def __str__(self) -> str:
        rate = f" + bytes at {1e-9 / self.s_per_byte:.4g} GB/s" if self.s_per_byte else ""
        return f"{self.start_s * 1e6:.3g} us{rate}"


@dataclasses.dataclass(frozen=True)
class Level:
    """Links that work as one: the dims of a torus, or the ports of a switch."""

    dims: tuple[tuple[int, Link], ...]

    @property
    def size(self) -> int:
        return math.prod(n for n, _ in self.dims)

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes/s into each device; the dims of a torus add up."""
        speeds = [link.ring_bytes_per_s for _, link in self.dims]
        return min(speeds) if self.dims[0][1].switched else sum(speeds)

    @property
    def hops_s(self) -> float:
        """Latency along the longest way."""
        if self.dims[0][1].switched:
            return math.ceil(math.log2(self.size)) * max(link.latency_s for _, link in self.dims)
        return sum(_hops(n, link) * link.latency_s for n, link in self.dims)


def all_gather_s(topology: Topology, axes: Axes, full_bytes):
    """Returns seconds of an all-gather; `full_bytes` [...] is what each device holds after it."""
    return seconds(Kind.ALL_GATHER, topology, axes, full_bytes)


def reduce_scatter_s(topology: Topology, axes: Axes, full_bytes):
    """Returns seconds of a reduce-scatter; `full_bytes` is what each device holds before it."""
    return seconds(Kind.REDUCE_SCATTER, topology, axes, full_bytes)


def all_reduce_s(topology: Topology, axes: Axes, full_bytes):
    """Returns seconds of an all-reduce; `full_bytes` is what each device holds before and after."""
    return seconds(Kind.ALL_REDUCE, topology, axes, full_bytes)


def all_to_all_s(topology: Topology, axes: Axes, local_bytes):
    """Returns seconds of an all-to-all; `local_bytes` is what each device holds at either end."""
    return seconds(Kind.ALL_TO_ALL, topology, axes, local_bytes)


def permute_s(topology: Topology, axes: Axes, local_bytes, shift: bool = False):
    """Returns seconds of a permute.

    Args:
      topology: mesh and links.
      axes: the axes along which devices exchange.
      local_bytes: what each device holds.
      shift: each device sends to its neighbour, one hop; else anywhere along the axes.
    """
    if shift:
        return _number(_shift(topology, _in_mesh_order(topology.mesh, axes))(local_bytes))
    return seconds(Kind.PERMUTE, topology, axes, local_bytes)


def seconds(kind: Kind, topology: Topology, axes: Axes, size_bytes):
    """Returns seconds of a collective; `size_bytes` as that collective's own function has it."""
    found = linear(kind, topology, axes)(size_bytes)
    if kind is Kind.ALL_REDUCE and _is_torus(topology, axes):
        # What is small is sent whole to everyone and added there: one step, not two. The TPU
        # compiler says so (`is_multistep:0`).
        whole = linear(Kind.ALL_GATHER, topology, axes)
        found = np.minimum(found, whole(topology.mesh.size(axes) * np.asarray(size_bytes)))
    return _number(found)


def linear(kind: Kind, topology: Topology, axes: Axes) -> Linear:
    """Returns the cost of a collective as a function of its bytes, of an all-reduce in two steps.

    Raises:
      MeshError: an axis is not of the mesh.
    """
    return _linear(kind, topology, _in_mesh_order(topology.mesh, axes))


def overlaps(kind: Kind, topology: Topology, axes: Axes) -> bool:
    """Tells whether the compiler runs a collective beside compute: on all links that it takes."""
    return bool(beside(kind, topology, axes))


def beside(kind: Kind, topology: Topology, axes: Axes) -> str:
    """Returns the kind of the slowest link that a collective takes, if the compiler runs it beside
    compute on all of them, else ""."""
    links = _links(topology, axes)
    if not links or not all(kind.value in link.overlaps for link in links):
        return ""
    return min(links, key=lambda link: link.bytes_per_s).kind


def scatters(topology: Topology, axes: Axes) -> bool:
    """Tells whether a reduce-scatter is compiled as one.

    Over a whole slice of equal torus dims (v5e 4x4, v5p 2x2x2) the TPU compiler sums everything on
    every device and slices; over 2x4, one dim or part of a slice it does not.
    """
    dims = [part for part in topology.dims(axes) if part[0] > 1]
    torus = len(dims) > 1 and all(not link.switched for _, link in dims)
    whole = topology.mesh.size(axes) == topology.mesh.device_count
    return not (torus and whole and len({size for size, _ in dims}) == 1)


def wire_bytes(kind: Kind, mesh: MeshShape, axes: Axes, size_bytes):
    """Returns the bytes that each device sends."""
    n = mesh.size(axes)
    share = {
        Kind.ALL_GATHER: (n - 1) / n,
        Kind.REDUCE_SCATTER: (n - 1) / n,
        Kind.ALL_REDUCE: 2 * (n - 1) / n,
        Kind.ALL_TO_ALL: (n - 1) / n,
        Kind.PERMUTE: float(n > 1),
        Kind.SLICE: 0.0,
    }[kind]
    return share * size_bytes


def _is_torus(topology: Topology, axes: Axes) -> bool:
    return all(link.kind == "ici" for link in _links(topology, axes))


def _links(topology: Topology, axes: Axes) -> list[Link]:
    return [link for level in levels_of(topology, axes) for _, link in level.dims]


def _number(found: np.ndarray) -> Any:
    return float(found) if found.ndim == 0 else found


def _in_mesh_order(mesh: MeshShape, axes: Axes) -> Axes:
    mesh.size(axes)
    return tuple(a for a in mesh.names if a in axes)


@functools.cache
def _linear(kind: Kind, topology: Topology, axes: Axes) -> Linear:
    if kind is Kind.SLICE:
        return Linear(0.0, 2 / topology.chip.hbm_bytes_per_s)
    levels = levels_of(topology, axes)
    if not levels:
        return Linear()
    launch_s = max(link.start_s for level in levels for _, link in level.dims)
    hops_s = sum(level.hops_s for level in levels)
    if kind is Kind.ALL_TO_ALL or kind is Kind.PERMUTE:
        whole = kind is Kind.PERMUTE
        if whole:  # perhaps along one axis only
            levels += tuple(level for axis in axes for level in levels_of(topology, (axis,)))
        ports = [port for level in levels for port in _ports(level)]
        return Linear(launch_s + hops_s, max(_exchange(n, link, whole) for n, link in ports))
    s_per_byte, inner = 0.0, 1
    for level in levels:
        share = (level.size - 1) / level.size / inner
        s_per_byte = max(s_per_byte, share / level.ring_bytes_per_s)
        inner *= level.size
    return Linear(launch_s) + Linear(hops_s, s_per_byte) * (2 if kind is Kind.ALL_REDUCE else 1)


def levels_of(topology: Topology, axes: Axes) -> tuple[Level, ...]:
    """Returns the levels that a group of devices along `axes` spans, the fastest first."""
    groups: dict[tuple, list[tuple[int, Link]]] = {}
    for size, link in topology.dims(axes):
        if size > 1:
            key = (link.kind, link.bytes_per_s) if link.switched else (link.kind,)
            groups.setdefault(key, []).append((size, link))
    levels = [Level(tuple(dims)) for dims in groups.values()]
    return tuple(sorted(levels, key=lambda v: -v.ring_bytes_per_s))


def _ports(level: Level) -> tuple[tuple[int, Link], ...]:
    """The dims of a torus each carry a part of the way; a switch is one dim."""
    if level.dims[0][1].switched:
        return ((level.size, level.dims[0][1]),)
    return level.dims


def _exchange(n: int, link: Link, whole: bool) -> float:
    """Seconds per local byte when every device sends to every other, or all of it to one (`whole`).

    The load of the busiest link, the shortest way round; a `whole` message does not split.
    """
    if link.switched:
        return (1 if whole else (n - 1) / n) / link.bytes_per_s
    if link.wrap and link.both_ways:
        load = n * n // 4 / 2 / n
    elif link.wrap:
        load = (n - 1) / 2
    else:
        load = n * n // 4 / n
    return (max(load, 1.0) if whole else load) / link.bytes_per_s


def _shift(topology: Topology, axes: Axes) -> Linear:
    links = _links(topology, axes)
    if not links:
        return Linear()
    start_s = max(link.start_s + link.latency_s for link in links)
    return Linear(start_s, max(1 / link.bytes_per_s for link in links))


def _hops(n: int, link: Link) -> int:
    return n // 2 if link.wrap and link.both_ways else n - 1
