"""Which links a mesh axis runs over, read from the devices or from how such machines are wired.

Each device gets physical coordinates: `(slice, x, y, z, core)` on a TPU, `(node, chip)` elsewhere.
The coordinates that change along a mesh axis are the links of that axis. Two v5e slices of 2x4 in a
mesh `data=4,model=4` make `data` cross the slices and one torus dim, `model` run along the other.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.errors import HardwareError, MeshError
from autoshard.hardware import Chip, Fabric, Hardware, Link
from autoshard.sharding import Axes, MeshShape


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the devices of a mesh stand: `places` are the bytes of int64[*sizes, columns]; each
    column has a link."""

    sizes: tuple[int, ...]
    places: bytes
    columns: tuple[Link | None, ...]

    @functools.cached_property
    def coordinates(self) -> np.ndarray:
        return np.frombuffer(self.places, np.int64).reshape(*self.sizes, len(self.columns))

    def lines(self, axes: Sequence[int]) -> np.ndarray:
        """Returns the coordinates of each group along some axes: [groups, n, columns]."""
        last = list(range(-1 - len(axes), -1))
        moved = np.moveaxis(self.coordinates, list(axes), last)
        return moved.reshape(-1, math.prod(self.sizes[a] for a in axes), len(self.columns))

    @functools.cache  # noqa: B019 (grids are few and live as long as their topology)
    def parts(self, axes: tuple[int, ...]) -> tuple[tuple[int, Link], ...] | None:
        """Returns the `(size, link)` of the columns that a group along some axes spans, major
        first, or None where it stands in no grid order."""
        lines = self.lines(axes)
        varying = [c for c in range(lines.shape[-1]) if (lines[..., c] != lines[:, :1, c]).any()]
        steps = [np.diff(np.sort(lines[..., c])).astype(bool) for c in varying]
        counts = [1 + int(step.sum(-1).max()) for step in steps]
        if math.prod(counts) != lines.shape[1]:
            return None
        return tuple(
            (n, _strided(link, lines[0, :, c], self.coordinates[..., c]))
            for c, n in zip(varying, counts, strict=True)
            if (link := self.columns[c]) is not None
        )

    def crowding(self, axes: Sequence[int], column: int) -> float:
        """Returns how many groups share a link of a torus dim where most cross it."""
        lines = self.lines(axes)[..., column]
        first, last = lines.min(-1), lines.max(-1)
        values = np.unique(lines)
        links = self.coordinates[..., 0].size / len(values)
        return max(float(((first <= v) & (v < last)).sum() / links) for v in values[:-1])


@dataclasses.dataclass(frozen=True)
class Topology:
    """A mesh with its chip, the link of each mesh axis, and where the devices stand if known."""

    mesh: MeshShape
    chip: Chip
    links: tuple[Link, ...]
    grid: Grid | None = None

    def __post_init__(self):
        if len(self.links) != len(self.mesh.axes):
            raise HardwareError(
                f"got {len(self.links)} links, wanted one for each axis of {self.mesh}"
            )

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.chip.name, self.links))

    def __hash__(self) -> int:
        return self._hash

    def link(self, axis: str) -> Link:
        return self.links[self.mesh.names.index(axis)]

    def parts(self, axis: str) -> tuple[tuple[int, Link], ...]:
        """Returns the `(size, link)` that an axis is made of, major first."""
        link = self.link(axis)
        return link.parts or ((self.mesh.size(axis), link),)

    def dims(self, axes: Axes) -> tuple[tuple[int, Link], ...]:
        """Returns the `(size, link)` that several axes are made of together.

        Axes that lie along one dim of a torus share its links.
        """
        if self.grid is not None and len(axes) > 1:
            found = self.grid.parts(tuple(self.mesh.names.index(a) for a in axes))
            if found is not None:
                return found
        return tuple(part for axis in axes for part in self.parts(axis))

    def __str__(self) -> str:
        axes = (f"{n}={s} {link}" for (n, s), link in zip(self.mesh.axes, self.links, strict=True))
        return f"{self.chip.name}: " + "; ".join(axes)


