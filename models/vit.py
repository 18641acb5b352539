"""Vision transformer classifier, Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).

Pre-norm layers as in table 1 there; the class is read from the mean of the patches. Dims as in
blocks.py, with S patches an image and P pixel values a patch.
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
    heads: int
    image: int  # pixels a side
    patch: int  # pixels a side
    classes: int  # V
    batch: int  # B
    scan: bool = True
    remat: bool = True
    compute_dtype: str = "bfloat16"


SIZES = {
    "tiny": Sizes(2, 64, 128, 8, 16, 4, 16, 8, remat=False, compute_dtype="float32"),
    "b16": Sizes(12, 768, 3072, 12, 224, 16, 1000, 1024),
    "l16": Sizes(24, 1024, 4096, 16, 224, 16, 1000, 1024),
    "h14": Sizes(32, 1280, 5120, 16, 224, 14, 1000, 4096),
}


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.attention_norm = blocks.LayerNorm(sizes.width)
        self.attention = blocks.Attention(sizes.width, sizes.heads, sizes.heads, rngs)
        self.mlp_norm = blocks.LayerNorm(sizes.width)
        self.mlp_in = blocks.Dense(sizes.width, sizes.hidden, rngs)
        self.mlp_out = blocks.Dense(sizes.hidden, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, D]
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))


class ViT(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        patches = (sizes.image // sizes.patch) ** 2
        self.embed = blocks.Dense(3 * sizes.patch**2, sizes.width, rngs)  # [P, D]
        self.positions = blocks.weight(rngs, patches, sizes.width, fan_in=sizes.width)  # [S, D]
        self.layers = blocks.stack(lambda r: Layer(sizes, r), sizes.layers, rngs, sizes.scan)
        self.norm = blocks.LayerNorm(sizes.width)
        self.head = blocks.Dense(sizes.width, sizes.classes, rngs)  # [D, V]

    def __call__(self, images: jax.Array) -> jax.Array:  # [B, image, image, 3] -> [B, V]
        x = self.embed(patches(images.astype(self.sizes.compute_dtype), self.sizes.patch))
        x = x + self.positions[...].astype(x.dtype)
        x = blocks.through(self.layers, x, lambda layer, x: layer(x), self.sizes.remat)
        return self.head(jnp.mean(self.norm(x), axis=1))


def patches(images: jax.Array, side: int) -> jax.Array:
    """[B, image, image, 3] -> [B, S, P], the pixels of each square patch."""
    B, image, _, C = images.shape
    n = image // side
    x = images.reshape(B, n, side, n, side, C)
    x = x.transpose(0, 1, 3, 2, 4, 5)  # [B, n, n, side, side, C]
    return x.reshape(B, n * n, side * side * C)  # [B, S, P]


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the class, f32[]."""
    return blocks.cross_entropy(training.bind(ViT, sizes, params)(batch["images"]), batch["labels"])


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on batch["images"] f32[B, image, image, 3] and batch["labels"] int32[B]."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(ViT, sizes, seed), sizes)
    key = jax.random.key(seed)
    images = jax.random.normal(key, (sizes.batch, sizes.image, sizes.image, 3))
    labels = jax.random.randint(key, (sizes.batch,), 0, sizes.classes)
    return state, {"images": images, "labels": labels}


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
