"""A function and its arguments -> a jaxpr -> a Graph, with paths, source lines, donation."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType

from autoshard.errors import ArgumentError
from autoshard.graph import Graph, Kind, Op, Value, share_reads
from autoshard.references import without_references

WHILE_TRIPS = (
    16  # a `while` does not say how often it runs: assume more than once, less than a long scan
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function.

    `inputs` and `outputs` are the flat array arguments and results in pytree order; `carried[i]`
    is the output that the next call takes as input i (a train step's state), or None; `donated[i]`
    says whether input i is donated.
    """

    graph: Graph
    jaxpr: jex.ClosedJaxpr
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    output_names: tuple[str, ...]
    carried: tuple[int | None, ...]
    donated: tuple[bool, ...]
    in_tree: Any
    out_tree: Any
    name: str
    fingerprint: (
        str  # of arguments, results and operations; pins, donation and source lines do not count
    )


def trace(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    donate_argnames: Sequence[str] = (),
    carried: bool = True,
) -> Program:
    """Traces `fn(*args, **kwargs)`; nothing is allocated and nothing runs.

    Args:
      args: pytrees of arrays, NumPy arrays, Python scalars or ShapeDtypeStructs; static ones as
        they are.
      carried: whether results that match an argument's pytree become that argument of the next
        call.

    Raises:
      ArgumentError: a leaf that is not an array, named by its path.
    """
    kwargs = kwargs or {}
    abstract = [
        a if i in static_argnums else abstract_tree(a, argument_name(fn, i))
        for i, a in enumerate(args)
    ]
    abstract_kwargs = {k: abstract_tree(v, k) for k, v in kwargs.items()}
    jitted = jax.jit(
        fn,
        static_argnums=tuple(static_argnums),
        donate_argnums=tuple(donate_argnums),
        donate_argnames=tuple(donate_argnames) or None,
    )
    traced = jitted.trace(*abstract, **abstract_kwargs)
    closed = without_references(traced.jaxpr)
    info, in_tree = jax.tree.flatten(traced.args_info)
    out_tree = jax.tree.structure(traced.out_info)
    dynamic = [i for i in range(len(args)) if i not in static_argnums]
    names = _input_names(fn, traced.args_info, dynamic)
    builder = _Builder()
    inputs = tuple(
        builder.value(v.aval, n) for v, n in zip(closed.jaxpr.invars, names, strict=True)
    )
    output_names = tuple(f"result{p}" for p, _ in _leaf_paths(traced.out_info))
    links = _carried(traced.args_info, traced.out_info) if carried else {}
    graph, outputs, digest = builder.program(closed, inputs, output_names, links)
    return Program(
        graph=graph,
        jaxpr=closed,
        inputs=inputs,
        outputs=outputs,
        output_names=output_names,
        carried=tuple(links.get(i) for i in range(len(inputs))),
        donated=tuple(a.donated for a in info),
        in_tree=in_tree,
        out_tree=out_tree,
        name=_name(fn),
        fingerprint=digest,
    )


def auto_axes() -> contextlib.AbstractContextManager:
    """Returns a context in which the axes of the caller's mesh, if there is one, are all Auto.

    On Explicit axes JAX would decide shardings while it traces, and forbid constraints.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(kind is AxisType.Auto for kind in mesh.axis_types):
        return contextlib.nullcontext()
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
    )


def abstract_tree(tree: Any, name: str) -> Any:
    """Replaces each array by its ShapeDtypeStruct: no sharding of it reaches the trace."""

    def abstract(path, leaf):
        try:
            aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        except (TypeError, AttributeError):
            where = name + jax.tree_util.keystr(path)
            raise ArgumentError(
                f"{where} is {leaf!r} of type {type(leaf).__name__}, wanted an array: "
                "pass an array or a jax.ShapeDtypeStruct, or list the argument in static_argnums"
            ) from None

    return jax.tree_util.tree_map_with_path(abstract, tree)


def _name(fn: Callable) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _digest(parts: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()[:32]


def argument_name(fn: Callable, position: int) -> str:
    """Returns the parameter name of a positional argument, `args[3]` for one that has none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return f"args[{position}]"
    for i, p in enumerate(parameters):
        if p.kind is inspect.Parameter.VAR_POSITIONAL and position >= i:
            return f"{p.name}[{position - i}]"
        if i == position and p.kind is not inspect.Parameter.KEYWORD_ONLY:
            return p.name
    return f"args[{position}]"