def topology(mesh: MeshShape, hardware: Hardware, devices: np.ndarray | None = None) -> Topology:
    """Returns the link of each mesh axis.

    Args:
      mesh: names and sizes of the axes.
      hardware: a chip and how it is wired, or one link for each axis.
      devices: device objects in the mesh's shape. `coords`, `core_on_chip`, `slice_index` and
        `process_index` are read where they exist. None, or devices of another kind (a plan for TPUs
        made on CPU devices): the usual slice shape or nodes, mesh major first.

    Raises:
      HardwareError: an axis has no link, or the mesh is larger than the machine.
      MeshError: the devices do not have the mesh's shape.
    """
    if devices is not None and devices.shape != tuple(size for _, size in mesh.axes):
        raise MeshError(f"devices of shape {devices.shape} do not fit the mesh {mesh}")
    if hardware.axis_links:
        return Topology(mesh, hardware.chip, tuple(hardware.link_of(a) for a in mesh.names))
    chip, fabric = hardware.chip, hardware.links
    if fabric is None:
        raise HardwareError(f"hardware {hardware.name!r} has no links")
    if devices is not None and not _is_described(devices, fabric):
        devices = None
    if fabric.torus_dims:
        coordinates = _default_torus(mesh, fabric) if devices is None else _tpu_coordinates(devices)
        if chip.cores > 1 and len(np.unique(coordinates[..., -1])) > 1:
            chip, fabric = chip.per_core(), _per_core(fabric, chip.cores)
        columns = _torus_links(coordinates, fabric)
    else:
        nodes = _nodes(devices, fabric) if devices is not None else None
        coordinates = _switch_coordinates(mesh, fabric, nodes)
        columns = [fabric.across, fabric.inside]
    sizes = tuple(size for _, size in mesh.axes)
    grid = Grid(sizes, np.ascontiguousarray(coordinates, np.int64).tobytes(), tuple(columns))
    links = tuple(_axis_link(i, mesh, grid, hardware) for i in range(len(sizes)))
    return Topology(mesh, chip, links, grid)


def _axis_link(axis: int, mesh: MeshShape, grid: Grid, hardware: Hardware) -> Link:
    """Returns the link of one mesh axis."""
    name, _ = mesh.axes[axis]
    lines, columns = grid.lines((axis,)), grid.columns
    varying = [c for c in range(lines.shape[-1]) if (lines[..., c] != lines[:, :1, c]).any()]
    if not varying:
        assert columns[-1] is not None
        return columns[-1]
    missing = [c for c in varying if columns[c] is None]
    if missing:
        raise HardwareError(
            f"mesh axis {name!r} crosses domains of {hardware.name!r}, which has no link across:"
            " give Hardware(links=Fabric(..., across=Link(...)))"
        )
    parts = grid.parts((axis,))
    if parts is None:
        # Devices in no grid order: every hop may need every link, so the slowest one decides.
        crossed = {c: link for c in varying if (link := columns[c]) is not None}
        slowest = min(crossed.values(), key=lambda link: link.bytes_per_s)
        crowds = [grid.crowding((axis,), c) for c, link in crossed.items() if not link.switched]
        speed = slowest.bytes_per_s / max([1.0, *crowds])
        return dataclasses.replace(slowest, bytes_per_s=speed, wrap=False)
    if len(parts) == 1:
        return parts[0][1]
    slowest = min((link for _, link in parts), key=lambda link: link.bytes_per_s)
    return dataclasses.replace(slowest, parts=parts)


