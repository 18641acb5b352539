"""Random programs: up to some 30 operations on arrays of odd sizes, with nested bodies."""

import functools
import math
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tests.random_steps import BOOL, F32, I32, MAX_SIZE, RandomProgram, operation

DIMS = (8, 4, 16, 6, 12, 2, 3, 5, 7, 1, 24)
MAX_DEPTH = 2


def random_program(
    rng: random.Random, most_steps: int = 30, differentiable: bool = False
) -> RandomProgram:
    dims = [rng.choice(DIMS) for _ in range(3)] + [8]
    ranks = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))] + [2]
    avals = [jax.ShapeDtypeStruct([rng.choice(dims) for _ in range(r)], F32) for r in ranks]
    avals.append(jax.ShapeDtypeStruct([rng.choice(dims) for _ in range(rng.randint(0, 2))], I32))
    avals = [a if math.prod(a.shape) <= MAX_SIZE else avals[-1] for a in avals]
    program = RandomProgram(rng, avals, [True] * len(avals), 0)
    program.differentiable = differentiable
    return program.grow(rng.randint(3, most_steps))


@operation
def unary(p: RandomProgram):
    name, fn, exact = p.rng.choice(
        [
            ("sin", jnp.sin, False), ("tanh", jnp.tanh, False), ("neg", jnp.negative, True),
            ("abs", jnp.abs, True), ("relu", jax.nn.relu, True),
            ("exp", lambda x: jnp.exp(x * x * -1.0), False), ("gelu", jax.nn.gelu, False),
            ("sqrt", lambda x: jnp.sqrt(jnp.abs(x) + 1.0), False),
            ("half", lambda x: x * 0.5, True), ("clip", lambda x: jnp.clip(x, -0.5, 0.5), True),
        ]
    )  # fmt: skip
    p.add(name, fn, [p.pick()], exact)


@operation
def binary(p: RandomProgram):
    a = p.pick()
    shape = p.avals[a].shape
    b = p.pick(also=lambda v: v.shape == shape)
    name, fn, exact = p.rng.choice(
        [
            ("mean", lambda x, y: (x + y) * 0.5, True), ("sub", lambda x, y: (x - y) * 0.5, True),
            ("mul", jnp.multiply, False), ("max", jnp.maximum, True), ("min", jnp.minimum, True),
            ("div", lambda x, y: x / (1.0 + jnp.abs(y)), False),
        ]
    )  # fmt: skip
    if name in ("max", "min") and p.near_ties_matter(a, b):
        name, fn, exact = "logaddexp", jnp.logaddexp, False
    p.add(name, fn, [a, b], exact)


@operation
def binary_broadcast(p: RandomProgram):
    a = p.pick(rank=2)
    b = p.pick(also=lambda v: a is not None and 0 < len(v.shape) and _is_suffix(v, p.avals[a]))
    if a is not None and b is not None:
        p.add("mul_broadcast", lambda x, y: x * y, [a, b])


def _is_suffix(v, w) -> bool:
    return len(v.shape) < len(w.shape) and w.shape[len(w.shape) - len(v.shape) :] == v.shape


@operation
def select(p: RandomProgram):
    a = p.pick()
    shape = p.avals[a].shape
    b = p.pick(also=lambda v: v.shape == shape)
    mask = p.pick(BOOL, also=lambda v: v.shape == shape)
    if mask is not None:
        p.add("where", jnp.where, [mask, a, b], True)
    else:
        e = p.pick(exact=True)
        p.add("positive", lambda x: x > 0.1, [e], True)


@operation
def integers(p: RandomProgram):
    if p.rng.random() < 0.5:
        e = p.pick(exact=True)
        p.add("to_int", lambda x: jnp.abs(x * 4.0).astype(jnp.int32) % 7, [e], True)
        return
    i = p.pick(I32)
    name, fn = p.rng.choice(
        [
            ("to_float", lambda x: x.astype(jnp.float32) * 0.125), ("hash", lambda x: x * 5 % 7),
            ("bits", lambda x: (x ^ 3) & 7), ("odd", lambda x: (x % 2) == 1),
            ("one_hot", lambda x: jax.nn.one_hot(x, 7)),
            ("total", lambda x: jnp.sum(x, keepdims=True) % 7),
        ]
    )  # fmt: skip
    p.add(name, fn, [i], True)


