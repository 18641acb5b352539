"""The collectives of a compiled program: kind, bytes, mesh axes, runs, source line.

The unit of bytes is one device's, by kind: all-gather the whole array after it, reduce-scatter and
all-reduce the whole array before it, all-to-all and collective-permute what the device holds.
"""

import dataclasses
from collections.abc import Sequence

from autoshard import hlo, schedule
from autoshard.errors import MeshError
from autoshard.sharding import Axes, MeshShape


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective of the program, all its runs in a step together."""

    kind: str  # one of schedule.KINDS
    bytes: float  # of one run
    axes: Axes  # mesh axes that its groups span, in the mesh's order
    group_size: int  # of a permute: devices that its pairs connect
    trips: int  # runs in a step
    channel_id: int | None
    source: str  # "file.py:12 (fn)", or "" where XLA kept none
    op_name: str
    asynchronous: bool  # may overlap with what stands between its start and its end
    dtype: str
    shape: str  # of its operands: "bf16[8,128]"
    shift: bool = False  # a permute in which everyone sends to a neighbour along the axes
    resliced: bool = False  # of the whole that it makes, each device goes on with a slice only

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.trips

    @property
    def wire_bytes(self) -> float:
        """What each device sends in a step: (n-1)/n of the bytes, twice for an all-reduce."""
        return wire_bytes(self.kind, self.bytes, self.group_size) * self.trips

    def __str__(self) -> str:
        manner = " async" if self.asynchronous else ""
        where = f" at {self.source}" if self.source else ""
        sliced = " only to be sliced" if self.resliced else ""
        first, *more = self.shape.split("+")
        others = f" and {len(more)} more" if more else ""
        return (
            f"{self.kind} over {axes_text(self.axes)}: {self.trips} x "
            f"{bytes_text(self.bytes)} {first}{others}{manner}{where}{sliced}"
        )


def wire_bytes(kind: str, nbytes: float, group_size: int) -> float:
    """Returns the bytes that each device of a group sends in one run of a collective.

    Rings send (n-1)/n of the array for a gather or a scatter of it, both for an all-reduce
    ("How to Scale Your Model", ch. 3); an all-to-all keeps the n-th part; a permute sends all.
    """
    if group_size <= 1:
        return 0.0
    if kind == "collective-permute":
        return nbytes
    return nbytes * (group_size - 1) / group_size * (2 if kind == "all-reduce" else 1)


def slices(
    module: hlo.Module, mesh: MeshShape, order: Sequence[int], slice_ids: Sequence[int] | None
) -> list[list[int]]:
    """Returns for each slice the positions in the mesh of the program's partitions."""
    count, rest = divmod(mesh.device_count, module.partition_count)
    if slice_ids is not None and count > 1:
        order = sorted(order, key=lambda position: slice_ids[position])
        rest = rest or len(set(slice_ids)) != count
    if rest or count < 1:
        raise MeshError(
            f"the program was compiled for {module.partition_count} devices, the mesh {mesh} has "
            f"{mesh.device_count}: pass the mesh that it was compiled for"
        )
    size = module.partition_count
    return [list(order[s * size : (s + 1) * size]) for s in range(count)]


def _groups(
    module: hlo.Module, slices: Sequence[Sequence[int]], transfer: schedule.Transfer
) -> list[tuple[int, ...]]:
    """Returns the groups of a collective as positions in the mesh."""
    if transfer.across_slices:
        # The target `{1,2}x{0:7}`: slices, counted from 1, and devices of each.
        target = transfer.instruction.text("_xla_megascale_target") or ""
        numbers = [
            int(n) - 1 for n in target.partition("x")[0].strip("{}").split(",") if n.isdigit()
        ]
        chosen = [slices[n] for n in numbers if n < len(slices)]
        return list(zip(*(chosen if len(chosen) > 1 else slices), strict=True))
    groups = hlo.groups(transfer.instruction, module.partition_count)
    return [tuple(slices[0][p] for p in group) for group in groups]


def read(
    module: hlo.Module,
    mesh: MeshShape,
    slices: Sequence[Sequence[int]],
    transfer: schedule.Transfer,
) -> CompiledCollective | None:
    """Returns what a transfer is on the mesh, or None for a copy.

    Args:
      module: that the transfer stands in.
      mesh: its axes and sizes.
      slices: what `slices` gave.
      transfer: one of the schedule.
    """
    if transfer.kind == "copy":
        return None
    instruction = transfer.instruction
    groups = _groups(module, slices, transfer)
    group_size = max((len(g) for g in groups), default=1)
    arrays = _operand_arrays(transfer)
    nbytes = sum(a.bytes for a in arrays)
    axes = _spanned(groups, mesh)
    named = _named(module, transfer)
    return CompiledCollective(
        kind=transfer.kind,
        bytes=nbytes * group_size if transfer.kind == "all-gather" else nbytes,
        axes=axes,
        group_size=group_size,
        trips=transfer.trips,
        channel_id=instruction.integer("channel_id"),
        source=next(filter(None, map(module.source, named)), ""),
        op_name=next(filter(None, (i.text("op_name") for i in named)), ""),
        asynchronous=transfer.asynchronous,
        dtype=max(arrays, key=lambda a: a.bytes).dtype if arrays else "",
        shape="+".join(map(str, arrays)),
        shift=_is_shift(instruction, axes, mesh, slices),
        resliced=transfer.kind in ("all-gather", "all-reduce")
        and _is_sliced(module, transfer.computation, instruction),
    )


