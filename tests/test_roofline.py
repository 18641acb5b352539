"""Arithmetic, traffic and tiles of single operations, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import roofline
from autoshard.fusion import fusion, readers_of
from autoshard.graph import Kind
from autoshard.hardware import preset
from autoshard.trace import trace

V5E = preset("v5e").chip


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def leaves(fn, *args):
    ops = tuple(trace(fn, args).graph.leaves())
    return [op for op in ops if op.kind is Kind.LEAF], fusion(ops, readers_of(ops))


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (jnp.matmul, (array(8, 16), array(16, 32)), 2 * 8 * 16 * 32),
        (
            lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
            (array(4, 8, 16), array(4, 16, 32)),
            2 * 4 * 8 * 16 * 32,
        ),
        (jnp.sin, (array(8),), 0),
    ],
)
def test_flops(fn, args, flops):
    assert sum(map(roofline.flops, leaves(fn, *args)[0])) == flops


def test_convolution_flops():
    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    (op,), _ = leaves(conv, array(2, 8, 8, 3), array(3, 3, 3, 16))
    assert roofline.flops(op) == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 3)


def test_a_gather_reads_its_rows_not_its_table():
    (*_, op), found = leaves(lambda x, i: x[i], array(1000, 8), array(4, dtype="int32"))
    read = sum(size for _, size in roofline.reads(op, found))
    assert read < 1000 and roofline.writes(op, found) == [0]


def test_a_chain_reads_and_writes_once():
    ops, found = leaves(lambda x, y: jnp.sin(x) * y + 1, array(8, 8), array(8, 8))
    assert sum(size for op in ops for _, size in roofline.reads(op, found)) == 2 * 8 * 8 * 4
    assert sum(len(roofline.writes(op, found)) for op in ops) == 1


def test_seconds_is_the_larger_of_arithmetic_and_traffic():
    (op,), _ = leaves(
        jnp.matmul, array(4096, 4096, dtype="bfloat16"), array(4096, 4096, dtype="bfloat16")
    )
    shards, traffic = np.array([1.0, 4.0, 4.0]), np.array([0.0, 0.0, 8.1e11])
    found = roofline.seconds(op, shards, traffic, V5E)
    flops = 2 * 4096**3 / 1.97e14
    assert found == pytest.approx([flops, flops / 4, 1.0])


@pytest.mark.parametrize(
    ("lhs", "rhs", "use"),
    [
        ((256, 256), (256, 256), 1.0),
        ((256, 64), (64, 256), 0.5),  # the contraction fills half a tile
        ((256, 128), (128, 192), 0.75),
        ((4, 128), (128, 4096), 4 / 128),
    ],
)
def test_tiles_of_a_matmul(lhs, rhs, use):
    (op,), _ = leaves(jnp.matmul, array(*lhs), array(*rhs))
    assert roofline.tile_use(op, lhs, rhs, V5E) == pytest.approx(use)


@pytest.mark.parametrize(
    ("shape", "itemsize", "stored"),
    [
        ((8, 128), 4, 8 * 128 * 4),
        ((8, 100), 4, 8 * 128 * 4),
        ((100, 8), 4, 128 * 8 * 4),  # lies the other way
        ((2, 100), 4, 2 * 128 * 4),  # a small tile
        ((16, 256, 3), 2, 3 * 16 * 256 * 2),
        ((), 4, 4),
        ((1, 1), 2, 1 * 128 * 2),
    ],
)
def test_padding_in_memory(shape, itemsize, stored):
    assert V5E.stored_bytes(shape, itemsize) == stored
    assert preset("h100").chip.stored_bytes(shape, itemsize) == np.prod(shape) * itemsize


def test_what_is_gathered_lies_as_its_blocks_do():
    """The TPU compiler gathers weights of 64-wide heads, f32[2,64,16,64] to f32[2,1024,16,64], with
    the last dim minor, though the second would need no padding."""
    whole, block = (2, 1024, 16, 64), (2, 64, 16, 64)
    assert V5E.stored_bytes(whole, 4) == 2 * 1024 * 16 * 64 * 4
    assert V5E.stored_bytes(whole, 4, like=block) == 2 * 1024 * 16 * 128 * 4


def test_gathered_rows_lie_one_after_another():
    """As in every gather that the TPU compiler makes of tables of few columns."""
    assert V5E.stored_bytes((32768, 8), 4, majors=(0,)) == 32768 * 128 * 4
    padded = V5E.stored_bytes((4, 100, 200), 2, majors=(0, 1))
    assert padded == pytest.approx(4 * 112 * 256 * 2)
    table, rows = jnp.zeros((1000, 8)), jnp.zeros((4, 5), jnp.int32)

    def majors(fn, *args):
        ops = list(trace(fn, args).graph.leaves())
        (op,) = [op for op in ops if op.primitive == "gather"]
        return roofline.majors(op, "results", 0)

    assert majors(lambda t, i: t[i], table, rows) == (0, 1)
    assert majors(lambda t, i: t[:, i], table, rows) == ()
