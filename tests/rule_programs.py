"""One small program for each primitive: what the generated tests and docs/ run over.

`python -m tests.rule_programs` prints docs/primitives.md.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.ad_checkpoint
import jax.extend.random
import jax.numpy as jnp
import jax.scipy.linalg
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import primitives as jax_primitives

from autoshard import primitives
from autoshard.rules import ReplicatedWarning, Rule, rules_for

Aval = jax.ShapeDtypeStruct
# Control flow and calls: the planner goes into their bodies, so they have no rule of their own.
NESTED = (
    "call",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "remat2",
    "checkpoint",
)
NESTED += ("scan", "while", "custom_vjp_call_jaxpr", "core_call", "pjit")
# Collectives over named axes stand inside shard_map only, which is left alone as a whole.
INSIDE_SHARD_MAP = (
    "all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum",
    "ragged_all_to_all",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays, and the primitives it is here for (empty: all that it binds)."""

    fn: Callable
    avals: tuple[Aval, ...]
    only: tuple[str, ...] = ()


def f32(*shape: int) -> Aval:
    return Aval(shape, jnp.float32)


def i32(*shape: int) -> Aval:
    return Aval(shape, jnp.int32)


def c64(*shape: int) -> Aval:
    return Aval(shape, jnp.complex64)


def bools(*shape: int) -> Aval:
    return Aval(shape, jnp.bool_)


def keys(*shape: int) -> Aval:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape))


def equations(fn: Callable, avals) -> list[JaxprEqn]:
    """Returns the leaf equations of a function, those of nested bodies too."""
    return list(_leaves(jax.make_jaxpr(fn)(*avals).jaxpr))


def _leaves(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in NESTED:
            yield eqn
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _leaves(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def _is_jaxpr(value) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _conv(strides=(1, 1), padding: str | tuple = "SAME", **kwargs):
    return functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **kwargs,
    )


def _conv_grads(strides):
    return jax.grad(lambda x, k: jnp.sum(_conv(strides)(x, k) ** 2), (0, 1))


def _pool(init, op, window, stride, padding):
    return lambda x: lax.reduce_window(
        x, init, op, (1, window, window, 1), (1, stride, stride, 1), padding
    )


def _pool_select(x, s):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") * s


_ONE_TO_ONE = (
    lax.abs, lax.acos, lax.acosh, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e,
    lax.bessel_i1e, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv,
    lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.is_finite, lax.lgamma, lax.log,
    lax.log1p, lax.logistic, lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh,
    lax.sqrt, lax.square, lax.tan, lax.tanh, lambda x: lax.integer_pow(x, 3), lambda x:
    lax.reduce_precision(x, 5, 10), lambda x: lax.convert_element_type(x, jnp.bfloat16), lambda
    x: lax.bitcast_convert_type(x, jnp.int32), lax.stop_gradient, jnp.copy, lambda x:
    jax.ad_checkpoint.checkpoint_name(x, "x"), lambda x: lax.optimization_barrier(x), lambda x:
    x.astype(jnp.float8_e4m3fn), lambda x: x.astype(jnp.int4), jax.nn.gelu, jax.nn.softmax,
    jax.nn.logsumexp, jax.nn.relu, jnp.sinc,
)  # fmt: skip
_TWO_TO_ONE = (
    lax.add, lax.atan2, lax.complex, lax.div, lax.eq, lax.ge, lax.gt, lax.igamma,
    lax.igamma_grad_a, lax.igammac, lax.le, lax.lt, lax.max, lax.min, lax.mul, lax.ne,
    lax.nextafter, lax.polygamma, lax.pow, lax.rem, lax.sub, lax.zeta, lambda x, y:
    lax.regularized_incomplete_beta_p.bind(x, y, y), lambda x, y: lax.clamp(0.0, x, y), lambda
    x, y: jax.grad(lambda x: jnp.sum(x * y + x))(x), lambda x, y: jnp.where(x > y, x, y),
)  # fmt: skip
_INTEGER = (
    lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.shift_left,
    lax.shift_right_arithmetic, lax.shift_right_logical, lambda x, y: lax.clz(x), lambda x, y:
    lax.population_count(x), lambda x, y: lax.bitwise_not(y),
)  # fmt: skip


def _pointwise() -> Iterator[Program]:
    for fn in _ONE_TO_ONE:
        yield Program(fn, (f32(16, 8),))
    for fn in _TWO_TO_ONE:
        yield Program(fn, (f32(16, 8), f32(16, 8)))
    for fn in _INTEGER:
        yield Program(fn, (i32(16, 8), i32(16, 8)))
    for fn in (lax.conj, lax.real, lax.imag, lax.abs, jnp.angle):
        yield Program(fn, (c64(16, 8),))


def _reductions() -> Iterator[Program]:
    x = (f32(16, 8, 4),)
    for fn in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax, jnp.argmin, jnp.mean, jnp.var):
        yield Program(functools.partial(fn, axis=1), x)
    yield Program(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a * 0, (0,)), x)
    for fn in (jnp.all, jnp.any):
        yield Program(functools.partial(fn, axis=0), (bools(16, 8),))
    yield Program(lambda x: lax.reduce_xor(x, axes=(0,)), (i32(16, 8),))
    for fn in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        yield Program(functools.partial(fn, axis=1), x)
    yield Program(lambda x: (lax.sort(x, dimension=1), jnp.argsort(x, 0)), x)
    yield Program(lambda x: lax.top_k(x, 3), (f32(16, 8, 8),))
    yield Program(lambda x: lax.approx_max_k(x, 3), (f32(16, 8, 8),))


