"""U-Net that predicts the noise in an image, the denoiser of a diffusion model.

Ronneberger et al., "U-Net" (2015), with residual blocks and GroupNorm as in Ho et al., "Denoising
Diffusion Probabilistic Models" (2020), appendix B. Dims: B batch, Y and X pixels, C channels.
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
    channels: tuple[int, ...]  # of each level, finest first
    image: int  # pixels a side, Y = X
    batch: int  # B
    groups: int = 32  # of GroupNorm
    compute_dtype: str = "bfloat16"


SIZES = {
    "tiny": Sizes((16, 32), image=16, batch=8, groups=4, compute_dtype="float32"),
    "cifar": Sizes((128, 256, 256, 256), image=32, batch=128),
    "256": Sizes((128, 128, 256, 256, 512, 512), image=256, batch=64),
}


class Residual(nnx.Module):
    """Two convolutions told the noise level: x [B, Y, X, inputs] -> [B, Y, X, outputs]."""

    def __init__(self, inputs: int, outputs: int, sizes: Sizes, rngs: nnx.Rngs):
        self.norm1 = blocks.GroupNorm(inputs, sizes.groups)
        self.conv1 = blocks.Conv(inputs, outputs, rngs)
        self.level = blocks.Dense(sizes.channels[0], outputs, rngs)
        self.norm2 = blocks.GroupNorm(outputs, sizes.groups)
        self.conv2 = blocks.Conv(outputs, outputs, rngs)
        self.skip = blocks.Dense(inputs, outputs, rngs)

    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        y = self.conv1(jax.nn.silu(self.norm1(x))) + self.level(level)[:, None, None, :]
        return self.skip(x) + self.conv2(jax.nn.silu(self.norm2(y)))


class UNet(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        channels = sizes.channels
        steps = list(zip(channels, channels[1:], strict=False))  # (finer, coarser)
        self.inlet = blocks.Conv(3, channels[0], rngs)
        self.down = nnx.List([Residual(c, c, sizes, rngs) for c in channels[:-1]])
        self.shrink = nnx.List([blocks.Conv(c, d, rngs, stride=2) for c, d in steps])
        self.middle = Residual(channels[-1], channels[-1], sizes, rngs)
        self.grow = nnx.List([blocks.Conv(d, c, rngs) for c, d in steps])
        self.up = nnx.List([Residual(2 * c, c, sizes, rngs) for c in channels[:-1]])
        self.norm = blocks.GroupNorm(channels[0], sizes.groups)
        self.outlet = blocks.Conv(channels[0], 3, rngs)

    def __call__(self, images: jax.Array, noise_level: jax.Array) -> jax.Array:
        """[B, Y, X, 3] and f32[B] in [0, 1] -> the noise in the images, [B, Y, X, 3]."""
        level = waves(noise_level, self.sizes.channels[0]).astype(self.sizes.compute_dtype)
        x = self.inlet(images.astype(level.dtype))
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            skips.append(block(x, level))
            x = shrink(skips[-1])
        x = self.middle(x, level)
        for block, grow, skip in reversed(list(zip(self.up, self.grow, skips, strict=True))):
            x = jnp.concatenate([skip, grow(enlarge(x))], axis=-1)  # [B, Y, X, 2 C]
            x = block(x, level)
        return self.outlet(jax.nn.silu(self.norm(x)))


def enlarge(x: jax.Array) -> jax.Array:
    """[B, Y, X, C] -> [B, 2 Y, 2 X, C], nearest neighbour."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def waves(level: jax.Array, width: int) -> jax.Array:
    """f32[B] in [0, 1] -> f32[B, width]: sines and cosines of geometrically spaced frequencies."""
    frequencies = 1000.0 ** jnp.linspace(0.0, 1.0, width // 2)
    angles = level[:, None] * frequencies  # [B, width/2]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean squared error of the predicted noise, f32[]; the images keep unit variance."""
    level = batch["noise_level"]
    signal, spread = jnp.sqrt(1 - level), jnp.sqrt(level)  # [B]
    noisy = jnp.einsum("b,byxc->byxc", signal, batch["images"])
    noisy = noisy + jnp.einsum("b,byxc->byxc", spread, batch["noise"])
    predicted = training.bind(UNet, sizes, params)(noisy, level)
    return jnp.mean((predicted.astype(jnp.float32) - batch["noise"]) ** 2)


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on "images" and "noise" f32[B, Y, X, 3], "noise_level" f32[B] of `batch`."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(UNet, sizes, seed), sizes)
    shape = (2, sizes.batch, sizes.image, sizes.image, 3)
    images, noise = jax.random.normal(jax.random.key(seed), shape)
    noise_level = jnp.linspace(0.0, 1.0, sizes.batch)
    return state, {"images": images, "noise": noise, "noise_level": noise_level}


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