@operation
def contract(p: RandomProgram):
    """A dot_general over random pairs of equal dims, some contracted, some batched."""
    a = p.pick(rank=1)
    if a is None:
        return
    b = p.pick(rank=1, also=lambda v: set(v.shape) & set(p.avals[a].shape))
    x, y = p.avals[a].shape, p.avals[b].shape
    pairs, used = [], set()
    for i in p.rng.sample(range(len(x)), len(x)):
        j = next((j for j, n in enumerate(y) if n == x[i] and j not in used), None)
        if j is not None and len(pairs) < 3:
            pairs.append((i, j))
            used.add(j)
    summed = pairs[: p.rng.randint(1, 2)]
    batch = pairs[len(summed) :][: p.rng.randint(0, 2)]
    numbers = (tuple(zip(*summed, strict=True)), tuple(zip(*batch, strict=True)) or ((), ()))
    scale = 1 / math.sqrt(max(1, math.prod(x[i] for i, _ in summed)))

    def dot(u, v):
        return lax.dot_general(u, v, numbers) * jnp.float32(scale)  # type: ignore[arg-type]

    p.add(f"dot{numbers}", dot, [a, b])


@operation
def reshape(p: RandomProgram):
    a = p.pick(p.rng.choice((F32, F32, I32)), rank=1)
    if a is None:
        return
    shape = list(p.avals[a].shape)
    kind = p.rng.choice(("merge", "split", "flat", "unit"))
    d = p.rng.randrange(len(shape))
    if kind == "merge" and d + 1 < len(shape):
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    elif kind == "split":
        divisors = [k for k in range(2, shape[d]) if shape[d] % k == 0]
        if divisors:
            k = p.rng.choice(divisors)
            shape[d : d + 1] = [k, shape[d] // k]
    elif kind == "flat":
        shape = [math.prod(shape)]
    else:
        shape.insert(d, 1)
    p.add(f"reshape{shape}", lambda x: x.reshape(shape), [a], True)


@operation
def transpose(p: RandomProgram):
    a = p.pick(p.rng.choice((F32, F32, I32)), rank=2)
    if a is not None:
        order = p.rng.sample(range(len(p.avals[a].shape)), len(p.avals[a].shape))
        p.add(f"transpose{order}", lambda x: x.transpose(order), [a], True)


@operation
def broadcast(p: RandomProgram):
    a = p.pick()
    n, shape = p.rng.choice((2, 3, 4, 8)), p.avals[a].shape
    where = p.rng.randint(0, len(shape))
    to = (*shape[:where], n, *shape[where:])
    p.add(f"broadcast{to}", lambda x: jnp.broadcast_to(jnp.expand_dims(x, where), to), [a], True)


@operation
def reduce(p: RandomProgram):
    name, fn, exact = p.rng.choice(
        [
            ("sum", lambda x, d: jnp.sum(x, d) / math.sqrt(max(1, x.size)), False),
            ("mean", jnp.mean, False), ("max", jnp.max, True), ("min", jnp.min, True),
            ("logsumexp", jax.nn.logsumexp, False), ("softmax", jax.nn.softmax, False),
            ("var", jnp.var, False), ("prod", lambda x, d: jnp.prod(jnp.cos(x), d), False),
            ("argmax", lambda x, d: jnp.argmax(x, d[0]).astype(jnp.int32) % 7, True),
            ("any", lambda x, d: jnp.any(x > 0.2, d), True),
        ]
    )  # fmt: skip
    a = p.pick(rank=1, exact=name in ("argmax", "any"))
    if a is not None and (p.avals[a].size or name in ("sum", "prod", "any", "softmax")):
        rank = len(p.avals[a].shape)
        dims = tuple(sorted(p.rng.sample(range(rank), p.rng.randint(1, min(2, rank)))))
        if name in ("max", "min") and p.near_ties_matter(a):
            name, fn = "norm", lambda x, d: jnp.sqrt(1.0 + jnp.sum(x * x, d))
        p.add(f"{name}{dims}", lambda x: fn(x, dims), [a], exact)


@operation
def running(p: RandomProgram):
    a = p.pick(rank=1)
    if a is None:
        return
    d, back = p.rng.randrange(len(p.avals[a].shape)), p.rng.random() < 0.3
    name, fn = p.rng.choice(
        [
            ("cumsum", lambda x: lax.cumsum(x, d, reverse=back) / max(1, x.shape[d])),
            ("cummax", lambda x: lax.cummax(x, d, reverse=back)),
            ("cumprod", lambda x: lax.cumprod(jnp.cos(x), d, reverse=back)),
            ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, d, reverse=back)),
            ("associative", lambda x: lax.associative_scan(jnp.minimum, x, axis=d, reverse=back)),
        ]
    )
    if name in ("cummax", "associative") and p.near_ties_matter(a):
        name, fn = "products", lambda x: _running_products(jnp.cos(x), d, back)
    p.add(f"{name}({d}, {back})", fn, [a])


