"""A plan: the sharding of every argument, result and intermediate, what it costs, and how sure
that is.

Its file is JSON with a version; `load` refuses another version, and `jit` another program or mesh.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from autoshard import explain
from autoshard.apply import Constraints, Scatter
from autoshard.emit import PlannedCollective
from autoshard.errors import PlanError
from autoshard.problem import Status
from autoshard.sharding import MeshShape, Sharding

if TYPE_CHECKING:
    from autoshard.check import Check

VERSION = 2


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or result and its sharding; `path` are the pytree keys, each with its kind."""

    name: str
    path: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding

    @property
    def spec(self) -> PartitionSpec:
        return self.sharding.to_spec()

    def __str__(self) -> str:
        return f"{self.name}: {self.sharding.text(self.shape, self.dtype)}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to shard one program on one mesh.

    Attributes:
      step_time_s, peak_bytes: predicted, per device.
      objective_s, bound_s: what the solver minimised and the proven lower bound, in one model and
        unit.
      carried: for each argument, the result that becomes it in the next call, or None.
    """

    program: str
    fingerprint: str
    mesh: MeshShape
    hardware: str
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    carried: tuple[int | None, ...]
    donated: tuple[bool, ...]
    constraints: Constraints
    collectives: tuple[PlannedCollective, ...]
    live_at_peak: tuple[tuple[str, float], ...]  # largest first: value, bytes
    status: Status
    objective_s: float
    bound_s: float
    step_time_s: float
    peak_bytes: float
    memory_limit_bytes: float | None
    known: tuple[tuple[str, float, float], ...]  # known plans: name, objective_s, peak_bytes
    tried: tuple[tuple[str, str], ...] = ()  # other meshes, and why they lose
    compiled: tuple[tuple[str, float, float], ...] = ()
    """Plans that were compiled to refine this one: mesh, step predicted and compiled, inf where the
    compiler refuses."""
    time_limit_struck: bool = False  # the wall clock cut the search: another run may differ
    stages: tuple[tuple[str, float], ...] = dataclasses.field(default=(), compare=False)
    trees: tuple[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    devices: Mesh | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments; keywords, if any, last, as a dict."""
        specs = [a.spec for a in self.arguments]
        if self.trees is None:
            return _rebuild([a.path for a in self.arguments], specs)
        args, kwargs = jax.tree.unflatten(self.trees[0], specs)
        return (*args, kwargs) if kwargs else tuple(args)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the results."""
        specs = [r.spec for r in self.results]
        if self.trees is None:
            return _rebuild([r.path for r in self.results], specs)
        return jax.tree.unflatten(self.trees[1], specs)

    @property
    def used_axes(self) -> frozenset[str]:
        """The mesh axes along which anything at all is split."""
        c = self.constraints
        chains = (*c.operands.values(), *c.results.values())
        shardings = [s for chain in chains for s in chain]
        shardings += [a.sharding for a in (*self.arguments, *self.results)]
        shardings += [s for scatter in c.scatters.values() for s in scatter.operands]
        return frozenset(axis for s in shardings for axis in s.axes)

    def explain(self) -> str:
        """Returns who is sharded how, what it costs, what moves, where the memory peaks."""
        return explain.text(self)

    def __str__(self) -> str:
        return explain.headline(self)

    def jit(self, fn: Callable, mesh: Any = None, **options: Any) -> Callable:
        """Returns `fn` jitted with the plan's shardings and constraints.

        Args:
          mesh: a mesh of devices, real or ahead-of-time, with the plan's axes; None: the planned
            mesh.
          options: static_argnums, as they were planned; compiler_options, as of jax.jit, beside
            those that the predicted peak counts on.

        Raises:
          MeshError: the mesh has other axes.
          PlanError: at the first call, if `fn` is not the program that was planned.
        """
        from autoshard.jitted import planned_function

        return planned_function(self, fn, mesh, **options)

    def check(
        self,
        fn: Callable,
        *args: Any,
        mesh: Any = None,
        topology: str | None = None,
        static_argnums: Sequence[int] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Check":
        """Compiles `fn` under the plan; returns what was predicted beside what XLA made of it.

        Args:
          args: arrays or jax.ShapeDtypeStruct, as planned.
          mesh: a mesh of devices, real or ahead-of-time; None: the planned mesh.
          topology: a machine to compile for that need not be here, as "v5e:4x4", instead of a mesh.

        Raises:
          MeshError, HardwareError: the target does not fit the plan, or is unknown.
          PlanError: `fn` is not the program that was planned.
        """
        from autoshard.check import check

        return check(
            self, fn, args, kwargs, mesh=mesh, topology=topology, static_argnums=static_argnums
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON, the same bytes for the same plan."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    def to_json(self) -> str:
        return json.dumps(_to_dict(self), indent=1, sort_keys=True) + "\n"


def load(path: str | os.PathLike) -> Plan:
    """Reads a plan.

    Raises:
      PlanError: not a plan file, or one of another version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (ValueError, UnicodeDecodeError) as e:
        raise PlanError(f"{os.fspath(path)} is not a plan: {e}") from None
    if not isinstance(data, dict) or "autoshard_plan" not in data:
        raise PlanError(f"{os.fspath(path)} is not a plan: it has no field 'autoshard_plan'")
    if data["autoshard_plan"] != VERSION:
        raise PlanError(
            f"{os.fspath(path)} has plan version {data['autoshard_plan']}, this autoshard reads "
            f"{VERSION}: plan again"
        )
    try:
        return _from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise PlanError(
            f"{os.fspath(path)} is damaged: {type(e).__name__} {e}: plan again"
        ) from None