def _is_shift(
    permute: hlo.Instruction, axes: Axes, mesh: MeshShape, slices: Sequence[Sequence[int]]
) -> bool:
    """Whether the pairs of a permute are neighbours along its axes, counted together."""
    count = mesh.size(axes)
    numbers = [
        tuple(_number(slices[0][p], axes, mesh) for p in pair) for pair in hlo.pairs(permute)
    ]
    return bool(numbers) and all((b - a) % count in (1, count - 1) for a, b in numbers)


def _number(device: int, axes: Axes, mesh: MeshShape) -> int:
    """Returns where a device is along some axes, row by row."""
    number, stride, width = 0, 1, 1
    for name, size in reversed(mesh.axes):
        if name in axes:
            number += device // stride % size * width
            width *= size
        stride *= size
    return number


_RESHAPES = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element")


def _is_sliced(module: hlo.Module, computation: hlo.Computation, whole: hlo.Instruction) -> bool:
    """Whether all that read an array take a slice at a place that depends on the device.

    A gather so used is what XLA warns of as involuntary full rematerialization; an all-reduce so
    used is a reduce-scatter that the compiler did not form.
    """
    users = computation.users.get(whole.name, ())
    return bool(users) and all(_slices_it(module, computation, whole, u) for u in users)


def _slices_it(module, computation, whole: hlo.Instruction, user: hlo.Instruction) -> bool:
    if user.opcode in _RESHAPES or user.opcode.endswith("-done"):
        return _is_sliced(module, computation, user)
    if user.opcode == "dynamic-slice":
        return user.operands[0] == whole.name
    if user.opcode != "fusion":
        return False
    fused = module.computations[user.called["calls"][0]]
    parameters = {int(i.arguments): i for i in fused.instructions if i.opcode == "parameter"}
    numbers = [n for n, name in enumerate(user.operands) if name == whole.name]
    return all(_is_sliced(module, fused, parameters[n]) for n in numbers)


def _operand_arrays(transfer: schedule.Transfer) -> tuple[hlo.Array, ...]:
    """Returns what a collective reads; results may hold buffers and counters beside it."""
    instruction, computation = transfer.instruction, transfer.computation
    operands = instruction.operands
    if "slice_sizes=" in instruction.attributes or instruction.opcode == "send":
        operands = operands[:1]  # a permute in place: buffers and offsets follow; or a token
    found = (computation.by_name[o] for o in operands if o in computation.by_name)
    return tuple(a for operand in found for a in operand.arrays)


def copied_bytes(transfer: schedule.Transfer) -> float:
    """Returns the bytes of a copy or slice: its result is (destination, source, context)."""
    arrays = sorted((a.bytes for a in transfer.instruction.arrays), reverse=True)
    return arrays[1] if len(arrays) > 1 else 0.0


def _spanned(groups: Sequence[Sequence[int]], mesh: MeshShape) -> Axes:
    """Returns the axes along which members of a group differ."""
    found, stride = [], 1
    for name, size in reversed(mesh.axes):
        if any(len({device // stride % size for device in group}) > 1 for group in groups):
            found.append(name)
        stride *= size
    return tuple(reversed(found))


def _named(module: hlo.Module, transfer: schedule.Transfer) -> list[hlo.Instruction]:
    """Returns instructions to name a collective by, nearest first.

    XLA drops the metadata of collectives that it makes or combines; then what is around it, what it
    reads and what reads it tell where it comes from. Elements of tuples come last: they bear the
    line of the loop.
    """
    places = [(transfer.computation, transfer.instruction), *reversed(transfer.wrappers)]
    near = [i for _, i in places]
    for step in (_read, _readers):
        for computation, instruction in places:
            layer = [instruction]
            for _ in range(4):
                layer = [n for i in layer for n in step(computation, i)][:16]
                near += layer
    return sorted(near, key=lambda i: i.opcode in ("get-tuple-element", "parameter", "tuple"))


def _read(computation: hlo.Computation, i: hlo.Instruction) -> list[hlo.Instruction]:
    return [computation.by_name[o] for o in i.operands if o in computation.by_name]


def _readers(computation: hlo.Computation, i: hlo.Instruction) -> list[hlo.Instruction]:
    return list(computation.users.get(i.name, ()))


def distinct(runs: Sequence[CompiledCollective | None]) -> tuple[CompiledCollective, ...]:
    """Joins the runs of one channel: XLA peels a loop by copying what it holds."""
    joined: dict[tuple, CompiledCollective] = {}
    for number, run in enumerate(runs):
        if run is None or run.group_size <= 1:
            continue
        channel = number if run.channel_id is None else run.channel_id
        key = (run.channel_id is None, channel, run.kind, run.axes, run.bytes)
        before = joined.get(key)
        if before is None:
            joined[key] = run
        else:
            joined[key] = dataclasses.replace(before, trips=before.trips + run.trips)
    return tuple(joined.values())


def axes_text(axes: Axes) -> str:
    return "*".join(axes) or "no axis"


def bytes_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return ""
