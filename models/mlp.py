"""Residual multi-layer perceptron on vectors, trained to a target vector by least squares."""

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
    batch: int  # B
    scan: bool = False
    remat: bool = False
    compute_dtype: str = "float32"


SIZES = {
    "tiny": Sizes(layers=2, width=64, hidden=128, batch=8),
    "small": Sizes(layers=4, width=256, hidden=1024, batch=512),
    "1b": Sizes(layers=8, width=4096, hidden=16_384, batch=4096, compute_dtype="bfloat16"),
    "8b": Sizes(16, 8192, 32_768, 16_384, scan=True, remat=True, compute_dtype="bfloat16"),
}


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.w_in = blocks.weight(rngs, sizes.width, sizes.hidden, fan_in=sizes.width)  # [D, F]
        self.w_out = blocks.weight(rngs, sizes.hidden, sizes.width, fan_in=sizes.hidden)  # [F, D]

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, D]
        hidden = jax.nn.gelu(blocks.project("bd,df->bf", x, self.w_in))
        return x + blocks.project("bf,fd->bd", hidden, self.w_out)


class MLP(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        self.layers = blocks.stack(lambda r: Layer(sizes, r), sizes.layers, rngs, sizes.scan)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, D]
        x = x.astype(self.sizes.compute_dtype)
        return blocks.through(self.layers, x, lambda layer, x: layer(x), self.sizes.remat)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean squared error, f32[]."""
    y = training.bind(MLP, sizes, params)(batch["x"]).astype(jnp.float32)
    return jnp.mean((y - batch["y"]) ** 2)


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on batch["x"] and batch["y"], both f32[B, D]."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(MLP, sizes, seed), sizes)
    x, y = jax.random.normal(jax.random.key(seed), (2, sizes.batch, sizes.width))
    return state, {"x": x, "y": y}


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