def _contractions() -> Iterator[Program]:
    yield Program(jnp.dot, (f32(16, 8), f32(8, 32)))
    yield Program(
        lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), (f32(8, 4, 2, 16), f32(8, 16, 2, 16))
    )
    yield Program(jnp.dot, (Aval((16, 8), jnp.bfloat16), Aval((8, 4), jnp.bfloat16)))
    yield Program(jnp.matmul, (i32(16, 8), i32(8, 4)))
    image, kernel = f32(4, 16, 16, 8), f32(3, 3, 8, 16)
    yield Program(_conv(), (image, kernel))
    yield Program(_conv((2, 2)), (image, kernel))
    yield Program(_conv(), (image, f32(1, 1, 8, 16)))
    yield Program(_conv((2, 2)), (image, f32(1, 1, 8, 16)))
    yield Program(_conv((4, 4), "VALID"), (image, f32(4, 4, 8, 16)))
    yield Program(_conv(feature_group_count=8), (image, f32(3, 3, 1, 32)))
    yield Program(_conv(feature_group_count=4), (image, f32(3, 3, 2, 32)))
    yield Program(_conv(batch_group_count=2), (image, kernel))
    yield Program(_conv(padding=((1, 1), (1, 1)), lhs_dilation=(2, 2)), (image, kernel))
    yield Program(_conv(rhs_dilation=(2, 2)), (image, kernel))
    yield Program(_conv_grads((1, 1)), (image, kernel), ("conv_general_dilated",))
    yield Program(_conv_grads((2, 2)), (image, kernel), ("conv_general_dilated",))
    yield Program(lax.ragged_dot, (f32(16, 8), f32(4, 8, 32), i32(4)))
    for init, op in ((0.0, lax.add), (-jnp.inf, lax.max), (jnp.inf, lax.min)):
        yield Program(_pool(init, op, 2, 2, "VALID"), (image,))
        yield Program(_pool(init, op, 3, 1, "SAME"), (image,))
    yield Program(_pool(1.0, lambda a, b: a * b + 0 * a, 2, 2, "VALID"), (image,))
    max_pool = _pool(-jnp.inf, lax.max, 3, 2, "SAME")
    yield Program(jax.grad(lambda x: jnp.sum(max_pool(x))), (image,), ("select_and_scatter_add",))
    jvp = lambda x: jax.jvp(jax.grad(lambda x: jnp.sum(max_pool(x) ** 2)), (x,), (x,))  # noqa: E731
    yield Program(jvp, (image,), ("select_and_gather_add",))


