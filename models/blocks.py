"""Layers shared by the model families.

A layer computes in the dtype of its input `x`, whatever that of its parameters, and normalises in
float32. Dims: B batch, S positions, T positions attended to, D model width, F hidden width, K
key/value heads, G queries a key/value head, H head width, V classes or words.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def weight(rngs: nnx.Rngs, *shape: int, fan_in: int) -> nnx.Param:
    """Returns a normal parameter whose product with unit-variance inputs has unit variance."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)


def project(spec: str, x: jax.Array, w: nnx.Variable) -> jax.Array:
    """Contracts activations with a parameter, in the dtype of the activations."""
    return jnp.einsum(spec, x, w[...].astype(x.dtype))


class RMSNorm(nnx.Module):
    """Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019): [..., D] -> [..., D]."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return (y * self.scale[...].astype(y.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Ba et al., "Layer Normalization" (2016): [..., D] -> [..., D]."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = standardize(x.astype(jnp.float32), axes=(-1,))
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Wu and He, "Group Normalization" (2018), on images: [B, Y, X, C] -> [B, Y, X, C]."""

    def __init__(self, channels: int, groups: int):
        self.groups = groups
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        grouped = (*x.shape[:3], self.groups, x.shape[3] // self.groups)
        y = x.astype(jnp.float32).reshape(grouped)  # [B, Y, X, groups, C/groups]
        y = standardize(y, axes=(1, 2, 4)).reshape(x.shape)  # [B, Y, X, C]
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


def standardize(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns `x` with mean 0 and variance 1 over `axes`."""
    x = x - jnp.mean(x, axis=axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + 1e-6)


class Dense(nnx.Module):
    """Affine map of the last dim: [..., inputs] -> [..., outputs]."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.w = weight(rngs, inputs, outputs, fan_in=inputs)
        self.b = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return project("...i,io->...o", x, self.w) + self.b[...].astype(x.dtype)


class Conv(nnx.Module):
    """3 x 3 convolution: [B, Y, X, inputs] -> [B, Y/stride, X/stride, outputs]."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, stride: int = 1):
        self.stride = stride
        self.w = weight(rngs, 3, 3, inputs, outputs, fan_in=9 * inputs)
        self.b = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        w, b = self.w[...].astype(x.dtype), self.b[...].astype(x.dtype)
        strides = (self.stride, self.stride)
        return b + jax.lax.conv_general_dilated(
            x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class SwiGLU(nnx.Module):
    """Shazeer, "GLU Variants Improve Transformer" (2020): [B, S, D] -> [B, S, D]."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.w_gate = weight(rngs, width, hidden, fan_in=width)  # [D, F]
        self.w_up = weight(rngs, width, hidden, fan_in=width)  # [D, F]
        self.w_down = weight(rngs, hidden, width, fan_in=hidden)  # [F, D]

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(project("bsd,df->bsf", x, self.w_gate))
        return project("bsf,fd->bsd", gate * project("bsd,df->bsf", x, self.w_up), self.w_down)


class Attention(nnx.Module):
    """Grouped-query attention, Ainslie et al., "GQA" (2023); `heads == kv_heads` is multi-head."""

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs):
        groups, head = heads // kv_heads, width // heads
        self.wq = weight(rngs, width, kv_heads, groups, head, fan_in=width)  # [D, K, G, H]
        self.wk = weight(rngs, width, kv_heads, head, fan_in=width)  # [D, K, H]
        self.wv = weight(rngs, width, kv_heads, head, fan_in=width)  # [D, K, H]
        self.wo = weight(rngs, kv_heads, groups, head, width, fan_in=width)  # [K, G, H, D]

    def queries(self, x: jax.Array) -> jax.Array:
        return project("bsd,dkgh->bskgh", x, self.wq)

    def keys(self, x: jax.Array) -> jax.Array:
        return project("btd,dkh->btkh", x, self.wk)

    def values(self, x: jax.Array) -> jax.Array:
        return project("btd,dkh->btkh", x, self.wv)

    def output(self, x: jax.Array) -> jax.Array:
        return project("bskgh,kghd->bsd", x, self.wo)

    def __call__(
        self, x: jax.Array, context: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        """Attends from the positions of `x` [B, S, D] to those of `context` [B, T, D]."""
        q, k, v = self.queries(x), self.keys(context), self.values(context)
        return self.output(attend(q, k, v, mask))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax attention: q [B, S, K, G, H], k and v [B, T, K, H] -> [B, S, K, G, H].

    Args:
      mask: bool[S, T], which positions T each position S may see; None: all.
    """
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v)


def causal_mask(length: int) -> jax.Array:
    """bool[S, S]: each position sees itself and those before it."""
    return jnp.tril(jnp.ones((length, length), bool))


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, Su et al., "RoFormer" (2021), of [B, S, ..., H] at positions [S]."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)  # [H/2]
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [S, H/2]
    angles = jnp.expand_dims(angles, range(1, x.ndim - 2))  # [S, 1..., H/2]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def stack(layer: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs, scan: bool):
    """Returns `depth` layers: one module with stacked parameters [depth, ...], or a list."""
    stacked = nnx.vmap(layer)(rngs.split(depth))
    if scan:
        return stacked
    graphdef, params = nnx.split(stacked)
    slices = [jax.tree.map(operator.itemgetter(i), params) for i in range(depth)]
    return nnx.List([nnx.merge(graphdef, layer_params) for layer_params in slices])


def through(layers: Any, x: Any, call: Callable[[Any, Any], Any], remat: bool) -> Any:
    """Carries `x` through a `stack`: `x = call(layer, x)` for each layer in turn.

    Args:
      remat: keep only the input of each layer for the backward pass, and compute the rest again.
    """
    if isinstance(layers, nnx.List):
        for layer in layers:
            x = rematerialized(layer, call, remat, prevent_cse=True)(x, nnx.state(layer))
        return x
    # Inside a scan the loop itself keeps the compiler from merging the two forward passes.
    step = rematerialized(layers, call, remat, prevent_cse=False)
    return jax.lax.scan(lambda x, params: (step(x, params), None), x, nnx.state(layers))[0]


def rematerialized(layer: nnx.Module, call: Callable, remat: bool, prevent_cse: bool) -> Callable:
    """Returns `(x, params) -> call(layer with params, x)`, checkpointed if asked."""
    graphdef = nnx.graphdef(layer)

    def step(x, params):
        return call(nnx.merge(graphdef, params), x)

    return jax.checkpoint(step, prevent_cse=prevent_cse) if remat else step


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions of -log p(label): logits [..., V], labels int32[...] -> f32[]."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # A product with the one-hot labels reads the log-probabilities in place; no gather over V.
    hits = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32) * logprobs
    return -jnp.mean(jnp.sum(hits, axis=-1))


def random_text(batch: int, length: int, vocab: int, seed: int) -> dict[str, jax.Array]:
    """Returns tokens and the ones that follow them, both int32[B, S], uniform in the vocabulary."""
    text = jax.random.randint(jax.random.key(seed), (batch, length + 1), 0, vocab)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}