def _strided(link: Link, line: np.ndarray, column: np.ndarray) -> Link:
    """A chain over every k-th chip shares its links with k - 1 others, and each step is k hops."""
    if link.switched:
        return link
    values = np.unique(line)
    if len(values) == len(np.unique(column)):
        return link
    stride = int(np.diff(values).min())
    return dataclasses.replace(
        link, bytes_per_s=link.bytes_per_s / stride, latency_s=link.latency_s * stride, wrap=False
    )


def _torus_links(coordinates: np.ndarray, fabric: Fabric) -> list[Link | None]:
    """Links of the columns (slice, x, y, z, core)."""
    links: list[Link | None] = [fabric.across]
    sizes = [len(np.unique(coordinates[..., c])) for c in range(1, 4)]
    # Optical switches close a ring only around whole cubes, 2x2x4 has none ([book] part 2).
    whole = fabric.torus_dims < 3 or all(s % fabric.wrap_multiple == 0 for s in sizes)
    for size in sizes:
        wrap = whole and size > 2 and size % fabric.wrap_multiple == 0
        links.append(dataclasses.replace(fabric.inside, wrap=wrap))
    return [*links, fabric.on_chip or fabric.inside]


def _per_core(fabric: Fabric, cores: int) -> Fabric:
    """The cores of a chip share its links."""

    def share(link: Link) -> Link:
        return dataclasses.replace(link, bytes_per_s=link.bytes_per_s / cores)

    across = fabric.across and share(fabric.across)
    return dataclasses.replace(fabric, inside=share(fabric.inside), across=across)


def _is_described(devices: np.ndarray, fabric: Fabric) -> bool:
    """Tells whether these devices can say where they stand in such a fabric."""
    if fabric.torus_dims:
        return all(getattr(d, "coords", None) is not None for d in devices.flat)
    return all(getattr(d, "platform", None) != "cpu" for d in devices.flat)


def _tpu_coordinates(devices: np.ndarray) -> np.ndarray:
    """Reads (slice, x, y, z, core) of each device: [*mesh, 5]."""
    rows = []
    for device in devices.flat:
        xyz = (*device.coords, 0, 0)[:3]
        slice_index = getattr(device, "slice_index", None) or 0
        rows.append((slice_index, *xyz, getattr(device, "core_on_chip", None) or 0))
    return np.array(rows, dtype=np.int64).reshape(*devices.shape, 5)


