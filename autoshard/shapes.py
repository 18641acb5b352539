"""Which meshes to plan for, where the user left that open.

Asked for some devices or for a machine, every way to write their number as a product of up to
three axes is a candidate; two whose axes run over the same links are one. A candidate is given up
as soon as its proven bound is above the best plan found so far.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard import aot, planning
from autoshard.errors import InfeasibleError, MeshError
from autoshard.explain import seconds_text
from autoshard.hardware import preset
from autoshard.meshes import DEFAULT_NAMES, MeshLike
from autoshard.plan import Plan
from autoshard.sharding import MeshShape

MOST_AXES = 2  # a third axis multiplies the strategies of every operation


def fastest(
    mesh: MeshLike | int | None,
    options: planning.Options,
    plan_on: Callable[[planning.Target, float], planning.Planned],
) -> planning.Planned:
    """Returns the fastest plan over all candidates; it says why the others lose.

    Args:
      plan_on: plans for a target; plans slower than the given seconds are of no use.

    Raises:
      InfeasibleError: nothing fits on any of them.
    """
    best: planning.Planned | None = None
    others: list[tuple[planning.Target, Plan | InfeasibleError]] = []
    for target in candidates(mesh, options):
        try:
            found = plan_on(target, best.plan.objective_s if best else math.inf)
        except InfeasibleError as e:
            others.append((target, e))
            continue
        others.append((target, found.plan))
        if best is None or found.plan.objective_s < best.plan.objective_s:
            best = found
    if best is None:
        raise next(e for _, e in others if isinstance(e, InfeasibleError))
    smaller = fewer(mesh, best.plan, options)
    if smaller is not None:
        found = plan_on(smaller, math.inf)
        if found.plan.objective_s <= best.plan.objective_s:
            best = found
    tried = tuple(
        (str(target.mesh), why_not(plan, best.plan)) for target, plan in others
        if plan is not best.plan
    )  # fmt: skip
    return dataclasses.replace(best, plan=dataclasses.replace(best.plan, tried=tried))


def is_open(mesh: MeshLike | int | None) -> bool:
    """Returns whether the shape of the mesh is the planner's to choose."""
    return (
        mesh is None or (isinstance(mesh, int) and not isinstance(mesh, bool)) or _is_machine(mesh)
    )


def candidates(mesh: MeshLike | int | None, options: planning.Options) -> list[planning.Target]:
    """Returns the targets to plan for, the fewest axes first: one, if the mesh is given.

    Raises:
      MeshError, HardwareError: mesh, machine or hardware is unknown.
    """
    if not is_open(mesh):
        return [planning.target(mesh, options)]  # type: ignore[arg-type]
    count = _device_count(mesh)
    found: dict[tuple, planning.Target] = {}
    for shape in shapes(count):
        target = _target(mesh, shape, options)
        axes = zip(shape.axes, target.topology.links, strict=True)
        links = tuple(sorted(f"{size} {link!r}" for (_, size), link in axes))
        found.setdefault(links, target)
    return list(found.values())


def fewer(
    mesh: MeshLike | int | None, plan: Plan, options: planning.Options
) -> planning.Target | None:
    """Returns the mesh without the axes that a plan leaves idle, or None where it uses them all."""
    used = plan.used_axes
    axes = tuple((n, s) for n, s in plan.mesh.axes if n in used)
    if not is_open(mesh) or len(axes) == len(plan.mesh.axes) or plan.mesh.device_count == 1:
        return None
    return _target(mesh, MeshShape(axes or ((DEFAULT_NAMES[0], 1),)), options)


def shapes(device_count: int) -> list[MeshShape]:
    """Returns every ordered factorisation into at most MOST_AXES axes, the fewest axes first."""
    if device_count < 1:
        raise MeshError(f"got a mesh of {device_count} devices, wanted at least 1")
    found: list[tuple[int, ...]] = [(device_count,)]
    for count in range(2, MOST_AXES + 1):
        found += _factorisations(device_count, count)
    return [MeshShape(tuple(zip(DEFAULT_NAMES, sizes, strict=False))) for sizes in found]


def _factorisations(n: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        if n > 1:
            yield (n,)
        return
    for first in range(n // 2, 1, -1):
        if n % first == 0:
            for rest in _factorisations(n // first, count - 1):
                yield (first, *rest)


def why_not(plan: Plan | InfeasibleError, best: Plan) -> str:
    """Returns why another mesh loses."""
    if isinstance(plan, InfeasibleError):
        return "does not fit"
    if plan.bound_s > best.objective_s:
        return f"no plan is faster than {seconds_text(plan.bound_s)}"
    slower = plan.objective_s / best.objective_s if best.objective_s > 0 else 1.0
    moves = seconds_text(sum(c.seconds for c in plan.collectives))
    return f"{seconds_text(plan.objective_s)} ({slower:.3f} x), {moves} of it collectives"


def _is_machine(mesh: MeshLike | int | None) -> bool:
    return isinstance(mesh, str) and re.fullmatch(r"\s*\w+:[\dx]+(\*\d+)?\s*", mesh) is not None


def _device_count(mesh: MeshLike | int | None) -> int:
    if mesh is None:
        return len(jax.devices())
    return mesh if isinstance(mesh, int) else len(aot.devices(str(mesh)))


def _target(
    mesh: MeshLike | int | None, shape: MeshShape, options: planning.Options
) -> planning.Target:
    """Resolves one shape of the user's devices, of a machine, or of a number of devices."""
    if isinstance(mesh, str):
        if len(aot.devices(mesh)) == shape.device_count:
            return planning.target(aot.mesh(mesh, shape), options)
        hardware = options.hardware or preset(mesh.partition(":")[0].strip())
        return planning.target(shape, dataclasses.replace(options, hardware=hardware))
    local = jax.devices()
    if options.hardware is not None and len(local) < shape.device_count:
        return planning.target(shape, options)
    if len(local) < shape.device_count:
        raise MeshError(
            f"got a mesh of {shape.device_count} devices, this process has {len(local)}: pass "
            "hardware='v5e' or another preset, or a machine such as mesh='v5e:4x4'"
        )
    devices = np.array(local[: shape.device_count]).reshape([size for _, size in shape.axes])
    types = (AxisType.Auto,) * len(shape.names)
    return planning.target(Mesh(devices, shape.names, axis_types=types), options)
