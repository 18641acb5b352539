"""Control flow, derivatives and checkpoints: planned inside, and right under any plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autoshard
from tests.plans import assert_same, check_random_plans, mesh_of, on_one_device

X = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)
M = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32) / 3
V = np.random.default_rng(2).normal(size=(8,)).astype(np.float32)
N = np.arange(24, dtype=np.int32).reshape(4, 6)


def scan_carry_and_stack(m, xs):
    return lax.scan(lambda c, x: (jnp.tanh(c @ m + x), c * 2.0), jnp.zeros((4, 8)), xs)


def scan_reversed(m, xs):
    return lax.scan(lambda c, x: (c @ m * 0.5 + x, jnp.sum(c, 0)), xs[0], xs, reverse=True)


def scan_unrolled(m, xs):
    return lax.scan(lambda c, x: (c @ m + x, x @ m), xs[0], xs, unroll=2)


def scan_without_xs(m, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ m), None), x[0], None, length=3)


def scan_only_ys(m, xs):
    return lax.scan(lambda _, x: (None, x @ m), None, xs)


def scan_carry_swaps(m, xs):
    def body(carry, x):
        a, b = carry
        return (b, a @ m + x), a

    return lax.scan(body, (xs[0], xs[1]), xs)


def scan_same_value_everywhere(m, xs):
    """One value as constant, carry and scanned operand; one result stacked twice."""

    def body(c, x):
        y = c @ m + x * m[:4]
        return y, (y, y)

    return lax.scan(body, xs[0], xs)


def scan_of_scan(m, xs):
    def row(c, x):
        c, y = lax.scan(lambda d, e: (d * 0.5 + e, jnp.dot(m, d)), c, x)
        return c, y

    return lax.scan(row, V, xs)


def scan_of_keys(m, xs):
    def body(key, x):
        key, sub = jax.random.split(key)
        return key, x + jax.random.normal(sub, x.shape) @ m

    key, ys = lax.scan(body, jax.random.key(3), xs)
    return jax.random.key_data(key), ys


def scan_of_booleans_and_integers(m, xs):
    def body(c, x):
        count, seen = c
        return (count + jnp.sum(x > 0, axis=0, dtype=jnp.int32), seen | (x > 1)), count

    return lax.scan(body, (jnp.zeros(8, jnp.int32), jnp.zeros((4, 8), bool)), xs)


def scan_of_length_zero(m, xs):
    return lax.scan(lambda c, x: (c @ m + x, c), xs[0], xs[:0])


def scan_of_length_one(m, xs):
    return lax.scan(lambda c, x: (c @ m + x, c), xs[0], xs[:1])


def grad_of_scan(m, xs):
    return jax.value_and_grad(lambda m: jnp.sum(scan_carry_and_stack(m, xs)[0] ** 2))(m)


def grad_of_scan_of_checkpoints(m, xs):
    @jax.checkpoint
    def layer(c, x):
        return jnp.tanh(c @ m + x), jnp.sum(c)

    def loss(m, xs):
        c, ys = lax.scan(lambda c, x: layer(c, x), xs[0], xs)
        return jnp.sum(c**2) + jnp.sum(ys)

    return jax.grad(loss, argnums=1)(m, xs)


def while_loop(m, xs):
    def test(c):
        return (c[0] < 5) & (jnp.sum(jnp.abs(c[1])) > 1e-3)

    return lax.while_loop(test, lambda c: (c[0] + 1, c[1] @ m * 0.5), (jnp.int32(0), xs[0]))


def while_with_constants_in_both(m, xs):
    limit = jnp.max(xs) * 3

    def test(c):
        return jnp.max(jnp.abs(c)) < limit

    return lax.while_loop(test, lambda c: c * 1.5 + jnp.abs(xs[1] @ m), xs[0])


def fori_loop(m, xs):
    return lax.fori_loop(0, 4, lambda i, c: c @ m + xs[i], xs[0])


def fori_loop_of_traced_length(m, xs):
    stop = jnp.argmax(xs[0, 0])
    return lax.fori_loop(0, stop, lambda i, c: c @ m * 0.5 + xs[i % 8], xs[0])


def fori_loop_that_updates_a_buffer(m, xs):
    def body(i, buffer):
        return lax.dynamic_update_index_in_dim(buffer, buffer[i] @ m + xs[i], i + 1, 0)

    return lax.fori_loop(0, 8, body, jnp.zeros((9, 4, 8)))


def grad_of_fori_loop(m, xs):
    return jax.grad(lambda m: jnp.sum(fori_loop(m, xs) ** 2))(m)


def cond(m, xs):
    return lax.cond(xs[0, 0, 0] > 0, lambda x: x @ m, lambda x: x * 2.0, xs)


def cond_with_nothing_in_common(m, xs):
    return lax.cond(
        xs[0, 0, 0] > 0,
        lambda: (xs[0] @ m, jnp.int32(1)),
        lambda: (jnp.zeros((4, 8)), jnp.int32(2)),
    )


def cond_that_passes_operands_on(m, xs):
    return lax.cond(xs[0, 0, 0] > 0, lambda a, b: (a, b, b), lambda a, b: (b, a, a), xs[0], xs[1])


def switch(m, xs):
    branches = [lambda x: x @ m, jnp.sin, lambda x: jnp.zeros_like(x), lambda x: x[::-1]]
    return [lax.switch(i, branches, xs[0]) for i in (jnp.argmax(V) % 4, 1)]


def grad_of_cond(m, xs):
    return jax.grad(lambda m: jnp.sum(cond(m, xs) ** 2))(m)


def cond_in_scan_in_cond(m, xs):
    def body(c, x):
        c = lax.cond(jnp.sum(x) > 0, lambda c: c @ m, lambda c: c - x, c)
        return c, jnp.mean(c)

    return lax.cond(
        jnp.sum(m) < 100, lambda: lax.scan(body, xs[0], xs), lambda: (xs[1], jnp.zeros(8))
    )


def while_in_scan(m, xs):
    def body(c, x):
        c = lax.while_loop(lambda c: jnp.sum(jnp.abs(c)) > 5.0, lambda c: c * 0.5, c @ m + x)
        return c, c[0]

    return lax.scan(body, xs[0], xs)


def associative_scan(m, xs):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (xs, xs * 0.5))


def map_and_batched_map(m, xs):
    return lax.map(lambda x: x @ m, xs), lax.map(lambda x: x @ m, xs, batch_size=3)


def vmap_of_grad(m, xs):
    return jax.vmap(jax.grad(lambda m, x: jnp.sum(jnp.tanh(x @ m))), (None, 0))(m, xs)


def vmap_of_while(m, xs):
    return jax.vmap(lambda x: lax.while_loop(lambda c: c[0, 0] < 2.0, lambda c: c + 0.5, x))(xs)


def vmap_of_cond(m, xs):
    return jax.vmap(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ m, jnp.sin, x))(xs)


def jvp(m, xs):
    return jax.jvp(lambda m: scan_carry_and_stack(m, xs), (m,), (m * 0.1,))


def linearize(m, xs):
    value, linear = jax.linearize(lambda m: jnp.tanh(xs @ m), m)
    return value, linear(m)


def hessian(m, xs):
    return jax.hessian(lambda v: jnp.sum(jnp.tanh(xs[0] @ v)))(m[0])


def jacobian_of_scan(m, xs):
    return jax.jacrev(lambda v: lax.scan(lambda c, x: (c * x[0], x @ c), v, xs)[1])(m[0])


def barrier_and_names(m, xs):
    y = checkpoint_name(xs @ m, "y")
    y, z = lax.optimization_barrier((y, xs))
    return y + z


def nested_jits(m, xs):
    @jax.jit
    def inner(x):
        return jnp.tanh(x @ m)

    return jax.jit(lambda x: inner(inner(x)))(xs)


def linear_solve(m, xs):
    return lax.custom_linear_solve(
        lambda v: v + M @ v * 0.1, V, lambda _, b: jnp.linalg.solve(jnp.eye(8) + M * 0.1, b)
    )


def custom_root(m, xs):
    return lax.custom_root(
        lambda x: x**3 - V**2 - 1,
        jnp.ones(8),
        lambda f, x: lax.fori_loop(0, 30, lambda _, x: x - f(x) / (3 * x**2), x),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


PROGRAMS = [
    scan_carry_and_stack, scan_reversed, scan_unrolled, scan_without_xs, scan_only_ys,
    scan_carry_swaps, scan_same_value_everywhere, scan_of_scan, scan_of_keys,
    scan_of_booleans_and_integers, scan_of_length_zero, scan_of_length_one, grad_of_scan,
    grad_of_scan_of_checkpoints, while_loop, while_with_constants_in_both, fori_loop,
    fori_loop_of_traced_length, fori_loop_that_updates_a_buffer, grad_of_fori_loop, cond,
    cond_with_nothing_in_common, cond_that_passes_operands_on, switch, grad_of_cond,
    cond_in_scan_in_cond, while_in_scan, associative_scan, map_and_batched_map, vmap_of_grad,
    vmap_of_while, vmap_of_cond, jvp, linearize, hessian, jacobian_of_scan, barrier_and_names,
    nested_jits, linear_solve, custom_root,
]  # fmt: skip


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _soft_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return soft(x), jax.nn.sigmoid(x) * dx


@jax.custom_vjp
def clipped(x, bound):
    return x * 2.0


clipped.defvjp(
    lambda x, bound: (x * 2.0, bound), lambda bound, g: (jnp.clip(g, -bound, bound), None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, by):
    return x * by


scaled.defvjp(lambda x, by: (x * by, x), lambda by, x, g: (g * by + x,))


def layers(policy=None):
    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, m):
        hidden = checkpoint_name(jnp.tanh(x @ m), "hidden")
        return jnp.sin(hidden @ m.T)

    def loss(m, xs):
        return jnp.mean(layer(layer(xs, m), m) ** 2)

    return loss


POLICIES = jax.checkpoint_policies
CUSTOM = {
    "custom_jvp": lambda m, xs: soft(xs @ m),
    "custom_jvp, jvp": lambda m, xs: jax.jvp(lambda m: soft(xs @ m), (m,), (m,)),
    "custom_jvp, grad": lambda m, xs: jax.grad(lambda m: jnp.sum(soft(xs @ m)))(m),
    "custom_vjp": lambda m, xs: clipped(xs @ m, 0.1),
    "custom_vjp, grad": lambda m, xs: jax.grad(lambda m: jnp.sum(clipped(xs @ m, 0.1) ** 2))(m),
    "custom_vjp, nondiff": lambda m, xs: jax.grad(lambda x: jnp.sum(scaled(x @ m, 3.0)))(xs),
    "custom_vjp in scan": lambda m, xs: lax.scan(
        lambda c, x: (clipped(c @ m, 0.1) + soft(x), None), xs[0], xs
    )[0],
    "relu and logsumexp": lambda m, xs: jax.nn.relu(jax.nn.logsumexp(xs @ m, axis=-1)),
    "checkpoint forward": lambda m, xs: layers()(m, xs),
    "checkpoint": lambda m, xs: jax.value_and_grad(layers())(m, xs),
    "checkpoint dots": lambda m, xs: jax.grad(layers(POLICIES.dots_saveable))(m, xs),
    "checkpoint nothing": lambda m, xs: jax.grad(layers(POLICIES.nothing_saveable))(m, xs),
    "checkpoint names": lambda m, xs: jax.grad(layers(POLICIES.save_only_these_names("hidden")))(
        m, xs
    ),
    "checkpoint of constants": lambda m, xs: jax.grad(
        jax.checkpoint(lambda m: jnp.sum(jnp.tanh(xs @ m + X[0] @ M) * jnp.asarray(V)))
    )(m),
    "checkpoint of scan": lambda m, xs: jax.grad(
        jax.checkpoint(lambda m: jnp.sum(scan_carry_and_stack(m, xs)[0]))
    )(m),
    "checkpoint of checkpoint": lambda m, xs: jax.grad(jax.checkpoint(layers()))(m, xs),
}


ALL = {f.__name__: f for f in PROGRAMS} | CUSTOM


@pytest.mark.parametrize("name", ALL)
def test_random_plan(name):
    check_random_plans(ALL[name], (M, X), seeds=[list(ALL).index(name)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_ten_random_plans(name):
    check_random_plans(ALL[name], (M, X), seeds=range(100, 110))


# What only the solver meets: bodies, carries and branches whose shardings it must agree on.
@pytest.mark.parametrize(
    "name",
    ["scan_of_scan", "scan_same_value_everywhere", "while_with_constants_in_both", "switch",
     "cond_in_scan_in_cond", "scan_of_length_zero", "custom_vjp in scan", "checkpoint of scan"],
)  # fmt: skip
def test_best_plan(name):
    run = autoshard.jit(ALL[name], mesh=mesh_of("4x2"))
    assert_same(run(M, X), on_one_device(ALL[name], (M, X)))
