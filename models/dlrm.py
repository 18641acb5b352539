"""Click prediction, Naumov et al., "Deep Learning Recommendation Model" (2019), trained by Adagrad.

Dims: B batch, T tables, D width of an embedding, P pairs of T + 1 vectors.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import blocks, training
from models.training import TrainState

donate_argnums = (0,)

ADAGRAD = optax.adagrad(0.05)


@dataclasses.dataclass(frozen=True)
class Sizes:
    tables: tuple[int, ...]  # rows of each table
    width: int  # D
    features: int  # dense features
    bottom: tuple[int, ...]  # hidden widths before the interaction
    top: tuple[int, ...]  # hidden widths after it
    batch: int  # B
    compute_dtype: str = "float32"


# Rows of the 26 categorical features of the Criteo 1TB click logs, at most 40 million a table, and
# the widths of the MLPerf training benchmark, github.com/mlcommons/training, recommendation_v2.
_CRITEO_ROWS = (
    *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546),
    *(403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935),
    *(12_972, 108, 36),
)

SIZES = {
    "tiny": Sizes((4096, 512, 40, 7, 3), 16, 8, bottom=(32,), top=(64, 32), batch=32),
    "criteo": Sizes(_CRITEO_ROWS, 128, 13, (512, 256), (1024, 1024, 512, 256), batch=65_536),
}


class MLP(nnx.Module):
    """ReLU layers of the given widths: [B, widths[0]] -> [B, widths[-1]]."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nnx.List([blocks.Dense(a, b, rngs) for a, b in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class DLRM(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        vectors = len(sizes.tables) + 1
        crossed = sizes.width + vectors * (vectors - 1) // 2  # D + P
        self.tables = nnx.List(
            [blocks.weight(rngs, rows, sizes.width, fan_in=sizes.width) for rows in sizes.tables]
        )
        self.bottom = MLP((sizes.features, *sizes.bottom, sizes.width), rngs)
        self.top = MLP((crossed, *sizes.top, 1), rngs)

    def __call__(self, dense: jax.Array, categories: jax.Array) -> jax.Array:
        """[B, features] and int32[B, T] -> logit of a click, [B]."""
        x = self.bottom(dense.astype(self.sizes.compute_dtype))  # [B, D]
        found = [t[...][categories[:, i]].astype(x.dtype) for i, t in enumerate(self.tables)]
        vectors = jnp.stack([x, *found], axis=1)  # [B, T + 1, D]
        products = jnp.einsum("btd,bud->btu", vectors, vectors)
        rows, columns = jnp.tril_indices(vectors.shape[1], k=-1)  # each pair once
        crossed = jnp.concatenate([x, products[:, rows, columns]], axis=1)  # [B, D + P]
        return self.top(crossed)[:, 0]


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean binary cross-entropy, f32[]."""
    logits = training.bind(DLRM, sizes, params)(batch["dense"], batch["categories"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), batch["clicks"]))


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One step on "dense" f32[B, features], "categories" int32[B, T], "clicks" f32[B]."""
    return training.train_step(loss, state, batch, ADAGRAD)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(DLRM, sizes, seed), sizes, ADAGRAD)
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (sizes.batch, len(sizes.tables))
    batch = {
        "dense": jax.random.normal(keys[0], (sizes.batch, sizes.features)),
        "categories": jax.random.randint(keys[1], shape, 0, jnp.array(sizes.tables)),
        "clicks": jax.random.bernoulli(keys[2], 0.5, (sizes.batch,)).astype(jnp.float32),
    }
    return state, batch


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
