"""What a TPU keeps in vector memory, and what it copies."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.hardware import preset
from autoshard.liveness import liveness
from autoshard.moves import copied, narrowed
from autoshard.trace import trace
from autoshard.vmem import GAP_LABEL, LOOP_GAP, Buffer, Buffers
from autoshard.vmem import fullest as fullest_of

MIB = 2.0**20


def fullest(buffers, times, vector_memory_bytes, loops=()):
    return fullest_of(Buffers.of(buffers), times, vector_memory_bytes, loops)


def small(start, end, mib, temporary=True):
    return Buffer(start, end, mib * MIB, f"{start} to {end}", temporary)


def test_small_temporaries_take_no_hbm():
    state = small(0, 4, 100, temporary=False)
    assert fullest([state, small(1, 2, 10)], 4, 112 * MIB)[0] == 100 * MIB
    assert fullest([state, small(1, 2, 10)], 4, 0)[0] == 110 * MIB


def test_large_temporaries_and_those_beyond_the_room_do():
    assert fullest([small(0, 1, 64)], 2, 112 * MIB)[0] == 64 * MIB
    many = [small(0, 1, 10) for _ in range(5)]
    assert fullest(many, 2, 112 * MIB)[0] == (50 - 20) * MIB  # two fit in a fifth of 112 MiB


def test_the_fullest_time_is_that_of_hbm():
    """More is alive at time 0, but all of it in vector memory."""
    size, alive = fullest([small(0, 1, 10), small(0, 1, 10), small(1, 2, 30)], 2, 112 * MIB)
    assert size == 30 * MIB
    assert alive == [("1 to 2", 30 * MIB)]
    buffers = [small(0, 1, 50, False), small(1, 2, 10), small(1, 2, 10), small(2, 3, 45, False)]
    assert fullest(buffers, 3, 112 * MIB)[0] == 50 * MIB
    assert fullest([small(0, 1, 5, False), *buffers[1:]], 3, 112 * MIB)[0] == 45 * MIB


def test_vector_memory_never_adds():
    buffers = [small(t, t + 1 + t % 3, 7 * (1 + t % 5), t % 2 == 0) for t in range(20)]
    sizes = [fullest(buffers, 24, n * MIB)[0] for n in (0, 16, 48, 112)]
    by_hand = max(sum(b.size_bytes for b in buffers if b.start <= t < b.end) for t in range(24))
    assert sizes[0] == by_hand
    assert all(s <= sizes[0] for s in sizes)


def test_what_lives_through_a_loop_keeps_a_gap_free():
    """Between the loops [2, 4) and [6, 8) lies the rest that is alive at time 5."""
    state = Buffer(0, 10, 1000 * MIB, "state", False, heap=False)
    stack, rest = small(2, 8, 400, False), small(5, 6, 100)
    loops = ((2, 4), (6, 8))
    size, alive = fullest([state, stack, rest], 10, 16 * MIB, loops)
    assert size == (1500 + LOOP_GAP * 100) * MIB
    assert alive[-1] == (GAP_LABEL, LOOP_GAP * 100 * MIB)
    large = small(5, 6, 800)
    assert fullest([state, stack, large], 10, 16 * MIB, loops)[0] == (2200 + LOOP_GAP * 400) * MIB
    for apart in ((), ((2, 9), (1, 3)), ((8, 9),)):  # none, or none that the stack lives through
        assert fullest([state, stack, rest], 10, 16 * MIB, apart)[0] == 1500 * MIB
    assert fullest([state, stack, rest], 10, 0, loops)[0] == 1500 * MIB  # no TPU
    # What vector memory holds leaves no gap.
    few = small(5, 6, 10)
    assert fullest([state, stack, few], 10, 100 * MIB, loops)[0] == 1400 * MIB
    held = Buffer(2, 8, 400 * MIB, "state", False, heap=False)
    assert fullest([held, rest], 10, 16 * MIB, loops)[0] == 500 * MIB  # an argument is not moved


def serve(cache, x):
    """[L, B, T, H] cache, as in decoding: each layer updates its part of it."""

    def layer(x, kept):
        kept = jax.lax.dynamic_update_slice_in_dim(kept, x[:, None], 3, axis=1)
        return x + kept.sum(1), kept

    x, cache = jax.lax.scan(layer, x, cache)
    return cache, x


def scale(cache, x):
    def layer(x, kept):
        return x + kept.sum(1), 2 * kept

    x, cache = jax.lax.scan(layer, x, cache)
    return cache, x


@pytest.mark.parametrize(("fn", "count"), [(serve, 3), (scale, 1)])
def test_a_cache_updated_in_a_loop_is_copied_three_times(fn, count):
    """Out of its stack, into the next one, and over the donated argument; 2 * kept is written
    where it belongs as it is computed."""
    args = (jax.ShapeDtypeStruct((4, 8, 16, 128), jnp.float32), jnp.zeros((8, 128)))
    program = trace(fn, args, donate_argnums=(0,))
    ops = tuple(program.graph.leaves())
    found = copied(ops, liveness(program.graph).fusion, program.donated)
    assert len(found) == count
    kept = copied(ops, liveness(program.graph).fusion, [False] * len(program.donated))
    assert len(kept) == count - 1


def test_rows_that_fill_registers_in_part_are_copied_slower():
    chip = preset("v5e").chip
    full, half, few = (chip.move_s((4, 8192 // n, n, 128), 4) for n in (8, 4, 1))
    assert half == pytest.approx(2 * full)
    assert few == pytest.approx(full)  # a dim of 1 is none
    assert chip.move_s((64, 8, 128), 2) == pytest.approx(chip.move_s((64, 8, 128), 4))


def test_a_gpu_copies_bytes():
    chip = preset("h100").chip
    assert chip.move_s((64, 2, 128), 2) == pytest.approx(
        2 * 64 * 2 * 128 * 2 / chip.hbm_bytes_per_s
    )
    assert chip.vector_memory_bytes == 0


def ends_of(fn, *shapes):
    """Returns the primitives that read an operand narrowed, by operand number."""
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    ops = tuple(trace(fn, args).graph.leaves())
    found = narrowed(ops)
    return [(op.primitive, k) for op in ops for k in range(len(op.operands)) if (op, k) in found]


def test_what_only_matmuls_read_travels_as_bfloat16():
    both = [("dot_general", 0), ("dot_general", 1)]
    assert ends_of(lambda x, w: x @ w, (8, 8), (8, 8)) == both
    assert ends_of(lambda x, w: jnp.tanh(x) @ w, (8, 8), (8, 8)) == [("dot_general", 1)]
    exact = ends_of(lambda x, w: jnp.matmul(x, w, precision="highest"), (8, 8), (8, 8))
    assert exact == []
