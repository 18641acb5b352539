"""Private training of the MLP, Abadi et al., "Deep Learning with Differential Privacy" (2016).

The gradient of each example is clipped to a norm of at most `CLIP`; their sum gets noise.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from models import mlp, training
from models.mlp import Sizes
from models.training import TrainState

donate_argnums = (0,)

CLIP = 1.0  # C in algorithm 1
NOISE = 0.01  # sigma in algorithm 1
SGD = optax.sgd(0.1, momentum=0.9)

SIZES = {
    "tiny": Sizes(layers=2, width=64, hidden=128, batch=8),
    "small": Sizes(layers=4, width=256, hidden=1024, batch=256),
    "large": Sizes(layers=8, width=1024, hidden=4096, batch=1024),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateState(TrainState):
    key: jax.Array  # of the noise


def train_step(state: PrivateState, batch: dict) -> tuple[PrivateState, jax.Array]:
    """One private step on batch["x"] and batch["y"], both f32[B, D]."""

    def example_loss(params, x, y):
        return mlp.loss(params, state.sizes, {"x": x[None], "y": y[None]})

    each = jax.vmap(jax.value_and_grad(example_loss), in_axes=(None, 0, 0))
    losses, grads = each(state.params, batch["x"], batch["y"])  # [B], and [B, ...] a parameter
    key, noise_key = jax.random.split(state.key)
    state = dataclasses.replace(state, key=key)
    return state.apply_gradients(privatize(grads, noise_key), SGD), jnp.mean(losses)


def privatize(grads: dict, key: jax.Array) -> dict:
    """Clips, sums, adds noise and averages per-example gradients: leaves [B, ...] -> [...]."""
    leaves, tree = jax.tree.flatten(grads)
    square = sum(jnp.sum(g * g, axis=range(1, g.ndim)) for g in leaves)  # [B]
    scale = jnp.minimum(1.0, CLIP * jax.lax.rsqrt(square + 1e-12))  # [B]

    def mean(grad, key):
        total = jnp.tensordot(scale, grad, axes=1)
        noise = NOISE * CLIP * jax.random.normal(key, total.shape)
        return (total + noise) / len(scale)

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([mean(g, k) for g, k in zip(leaves, keys, strict=True)])


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[PrivateState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    params = training.init_params(mlp.MLP, sizes, seed)
    state = PrivateState(
        params=params, opt_state=SGD.init(params), sizes=sizes, key=jax.random.key(seed)
    )
    _, batch = mlp.init(sizes, seed)
    return state, batch


def example_arguments(size: str | Sizes = "tiny") -> tuple[PrivateState, dict]:
    return jax.eval_shape(lambda: init(size))
