"""The meshes that users bring: real, abstract, a dict, a text, or none."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import MeshError
from autoshard.sharding import MeshShape

MeshLike = Mesh | AbstractMesh | Mapping[str, int] | str | MeshShape
DEFAULT_NAMES = ("x", "y", "z")


def mesh_shape(mesh: MeshLike) -> MeshShape:
    """Returns the axis names and sizes of any mesh.

    Raises:
      MeshError: not a mesh, or one without names.
    """
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, str):
        return MeshShape.parse(mesh)
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return MeshShape(tuple((str(n), int(s)) for n, s in mesh.shape.items()))
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
                raise MeshError(f"mesh axis {name!r}: {size!r}: wanted a name and an integer size")
        return MeshShape(tuple(mesh.items()))
    raise MeshError(
        f"got a mesh of type {type(mesh).__name__}: pass a jax.sharding.Mesh, an AbstractMesh, "
        "dict(data=4, model=2) or 'data=4,model=2'"
    )


def devices_of(mesh: MeshLike | None) -> np.ndarray | None:
    """Returns the devices of a real mesh in mesh shape, or None."""
    return mesh.devices if isinstance(mesh, Mesh) else None


def concrete_mesh(mesh: MeshLike) -> Mesh:
    """Returns a mesh of devices whose axes are all Auto, so that constraints are allowed on it.

    A mesh without devices takes the local ones.

    Raises:
      MeshError: there are more or fewer devices than the mesh wants.
    """
    shape = mesh_shape(mesh)
    if isinstance(mesh, Mesh):
        devices = mesh.devices
    else:
        local = jax.devices()
        if len(local) < shape.device_count or (shape.device_count < len(local) and not shape.axes):
            raise MeshError(
                f"mesh {shape} wants {shape.device_count} devices, there are {len(local)}"
            )
        if len(local) != shape.device_count:
            raise MeshError(
                f"mesh {shape} has {shape.device_count} devices, this process has {len(local)}: "
                "pass a jax.sharding.Mesh of the devices you mean"
            )
        devices = np.array(local).reshape([size for _, size in shape.axes])
    return Mesh(devices, shape.names, axis_types=(AxisType.Auto,) * len(shape.names))
