"""A plan compiled for a target: what was predicted beside what XLA made of it."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard import aot, inspect
from autoshard.errors import HardwareError, MeshError
from autoshard.explain import bytes_text, seconds_text
from autoshard.hardware import Chip, from_device_kind, preset
from autoshard.meshes import concrete_mesh, mesh_shape
from autoshard.plan import Array, Plan
from autoshard.schedule import Times
from autoshard.topology import Topology
from autoshard.topology import topology as topology_of

NAMED = 8  # collectives listed by name on either side


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the plan promises on one device."""

    argument_bytes: float
    output_bytes: float
    alias_bytes: float  # of outputs that reuse donated arguments
    peak_bytes: float
    step_s: float

    @property
    def temp_bytes(self) -> float:
        return self.peak_bytes - self.argument_bytes - self.output_bytes + self.alias_bytes


@dataclasses.dataclass(frozen=True)
class Check:
    """A plan beside what the compiler of its target made of it, per device.

    Attributes:
      step: what was compiled; None where the compiler refused the program for its memory.
      refused: the first line of that refusal.
      comparison: collectives, planned and compiled.
      times: the step estimated from the compiled schedule; None where the compiler gives no cycles.
    """

    program: str
    target: str
    predicted: Predicted
    step: inspect.CompiledStep | None = dataclasses.field(repr=False)
    refused: str | None
    comparison: inspect.Comparison | None
    times: Times | None

    @property
    def memory(self) -> inspect.Memory | None:
        return self.step and self.step.memory

    @property
    def peak_ratio(self) -> float | None:
        """Predicted over compiled peak."""
        return self.predicted.peak_bytes / self.memory.peak_bytes if self.memory else None

    @property
    def unplanned_fraction(self) -> float:
        """The share of the bytes sent that no plan explains."""
        return self.comparison.unplanned_fraction if self.comparison else 0.0

    def __str__(self) -> str:
        lines = [f"{self.program} compiled for {self.target}"]
        if self.refused:
            lines.append(f"the compiler refuses it: {self.refused}")
        lines += ["", *_table(self)]
        if self.comparison is not None:
            lines += ["", "collectives", *_collectives(self.comparison)]
        if self.step is not None:
            lines += [f"note: {note}" for note in self.step.notes]
        return "\n".join(lines)


def check(
    plan: Plan,
    fn: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | None = None,
    topology: str | None = None,
    static_argnums: Sequence[int] = (),
) -> Check:
    """Compiles `fn` under the plan, for `mesh` or an ahead-of-time `topology` such as "v5e:4x4".

    Raises:
      MeshError: the mesh is not the planned one, or has no devices.
      HardwareError: the topology is unknown, or its compiler is not installed.
      PlanError: `fn` is not the program that was planned.
    """
    target = _mesh(plan, mesh, topology)
    links = _topology(plan, target)
    predicted = predict(plan, links.chip)
    name = topology or f"{target.devices.size} x {target.devices.flat[0].device_kind}"
    lowered: Any = plan.jit(fn, target, static_argnums=static_argnums).lower(
        *args, **(kwargs or {})
    )
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return Check(plan.program, name, predicted, None, _refusal(str(e)), None, None)
    step = inspect.inspect(compiled, target)
    return Check(
        program=plan.program,
        target=name,
        predicted=predicted,
        step=step,
        refused=None,
        comparison=inspect.unplanned(step, plan.collectives),
        times=step.times(inspect.price_on(links)),
    )


def predict(plan: Plan, chip: Chip) -> Predicted:
    """Returns what a plan promises on a chip."""
    sizes = [_local_bytes(a, plan, chip) for a in plan.arguments]
    results = [_local_bytes(r, plan, chip) for r in plan.results]
    kept = [
        results[k]
        for k, donated in zip(plan.carried, plan.donated, strict=True)
        if donated and k is not None
    ]
    return Predicted(sum(sizes), sum(results), sum(kept), plan.peak_bytes, plan.step_time_s)


def _local_bytes(array: Array, plan: Plan, chip: Chip) -> float:
    itemsize = _itemsize(array.dtype)
    return chip.stored_bytes(array.sharding.local_shape(array.shape, plan.mesh), itemsize)


def _itemsize(dtype: str) -> float:
    if dtype.startswith("key<"):
        return 8.0
    return jax.numpy.dtype(dtype).itemsize if not dtype.startswith("float0") else 0.0


def _mesh(plan: Plan, mesh: Mesh | None, topology: str | None) -> Mesh:
    if topology is not None:
        return aot.mesh(topology, plan.mesh)
    found = mesh if mesh is not None else plan.devices
    if found is None:
        raise MeshError(
            f"the plan for {plan.mesh} has no devices to compile for: pass mesh=, or topology= "
            "such as 'v5e:4x4' to compile ahead of time"
        )
    if mesh_shape(found) != plan.mesh:
        raise MeshError(f"the plan is for mesh {plan.mesh}, got {mesh_shape(found)}")
    return concrete_mesh(found)


def _topology(plan: Plan, mesh: Mesh) -> Topology:
    """Returns the links of the devices compiled for, or of the planned hardware if they are
    unknown."""
    devices: np.ndarray = mesh.devices
    try:
        hardware = from_device_kind(devices.flat[0].device_kind)
    except HardwareError:
        hardware = preset(plan.hardware)
    return topology_of(plan.mesh, hardware, devices)


def _refusal(message: str) -> str:
    found = re.search(r"Ran out of memory[^\n]*", message)
    return (found[0] if found else message.splitlines()[0])[:300]


def _table(c: Check) -> list[str]:
    rows: list[tuple[str, str, str, str]] = [("", "predicted", "compiled", "ratio")]
    memory, predicted = c.memory, c.predicted
    for name in ("argument", "output", "alias", "temp", "peak"):
        have = getattr(predicted, f"{name}_bytes")
        made = getattr(memory, f"{name}_bytes") if memory else None
        label = {"argument": "arguments", "output": "outputs", "alias": "outputs in place",
                 "temp": "temporaries", "peak": "peak"}[name]  # fmt: skip
        rows.append((label, bytes_text(have), *_against(have, made, bytes_text)))
    step_s = c.times.step_s if c.times else None
    rows.append(
        ("step", seconds_text(predicted.step_s), *_against(predicted.step_s, step_s, seconds_text))
    )
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = [
        "  ".join(cell.ljust(w) if k == 0 else cell.rjust(w)
                  for k, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    return lines + ([f"estimated from the compiled schedule: {c.times}"] if c.times else [])


def _against(have: float, made: float | None, text: Callable[[float], str]) -> tuple[str, str]:
    if made is None:
        return "-", ""
    return text(made), f"{have / made:.2f}" if made else ""


def _collectives(found: inspect.Comparison) -> list[str]:
    lines = found.table().splitlines()
    for title, alone in (
        ("not planned", found.unplanned),
        ("planned, not compiled", found.missing),
    ):
        lines += [f"{title}, {bytes_text(n)} sent: {c}" for c, n in alone[:NAMED]]
        if len(alone) > NAMED:
            rest = sum(n for _, n in alone[NAMED:])
            lines.append(f"{title}, {bytes_text(rest)} sent: {len(alone) - NAMED} more")
    lines.append(
        f"{bytes_text(found.unplanned_bytes)} of {bytes_text(found.compiled_bytes)} sent "
        f"({found.unplanned_fraction:.1%}) was not planned"
    )
    return lines
