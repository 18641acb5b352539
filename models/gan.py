"""Generator and discriminator of images, each with its optimizer, Radford et al., "DCGAN" (2015).

The losses are the non-saturating ones of Goodfellow et al., "Generative Adversarial Nets" (2014).
Dims: B batch, Z width of the latents, Y and X pixels, C channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import blocks, training
from models.training import TrainState

donate_argnums = (0,)

GENERATOR_ADAM = optax.adam(2e-4, b1=0.5, eps=1e-5)
DISCRIMINATOR_ADAM = optax.adam(1e-4, b1=0.5, eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Sizes:
    latent: int  # Z
    channels: tuple[int, ...]  # of each level, coarsest (4 x 4 pixels) first
    batch: int  # B
    groups: int = 8  # of GroupNorm
    compute_dtype: str = "float32"

    @property
    def image(self) -> int:
        """Pixels a side, Y = X."""
        return 4 * 2 ** len(self.channels)


SIZES = {
    "tiny": Sizes(latent=16, channels=(32, 16), batch=8),
    "64": Sizes(latent=128, channels=(1024, 512, 256, 128), batch=256, compute_dtype="bfloat16"),
}


class Generator(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        channels, groups = sizes.channels, sizes.groups
        self.sizes = sizes
        self.inlet = blocks.weight(rngs, sizes.latent, 4, 4, channels[0], fan_in=sizes.latent)
        self.norms = nnx.List([blocks.GroupNorm(c, groups) for c in channels])
        outputs = (*channels[1:], 3)
        kernels = [
            blocks.weight(rngs, 4, 4, a, b, fan_in=4 * a)
            for a, b in zip(channels, outputs, strict=True)
        ]
        self.kernels = nnx.List(kernels)  # [4, 4, C, C of the next level]

    def __call__(self, latents: jax.Array) -> jax.Array:  # [B, Z] -> [B, Y, X, 3]
        x = latents.astype(self.sizes.compute_dtype)
        x = blocks.project("bz,zyxc->byxc", x, self.inlet)  # [B, 4, 4, C]
        for norm, kernel in zip(self.norms, self.kernels, strict=True):
            x = jax.nn.relu(norm(x))
            x = jax.lax.conv_transpose(x, kernel[...].astype(x.dtype), (2, 2), "SAME")
        return jnp.tanh(x)


class Discriminator(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        channels = (3, *reversed(sizes.channels))
        self.sizes = sizes
        pairs = zip(channels, channels[1:], strict=False)
        self.convs = nnx.List([blocks.Conv(a, b, rngs, stride=2) for a, b in pairs])
        self.outlet = blocks.weight(rngs, 4, 4, channels[-1], fan_in=16 * channels[-1])  # [4, 4, C]

    def __call__(self, images: jax.Array) -> jax.Array:  # [B, Y, X, 3] -> logit of real, [B]
        x = images.astype(self.sizes.compute_dtype)
        for conv in self.convs:
            x = jax.nn.leaky_relu(conv(x), 0.2)
        return blocks.project("byxc,yxc->b", x, self.outlet)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    generator: TrainState
    discriminator: TrainState


def generator_loss(params: dict, discriminator: TrainState, sizes: Sizes, batch: dict) -> jax.Array:
    fakes = training.bind(Generator, sizes, params)(batch["latents"])
    return -mean_log_sigmoid(training.bind(Discriminator, sizes, discriminator.params)(fakes))


def discriminator_loss(params: dict, generator: TrainState, sizes: Sizes, batch: dict) -> jax.Array:
    fakes = training.bind(Generator, sizes, generator.params)(batch["latents"])
    discriminator = training.bind(Discriminator, sizes, params)
    real, fake = discriminator(batch["images"]), discriminator(fakes)
    return -mean_log_sigmoid(real) - mean_log_sigmoid(-fake)


def mean_log_sigmoid(logits: jax.Array) -> jax.Array:  # [B] -> f32[]
    return jnp.mean(jax.nn.log_sigmoid(logits.astype(jnp.float32)))


def train_step(state: State, batch: dict) -> tuple[State, dict[str, jax.Array]]:
    """Both players move at once, on "images" f32[B, Y, X, 3] and "latents" f32[B, Z] of `batch`.

    Returns the new state and both losses, f32[].
    """
    g, d = state.generator, state.discriminator
    g_loss, g_grads = jax.value_and_grad(generator_loss)(g.params, d, g.sizes, batch)
    d_loss, d_grads = jax.value_and_grad(discriminator_loss)(d.params, g, d.sizes, batch)
    state = State(
        g.apply_gradients(g_grads, GENERATOR_ADAM), d.apply_gradients(d_grads, DISCRIMINATOR_ADAM)
    )
    return state, {"generator": g_loss, "discriminator": d_loss}


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[State, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    generator = training.init_params(Generator, sizes, seed)
    discriminator = training.init_params(Discriminator, sizes, seed + 1)
    state = State(
        TrainState.create(generator, sizes, GENERATOR_ADAM),
        TrainState.create(discriminator, sizes, DISCRIMINATOR_ADAM),
    )
    images_key, latents_key = jax.random.split(jax.random.key(seed))
    images = jax.random.normal(images_key, (sizes.batch, sizes.image, sizes.image, 3))
    latents = jax.random.normal(latents_key, (sizes.batch, sizes.latent))
    return state, {"images": jnp.tanh(images), "latents": latents}


def example_arguments(size: str | Sizes = "tiny") -> tuple[State, dict]:
    return jax.eval_shape(lambda: init(size))
