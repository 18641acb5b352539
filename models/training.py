"""What a training step is made of, whatever the model: a state, gradients, an optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import optax
from flax import nnx

# Betas, epsilon and weight decay: Touvron et al., "Llama 2" (2023), section 2.2.
ADAMW = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state (float32 leaves), with the sizes they were made for."""

    params: Any
    opt_state: optax.OptState
    sizes: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, params: Any, sizes: Any, optimizer=ADAMW) -> Self:
        return cls(params, optimizer.init(params), sizes)

    def apply_gradients(self, grads: Any, optimizer=ADAMW) -> Self:
        # Optax 0.2.8 raises a float to an integer count, an error under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return dataclasses.replace(self, params=params, opt_state=opt_state)


def init_params(
    module: Callable[..., nnx.Module], sizes: Any, seed: int, kind: type[nnx.Variable] = nnx.Param
) -> dict:
    """Returns the parameters of one kind of `module(sizes, rngs)` as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module(sizes, nnx.Rngs(jax.random.key(seed))), kind))


def bind(module: Callable[..., nnx.Module], sizes: Any, *params: dict) -> Any:
    """Returns `module(sizes, ...)` with its parameters taken from `params`, one dict a kind."""
    return nnx.merge(_graphdef(module, sizes), *params)


def train_step(
    loss: Callable[..., jax.Array], state: TrainState, batch: Any, optimizer=ADAMW
) -> tuple[TrainState, jax.Array]:
    """One step on `loss(params, sizes, batch)`; returns the new state and the loss, f32[]."""
    value, grads = jax.value_and_grad(loss)(state.params, state.sizes, batch)
    return state.apply_gradients(grads, optimizer), value


@functools.cache
def _graphdef(module: Callable[..., nnx.Module], sizes: Any) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: module(sizes, nnx.Rngs(0))))