def _moves() -> Iterator[Program]:
    x = f32(16, 8)
    yield Program(lambda x: x.reshape(4, 4, 2, 4), (x,))
    yield Program(lambda x: x.reshape(4, 32), (x,))
    yield Program(lambda x: x.reshape(6, 4), (f32(4, 6),))
    yield Program(lambda x: x.reshape(-1), (f32(8, 3, 5),))
    yield Program(lambda x: x.T, (x,))
    yield Program(lambda x: lax.transpose(x, (2, 0, 1)), (f32(16, 8, 4),))
    yield Program(lambda x: jnp.broadcast_to(x, (8, 16, 8)), (x,))
    yield Program(lambda x: x[:, None, :], (x,))
    yield Program(jnp.squeeze, (f32(16, 1, 8),))
    yield Program(lambda x: (x[:, 2:6], x[::2], x[1::2], x[:, :1], x[::-1]), (x,))
    yield Program(lambda x: jnp.split(x, 2, 1), (x,))
    yield Program(lambda x: jnp.pad(x, ((1, 1), (0, 8))), (x,))
    yield Program(lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0))), (x,))
    yield Program(lambda x: lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 0))), (x,))
    yield Program(lambda x, y: (jnp.concatenate([x, y, x], 1), jnp.stack([x, y], 1)), (x, x))
    yield Program(lambda x: jnp.tile(x, (2, 3)), (x,))
    yield Program(
        lambda: (lax.iota(jnp.int32, 16), lax.broadcasted_iota(jnp.float32, (16, 8), 1)), ()
    )
    yield Program(lambda: (jnp.eye(8), jnp.tri(8), jnp.zeros((16, 8))), ())
    yield Program(lambda i, x: lax.select_n(i, x, x + 1, x * 2), (i32(16, 8), x))
    yield Program(lambda x: jax.image.resize(x, (16, 32, 3), "bilinear"), (f32(8, 16, 3),))
    yield Program(lambda x: jnp.fft.fft2(x), (f32(16, 8, 4),))
    yield Program(lambda x: jnp.fft.rfft(x), (f32(16, 8),))
    yield Program(lambda x: x.at[0:4].set(0.0), (x,))
    yield Program(lambda x: jnp.roll(x, 3, 0), (x,))
    yield Program(lambda x: jnp.diagonal(x), (f32(8, 8),))


def _indexed() -> Iterator[Program]:
    x, i, u = f32(16, 8), i32(4), f32(4, 8)
    gathers, scatters = (
        ("gather",),
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
    )
    scatters += ("scatter-sub",)
    yield Program(lambda x, i: x[i], (x, i32(8, 4)), gathers)
    yield Program(lambda x, i: jnp.take(x, i, axis=1, mode="fill"), (x, i), gathers)
    yield Program(lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (x, i), gathers)
    yield Program(lambda x, i: x[i[:, 0], i[:, 1]], (f32(16, 32, 8), i32(4, 2)), gathers)
    yield Program(lambda x, i: jnp.take_along_axis(x, i, 1), (x, i32(16, 4)), gathers)
    windows = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8)), (None, 0))
    yield Program(windows, (x, i), gathers)
    for name in ("set", "add", "multiply", "min", "max", "subtract"):
        update = lambda x, i, u, name=name: getattr(x.at[i], name)(u)  # noqa: E731
        yield Program(update, (x, i, u), scatters)
        yield Program(jax.vmap(update), (f32(8, 16, 4), i32(8, 2), f32(8, 2, 4)), scatters)
    yield Program(
        lambda x, i, u: x.at[i[:, 0], i[:, 1]].add(u), (f32(16, 32, 8), i32(4, 2), u), scatters
    )
    yield Program(lambda u, i: jax.ops.segment_sum(u, i, 8), (f32(16, 4), i32(16)), scatters)
    yield Program(lambda x, i: lax.dynamic_slice(x, (i, i), (16, 4)), (x, i32()))
    yield Program(lambda x, i: lax.dynamic_slice(x, (i, i), (1, 8)), (x, i32()))
    for shape in ((16, 8), (1, 8), (4, 8), (16, 1)):
        write = lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i))  # noqa: E731
        yield Program(write, (x, f32(*shape), i32()), ("dynamic_update_slice",))
    write = jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)))
    yield Program(write, (f32(8, 16, 4), f32(8, 1, 4), i32(8)), scatters)


