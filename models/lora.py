"""Fine-tuning of a frozen GPT through low-rank adapters, Hu et al., "LoRA" (2021).

Queries and values become `x W + (x A) B`, where A and B alone are trained. Dims as in blocks.py,
and R the rank of the adapters.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import blocks, gpt, training
from models.training import TrainState

donate_argnums = (0,)


@dataclasses.dataclass(frozen=True)
class Sizes(gpt.Sizes):
    rank: int = 8  # R


SIZES = {name: Sizes(**dataclasses.asdict(gpt.SIZES[name])) for name in ("tiny", "1b", "8b", "70b")}


class Adapter(nnx.Variable):
    """A trained parameter, told from the frozen ones by its type."""


class Attention(blocks.Attention):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes.width, sizes.heads, sizes.kv_heads, rngs)
        width, rank = sizes.width, sizes.rank
        normal = jax.random.normal(rngs.params(), (2, width, rank)) * width**-0.5
        self.q_down, self.v_down = Adapter(normal[0]), Adapter(normal[1])  # [D, R]
        self.q_up = Adapter(jnp.zeros((rank, *self.wq.shape[1:])))  # [R, K, G, H]
        self.v_up = Adapter(jnp.zeros((rank, *self.wv.shape[1:])))  # [R, K, H]

    def queries(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, K, G, H]
        low = blocks.project("bsd,dr->bsr", x, self.q_down)
        return super().queries(x) + blocks.project("bsr,rkgh->bskgh", low, self.q_up)

    def values(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, K, H]
        low = blocks.project("bsd,dr->bsr", x, self.v_down)
        return super().values(x) + blocks.project("bsr,rkh->bskh", low, self.v_up)


class Layer(gpt.Layer):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes, rngs)
        self.attention = Attention(sizes, rngs)


class GPT(gpt.GPT):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes, rngs, Layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraState(TrainState):
    """`params` are the adapters; `base`, in the compute dtype, leaves a step as it came."""

    base: Any


def loss(params: dict, base: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next token, f32[]."""
    logits = training.bind(GPT, sizes, params, base)(batch["tokens"])
    return blocks.cross_entropy(logits, batch["targets"])


def train_step(state: LoraState, batch: dict) -> tuple[LoraState, jax.Array]:
    """One AdamW step of the adapters on batch["tokens"] and batch["targets"], both int32[B, S]."""
    of_adapters = functools.partial(loss, base=state.base, sizes=state.sizes, batch=batch)
    value, grads = jax.value_and_grad(of_adapters)(state.params)
    return state.apply_gradients(grads), value


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[LoraState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    base = training.init_params(GPT, sizes, seed)
    base = jax.tree.map(lambda p: p.astype(sizes.compute_dtype), base)
    adapters = training.init_params(GPT, sizes, seed, Adapter)
    state = LoraState(
        params=adapters, opt_state=training.ADAMW.init(adapters), sizes=sizes, base=base
    )
    return state, blocks.random_text(sizes.batch, sizes.length, sizes.vocab, seed)


def example_arguments(size: str | Sizes = "tiny") -> tuple[LoraState, dict]:
    return jax.eval_shape(lambda: init(size))
