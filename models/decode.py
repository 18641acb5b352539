"""Serving the GPT: one token more for each sequence, with a cache of keys and values.

Dims as in blocks.py, with L layers and T positions of the cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models import blocks, gpt, training
from models.gpt import SIZES, Sizes

donate_argnums = (1,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    keys: jax.Array  # [L, B, T, K, H]
    values: jax.Array  # [L, B, T, K, H]
    position: jax.Array  # int32[], how many tokens it holds
    sizes: Sizes = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, sizes: Sizes) -> "Cache":
        head = sizes.width // sizes.heads
        shape = (sizes.layers, sizes.batch, sizes.length, sizes.kv_heads, head)
        zeros = jnp.zeros((2, *shape), sizes.compute_dtype)
        return cls(zeros[0], zeros[1], jnp.zeros((), jnp.int32), sizes)


def serve_step(params: dict, cache: Cache, tokens: jax.Array) -> tuple[Cache, jax.Array]:
    """Appends `tokens` int32[B]; returns the cache and logits [B, V] of the ones that follow."""
    model = training.bind(gpt.GPT, cache.sizes, params)
    graphdef, layers = nnx.split(model.layers)

    def step(x, layer):
        params, keys, values = layer
        layer = nnx.merge(graphdef, params)
        x, keys, values = attend_cached(layer, x, keys, values, cache.position)
        return x, (keys, values)

    x = model.embedding(tokens[:, None])  # [B, 1, D]
    x, (keys, values) = jax.lax.scan(step, x, (layers, cache.keys, cache.values))
    cache = dataclasses.replace(cache, keys=keys, values=values, position=cache.position + 1)
    return cache, model.logits(x)[:, 0]


def attend_cached(
    layer: gpt.Layer, x: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer at one position: x [B, 1, D], keys and values [B, T, K, H] -> the same three."""
    q, k, v = layer.queries_keys_values(x, position[None])
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k, position, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, position, axis=1)
    seen = jnp.arange(keys.shape[1])[None] <= position  # [1, T]
    x = x + layer.attention.output(blocks.attend(q, keys, values, seen))
    return x + layer.mlp(layer.mlp_norm(x)), keys, values


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[dict, Cache, jax.Array]:
    """Returns parameters in the compute dtype, an empty cache, a first token for each sequence."""
    sizes = SIZES[size] if isinstance(size, str) else size
    params = training.init_params(gpt.GPT, sizes, seed)
    params = jax.tree.map(lambda p: p.astype(sizes.compute_dtype), params)
    tokens = blocks.random_text(sizes.batch, sizes.length, sizes.vocab, seed)["tokens"][:, 0]
    return params, Cache.empty(sizes), tokens


def example_arguments(size: str | Sizes = "tiny") -> tuple[dict, Cache, jax.Array]:
    return jax.eval_shape(lambda: init(size))
