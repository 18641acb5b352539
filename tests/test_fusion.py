"""What is written to memory, in programs small enough to see it by hand."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.fusion import Fusion, fusion, readers_of
from autoshard.graph import Kind, Op
from autoshard.trace import trace

F32 = jnp.float32


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def analyse(fn, *args) -> tuple[tuple[Op, ...], Fusion]:
    ops = tuple(trace(fn, args).graph.leaves())
    return ops, fusion(ops, readers_of(ops))


def written(fn, *args) -> list[str]:
    """Returns the primitives whose results have buffers, in order."""
    ops, found = analyse(fn, *args)
    return [
        op.primitive
        for op in ops
        for v in op.results
        if op.kind is Kind.LEAF and v in found.written
    ]


X, W, V = array(8, 16), array(16, 32), array(32, 16)


def gated(y):
    return jnp.sin(y) * y


def both(y, v):
    return jnp.sin(y) @ v, jnp.cos(y) @ v


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        # An elementwise chain into a result has no buffer but the result's.
        (lambda x: jnp.sin(x) * 2 + 1, (X,), []),
        # A matmul with one elementwise reader is written as that reader's result.
        (lambda x, w: jnp.sin(x @ w), (X, W), []),
        (lambda x, w, v: jnp.sin(x @ w) @ v, (X, W, V), ["sin"]),
        # Several readers that end in one result are one kernel with the matmul.
        (lambda x, w, v: gated(x @ w) @ v, (X, W, V), ["mul"]),
        # Several readers that do not: it is written, and what they compute is not.
        (lambda x, w, v: both(x @ w, v), (X, W, V), ["dot_general"]),
        # A kernel holds one matmul.
        (lambda x, w: (x @ w) * (jnp.sin(x) @ w), (X, W), ["dot_general"]),
        (lambda x: jnp.exp(x - jnp.max(x)), (X,), ["reduce_max"]),
        # A gather finds its indices in memory, and its result is written.
        (lambda x, i: x[i] + 1, (X, array(4, dtype="int32")), ["broadcast_in_dim", "gather"]),
        (lambda x: x + jnp.zeros((8, 16)), (X,), []),
    ],
)
def test_written(fn, args, expected):
    assert written(fn, *args) == expected


def test_a_narrow_copy_with_several_readers_is_kept():
    def fn(x, w):
        narrow = w.astype(jnp.bfloat16)
        return x @ narrow, (2 * x) @ narrow

    assert written(fn, array(8, 16, dtype="bfloat16"), W) == ["convert_element_type"]


def test_a_matmul_before_a_cast_is_kept_narrow():
    def fn(x, w):
        y = (x @ w).astype(F32)
        return jnp.exp(y - jnp.max(y))

    ops, found = analyse(fn, array(8, 16, dtype="bfloat16"), array(16, 32, dtype="bfloat16"))
    kept = [v.dtype for op in ops for v in op.results if v in found.written and v.shape == (8, 32)]
    assert kept[0] == "bfloat16"


def test_a_kernel_reads_each_stored_value_once():
    ops, found = analyse(lambda x, y: jnp.sum(x * y + x), X, array(8, 16))
    (reduction,) = [op for op in ops if op.primitive == "reduce_sum"]
    assert [r.value.name for r in found.kernels[reduction].roots] == ["x", "y"]
    assert [r.size_bytes for r in found.kernels[reduction].roots] == [512, 512]


def test_the_new_state_is_computed_by_one_pass():
    def step(state, g):
        m = 0.9 * state["m"] + g
        return {"m": m, "w": state["w"] - m}

    ops, found = analyse(step, {"m": X, "w": X}, X)
    kernels = [found.kernels[op] for op in ops if op in found.kernels]
    read = [root.value.name for kernel in kernels for root in kernel.roots]
    assert sorted(read) == ["g", "state['m']", "state['w']"]


@pytest.mark.parametrize("trained", [True, False])
def test_equal_layers_read_the_same_however_deep(trained):
    """Frozen weights leave each residual gradient with one matmul that reads it."""

    def loss(scales, weights, x):
        for scale, w in zip(scales, weights, strict=True):
            h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) * scale
            x = x + jnp.tanh(h @ w) @ w.T
        return jnp.sum(x)

    step, reads = jax.grad(loss, (0, 1) if trained else 0), {}
    for depth in (4, 6, 8):
        args = [array(16)] * depth, [array(16, 64)] * depth, array(8, 16)
        ops, found = analyse(step, *args)
        kernels = [found.kernels[op] for op in ops if op in found.kernels]
        reads[depth] = sum(root.size_bytes for kernel in kernels for root in kernel.roots)
    assert reads[8] - reads[6] == reads[6] - reads[4]


def test_a_mask_has_no_buffer_but_what_it_masks_has():
    def fn(q, k):
        scores = (q @ k).astype(F32)
        places = jnp.arange(8)
        seen = places[:, None] >= places[None]
        masked = jnp.where(seen, scores, -1e9)
        return jnp.exp(masked - jnp.max(masked))

    half = {"dtype": "bfloat16"}
    ops, found = analyse(fn, array(8, 16, **half), array(16, 8, **half))
    (ge,) = [op for op in ops if op.primitive == "ge"]
    assert ge.results[0] in found.free
    kept = [op for op in ops if op.kind is Kind.LEAF and op.results[0] in found.written]
    assert [op.primitive for op in kept] == ["select_n", "reduce_max"]


@pytest.mark.parametrize("returns", [True, False])
def test_a_group_norm_is_computed_in_the_shape_around_it(returns):
    """The groups that a matmul reads as they are have a buffer of their own."""

    def fn(x, w, v):
        y = (x @ w).astype(F32).reshape(8, 4, 8)
        y = y - y.mean(-1, keepdims=True)
        return y.reshape(8, 32).sum(0) if returns else y @ v

    half = {"dtype": "bfloat16"}
    ops, found = analyse(fn, array(8, 16, **half), array(16, 32, **half), array(8, 5))
    kept = [v for op in ops for v in op.results if op.kind is Kind.LEAF and v in found.written]
    large = [(v.dtype, v.shape) for v in kept if v.size_bytes >= 512]
    groups = [("bfloat16", (8, 32))] if returns else [("float32", (8, 4, 8))]
    assert [form for form in large if form in groups] == groups
    assert (("float32", (8, 4, 8)) in large) == (not returns)