def _leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _input_names(fn: Callable, args_info: Any, dynamic: Sequence[int]) -> list[str]:
    positional, keyword = args_info
    names = []
    for position, tree in zip(dynamic, positional, strict=True):
        names += [argument_name(fn, position) + path for path, _ in _leaf_paths(tree)]
    for key, tree in sorted(keyword.items()):
        names += [key + path for path, _ in _leaf_paths(tree)]
    return names


def _carried(args_info: Any, out_info: Any) -> dict[int, int]:
    """Matches arguments to results of the same pytree and avals: input index -> output index.

    Only whole arguments of more than one leaf, or donated ones, are matched; each result serves
    once.
    """
    positional, keyword = args_info
    results, start = [], 0
    top = out_info if isinstance(out_info, (tuple, list)) else (out_info,)
    for tree in top:
        leaves, structure = jax.tree.flatten(tree)
        results.append((structure, [(x.shape, x.dtype) for x in leaves], start))
        start += len(leaves)
    links: dict[int, int] = {}
    index = 0
    for tree in [*positional, *(v for _, v in sorted(keyword.items()))]:
        leaves, structure = jax.tree.flatten(tree)
        avals = [(x.shape, x.dtype) for x in leaves]
        sized = len(leaves) > 1 or any(x.donated for x in leaves)
        for k, (other, other_avals, out_start) in enumerate(results):
            if leaves and sized and structure == other and avals == other_avals:
                links |= {index + j: out_start + j for j in range(len(leaves))}
                del results[k]
                break
        index += len(leaves)
    return links


