"""A decoder whose MLPs are mixtures of experts, each token sent to its top-k.

Two ways to bring tokens to experts: `capacity` is Lepikhin et al., "GShard" (2020), which fills C
slots an expert with one-hot einsums and drops the rest; `ragged` is dropless, as Gale et al.,
"MegaBlocks" (2022): tokens sorted by expert, one ragged product. Sizes "8x7b" are Mixtral's,
arXiv:2401.04088. Dims as in blocks.py, and E experts, C slots, R choices a token, N = B S R rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models import blocks, gpt, training
from models.training import TrainState

donate_argnums = (0,)

BALANCE = 0.01  # weight of the load-balancing loss; Fedus et al., "Switch Transformers" (2021), 2.2


@dataclasses.dataclass(frozen=True)
class Sizes(gpt.Sizes):
    experts: int = 8  # E
    choices: int = 2  # R
    capacity_factor: float = 1.25
    dispatch: str = "capacity"  # or "ragged"

    @property
    def capacity(self) -> int:
        """Slots an expert and a sequence."""
        return int(self.capacity_factor * self.choices * self.length / self.experts)


_TINY = Sizes(2, 64, 128, 8, 4, 256, 8, 32, remat=False, compute_dtype="float32")
_SMALL = Sizes(4, 256, 512, 8, 4, 1024, 16, 256, remat=False, compute_dtype="float32")
_MIXTRAL = Sizes(32, 4096, 14_336, 32, 8, 32_000, 128, 4096)

SIZES = {
    "tiny": _TINY,
    "tiny_ragged": dataclasses.replace(_TINY, dispatch="ragged"),
    "small": _SMALL,
    "8x7b": _MIXTRAL,
    "8x7b_ragged": dataclasses.replace(_MIXTRAL, dispatch="ragged"),
}


class Experts(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width, hidden, experts = sizes.width, sizes.hidden, sizes.experts
        self.sizes = sizes
        self.router = blocks.weight(rngs, width, experts, fan_in=width)  # [D, E]
        self.w_gate = blocks.weight(rngs, experts, width, hidden, fan_in=width)  # [E, D, F]
        self.w_up = blocks.weight(rngs, experts, width, hidden, fan_in=width)  # [E, D, F]
        self.w_down = blocks.weight(rngs, experts, hidden, width, fan_in=hidden)  # [E, F, D]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S, D] -> [B, S, D] and the load-balancing loss, f32[]."""
        logits = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), self.router[...])
        probs = jax.nn.softmax(logits, axis=-1)
        weights, chosen = jax.lax.top_k(probs, self.sizes.choices)  # [B, S, R], int32[B, S, R]
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        hits = jax.nn.one_hot(chosen, self.sizes.experts, dtype=jnp.float32)  # [B, S, R, E]
        dispatch = self.ragged if self.sizes.dispatch == "ragged" else self.capacity
        return dispatch(x, weights, chosen, hits), balance_loss(probs, hits)

    def capacity(self, x, weights, chosen, hits):
        """Each sequence has C slots in each expert; first choices take them before second ones."""
        combine = slots(weights, hits, self.sizes.capacity)  # [B, S, E, C]
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        gate = jax.nn.silu(blocks.project("ebcd,edf->ebcf", inputs, self.w_gate))
        hidden = gate * blocks.project("ebcd,edf->ebcf", inputs, self.w_up)
        outputs = blocks.project("ebcf,efd->ebcd", hidden, self.w_down)
        return jnp.einsum("bsec,ebcd->bsd", combine.astype(x.dtype), outputs)

    def ragged(self, x, weights, chosen, hits):
        """Rows sorted by expert; each expert multiplies as many rows as chose it."""
        B, S, D = x.shape
        order = jnp.argsort(chosen.reshape(-1))  # [N], rows of expert 0 first
        counts = jnp.sum(hits, axis=(0, 1, 2)).astype(jnp.int32)  # [E]
        inputs = x.reshape(B * S, D)[order // self.sizes.choices]  # [N, D]

        def product(rows, w):
            return jax.lax.ragged_dot(rows, w[...].astype(rows.dtype), counts)

        hidden = jax.nn.silu(product(inputs, self.w_gate)) * product(inputs, self.w_up)  # [N, F]
        outputs = product(hidden, self.w_down)[jnp.argsort(order)]  # [N, D], rows in token order
        outputs = outputs.reshape(B, S, -1, D)  # [B, S, R, D]
        return jnp.einsum("bsr,bsrd->bsd", weights.astype(x.dtype), outputs)


def slots(weights: jax.Array, hits: jax.Array, capacity: int) -> jax.Array:
    """Returns the weight of each token in each slot of each expert, f32[B, S, E, C].

    Args:
      weights: f32[B, S, R] of each choice.
      hits: f32[B, S, R, E], one-hot choices.
    """
    B, S, R, E = hits.shape
    queue = hits.transpose(0, 2, 1, 3).reshape(B, R * S, E)  # first choices of all tokens first
    place = jnp.cumsum(queue, axis=1) - queue  # how many are before it in its expert's queue
    place = place.reshape(B, R, S, E).transpose(0, 2, 1, 3)  # [B, S, R, E]
    place = jnp.sum(place * hits, axis=-1).astype(jnp.int32)  # [B, S, R]
    slot = jax.nn.one_hot(place, capacity, dtype=jnp.float32)  # [B, S, R, C]; 0 beyond the capacity
    return jnp.einsum("bsr,bsre,bsrc->bsec", weights, hits, slot)


def balance_loss(probs: jax.Array, hits: jax.Array) -> jax.Array:
    """1 where experts are equally loaded and more elsewhere: probs [B, S, E], hits [B, S, R, E]."""
    load = jnp.mean(hits, axis=(0, 1, 2))  # [E]
    return probs.shape[-1] * jnp.sum(load * jnp.mean(probs, axis=(0, 1)))


class Layer(gpt.Layer):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes, rngs)
        self.mlp = Experts(sizes, rngs)

    def __call__(self, x: jax.Array, balance: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.attend(x)
        y, layer_balance = self.mlp(self.mlp_norm(x))
        return x + y, balance + layer_balance


class MoE(gpt.GPT):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes, rngs, Layer)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B, S] -> logits [B, S, V] and the mean load-balancing loss, f32[]."""
        x = (self.embedding(tokens), jnp.zeros(()))
        x, balance = blocks.through(self.layers, x, lambda layer, x: layer(*x), self.sizes.remat)
        return self.logits(x), balance / self.sizes.layers


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next token and the load-balancing loss, f32[]."""
    logits, balance = training.bind(MoE, sizes, params)(batch["tokens"])
    return blocks.cross_entropy(logits, batch["targets"]) + BALANCE * balance


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on batch["tokens"] and batch["targets"], both int32[B, S]."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(MoE, sizes, seed), sizes)
    return state, blocks.random_text(sizes.batch, sizes.length, sizes.vocab, seed)


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