def key_path(path: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Returns a path as pairs: ("item", "0"), ("key", "w"), ("field", "x")."""
    kinds = {
        "SequenceKey": ("item", "idx"),
        "DictKey": ("key", "key"),
        "GetAttrKey": ("field", "name"),
    }
    pairs = []
    for entry in path:
        kind, attribute = kinds.get(type(entry).__name__, ("key", "key"))
        pairs.append((kind, str(getattr(entry, attribute, entry))))
    return tuple(pairs)


def _rebuild(paths: Sequence[tuple[tuple[str, str], ...]], leaves: Sequence[Any]) -> Any:
    """Builds nested tuples and dicts from paths; an object becomes a dict of its fields."""
    if len(paths) == 1 and not paths[0]:
        return leaves[0]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, path in enumerate(paths):
        groups.setdefault(path[0], []).append(i)
    children = {
        key: _rebuild([paths[i][1:] for i in group], [leaves[i] for i in group])
        for key, group in groups.items()
    }
    if all(kind == "item" for kind, _ in children):
        return tuple(children.values())
    return {key: child for (_, key), child in children.items()}


def _dims(sharding: Sharding) -> list[list[str]]:
    return [list(axes) for axes in sharding.dims]


def _sharding(dims: Any) -> Sharding:
    return Sharding(tuple(tuple(str(a) for a in axes) for axes in dims))


def _to_dict(plan: Plan) -> dict[str, Any]:
    plain = {
        f.name: getattr(plan, f.name)
        for f in dataclasses.fields(Plan)
        if f.name not in ("stages", "trees", "devices")
    }
    c = plan.constraints
    return plain | {
        "autoshard_plan": VERSION,
        "mesh": [list(axis) for axis in plan.mesh.axes],
        "arguments": [_array_to_dict(a) for a in plan.arguments],
        "results": [_array_to_dict(r) for r in plan.results],
        "constraints": {
            role: [[path, k, [_dims(s) for s in chain]] for (path, k), chain in table.items()]
            for role, table in (("operands", c.operands), ("results", c.results))
        }
        | {"scatters": [[path, _scatter_to_dict(s)] for path, s in c.scatters.items()]}
        | {"again": sorted([path, k] for path, k in c.again)},
        "collectives": [dataclasses.asdict(c) for c in plan.collectives],
        "status": plan.status.name,
        "time_limit_struck": plan.time_limit_struck,
    }


def _scatter_to_dict(scatter: Scatter) -> dict[str, Any]:
    return {
        "operands": [_dims(s) for s in scatter.operands],
        "result": _dims(scatter.result),
        "dims": [list(axes) for axes in scatter.dims],
        "summed": list(scatter.summed),
    }


def _scatter_from_dict(data: dict[str, Any]) -> Scatter:
    return Scatter(
        tuple(map(_sharding, data["operands"])),
        _sharding(data["result"]),
        tuple(map(tuple, data["dims"])),
        tuple(data["summed"]),
    )


def _array_to_dict(array: Array) -> dict[str, Any]:
    return {**dataclasses.asdict(array), "sharding": _dims(array.sharding)}


def _from_dict(data: dict[str, Any]) -> Plan:
    def arrays(entries):
        return tuple(
            Array(
                a["name"],
                tuple((str(kind), str(key)) for kind, key in a["path"]),
                tuple(a["shape"]),
                a["dtype"],
                _sharding(a["sharding"]),
            )
            for a in entries
        )

    def chains(role):
        return {
            (path, k): tuple(map(_sharding, chain)) for path, k, chain in data["constraints"][role]
        }

    scatters = {path: _scatter_from_dict(s) for path, s in data["constraints"]["scatters"]}
    again = frozenset((path, k) for path, k in data["constraints"]["again"])
    constraints = Constraints(chains("operands"), chains("results"), scatters, again)
    collectives = tuple(
        PlannedCollective(**{**c, "axes": tuple(c["axes"])}) for c in data["collectives"]
    )
    plain = {
        name: data[name]
        for name in ("program", "fingerprint", "hardware", "objective_s", "bound_s", "step_time_s",
                     "peak_bytes", "memory_limit_bytes")
    }  # fmt: skip
    return Plan(
        **plain,
        mesh=MeshShape(tuple((str(n), int(s)) for n, s in data["mesh"])),
        arguments=arrays(data["arguments"]),
        results=arrays(data["results"]),
        carried=tuple(data["carried"]),
        donated=tuple(data["donated"]),
        constraints=constraints,
        collectives=collectives,
        live_at_peak=tuple((str(n), float(b)) for n, b in data["live_at_peak"]),
        status=Status[data["status"]],
        known=tuple((str(n), float(s), float(b)) for n, s, b in data["known"]),
        tried=tuple((str(n), str(why)) for n, why in data.get("tried", ())),
        compiled=tuple((str(n), float(a), float(b)) for n, a, b in data.get("compiled", ())),
        time_limit_struck=bool(data.get("time_limit_struck", False)),
    )