def _default_torus(mesh: MeshShape, fabric: Fabric) -> np.ndarray:
    """Returns coordinates [*mesh, 5] in the usual slice, each axis over whole dims if possible."""
    count = mesh.device_count
    slices = math.ceil(count / (fabric.domain_size or count))
    if count % slices:
        raise HardwareError(
            f"{count} devices do not divide into slices of {fabric.domain_size}:"
            " pass the mesh's devices"
        )
    sizes = [size for _, size in mesh.axes]
    outer, inner = _split_major(sizes, slices, mesh)
    cores = math.gcd(count // slices, fabric.devices_per_chip)
    torus = slice_shape(count // slices // cores, fabric.torus_dims)
    physical = (*torus, *(1,) * (3 - len(torus)), cores)
    order = _assign_dims(inner, physical)
    # Position in the slice -> (x, y, z, core), the dims in the chosen order.
    grid = np.moveaxis(np.indices(physical), 0, -1).transpose(*order, 4).reshape(*inner, 4)
    index = np.indices(sizes).reshape(len(sizes), -1)
    inner_size = np.array(inner, dtype=np.int64).reshape(-1, 1)
    chips = grid[tuple(index % inner_size)]
    slice_index = np.ravel_multi_index(tuple(index // inner_size), tuple(outer)) if sizes else 0
    return np.column_stack([slice_index, chips]).reshape(*sizes, 5)


def slice_shape(count: int, dims: int) -> tuple[int, ...]:
    """Returns the usual slice of `count` chips: 8 is 2x4 in two dims, 2x2x2 in three.

    Its dims are powers of two as equal as can be, ascending; another factor goes to the last.
    """
    shape, rest = [1] * dims, count
    while rest % 2 == 0:
        at = min(range(dims), key=lambda d: (shape[d], -d))
        shape[at] *= 2
        rest //= 2
    shape.sort()
    shape[-1] *= rest
    return tuple(shape)


def _assign_dims(sizes: Sequence[int], physical: tuple[int, ...]) -> tuple[int, ...]:
    """Returns an order of the torus dims in which mesh axes take whole dims, if there is one."""
    order: list[int] = []

    def place(axis: int, left: tuple[int, ...]) -> bool:
        if axis == len(sizes):
            order.extend(left)
            return True
        for subset in _subsets(left):
            if math.prod(physical[d] for d in subset) == sizes[axis]:
                order.extend(subset)
                if place(axis + 1, tuple(d for d in left if d not in subset)):
                    return True
                del order[len(order) - len(subset) :]
        return False

    ones = tuple(d for d in range(len(physical)) if physical[d] == 1)
    if place(0, tuple(d for d in range(len(physical)) if physical[d] > 1)):
        return (*order, *ones)
    return tuple(range(len(physical)))


def _subsets(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    masks = sorted(range(2 ** len(dims)), key=lambda m: (m.bit_count(), m))
    return [tuple(d for i, d in enumerate(dims) if m >> i & 1) for m in masks]


def _split_major(
    sizes: Sequence[int], domains: int, mesh: MeshShape
) -> tuple[list[int], list[int]]:
    """Splits the axes, major first, over `domains`: sizes = outer * inner."""
    outer, inner, left = [], [], domains
    for size in sizes:
        take = math.gcd(size, left)
        outer.append(take)
        inner.append(size // take)
        left //= take
    if left > 1:
        raise HardwareError(
            f"mesh {mesh} does not divide over {domains} slices or nodes: pass its devices, or a"
            " mesh whose first axis is a multiple of it"
        )
    return outer, inner


def _nodes(devices: np.ndarray, fabric: Fabric) -> np.ndarray:
    """Returns the node of each device, in the mesh's shape."""
    flat = list(devices.flat)
    process = [getattr(d, "process_index", 0) or 0 for d in flat]
    slices = [getattr(d, "slice_index", None) for d in flat]
    keys: list[tuple] = [(p,) if s is None else (s,) for p, s in zip(process, slices, strict=True)]
    limit = fabric.domain_size or len(flat)
    if max(keys.count(k) for k in dict.fromkeys(keys)) > limit:
        # Compile-only devices put all hosts into one slice.
        keys = [(s or 0, p) for p, s in zip(process, slices, strict=True)]
    numbers = {k: i for i, k in enumerate(sorted(dict.fromkeys(keys)))}
    return np.array([numbers[k] for k in keys]).reshape(devices.shape)


def _switch_coordinates(mesh: MeshShape, fabric: Fabric, nodes: np.ndarray | None) -> np.ndarray:
    """Returns (node, chip within the node) of each mesh position: [*mesh, 2]."""
    sizes = tuple(size for _, size in mesh.axes)
    ids = np.arange(mesh.device_count).reshape(sizes)
    if nodes is None:
        count = math.ceil(mesh.device_count / (fabric.domain_size or mesh.device_count))
        outer, inner = _split_major(sizes, count, mesh)
        index = np.indices(sizes).reshape(len(sizes), -1)
        inner_size = np.array(inner, dtype=np.int64).reshape(-1, 1)
        node = np.ravel_multi_index(tuple(index // inner_size), tuple(outer))
        chip = np.ravel_multi_index(tuple(index % inner_size), tuple(inner))
        return np.column_stack([node, chip]).reshape(*sizes, 2)
    chip = np.zeros(sizes, np.int64)
    for node in np.unique(nodes):
        chip[nodes == node] = np.argsort(np.argsort(ids[nodes == node]))
    return np.stack([nodes, chip], -1)
