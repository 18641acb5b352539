"""Encoder-decoder transformer for translation, Vaswani et al., "Attention Is All You Need" (2017).

One embedding serves source, target and output words, as in section 3.4 there; norms come first.
Dims as in blocks.py: S target and T source positions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models import blocks, training
from models.training import TrainState

donate_argnums = (0,)


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int  # of the encoder, and of the decoder
    width: int  # D
    hidden: int  # F
    heads: int
    vocab: int  # V
    batch: int  # B
    source: int  # T
    target: int  # S
    scan: bool = True
    remat: bool = True
    compute_dtype: str = "bfloat16"


SIZES = {
    "tiny": Sizes(2, 64, 128, 8, 256, 8, 32, 16, remat=False, compute_dtype="float32"),
    "base": Sizes(6, 512, 2048, 8, 37_000, 256, 128, 128),
    "big": Sizes(6, 1024, 4096, 16, 37_000, 256, 128, 128),
}


class FeedForward(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm = blocks.LayerNorm(sizes.width)
        self.w_in = blocks.Dense(sizes.width, sizes.hidden, rngs)
        self.w_out = blocks.Dense(sizes.hidden, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        return x + self.w_out(jax.nn.relu(self.w_in(self.norm(x))))


class EncoderLayer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm = blocks.LayerNorm(sizes.width)
        self.attention = blocks.Attention(sizes.width, sizes.heads, sizes.heads, rngs)
        self.feed_forward = FeedForward(sizes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        y = self.norm(x)
        return self.feed_forward(x + self.attention(y, y))


class DecoderLayer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm = blocks.LayerNorm(sizes.width)
        self.attention = blocks.Attention(sizes.width, sizes.heads, sizes.heads, rngs)
        self.cross_norm = blocks.LayerNorm(sizes.width)
        self.cross_attention = blocks.Attention(sizes.width, sizes.heads, sizes.heads, rngs)
        self.feed_forward = FeedForward(sizes, rngs)

    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        """[B, S, D], and the encoded source [B, T, D] -> [B, S, D]."""
        y = self.norm(x)
        x = x + self.attention(y, y, blocks.causal_mask(x.shape[1]))
        x = x + self.cross_attention(self.cross_norm(x), encoded)
        return self.feed_forward(x)


class Transformer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        depth, scan = sizes.layers, sizes.scan
        self.embed = blocks.weight(rngs, sizes.vocab, sizes.width, fan_in=sizes.width)  # [V, D]
        self.encoder = blocks.stack(lambda r: EncoderLayer(sizes, r), depth, rngs, scan)
        self.encoder_norm = blocks.LayerNorm(sizes.width)
        self.decoder = blocks.stack(lambda r: DecoderLayer(sizes, r), depth, rngs, scan)
        self.decoder_norm = blocks.LayerNorm(sizes.width)

    def __call__(self, source: jax.Array, tokens: jax.Array) -> jax.Array:
        """int32[B, T] and int32[B, S] -> logits [B, S, V]."""
        remat = self.sizes.remat
        x = self.embedding(source)
        encoded = self.encoder_norm(blocks.through(self.encoder, x, lambda f, x: f(x), remat))
        x = self.embedding(tokens)
        x = blocks.through(self.decoder, x, lambda f, x: f(x, encoded), remat)
        return blocks.project("bsd,vd->bsv", self.decoder_norm(x), self.embed)

    def embedding(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> [B, S, D]
        words = self.embed[...][tokens] * self.sizes.width**0.5
        return (words + sinusoids(*words.shape[1:])).astype(self.sizes.compute_dtype)


def sinusoids(length: int, width: int) -> jax.Array:
    """Positions as sines and cosines, f32[S, D]; section 3.5 of the paper."""
    position = jnp.arange(length, dtype=jnp.float32)[:, None]  # [S, 1]
    angles = position / 10_000.0 ** jnp.linspace(0.0, 1.0, width // 2, endpoint=False)  # [S, D/2]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next target word, f32[]."""
    logits = training.bind(Transformer, sizes, params)(batch["source"], batch["tokens"])
    return blocks.cross_entropy(logits, batch["targets"])


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on "source" int32[B, T], "tokens" and "targets" int32[B, S] of `batch`."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(Transformer, sizes, seed), sizes)
    source = jax.random.randint(jax.random.key(seed), (sizes.batch, sizes.source), 0, sizes.vocab)
    text = blocks.random_text(sizes.batch, sizes.target, sizes.vocab, seed + 1)
    return state, {"source": source, **text}


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
