"""Selective state-space language model, Gu and Dao, "Mamba" (2023), with an associative scan.

Dims: B batch, S positions, D model width, I inner width (2 D), N states a channel, R rank of the
step size, W width of the causal convolution, V words.
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
    layers: int
    width: int  # D
    states: int  # N
    rank: int  # R
    vocab: int  # V
    batch: int  # B
    length: int  # S
    kernel: int = 4  # W
    scan: bool = True
    remat: bool = True
    compute_dtype: str = "bfloat16"


SIZES = {
    "tiny": Sizes(2, 32, 8, 8, 256, 8, 16, remat=False, compute_dtype="float32"),
    "130m": Sizes(24, 768, 16, 48, 50_280, 32, 1024),
    "1.4b": Sizes(48, 2048, 16, 128, 50_280, 64, 1024),
}


class Mamba(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width, inner, states, rank = sizes.width, 2 * sizes.width, sizes.states, sizes.rank
        self.norm = blocks.RMSNorm(width)
        self.w_in = blocks.weight(rngs, width, inner, fan_in=width)  # [D, I]
        self.w_gate = blocks.weight(rngs, width, inner, fan_in=width)  # [D, I]
        self.kernel = blocks.weight(rngs, sizes.kernel, 1, inner, fan_in=sizes.kernel)  # [W, 1, I]
        self.w_rank = blocks.weight(rngs, inner, rank, fan_in=inner)  # [I, R]
        self.w_step = blocks.Dense(rank, inner, rngs)  # [R, I]
        self.w_write = blocks.weight(rngs, inner, states, fan_in=inner)  # [I, N]
        self.w_read = blocks.weight(rngs, inner, states, fan_in=inner)  # [I, N]
        decay = jnp.arange(1, states + 1, dtype=jnp.float32)  # the S4D-real initialisation
        self.log_decay = nnx.Param(jnp.tile(jnp.log(decay), (inner, 1)))  # [I, N]
        self.skip = nnx.Param(jnp.ones(inner))
        self.w_out = blocks.weight(rngs, inner, width, fan_in=inner)  # [I, D]

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        y = self.norm(x)
        inputs = jax.nn.silu(self.convolve(blocks.project("bsd,di->bsi", y, self.w_in)))
        outputs = self.select(inputs) * jax.nn.silu(blocks.project("bsd,di->bsi", y, self.w_gate))
        return x + blocks.project("bsi,id->bsd", outputs, self.w_out)

    def convolve(self, x: jax.Array) -> jax.Array:
        """Causal convolution of each channel: [B, S, I] -> [B, S, I]."""
        kernel = self.kernel[...].astype(x.dtype)
        padding = [(kernel.shape[0] - 1, 0)]
        dims, channels = ("NWC", "WIO", "NWC"), x.shape[-1]
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), padding, dimension_numbers=dims, feature_group_count=channels
        )

    def select(self, x: jax.Array) -> jax.Array:
        """The state space, algorithm 2 of the paper: [B, S, I] -> [B, S, I]."""
        step = self.w_step(blocks.project("bsi,ir->bsr", x, self.w_rank))
        step = jax.nn.softplus(step.astype(jnp.float32) - 4)  # [B, S, I]; starts near 0.02
        write = blocks.project("bsi,in->bsn", x, self.w_write).astype(jnp.float32)
        read = blocks.project("bsi,in->bsn", x, self.w_read).astype(jnp.float32)
        inputs = x.astype(jnp.float32)
        decay = jnp.exp(-jnp.einsum("bsi,in->bsin", step, jnp.exp(self.log_decay[...])))
        states = recurrence(decay, jnp.einsum("bsi,bsn->bsin", step * inputs, write))
        outputs = jnp.einsum("bsin,bsn->bsi", states, read) + self.skip[...] * inputs
        return outputs.astype(x.dtype)


def recurrence(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    """Returns `h[s] = decay[s] * h[s - 1] + inputs[s]` along dim 1, with `h` zero before it."""

    def compose(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    return jax.lax.associative_scan(compose, (decay, inputs), axis=1)[1]


class LanguageModel(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        self.embed = blocks.weight(rngs, sizes.vocab, sizes.width, fan_in=sizes.width)  # [V, D]
        self.layers = blocks.stack(lambda r: Mamba(sizes, r), sizes.layers, rngs, sizes.scan)
        self.norm = blocks.RMSNorm(sizes.width)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> [B, S, V]
        x = self.embed[...][tokens].astype(self.sizes.compute_dtype)
        x = blocks.through(self.layers, x, lambda layer, x: layer(x), self.sizes.remat)
        return blocks.project("bsd,vd->bsv", self.norm(x), self.embed)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next token, f32[]."""
    logits = training.bind(LanguageModel, sizes, params)(batch["tokens"])
    return blocks.cross_entropy(logits, batch["targets"])


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on batch["tokens"] and batch["targets"], both int32[B, S]."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(LanguageModel, sizes, seed), sizes)
    return state, blocks.random_text(sizes.batch, sizes.length, sizes.vocab, seed)


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
