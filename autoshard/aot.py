"""Devices of machines that are not here: targets to compile for ahead of time.

A target is a chip and a shape: `v5e:4x4` is one slice of 16 chips, `v5e:2x4*2` two slices of 8
joined by the data center network, `h100:8` one host with 8 GPUs, `h100:2x8` two such hosts.
The two cores of a v4 or v7 chip are a device each (`v4:2x2x2` has 16), other chips are one.

Nothing runs on these devices: a function is lowered for shapes, compiled, and its text read.
On a machine without accelerators set `JAX_PLATFORMS=cpu` before jax starts. While the TPU compiler
loads, `devices` sets two variables unless they are set already: `TPU_SKIP_MDS_QUERY=1` (do not wait
for a cloud metadata server) and `ALLOW_MULTIPLE_LIBTPU_LOAD=1` (its lock file would let only one
process of the machine in).
"""

import contextlib
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from autoshard.errors import HardwareError, MeshError
from autoshard.sharding import MeshShape

TPU_CHIPS = ("v4", "v5e", "v5p", "v6e", "v7")
GPU_CHIPS = ("h100",)

_TARGET = re.compile(r"(?P<chip>\w+):(?P<shape>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_INSTALL = "install it with `pip install 'autoshard[aot]'`"

# What XLA wants to know of an H100 SXM, in its own field names (GpuTargetConfigProto). Sources:
# "NVIDIA H100 Tensor Core GPU Architecture" (132 SMs of 128 FP32 lanes, 50 MB L2, 80 GB HBM3 at
# 3.35 TB/s, boost clock 1.98 GHz) and the CUDA C++ Programming Guide, "Compute Capabilities", 9.0
# (threads, grid, registers, 228 KB shared memory an SM of which a block may opt in to 227).
_H100 = {
    "gpu_device_info": {
        "cuda_compute_capability": {"major": 9, "feature_extension": "ACCELERATED_FEATURES"},
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "memory_bandwidth": 3352320000000,
        "device_memory_size": 84942979072,
        "l2_cache_size": 50 << 20,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": 228 << 10,
        "shared_memory_per_block_optin": 227 << 10,
    },
    "platform_name": '"CUDA"',
    "runtime_version": {"major": 12, "minor": 8},
    "dnn_version_info": {"major": 9, "minor": 10},
    "device_description_str": '"NVIDIA H100 80GB HBM3"',
}


def devices(target: str) -> np.ndarray:
    """Returns the devices of a target, slice by slice (host by host for GPUs), shape (n,).

    Raises:
      HardwareError: the target cannot be read, the chip is not known, the compiler for it is not
        installed, or the compiler refuses the shape.
    """
    return np.array(_devices(target), dtype=object)


def mesh(target: str, shape: MeshShape) -> Mesh:
    """Returns a mesh over all devices of a target, its axes left to the partitioner (Auto).

    Devices are laid out as `jax.make_mesh` does it, with the leading axes over the slices.

    Raises:
      MeshError: the mesh has another number of devices than the target.
      HardwareError: see `devices`.
    """
    found = devices(target)
    if shape.device_count != found.size:
        raise MeshError(
            f"the mesh {shape} has {shape.device_count} devices, the target {target!r} has "
            f"{found.size}: make the axis sizes multiply to {found.size}"
        )
    types = (AxisType.Auto,) * len(shape.axes)
    return Mesh(_laid_out(found, shape), shape.names, axis_types=types)


def _laid_out(found: np.ndarray, shape: MeshShape) -> np.ndarray:
    """Orders the devices so that neighbours on an axis are neighbours on the torus.

    Leading axes that multiply to the number of slices run over the slices. Devices without a torus
    (GPUs, the cores of one chip), or axes that straddle slices, keep their order.
    """
    sizes = tuple(size for _, size in shape.axes)
    slices = len({getattr(d, "slice_index", None) or 0 for d in found})
    cores = max(getattr(d, "core_on_chip", 0) for d in found) + 1
    leading = next((n for n in range(len(sizes)) if math.prod(sizes[:n]) == slices), None)
    if found[0].platform != "tpu" or cores > 1 or leading is None:
        return found.reshape(sizes)
    per_slice = found.reshape(slices, -1)
    tori = [_torus(sizes[leading:], row) for row in per_slice]
    return np.stack(tori).reshape(sizes)


def _torus(sizes: tuple[int, ...], found: np.ndarray) -> np.ndarray:
    return mesh_utils.create_device_mesh(sizes, list(found), allow_split_physical_axes=True)


@functools.lru_cache(maxsize=32)
def _devices(target: str) -> tuple[Any, ...]:
    m = _TARGET.fullmatch(target.strip().lower())
    if m is None:
        raise HardwareError(
            f"cannot read target {target!r}: write chip:shape, as v5e:4x4, v5e:2x4*2 (two slices) "
            "or h100:2x8 (two hosts of 8)"
        )
    if m["chip"] in TPU_CHIPS:
        return _tpu(m["chip"], m["shape"], int(m["slices"] or 1))
    if m["chip"] in GPU_CHIPS:
        return _gpu(target, m["shape"], m["slices"])
    known = ", ".join(TPU_CHIPS + GPU_CHIPS)
    raise HardwareError(f"unknown chip {m['chip']!r} in target {target!r}: wanted one of {known}")


def _tpu(chip: str, shape: str, slices: int) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise HardwareError(f"compiling for {chip} needs the TPU compiler libtpu: {_INSTALL}")
    name = {"v7": "tpu7x"}.get(chip, chip)
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        with _environment(_TPU_ENVIRONMENT):
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{name}:{shape}", **several
            ).devices
    except Exception as e:
        raise HardwareError(
            f"the TPU compiler refuses the target {chip}:{shape} ({e}): wanted a shape that is "
            "made, as v5e:2x4, v5e:4x4, v4:2x2x2, v5p:2x2x2, v6e:4x4 or v7:2x2x1"
        ) from e
    return tuple(sorted(found, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))


def _gpu(target: str, shape: str, slices: str | None) -> tuple[Any, ...]:
    hosts, _, per_host = shape.rpartition("x")
    if slices or "x" in hosts:
        raise HardwareError(
            f"cannot read target {target!r}: GPUs are hosts x GPUs a host, as h100:8 or h100:2x8"
        )
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        raise HardwareError(f"compiling for {target!r} needs the CUDA compiler of jax: {_INSTALL}")
    try:
        return tuple(
            topologies.get_topology_desc(
                platform="cuda",
                topology=f"1x{hosts or 1}x{per_host}",
                target_config=_proto_text(_H100),
            ).devices
        )
    except Exception as e:
        raise HardwareError(
            f"the GPU compiler refuses the target {target!r} ({e}): wanted hosts x GPUs a host"
        ) from e


def _proto_text(fields: dict) -> str:
    """Writes nested fields in the text form of protocol buffers."""
    parts = (
        f"{name} {{ {_proto_text(value)} }}" if isinstance(value, dict) else f"{name}: {value}"
        for name, value in fields.items()
    )
    return " ".join(parts)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables that are not set, and takes them back afterwards."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
