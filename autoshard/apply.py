"""A jaxpr and a plan's constraints -> the same computation with `with_sharding_constraint` where
the plan says so.

The jaxpr is evaluated again, equation by equation, under the user's source lines. Loops, branches,
checkpointed regions and custom derivatives are bound again with new bodies, so they stay what they
were; plain calls are inlined. Paths are those of `autoshard.graph`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.sharding import NamedSharding

from autoshard.graph import read_path
from autoshard.leading import leading
from autoshard.sharding import Axes, Sharding
from autoshard.trace import CALLS, as_closed, body_params, live_equations

Chain = tuple[Sharding, ...]  # the shardings that a value takes on, one after the other

INLINED = ("jit", "pjit", "closed_call", "core_call")


@dataclasses.dataclass(frozen=True)
class Scatter:
    """An operation that runs on its blocks, and whose one partial result is reduce-scattered.

    `dims` are the axes scattered onto each dim of the result, `summed` those all-reduced after.
    """

    operands: Chain
    result: Sharding
    dims: tuple[Axes, ...]
    summed: Axes

    def __str__(self) -> str:
        onto = [f"{','.join(axes)} onto dim {d}" for d, axes in enumerate(self.dims) if axes]
        summed = f", all-reduce {','.join(self.summed)}" if self.summed else ""
        return f"reduce-scatter {', '.join(onto)}{summed}"


@dataclasses.dataclass(frozen=True)
class Constraints:
    """The shardings to emit.

    `operands[path, k]` before operation `path` reads its operand k, `results[path, k]` on its
    result k; each a chain. `scatters[path]`: run the operation on its blocks. `again`: the operands
    that are gathered though another operation has gathered the same before.
    """

    operands: Mapping[tuple[str, int], Chain]
    results: Mapping[tuple[str, int], Chain]
    scatters: Mapping[str, Scatter] = dataclasses.field(default_factory=dict)
    again: frozenset[tuple[str, int]] = frozenset()

    def __len__(self) -> int:
        return len(self.operands) + len(self.results) + len(self.scatters)

    def __str__(self) -> str:
        return (
            f"{len(self.operands)} on operands, {len(self.results)} on results, "
            f"{len(self.scatters)} reduce-scattered"
        )


def constrained(
    closed: jex.ClosedJaxpr,
    constraints: Constraints,
    mesh: jax.sharding.Mesh,
    carried: Sequence[int | None] = (),
) -> Callable[..., list[Any]]:
    """Returns a function of the flat arguments that computes the jaxpr's flat results under the
    constraints.

    Args:
      mesh: a mesh whose axes are all Auto, real or of ahead-of-time devices.
      carried: for each argument, the result that becomes it in the next call, or None.
    """
    return lambda *args: Evaluation(constraints, mesh).program(closed, args, carried)


class Evaluation:
    def __init__(self, constraints: Constraints, mesh: jax.sharding.Mesh):
        self.constraints, self.mesh = constraints, mesh

    def program(self, closed: jex.ClosedJaxpr, args: Sequence[Any], carried) -> list[Any]:
        args = [self.produced(x, f"in{i}", 0) for i, x in enumerate(args)]
        outs = self.body(closed, args, "")
        borders = {k: f"in{i}" for i, k in enumerate(carried) if k is not None}
        return [self.operand(x, borders.get(k, f"out{k}"), 0) for k, x in enumerate(outs)]

    def pin(self, x: Any, chain: Chain) -> Any:
        for sharding in chain:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, sharding.to_spec()))
        return x

    def operand(self, x: Any, path: str, k: int) -> Any:
        if (path, k) in self.constraints.again:
            # A choice of memory over time that XLA would undo, keeping what was gathered before.
            x = jax.lax.optimization_barrier(x)
        return self.pin(x, self.constraints.operands.get((path, k), ()))

    def produced(self, x: Any, path: str, k: int) -> Any:
        """Constrains a result, then brings it into the form that its readers share."""
        x = self.pin(x, self.constraints.results.get((path, k), ()))
        return self.operand(x, read_path(path, k), 0)

    def body(self, closed: Any, args: Sequence[Any], prefix: str) -> list[Any]:
        closed = as_closed(closed)
        jaxpr, env = closed.jaxpr, {}

        def read(v):
            return v.val if isinstance(v, jex.Literal) else env[v]

        env.update(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for i in live_equations(jaxpr):
            eqn = jaxpr.eqns[i]
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            context = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
            with context, eqn.ctx.manager:
                outs = self.equation(eqn, [read(v) for v in eqn.invars], f"{prefix}{i}")
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        nested = _NESTED.get(eqn.primitive.name)
        if nested is not None:
            return nested(self, eqn, args, path)
        args = [self.operand(x, path, k) for k, x in enumerate(args)]
        if eqn.primitive.name in _SLICED:
            args = _in_bounds(eqn, args)
        elif eqn.primitive.name.startswith(("gather", "scatter")):
            args[1] = _wide(args[1])
        alone = self.is_alone(eqn, path)
        if alone:
            args[0] = jax.lax.optimization_barrier(args[0])
        if eqn.primitive.name in _DEBUG and any("Ordered" in type(e).__name__ for e in eqn.effects):
            return _ordered(eqn, args)
        scatter = self.constraints.scatters.get(path)
        outs = _bind(eqn, args, eqn.params) if scatter is None else self.blocks(eqn, args, scatter)
        if alone or eqn.primitive.name == "mul" and self.is_one_integer_a_device(outs[0]):
            outs = [jax.lax.optimization_barrier(outs[0])]
        return [self.produced(x, path, k) for k, x in enumerate(outs)]

    def is_alone(self, eqn: jex.JaxprEqn, path: str) -> bool:
        """Whether a device may write at one index only, into a dim that is sharded.

        XLA 0.10.2 makes that a dynamic_slice, of which it adds the start, unclamped where the index
        is another device's, to that of a resharding's slice before it; and it adds into the other
        operand of a sum what is scattered into zeros. So nothing may move across.
        """
        if not eqn.primitive.name.startswith("scatter"):
            return False
        indices: Any = eqn.invars[1].aval
        numbers = eqn.params["dimension_numbers"]
        indexed = (*numbers.scatter_dims_to_operand_dims, *numbers.operand_batching_dims)
        chain = self.constraints.results.get((path, 0))
        sharded = chain is None or any(s.dims[d] for s in chain for d in indexed)
        return sharded and indices.size <= self.mesh.size * indices.shape[-1]

    def is_one_integer_a_device(self, x: Any) -> bool:
        """Whether blocks of x may hold one integer, which XLA 0.10.2 takes for index arithmetic.

        Of dynamic_slice(x, i) * c, sliced again to one integer, it drops the factor.
        """
        return jnp.issubdtype(x.dtype, jnp.integer) and 1 < x.size <= self.mesh.size

    def blocks(self, eqn: jex.JaxprEqn, args: list[Any], scatter: Scatter) -> list[Any]:
        """Binds the equation on each device's blocks and reduce-scatters its partial result."""

        def local(*xs):
            onto = [d for d, axes in enumerate(scatter.dims) if axes]
            params, order = eqn.params, tuple(range(len(scatter.dims)))
            if eqn.primitive.name == "dot_general" and len(onto) == 1 and onto[0] != order[-1]:
                params, xs, order = leading(params, xs, onto[0]) or (params, xs, order)
            (out,) = _bind(eqn, xs, params)
            for d in onto:
                out = _scattered(out, scatter.dims[d], order.index(d))
            out = jax.lax.psum(out, scatter.summed) if scatter.summed else out
            return jnp.transpose(out, [order.index(d) for d in range(len(order))])

        specs = tuple(s.to_spec() for s in scatter.operands)
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=scatter.result.to_spec(),
            check_vma=False,
        )
        return [run(*args)]

    def call(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        (name,) = body_params(eqn)
        closed = eqn.params[name]
        if eqn.primitive.name in INLINED:
            return self.body(closed, args, f"{path}/")
        new = _retrace(lambda *xs: self.body(closed, xs, f"{path}/"), closed)
        if isinstance(closed, jex.ClosedJaxpr):
            return _bind(eqn, args, {**eqn.params, name: new})
        return _bind(eqn, [*new.consts, *args], {**eqn.params, name: _consts_first(new)})

    def scan(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        closed = eqn.params["jaxpr"]
        n_const, n_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        first_x = n_const + n_carry
        names = [f"{path}.const{k}" for k in range(n_const)]
        names += [f"{path}.carry{k}" for k in range(n_carry)]
        names += [f"{path}.xs{k}" for k in range(len(args) - first_x)]
        args = [self.operand(x, name, 0) for x, name in zip(args, names, strict=True)]

        def body(*xs):
            xs = [self.produced(x, name, 0) for x, name in zip(xs, names, strict=True)]
            outs = self.body(closed, xs, f"{path}/")
            carried = [self.next_carry(x, path, k) for k, x in enumerate(outs[:n_carry])]
            return carried + [
                self.operand(y, f"{path}.ys{k}", 0) for k, y in enumerate(outs[n_carry:])
            ]

        outs = _bind(eqn, args, {**eqn.params, "jaxpr": _retrace(body, closed)})
        ends = [f"{path}.carry{k}" for k in range(n_carry)]
        ends += [f"{path}.ys{k}" for k in range(len(outs) - n_carry)]
        return self.exits(outs, ends, path)

    def loop(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        p = eqn.params
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        names = [f"{path}.const{k}" for k in range(n_cond + n_body)]
        names += [f"{path}.carry{k}" for k in range(len(args) - n_cond - n_body)]
        args = [self.operand(x, name, 0) for x, name in zip(args, names, strict=True)]
        carries = names[n_cond + n_body :]

        def test(*xs):
            xs = [self.produced(x, n, 0) for x, n in zip(xs, names[:n_cond] + carries, strict=True)]
            return self.body(p["cond_jaxpr"], xs, f"{path}.cond/")

        def body(*xs):
            inner = names[n_cond : n_cond + n_body] + carries
            xs = [self.produced(x, n, 0) for x, n in zip(xs, inner, strict=True)]
            outs = self.body(p["body_jaxpr"], xs, f"{path}.body/")
            return [self.next_carry(x, path, k) for k, x in enumerate(outs)]

        new = {
            "cond_jaxpr": _retrace(test, p["cond_jaxpr"]),
            "body_jaxpr": _retrace(body, p["body_jaxpr"]),
        }
        outs = _bind(eqn, args, {**p, **new})
        return self.exits(outs, carries, path)

    def branch(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        branches = []
        for b, closed in enumerate(eqn.params["branches"]):

            def body(*xs, b=b, closed=closed):
                outs = self.body(closed, xs, f"{path}.branch{b}/")
                return [self.operand(x, f"{path}.join{k}", b) for k, x in enumerate(outs)]

            branches.append(_retrace(body, closed))
        outs = _bind(eqn, args, {**eqn.params, "branches": tuple(branches)})
        return [self.produced(x, f"{path}.join{k}", 0) for k, x in enumerate(outs)]

    def next_carry(self, x: Any, path: str, k: int) -> Any:
        """Brings the next carry into the carry's own sharding at the end of an iteration."""
        name = f"{path}.carry{k}"
        return self.pin(self.operand(x, name, 1), self.constraints.results.get((name, 0), ()))

    def exits(self, outs: Sequence[Any], ends: Sequence[str], path: str) -> list[Any]:
        """Constrains results as the loop leaves them, then as their readers want them."""
        results = []
        for k, (x, end) in enumerate(zip(outs, ends, strict=True)):
            x = self.pin(x, self.constraints.results.get((end, 0), ()))
            x = self.operand(x, f"{path}.exit{k}", 0)
            results.append(self.produced(x, f"{path}.exit{k}", 0))
        return results


_NESTED = {name: Evaluation.call for name in CALLS} | {
    "scan": Evaluation.scan,
    "while": Evaluation.loop,
    "cond": Evaluation.branch,
}


def _bind(eqn: jex.JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(dict(params)))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _scattered(x: Any, axes: Axes, dim: int) -> Any:
    """Reduce-scatters onto a dim, dims of one left out meanwhile.

    The TPU compiler may put those outermost, and makes an all-reduce onto any other dim.
    """
    narrow = [n for d, n in enumerate(x.shape) if n != 1 or d == dim]
    at = sum(n != 1 for n in x.shape[:dim])
    out = jax.lax.psum_scatter(x.reshape(narrow), axes, scatter_dimension=at, tiled=True)
    return out.reshape(*x.shape[:dim], out.shape[at], *x.shape[dim + 1 :])


# The operand whose shape the slice has; None: the parameters say it. Then come the starts.
_SLICED = {"dynamic_slice": None, "dynamic_update_slice": 1}


def _in_bounds(eqn: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Clamps the starts of a slice, as it would itself.

    XLA 0.10.2 merges a dynamic_slice with the slice that a resharding puts behind it, and then
    clamps too late; a dynamic_update_slice of a sharded dim it does not clamp at all.
    """
    which = _SLICED[eqn.primitive.name]
    sizes = eqn.params["slice_sizes"] if which is None else args[which].shape
    first = len(args) - len(sizes)
    starts = [_wide(x) for x in args[first:]]
    for k, (n, size) in enumerate(zip(args[0].shape, sizes, strict=True)):
        dtype = jnp.result_type(starts[k])
        starts[k] = jax.lax.clamp(np.zeros((), dtype), starts[k], np.array(n - size, dtype))
    return [*args[:first], *starts]


_DEBUG = ("debug_callback", "debug_print")


def _ordered(eqn: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Prints in order by an `io_callback`: JAX has no ordered debug effect for many devices."""

    def host(*xs: Any) -> None:
        eqn.primitive.bind(*xs, **eqn.params)

    io_callback(host, None, *args, ordered=True)
    return []


def _wide(index: Any) -> Any:
    """Returns an index in which XLA can count: in 8 bits it overflows, and reads anywhere."""
    dtype = jnp.result_type(index)
    return jax.lax.convert_element_type(index, np.int32) if dtype.itemsize < 4 else index


def _retrace(body: Callable, closed: Any) -> jex.ClosedJaxpr:
    """Traces `body` for the inputs of `closed`."""
    return jax.make_jaxpr(body)(*[_struct(v.aval) for v in as_closed(closed).jaxpr.invars])


def _consts_first(closed: jex.ClosedJaxpr) -> jex.Jaxpr:
    """Returns a jaxpr whose first arguments are the constants."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _struct(aval: Any) -> Any:
    if hasattr(aval, "shape"):
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
        )
    return aval
