"""A decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The architecture of Touvron et al., "LLaMA" (2023), and Llama 3, arXiv:2407.21783, table 3.
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
    hidden: int  # F
    heads: int  # K * G
    kv_heads: int  # K
    vocab: int  # V
    batch: int  # B
    length: int  # S
    scan: bool = True
    remat: bool = True
    compute_dtype: str = "bfloat16"
    rope_theta: float = 500_000.0


SIZES = {
    "tiny": Sizes(2, 64, 128, 8, 4, 256, 8, 32, remat=False, compute_dtype="float32"),
    "small": Sizes(4, 128, 384, 8, 4, 256, 8, 128, remat=False, compute_dtype="float32"),
    "1b": Sizes(16, 2048, 8192, 16, 8, 32_000, 32, 2048),
    "8b": Sizes(32, 4096, 14_336, 32, 8, 128_256, 128, 4096),
    "70b": Sizes(80, 8192, 28_672, 64, 8, 128_256, 512, 4096),
    "405b": Sizes(126, 16_384, 53_248, 128, 8, 128_256, 1024, 4096),
}


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.attention_norm = blocks.RMSNorm(sizes.width)
        self.attention = blocks.Attention(sizes.width, sizes.heads, sizes.kv_heads, rngs)
        self.mlp_norm = blocks.RMSNorm(sizes.width)
        self.mlp = blocks.SwiGLU(sizes.width, sizes.hidden, rngs)
        self.rope_theta = sizes.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        x = self.attend(x)
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        q, k, v = self.queries_keys_values(x, jnp.arange(x.shape[1]))
        return x + self.attention.output(blocks.attend(q, k, v, blocks.causal_mask(x.shape[1])))

    def queries_keys_values(self, x: jax.Array, positions: jax.Array):
        """[B, S, D] at positions [S] -> q [B, S, K, G, H], k and v [B, S, K, H]."""
        y = self.attention_norm(x)
        q = blocks.rotate(self.attention.queries(y), positions, self.rope_theta)
        k = blocks.rotate(self.attention.keys(y), positions, self.rope_theta)
        return q, k, self.attention.values(y)


class GPT(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, layer: type[Layer] = Layer):
        self.sizes = sizes
        self.embed = blocks.weight(rngs, sizes.vocab, sizes.width, fan_in=1)  # [V, D]
        self.layers = blocks.stack(lambda r: layer(sizes, r), sizes.layers, rngs, sizes.scan)
        self.norm = blocks.RMSNorm(sizes.width)
        self.unembed = blocks.weight(rngs, sizes.width, sizes.vocab, fan_in=sizes.width)  # [D, V]

    def __call__(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> [B, S, V]
        x = self.embedding(tokens)
        x = blocks.through(self.layers, x, lambda layer, x: layer(x), self.sizes.remat)
        return self.logits(x)

    def embedding(self, tokens: jax.Array) -> jax.Array:  # int32[B, S] -> [B, S, D]
        return self.embed[...][tokens].astype(self.sizes.compute_dtype)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, V]
        return blocks.project("bsd,dv->bsv", self.norm(x), self.unembed)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next token, f32[]."""
    logits = training.bind(GPT, sizes, params)(batch["tokens"])
    return blocks.cross_entropy(logits, batch["targets"])


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on batch["tokens"] and batch["targets"], both int32[B, S]."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(GPT, sizes, seed), sizes)
    return state, blocks.random_text(sizes.batch, sizes.length, sizes.vocab, seed)


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