def _random() -> Iterator[Program]:
    key = keys()
    yield Program(lambda k: jax.random.bits(k, (16, 8)), (key,))
    yield Program(lambda k: jax.random.bits(k, (16, 8), jnp.uint8), (key,))
    yield Program(lambda k: jax.random.normal(k, (8, 3)), (key,))
    yield Program(lambda k: jax.random.split(k, (8, 4)), (key,))
    yield Program(lambda k: jax.vmap(lambda k: jax.random.uniform(k, (4,)))(k), (keys(8),))
    yield Program(lambda k: jax.vmap(jax.random.fold_in)(k, jnp.arange(8)), (keys(8),))
    yield Program(lambda s: jax.vmap(jax.random.key)(s), (i32(8),))
    yield Program(lambda k: jax.random.wrap_key_data(jax.random.key_data(k)), (keys(8),))
    yield Program(lambda k: jax.random.clone(k), (keys(8),))
    yield Program(lambda k, x: jax.random.gamma(k, x), (key, f32(8, 4)), ("random_gamma",))
    yield Program(lambda k: lax.rng_bit_generator(k, (16, 8)), (Aval((4,), jnp.uint32),))
    yield Program(lambda a, b: lax.rng_uniform(a, b, (16, 8)), (f32(), f32()))
    counts = Aval((16, 8), jnp.uint32)
    yield Program(lambda x: jax.extend.random.threefry_2x32(jnp.ones(2, jnp.uint32), x), (counts,))
    yield Program(lambda k: jax.random.permutation(k, 16), (key,))


def _linear_algebra() -> Iterator[Program]:
    a, b = f32(8, 4, 4), f32(8, 4, 2)
    linalg = jnp.linalg
    yield Program(linalg.cholesky, (a,), ("cholesky",))
    yield Program(lambda a: linalg.qr(a), (a,))
    yield Program(lambda a: linalg.svd(a), (a,), ("svd",))
    yield Program(lambda a: linalg.eigh(a), (a,), ("eigh",))
    yield Program(lambda a: linalg.eig(a), (a,), ("eig",))
    yield Program(lambda a: jax.scipy.linalg.lu_factor(a), (a,), ("lu", "lu_pivots_to_permutation"))
    yield Program(lambda a, b: linalg.solve(a, b), (a, b))
    yield Program(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (a, b))
    yield Program(lambda d, b: lax.linalg.tridiagonal_solve(d, d, d, b), (f32(8, 4), f32(8, 4, 2)))
    yield Program(lambda a: lax.linalg.tridiagonal(a), (a,))
    yield Program(lambda a: lax.linalg.hessenberg(a), (a,))
    yield Program(lambda a: lax.linalg.schur(a), (f32(4, 4),))
    yield Program(lambda a, t: lax.linalg.householder_product(a, t), (a, f32(8, 4)))
    yield Program(lambda r, w: lax.linalg.cholesky_update(r, w), (f32(4, 4), f32(4)))
    yield Program(lambda a, c: lax.linalg.symmetric_product(a, c), (a, a))
    yield Program(lambda a: jax.scipy.linalg.expm(a), (a,))


