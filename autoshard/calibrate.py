"""Measures the devices at hand and fits the cost model to them, in under a minute.

Every device works at the same time, as in a real step: virtual CPU devices share their cores. For
each mesh axis one factor scales the start-up of the presumed link and one its seconds per byte,
such that the relative errors over all collectives and sizes are least.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from autoshard.collectives import Kind, linear
from autoshard.errors import HardwareError
from autoshard.hardware import Chip, Hardware, Link, from_device_kind, preset
from autoshard.sharding import MeshShape
from autoshard.topology import Topology, topology

_VERSION = 1
_DTYPES = ("float32", "bfloat16", "int8")
_SIZES_BYTES = (2**14, 2**18, 2**22)
_KINDS = (
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.ALL_REDUCE,
    Kind.ALL_TO_ALL,
    Kind.PERMUTE,
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured collective; `size_bytes` as its function in `collectives` has it."""

    kind: Kind
    axis: str
    size_bytes: float
    seconds: float


def calibrate(mesh: Mesh, path: str | pathlib.Path | None = None) -> Hardware:
    """Returns the hardware of a mesh as measured: FLOP/s, copies, and one link for each mesh axis.

    Args:
      mesh: a mesh of real devices.
      path: a JSON file of earlier measurements. What it holds for this kind of device and mesh is
        returned as it is; else the mesh is measured and added.

    Raises:
      HardwareError: the file is not one of ours.
    """
    shape = mesh_shape(mesh)
    known = load(mesh, path) if path is not None and pathlib.Path(path).exists() else None
    if known is not None:
        return known
    presumed = topology(shape, _presumed(mesh), mesh.devices)
    chip = dataclasses.replace(
        presumed.chip,
        flops_per_s={**presumed.chip.flops_per_s, **{d: _flops_per_s(mesh, d) for d in _DTYPES}},
        hbm_bytes_per_s=_copy_bytes_per_s(mesh),
    )
    samples = [
        Sample(kind, axis, size, _collective_s(mesh, kind, axis, size))
        for axis, count in shape.axes
        if count > 1
        for kind in _KINDS
        for size in _SIZES_BYTES
    ]
    hardware = fit(samples, dataclasses.replace(presumed, chip=chip))
    if path is not None:
        save(hardware, mesh, path)
    return hardware


def fit(samples: Sequence[Sample], presumed: Topology) -> Hardware:
    """Returns the presumed topology with each link scaled to the samples of its axis."""
    links = {}
    for axis in presumed.mesh.names:
        link, of_axis = presumed.link(axis), [s for s in samples if s.axis == axis]
        links[axis] = _scaled(link, *_scales(of_axis, presumed)) if of_axis else link
    name = f"{presumed.chip.name}-calibrated"
    return Hardware(name, dataclasses.replace(presumed.chip, name=name), axis_links=links)


def save(hardware: Hardware, mesh: Mesh, path: str | pathlib.Path):
    """Adds measured hardware to a JSON file, keyed by kind of device and mesh."""
    path = pathlib.Path(path)
    machines = _read(path) if path.exists() else {}
    machines[_key(mesh)] = {
        "name": hardware.name,
        "chip": dataclasses.asdict(hardware.chip),
        "axis_links": {a: dataclasses.asdict(link) for a, link in hardware.axis_links.items()},
    }
    path.write_text(json.dumps({"version": _VERSION, "machines": machines}, indent=1) + "\n")


def load(mesh: Mesh, path: str | pathlib.Path) -> Hardware | None:
    """Returns what a file holds for this kind of device and mesh, None if nothing.

    Raises:
      HardwareError: the file is not one of ours.
    """
    entry = _read(pathlib.Path(path)).get(_key(mesh))
    if entry is None:
        return None
    try:
        chip = {**entry["chip"], "matmul_tile": tuple(entry["chip"]["matmul_tile"])}
        links = {a: _link_of_json(link) for a, link in entry["axis_links"].items()}
        return Hardware(entry["name"], Chip(**chip), axis_links=links)
    except (KeyError, TypeError, AttributeError) as e:
        raise HardwareError(
            f"{path} has no readable entry for {_key(mesh)}: {e}; delete it and calibrate again"
        ) from None


def mesh_shape(mesh: Mesh) -> MeshShape:
    return MeshShape(tuple((str(name), int(size)) for name, size in mesh.shape.items()))