def _running_products(x, d: int, back: bool):
    return lax.associative_scan(jnp.multiply, x, axis=d, reverse=back)


@operation
def order(p: RandomProgram):
    a = p.pick(rank=1, exact=True)
    if a is None:
        return
    d = p.rng.randrange(len(p.avals[a].shape))
    n = p.avals[a].shape[-1]
    k = max(min(1, n), n // 2)
    name, fn = p.rng.choice(
        [
            ("sort", lambda x: jnp.sort(x, d)),
            ("argsort", lambda x: jnp.argsort(x, d).astype(jnp.int32) % 7),
            ("top_k", lambda x: tuple(lax.top_k(x, k))[0]),
            ("sort2", lambda x: tuple(lax.sort((x, x * 0.5), dimension=d, num_keys=1))),
        ]
    )  # fmt: skip
    p.add(f"{name}({d})", fn, [a], True)


@operation
def part(p: RandomProgram):
    a = p.pick(rank=1, also=lambda v: max(v.shape, default=0) > 1)
    if a is None:
        return
    shape = p.avals[a].shape
    d = p.rng.randrange(len(shape))
    n, i = shape[d], p.pick(I32)
    lo, step = p.rng.randrange(n), p.rng.choice((1, 1, 2))
    hi = p.rng.randint(lo + 1, n)
    width = hi - lo
    name, fn = p.rng.choice(
        [
            ("slice", lambda x, i: lax.slice_in_dim(x, lo, hi, step, d)),
            ("dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, jnp.max(i), width, d)),
            ("index", lambda x, i: lax.dynamic_index_in_dim(x, jnp.max(i), d, keepdims=False)),
            ("update", lambda x, i: lax.dynamic_update_slice_in_dim(
                x, -lax.slice_in_dim(x, lo, hi, 1, d), jnp.min(i), d)),
            ("rev", lambda x, i: jnp.flip(x, d)), ("roll", lambda x, i: jnp.roll(x, lo, d)),
            ("split", lambda x, i: tuple(jnp.split(x, [lo], d))),
        ]
    )  # fmt: skip
    p.add(f"{name}({d}, {lo}:{hi}:{step})", fn, [a, i], True)


@operation
def join(p: RandomProgram):
    a = p.pick(rank=1)
    if a is None:
        return
    shape = p.avals[a].shape
    d = p.rng.randrange(len(shape))
    b = p.pick(also=lambda v: len(v.shape) == len(shape) and _only_differ(v.shape, shape, d))
    pads = [(0, 0, 0)] * len(shape)
    pads[d] = (p.rng.randint(-1, 2), p.rng.randint(0, 2), p.rng.choice((0, 0, 1)))
    name, fn = p.rng.choice(
        [
            ("concatenate", lambda x, y: jnp.concatenate([x, y, x], d)),
            ("concatenate2", lambda x, y: jnp.concatenate([y, x], d)),
            ("stack", lambda x, y: jnp.stack([x, x * 0.5], d)),
            ("pad", lambda x, y: lax.pad(x, jnp.float32(0.5), pads)),
            ("tile", lambda x, y: jnp.tile(x, 2)), ("repeat", lambda x, y: jnp.repeat(x, 3, d)),
        ]
    )  # fmt: skip
    p.add(f"{name}({d})", fn, [a, b], True)


def _only_differ(a, b, d: int) -> bool:
    return all(m == n for e, (m, n) in enumerate(zip(a, b, strict=True)) if e != d)


@operation
def gather(p: RandomProgram):
    a, i = p.pick(rank=1), p.pick(I32)
    if a is None or not p.avals[a].size:
        return
    shape = p.avals[a].shape
    d = p.rng.randrange(len(shape))
    name, fn = p.rng.choice(
        [
            ("take", lambda x, i: jnp.take(x, i % shape[d], axis=d)),
            ("lookup", lambda x, i: x[i % shape[0]]),
            ("take_clip", lambda x, i: jnp.take(x, i, axis=d, mode="clip")),
            ("take_along", lambda x, i: jnp.take_along_axis(
                x, jnp.broadcast_to(jnp.sum(i), shape) % shape[d], d)),
            ("last", lambda x, i: x[..., -1] + x[..., 0]),
        ]
    )  # fmt: skip
    p.add(f"{name}({d})", fn, [a, i], True)


@operation
def scatter(p: RandomProgram):
    i = p.pick(I32, rank=1)
    a = p.pick(rank=1, also=lambda v: i is not None and v.shape[0] == p.avals[i].shape[0])
    if i is None or a is None or len(p.avals[i].shape) != 1:
        return
    n = p.rng.choice((7, 8, 12))
    name, fn, exact = p.rng.choice(
        [
            ("add", lambda i, x: jnp.zeros((n, *x.shape[1:])).at[i].add(x) * 0.5, False),
            ("max", lambda i, x: jnp.zeros((n, *x.shape[1:])).at[i].max(x), True),
            ("segment", lambda i, x: jax.ops.segment_sum(x, i, n) * 0.5, False),
            ("set", lambda i, x: jnp.zeros((n, *x.shape[1:])).at[i[0]].set(x[0]), True),
            ("permute", lambda i, x: jnp.zeros_like(x).at[jnp.argsort(i)].set(
                x, unique_indices=True), True),
        ]
    )  # fmt: skip
    p.add(f"scatter_{name}({n})", fn, [i, a], exact)


@operation
def window(p: RandomProgram):
    x = p.pick(rank=3, also=lambda v: len(v.shape) == 3 and v.shape[1] >= 2)
    if x is None:
        return
    c = p.avals[x].shape[2]
    k = p.pick(also=lambda v: len(v.shape) == 2 and v.shape[0] == c)
    stride = p.rng.choice((1, 2))
    if k is None:
        mean = p.near_ties_matter(x)
        first, fn = (0.0, lax.add) if mean else (-jnp.inf, lax.max)
        sizes, steps, name = (1, 2, 1), (1, stride, 1), "mean_pool" if mean else "pool"
        p.add(name, lambda u: lax.reduce_window(u, first, fn, sizes, steps, "SAME"), [x])
        return

    def convolve(u, v):
        kernel = jnp.stack([v, v * 0.5, -v]) / math.sqrt(3 * c)
        return lax.conv_general_dilated(
            u, kernel, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    p.add("convolve", convolve, [x, k])


@operation
def library(p: RandomProgram):
    a = p.pick(rank=2, also=lambda v: v.shape[-1] <= 12 and v.shape[-1] > 0)
    if a is None:
        return

    def positive(x):
        return x @ x.mT * 0.1 + jnp.eye(x.shape[-2])

    name, fn = p.rng.choice(
        [
            ("cholesky", lambda x: jnp.linalg.cholesky(positive(x))),
            ("solve", lambda x: jnp.linalg.solve(positive(x), x)),
            ("normal", lambda x: x + jax.random.normal(jax.random.key(1), x.shape)),
            ("uniform", lambda x: jax.random.uniform(jax.random.key(2), x.shape)),
        ]
    )
    p.add(name, fn, [a])


def _onto(c, y):
    """Brings any value into the shape of a carry."""
    y = y.astype(jnp.float32)
    return jnp.tanh(c + (y if y.shape == c.shape else jnp.mean(y) if y.size else 0.0))


@operation
def loop(p: RandomProgram):
    c, k = p.pick(), p.pick(I32) or p.pick()
    x = p.pick(rank=1, also=lambda v: v.shape[0] > 0)
    if p.depth >= MAX_DEPTH or x is None:
        return
    row = p.avals[x].update(shape=p.avals[x].shape[1:])
    body = p.body([k], [p.avals[c], row])
    reverse, kind = p.rng.random() < 0.3, p.rng.choice(("scan", "scan", "fori", "while", "map"))
    if kind == "while" and (p.depth or p.differentiable):  # no gradient passes one
        kind = "scan"

    def step(const, c, r):
        y = body(c, r, const)[-1]
        return _onto(c, y), (y, r)

    def run(c, x, const):
        if kind == "scan":
            c, (y, _) = lax.scan(lambda c, r: step(const, c, r), c, x, reverse=reverse)
            return c, y
        if kind == "map":
            return lax.map(lambda r: step(const, c, r)[0], x)
        if kind == "fori":
            return lax.fori_loop(0, 3, lambda i, c: step(const, c, x[i % x.shape[0]])[0], c)
        done, c = lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, step(const, s[1], x[0])[0]), (0, c)
        )
        return c * done

    p.add(f"{kind}{{{body.steps_text()}}}", run, [c, x, k])


@operation
def call(p: RandomProgram):
    a, b = p.pick(), p.pick(p.rng.choice((F32, I32))) or p.pick()
    if p.depth >= MAX_DEPTH:
        return
    kind = p.rng.choice(("cond", "checkpoint", "grad", "jit", "vmap"))
    inner = kind in ("grad", "checkpoint")
    body, other = (p.body([a, b], differentiable=inner) for _ in range(2))
    flag = p.pick(I32)

    def scalar(x, y):
        return sum(jnp.mean(v) for v in body(x, y) if v.size and v.dtype == F32) + jnp.mean(x)

    runs = {
        "cond": lambda i, x, y: lax.cond(
            jnp.max(i) > 3, lambda: _onto(x, body(x, y)[-1]), lambda: _onto(x, other(x, y)[-1])),
        "checkpoint": lambda i, x, y: jax.grad(jax.checkpoint(scalar))(x, y) * x.size,
        "grad": lambda i, x, y: jax.grad(scalar)(x, y) * x.size,
        "jit": lambda i, x, y: jax.jit(body)(x, y),
        "vmap": lambda i, x, y: jax.vmap(
            lambda s: _onto(x * s, body(x * s, y)[-1]))(jnp.arange(3.0)),
    }  # fmt: skip
    if not p.avals[a].size and kind in ("grad", "checkpoint"):
        return
    p.add(f"{kind}{{{body.steps_text()}}}", runs[kind], [flag, a, b])


def differentiated(program: RandomProgram) -> Callable:
    """Returns value and gradient of the sum of a program's float results."""
    floats = tuple(i for i, a in enumerate(program.avals[: program.arity]) if a.dtype == F32)

    def total(*args):
        return functools.reduce(
            jnp.add,
            (jnp.mean(y) for y in program(*args) if y.dtype == F32 and y.size),
            jnp.float32(0),
        )

    return jax.value_and_grad(total, argnums=floats)