class _Builder:
    """Turns jaxprs into Graphs; `env` maps the variables of one jaxpr to values."""

    def value(self, aval: Any, name: str) -> Value:
        shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)
        return Value(shape, _dtype_name(dtype), _itemsize(dtype), name)

    def program(
        self, closed, inputs, output_names, links
    ) -> tuple[Graph, tuple[Value | None, ...], str]:
        env: dict = {}
        ops: list[Op] = []
        for v, value in zip(closed.jaxpr.invars, inputs, strict=True):
            env[v] = value
        ops += self._constants(closed, env, "")
        body = self.equations(closed.jaxpr, env, "", 1)
        outputs = tuple(_read(env, v) for v in closed.jaxpr.outvars)
        digest = _digest(
            [*inputs, Graph("body", body), *zip(output_names, map(str, outputs), strict=True)]
        )
        for i, value in enumerate(inputs):
            back = outputs[links[i]] if i in links else None
            operands = (back,) if back is not None else ()
            ops.append(Op(f"in{i}", Kind.INPUT, "input", operands, (value,), ""))
        ops += body
        for k, value in enumerate(outputs):
            if k not in links.values() and value is not None:
                result = Value(value.shape, value.dtype, value.itemsize, output_names[k])
                ops.append(Op(f"out{k}", Kind.OUTPUT, "output", (value,), (result,), ""))
        graph = Graph("program", ops)
        share_reads(graph)
        return graph, outputs, digest

    def _constants(self, closed, env: dict, prefix: str) -> list[Op]:
        ops = []
        for k, v in enumerate(closed.jaxpr.constvars):
            env[v] = self.value(v.aval, f"{prefix}constant{k}")
            ops.append(Op(env[v].name, Kind.CONST, "constant", (), (env[v],), ""))
        return ops

    def equations(self, jaxpr, env: dict, prefix: str, trips: int) -> list[Op]:
        ops: list[Op] = []
        for i in live_equations(jaxpr):
            eqn = jaxpr.eqns[i]
            path = f"{prefix}{i}"
            nested = _NESTED.get(eqn.primitive.name)
            if nested is None and "jaxpr" in eqn.params and eqn.primitive.name in CALLS:
                nested = _Builder.call
            if nested is not None:
                ops += nested(self, eqn, env, path, trips)
                continue
            operands = tuple(_read(env, v) for v in eqn.invars)
            results = self._results(eqn, env, path)
            ops.append(
                Op(
                    path,
                    Kind.LEAF,
                    eqn.primitive.name,
                    operands,
                    results,
                    source_line(eqn),
                    trips,
                    eqn=eqn,
                )
            )
        return ops

    def _results(self, eqn, env: dict, path: str) -> tuple[Value, ...]:
        results = []
        for k, v in enumerate(eqn.outvars):
            name = f"%{path}" + (f".{k}" if len(eqn.outvars) > 1 else "")
            env[v] = self.value(v.aval, name)
            results.append(env[v])
        return tuple(results)

    def _body(self, closed, values, prefix: str, trips: int) -> tuple[list[Op], list[Value | None]]:
        """Converts a body whose inputs are `values`; returns its operations and results."""
        closed = as_closed(closed)
        env: dict = {}
        for v, value in zip(closed.jaxpr.invars, values, strict=True):
            env[v] = value
        ops = self._constants(closed, env, prefix)
        ops += self.equations(closed.jaxpr, env, prefix, trips)
        return ops, [_read(env, v) for v in closed.jaxpr.outvars]

    def call(self, eqn, env: dict, path: str, trips: int) -> list[Op]:
        values = [_read(env, v) for v in eqn.invars]
        closed = eqn.params[body_params(eqn)[0]]
        ops, results = self._body(closed, values, f"{path}/", trips)
        for v, value in zip(eqn.outvars, results, strict=True):
            env[v] = value
        return [self._nested(eqn, path, Kind.CALL, trips, (Graph("body", ops),))]

    def scan(self, eqn, env: dict, path: str, trips: int) -> list[Op]:
        p = eqn.params
        n_const, n_carry, length = p["num_consts"], p["num_carry"], p["length"]
        inner = trips * length
        values = [_read(env, v) for v in eqn.invars]
        results = self._results(eqn, env, path)
        body_vars = as_closed(p["jaxpr"]).jaxpr.invars
        ops, inside = self._enter(values[:n_const], path, trips)
        carries = self._carry_ops(
            values[n_const:][:n_carry], body_vars[n_const:], path, inner, trips
        )
        ops += carries
        inside += [op.results[0] for op in carries]
        for k, outer in enumerate(values[n_const + n_carry :]):
            aval = body_vars[n_const + n_carry + k].aval
            xs = self.value(aval, f"%{path}.xs{k}")
            inside.append(xs)
            ops.append(
                Op(
                    f"{path}.xs{k}",
                    Kind.SLICE,
                    "slice",
                    (outer,),
                    (xs,),
                    source_line(eqn),
                    inner,
                    (trips,),
                )
            )
        body, ends = self._body(p["jaxpr"], inside, f"{path}/", inner)
        for op, end in zip(carries, ends[:n_carry], strict=True):
            op.operands = (op.operands[0], end)
        stacks = []
        for k, y in enumerate(ends[n_carry:]):
            name = f"{path}.ys{k}"
            stacked = self.value(eqn.outvars[n_carry + k].aval, f"%{name}")
            stacks.append(Op(name, Kind.STACK, "stack", (y,), (stacked,), source_line(eqn), inner))
        nested = self._nested(eqn, path, Kind.LOOP, trips, (Graph("body", ops + body + stacks),))
        return [nested, *_exits(carries + stacks, results, path, trips)]

    def loop(self, eqn, env: dict, path: str, trips: int) -> list[Op]:
        p = eqn.params
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        inner = trips * WHILE_TRIPS
        values = [_read(env, v) for v in eqn.invars]
        results = self._results(eqn, env, path)
        ops, inside = self._enter(values[: n_cond + n_body], path, trips)
        body_vars = as_closed(p["body_jaxpr"]).jaxpr.invars
        carries = self._carry_ops(values[n_cond + n_body :], body_vars[n_body:], path, inner, trips)
        carried = [op.results[0] for op in carries]
        test, _ = self._body(p["cond_jaxpr"], inside[:n_cond] + carried, f"{path}.cond/", inner)
        body, ends = self._body(p["body_jaxpr"], inside[n_cond:] + carried, f"{path}.body/", inner)
        for op, end in zip(carries, ends, strict=True):
            op.operands = (op.operands[0], end)
        bodies = (Graph("cond", ops + carries + test), Graph("body", body))
        return [
            self._nested(eqn, path, Kind.LOOP, trips, bodies),
            *_exits(carries, results, path, trips),
        ]

    def branch(self, eqn, env: dict, path: str, trips: int) -> list[Op]:
        values = [_read(env, v) for v in eqn.invars]
        results = self._results(eqn, env, path)
        bodies, ends = [], []
        for k, closed in enumerate(eqn.params["branches"]):
            ops, out = self._body(closed, values[1:], f"{path}.branch{k}/", trips)
            bodies.append(Graph(f"branch{k}", ops))
            ends.append(out)
        joins = []
        for k, result in enumerate(results):
            joined = tuple(out[k] for out in ends)
            joins.append(
                Op(f"{path}.join{k}", Kind.JOIN, "join", joined, (result,), source_line(eqn), trips)
            )
        return [self._nested(eqn, path, Kind.BRANCH, trips, tuple(bodies)), *joins]

    def _enter(self, values, path: str, trips: int) -> tuple[list[Op], list[Value | None]]:
        ops, inside = [], []
        for k, outer in enumerate(values):
            if outer is None:
                inside.append(None)
                continue
            name = f"{path}.const{k}"
            value = Value(outer.shape, outer.dtype, outer.itemsize, f"%{name}")
            ops.append(Op(name, Kind.ENTER, "enter", (outer,), (value,), "", trips))
            inside.append(value)
        return ops, inside

    def _carry_ops(self, initial, body_vars, path: str, inner: int, trips: int) -> list[Op]:
        """One CARRY per carried value; its second operand is filled in when the body is known."""
        ops = []
        for k, first in enumerate(initial):
            name = f"{path}.carry{k}"
            value = self.value(body_vars[k].aval, f"%{name}")
            ops.append(
                Op(name, Kind.CARRY, "carry", (first, None), (value,), "", inner, (trips, inner))
            )
        return ops

    def _nested(self, eqn, path: str, kind: Kind, trips: int, bodies: tuple[Graph, ...]) -> Op:
        return Op(
            path, kind, eqn.primitive.name, (), (), source_line(eqn), trips, eqn=eqn, bodies=bodies
        )


