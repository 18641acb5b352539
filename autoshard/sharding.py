"""How one array lies on a mesh: named axes per dim.

A running example, used in the docstrings below: the mesh `data=4,model=2` and an array `f32[16,8]`.
Its sharding `f32[16@data,8@model]` gives each of the 8 devices a block of shape (4, 4).

Invariants: an axis shards at most one dim of an array; several axes on one dim are written major
first; a dim is sharded only by axes whose product divides it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from jax.sharding import PartitionSpec

from autoshard.errors import MeshError

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes, major first: `data=4,model=2`."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self):
        if len(set(self.names)) != len(self.axes):
            raise MeshError(f"mesh axes must have different names, got {self.names}")
        for name, size in self.axes:
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}, wanted at least 1")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads `data=4,model=2`.

        Raises:
          MeshError: the text is not a list of name=size.
        """
        axes = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            if not (equals and name.strip().isidentifier() and size.strip().isdigit()):
                raise MeshError(f"cannot read mesh axis {part!r} in {text!r}: write data=4,model=2")
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes))

    @functools.cached_property
    def names(self) -> Axes:
        return tuple(name for name, _ in self.axes)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @functools.cached_property
    def _products(self) -> dict[str | Axes, int]:
        return {(): 1}

    @property
    def device_count(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axes: str | Axes) -> int:
        """Returns the number of devices along one axis or the product over several."""
        found = self._products.get(axes)
        if found is None:
            names = (axes,) if isinstance(axes, str) else axes
            try:
                found = math.prod(self._sizes[a] for a in names)
            except KeyError as e:
                raise MeshError(f"unknown mesh axis {e.args[0]!r}: the mesh is {self}") from None
            self._products[axes] = found
        return found

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Mesh axes of each dim of one array, major first within a dim."""

    dims: tuple[Axes, ...]

    @classmethod
    def replicated(cls, rank: int) -> "Sharding":
        return cls(((),) * rank)

    @classmethod
    def from_spec(cls, spec: PartitionSpec, rank: int) -> "Sharding":
        """Reads a PartitionSpec, which may be shorter than the rank."""
        entries = tuple(spec) + (None,) * (rank - len(spec))
        return cls(tuple(_axes_of_entry(e) for e in entries))

    def to_spec(self) -> PartitionSpec:
        entries = [d[0] if len(d) == 1 else (d or None) for d in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.dims)

    @functools.cached_property
    def axes(self) -> Axes:
        """All axes used, in the order of the dims."""
        return tuple(itertools.chain.from_iterable(self.dims))

    @property
    def is_replicated(self) -> bool:
        return not any(self.dims)

    def shard_count(self, mesh: MeshShape) -> int:
        return mesh.size(self.axes)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        return tuple(n // mesh.size(d) for n, d in zip(shape, self.dims, strict=True))

    def local_bytes(self, shape: tuple[int, ...], itemsize: float, mesh: MeshShape) -> float:
        return math.prod(self.local_shape(shape, mesh)) * itemsize

    def check(self, shape: tuple[int, ...], mesh: MeshShape) -> str | None:
        """Returns what is wrong with this sharding for an array of `shape`, or None."""
        if len(self.dims) != len(shape):
            return f"{self} has {len(self.dims)} dims, the array has {len(shape)}"
        unknown = [a for a in self.axes if a not in mesh.names]
        if unknown:
            return f"unknown mesh axis {unknown[0]!r}: the mesh is {mesh}"
        if len(set(self.axes)) != len(self.axes):
            return f"{self} uses a mesh axis twice"
        for d, (n, axes) in enumerate(zip(shape, self.dims, strict=True)):
            if axes and (n == 0 or n % mesh.size(axes)):
                return f"dim {d} of size {n} is not divisible by {'*'.join(axes)}={mesh.size(axes)}"
        return None

    def text(self, shape: tuple[int, ...], dtype: str) -> str:
        """The form JAX prints, `f32[16@data,8@model]`; several axes as `16@(data,model)`."""
        dims = [f"{n}{_axes_text(axes)}" for n, axes in zip(shape, self.dims, strict=True)]
        return f"{dtype}[{','.join(dims)}]"

    def __str__(self) -> str:
        """`[data,(a,b),-]`: one entry a dim, `-` for none."""
        return "[" + ",".join(_axes_text(d)[1:] or "-" for d in self.dims) + "]"


def all_shardings(
    shape: tuple[int, ...], mesh: MeshShape, ordered: bool = True
) -> tuple[Sharding, ...]:
    """Returns every legal sharding of an array, replicated first, in a fixed order.

    Axes of size 1 never appear. With `ordered` both orders of two axes on one dim are listed
    (they differ in which devices hold a block); without it only the mesh's order.
    """
    return _all_shardings(tuple(shape), mesh, ordered)


@functools.lru_cache(maxsize=4096)
def _all_shardings(shape: tuple[int, ...], mesh: MeshShape, ordered: bool) -> tuple[Sharding, ...]:
    found = set(_placements(shape, mesh, ordered))
    return tuple(sorted(found, key=lambda s: (len(s.axes), s.dims)))


def _placements(shape: tuple[int, ...], mesh: MeshShape, ordered: bool) -> Iterator[Sharding]:
    axes = [name for name, size in mesh.axes if size > 1]
    for count in range(len(axes) + 1):
        chosen = (
            itertools.permutations(axes, count) if ordered else itertools.combinations(axes, count)
        )
        for order in chosen:
            for places in itertools.product(range(len(shape)), repeat=count):
                dims: list[Axes] = [()] * len(shape)
                for axis, d in zip(order, places, strict=True):
                    dims[d] += (axis,)
                sharding = Sharding(tuple(dims))
                if sharding.check(shape, mesh) is None:
                    yield sharding


def _axes_of_entry(entry) -> Axes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_text(axes: Axes) -> str:
    if not axes:
        return ""
    return "@" + (axes[0] if len(axes) == 1 else f"({','.join(axes)})")
