"""LSTM language model, Zaremba et al., "Recurrent Neural Network Regularization" (2014).

Dims: B batch, S positions, D width of words and states, V words.
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
    vocab: int  # V
    batch: int  # B
    length: int  # S
    compute_dtype: str = "bfloat16"


SIZES = {
    "tiny": Sizes(layers=2, width=64, vocab=256, batch=8, length=16, compute_dtype="float32"),
    "large": Sizes(layers=2, width=1500, vocab=10_000, batch=512, length=35),
    "1b": Sizes(layers=8, width=4096, vocab=32_000, batch=1024, length=128),
}


class LSTM(nnx.Module):
    """One layer; gates are input, forget, candidate, output, in that order."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.w_input = blocks.weight(rngs, width, 4, width, fan_in=width)  # [D, 4, D]
        self.w_state = blocks.weight(rngs, width, 4, width, fan_in=width)  # [D, 4, D]
        self.bias = nnx.Param(jnp.zeros((4, width)))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        inputs = blocks.project("bsd,dge->sbge", x, self.w_input)  # time first, for the scan

        def step(carry, gates):
            hidden, cell = carry  # [B, D], [B, D]
            gates = gates + blocks.project("bd,dge->bge", hidden, self.w_state)
            gates = gates + self.bias[...].astype(x.dtype)
            i, f, g, o = jnp.moveaxis(gates, 1, 0)  # [B, D] each
            cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros_like(x[:, 0])
        _, outputs = jax.lax.scan(step, (zeros, zeros), inputs)  # [S, B, D]
        return outputs.transpose(1, 0, 2)  # [B, S, D]


class LanguageModel(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        self.embed = blocks.weight(rngs, sizes.vocab, sizes.width, fan_in=1)  # [V, D]
        self.layers = nnx.List([LSTM(sizes.width, rngs) for _ in range(sizes.layers)])
        self.unembed = blocks.Dense(sizes.width, sizes.vocab, rngs)  # [D, V]

    def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> [B, S, V]
        x = self.embed[...][tokens].astype(self.sizes.compute_dtype)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(x)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next word, f32[]."""
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