# Primitives whose body is an ordinary call: its values are those of the surroundings.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

_NESTED = {name: _Builder.call for name in CALLS} | {
    "scan": _Builder.scan,
    "while": _Builder.loop,
    "cond": _Builder.branch,
}


def body_params(eqn) -> tuple[str, ...]:
    """Returns the names of the parameters that hold an equation's bodies; empty for a leaf."""
    name = eqn.primitive.name
    if name in CALLS:
        own = CALLS[name]
        return (own,) if own in eqn.params else ("call_jaxpr",)
    return {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}.get(
        name, ()
    )


def as_closed(jaxpr) -> jex.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def live_equations(jaxpr) -> list[int]:
    """Returns the indices of the equations whose results are used, or that have effects."""
    used = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    live = []
    for i in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[i]
        if eqn.effects or any(v in used for v in eqn.outvars):
            live.append(i)
            used |= {v for v in eqn.invars if not isinstance(v, jex.Literal)}
    return live[::-1]


def source_line(eqn) -> str:
    """Returns the user's line, `folder/file.py:12 (function)`, without the column."""
    text = source_info_util.summarize(eqn.source_info)
    where, space, function = text.partition(" ")
    file, *numbers = where.rsplit(":", 2) if where.count(":") > 1 else where.rsplit(":", 1)
    short = "/".join(file.replace("\\", "/").split("/")[-2:])
    return ":".join([short, *numbers[:1]]) + space + function


def _exits(carries: list[Op], results: Sequence[Value], path: str, trips: int) -> list[Op]:
    return [
        Op(f"{path}.exit{k}", Kind.EXIT, "exit", carry.results, (results[k],), "", trips)
        for k, carry in enumerate(carries)
    ]


# NumPy takes long to spell a dtype.
_dtype_name = functools.lru_cache(maxsize=256)(str)


def _itemsize(dtype: Any) -> float:
    """Returns bytes per element as stored: half a byte for 4-bit types, 0 for tokens."""
    if dtype is None:
        return 0.0
    name = _dtype_name(dtype)
    return 0.5 if "int4" in name or "float4" in name else float(dtype.itemsize)


def _read(env: dict, v) -> Value | None:
    return None if isinstance(v, jex.Literal) else env[v]