def _read(path: pathlib.Path) -> dict[str, dict]:
    try:
        data = json.loads(path.read_text())
        version, machines = data["version"], data["machines"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise HardwareError(f"{path} is no file of measurements ({e}): give another path") from None
    if version != _VERSION:
        raise HardwareError(f"{path} has version {version}, wanted {_VERSION}: calibrate again")
    return machines


def _key(mesh: Mesh) -> str:
    return f"{mesh.devices.flat[0].device_kind} {mesh_shape(mesh)}"


def _link_of_json(entry: dict) -> Link:
    parts = tuple((int(size), _link_of_json(link)) for size, link in entry["parts"])
    return Link(**{**entry, "parts": parts})


def _presumed(mesh: Mesh) -> Hardware:
    """What the devices are taken for before they are measured; an unknown kind for a switch."""
    device = mesh.devices.flat[0]
    try:
        return from_device_kind(device.device_kind)
    except HardwareError:
        generic = preset("cpu")
        memory = (device.memory_stats() or {}).get("bytes_limit", generic.chip.hbm_bytes)
        chip = dataclasses.replace(generic.chip, name=device.device_kind, hbm_bytes=float(memory))
        return dataclasses.replace(generic, name=device.device_kind, chip=chip)


def _scales(samples: list[Sample], presumed: Topology) -> tuple[float, float]:
    """Returns the factors of start-up and seconds per byte with the least mean error in log time.

    A few wild samples (another process took the cores) do not move it, as they would least squares.
    """
    costs = [linear(s.kind, presumed, (s.axis,)) for s in samples]
    measured_s = np.array([s.seconds for s in samples])
    start_s = np.array([c.start_s for c in costs])
    bytes_s = np.array([c.s_per_byte * s.size_bytes for c, s in zip(costs, samples, strict=True)])
    center, step = np.zeros(2), 0.1  # decades
    steps = np.arange(-50, 51)
    while step > 1e-9:
        factors = 10.0 ** (center[:, None] + step * steps)  # [2, F]
        modelled_s = (
            factors[0, :, None, None] * start_s + factors[1, None, :, None] * bytes_s
        )  # [F, F, samples]
        error = np.abs(np.log(modelled_s / measured_s)).mean(-1)
        at = np.unravel_index(np.argmin(error), error.shape)
        center, step = center + step * steps[list(at)], step / 10
        steps = np.arange(-20, 21)
    return float(10 ** center[0]), float(10 ** center[1])


def _scaled(link: Link, start: float, per_byte: float) -> Link:
    return dataclasses.replace(
        link,
        bytes_per_s=link.bytes_per_s / per_byte,
        latency_s=link.latency_s * start,
        start_s=link.start_s * start,
        parts=tuple((size, _scaled(part, start, per_byte)) for size, part in link.parts),
    )


# --- Measuring.


def _flops_per_s(mesh: Mesh, dtype: str) -> float:
    best = 0.0
    for n in (256, 512, 1024, 2048, 4096, 8192):
        x = jnp.ones((n, n), dtype)
        out = jnp.int32 if dtype == "int8" else None

        def body(x, out=out):
            y = jax.lax.dot(x, x, preferred_element_type=out)
            return jax.lax.optimization_barrier(y).astype(x.dtype)

        taken_s = _seconds_each(mesh, body, x)
        best = max(best, 2 * n**3 / taken_s)
        if taken_s > 2e-3:
            break
    return best


def _copy_bytes_per_s(mesh: Mesh) -> float:
    size = 2**23 if mesh.devices.flat[0].platform == "cpu" else 2**28
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / _seconds_each(mesh, lambda x: jax.lax.optimization_barrier(x + 1.0), x)


def _collective_s(mesh: Mesh, kind: Kind, axis: str, size_bytes: int) -> float:
    """Times a collective whose result is brought back to the shape it started from."""
    n = mesh.shape[axis]
    count = max(n, math.ceil(size_bytes / 4 / n) * n)
    if kind is Kind.ALL_GATHER:
        count //= n
    x = jnp.zeros(count, jnp.float32)
    return _seconds_each(mesh, functools.partial(_round_trip, kind=kind, axis=axis, n=n), x)


def _round_trip(x, *, kind: Kind, axis: str, n: int):
    barrier = jax.lax.optimization_barrier
    if kind is Kind.ALL_GATHER:
        return barrier(jax.lax.all_gather(x, axis, tiled=True))[: x.shape[0]]
    if kind is Kind.REDUCE_SCATTER:
        return jnp.tile(barrier(jax.lax.psum_scatter(x, axis, tiled=True)), n)
    if kind is Kind.ALL_REDUCE:
        return barrier(jax.lax.psum(x, axis))
    if kind is Kind.ALL_TO_ALL:
        return barrier(jax.lax.all_to_all(x, axis, 0, 0, tiled=True))
    return barrier(jax.lax.ppermute(x, axis, [(i, (i + n // 2) % n) for i in range(n)]))


def _seconds_each(mesh: Mesh, body: Callable, x: jax.Array) -> float:
    """Returns seconds of one `body` on all devices at once, from runs of few and many repeats."""

    def repeat(x, times):
        return jax.lax.fori_loop(0, times, lambda _, y: body(y), x)

    spec = PartitionSpec()
    run = jax.jit(
        jax.shard_map(repeat, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    )

    def timed(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(x, times))
        return time.perf_counter() - start

    timed(1)
    many = 1 + int(np.clip(0.02 / timed(2), 4, 64))
    few_s, many_s = (min(timed(times) for _ in range(4)) for times in (1, many))
    if many_s < 1.2 * few_s:
        return many_s / many  # noise hides the slope; this bounds it from above
    return (many_s - few_s) / (many - 1)