def _odd() -> Iterator[Program]:
    yield Program(jnp.add, (f32(7, 5), f32(7, 5)))
    yield Program(lambda x: jnp.sum(x, 0), (f32(0, 8),))
    yield Program(lambda x: x @ x.T, (f32(1, 1),))
    yield Program(lambda x: x + 1, (f32(2, 1, 2, 1, 2, 1, 2, 2),))
    yield Program(lambda x: jnp.sin(x) * 2, (f32(),))


def programs() -> list[Program]:
    families = (
        _pointwise,
        _reductions,
        _contractions,
        _moves,
        _indexed,
        _random,
        _linear_algebra,
        _odd,
    )
    return [program for family in families for program in family()]


def ruled_equations() -> list[tuple[JaxprEqn, Rule]]:
    """Returns each distinct equation of the programs, with its rule."""
    found: dict[str, JaxprEqn] = {}
    for program in programs():
        for eqn in equations(program.fn, program.avals):
            if not program.only or eqn.primitive.name in program.only:
                found.setdefault(_text(eqn), eqn)
    eqns = list(found.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)
        return list(zip(eqns, rules_for(eqns), strict=True))


def _text(eqn: JaxprEqn) -> str:
    avals = [str(v.aval) for v in (*eqn.invars, *eqn.outvars)]
    return f"{eqn.primitive.name}{avals}{sorted(eqn.params.items(), key=lambda item: item[0])}"


def jax_primitive_names() -> list[str]:
    """Returns the names of the primitives that JAX exports."""
    exported = [
        getattr(jax_primitives, name) for name in dir(jax_primitives) if name.endswith("_p")
    ]
    return sorted({p.name for p in exported})


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a primitive's rule comes from, and an example or the reason that there is none."""

    source: str
    text: str


def primitive_table() -> dict[str, Row]:
    """Returns the row of every primitive that the programs bind or JAX exports, by name."""
    rows = {name: Row("nested", "the planner goes into its body") for name in NESTED}
    rows |= {
        name: Row("inside shard_map", "a collective over named axes") for name in INSIDE_SHARD_MAP
    }
    rows |= {name: Row("replicated", reason) for name, reason in primitives.REPLICATED.items()}
    rows |= {name: Row("ours", "the identity") for name in ("sharding_constraint", "device_put")}
    for eqn, rule in ruled_equations():
        name = eqn.primitive.name
        if name in rows and rows[name].source != "none":
            continue
        if rule.is_replicated and rule.sizes and not _is_small(eqn):
            rows[name] = Row("none", "")
        elif name in primitives.RULES:
            rows[name] = Row("ours", f"`{rule}`")
        elif name in primitives.CORRECTIONS:
            rows[name] = Row("Shardy, corrected", f"`{rule}`")
        else:
            rows[name] = Row("Shardy", f"`{rule}`")
    return dict(sorted(rows.items()))


def _is_small(eqn: JaxprEqn) -> bool:
    return all(len(getattr(v.aval, "shape", ())) < 2 for v in (*eqn.invars, *eqn.outvars))


def table_text(table: dict[str, Row]) -> str:
    """Returns docs/primitives.md."""
    counts: dict[str, int] = {}
    for row in table.values():
        counts[row.source] = counts.get(row.source, 0) + 1
    summary = ", ".join(f"{count} {source}" for source, count in sorted(counts.items()))
    lines = [
        "# Primitives and their rules",
        "",
        "Made by `python -m tests.rule_programs`; a test compares. A rule is written over factors:",
        "`i k, k j -> i j {i=32, k=64:reduce, j=128}` is a matrix product.",
        "",
        f"{len(table)} primitives: {summary}.",
        "",
        "| primitive | rule from | example, or reason |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {row.source} | {row.text} |" for name, row in table.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table_text(primitive_table()), end="")
