"""Message passing on one large graph, to classify its nodes.

The step of Gilmer et al., "Neural Message Passing for Quantum Chemistry" (2017): a message from
both ends of an edge, summed where it arrives. Dims: N nodes, E edges, D width, V classes.
"""

import dataclasses

import jax
from flax import nnx

from models import blocks, training
from models.training import TrainState

donate_argnums = (0,)


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    width: int  # D
    features: int  # of a node
    classes: int  # V
    nodes: int  # N
    edges: int  # E
    scan: bool = True
    remat: bool = False
    compute_dtype: str = "float32"


# Hu et al., "Open Graph Benchmark" (2020), table 3: ogbn-arxiv and ogbn-products.
SIZES = {
    "tiny": Sizes(layers=2, width=32, features=16, classes=8, nodes=64, edges=256),
    "arxiv": Sizes(3, 256, features=128, classes=40, nodes=169_343, edges=1_166_243),
    "products": Sizes(
        3, 256, features=100, classes=47, nodes=2_449_029, edges=61_859_140, remat=True
    ),
}


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width = sizes.width
        self.norm = blocks.LayerNorm(width)
        self.from_sender = blocks.Dense(width, width, rngs)
        self.from_receiver = blocks.Dense(width, width, rngs)
        self.message = blocks.Dense(width, width, rngs)
        self.update = blocks.Dense(width, width, rngs)

    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """Nodes [N, D], edges int32[E] and int32[E] -> nodes [N, D]."""
        y = self.norm(x)
        edges = self.from_sender(y)[senders] + self.from_receiver(y)[receivers]  # [E, D]
        messages = self.message(jax.nn.relu(edges))  # [E, D]
        received = jax.ops.segment_sum(messages, receivers, num_segments=x.shape[0])  # [N, D]
        return x + self.update(jax.nn.relu(received))


class GNN(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        self.inlet = blocks.Dense(sizes.features, sizes.width, rngs)
        self.layers = blocks.stack(lambda r: Layer(sizes, r), sizes.layers, rngs, sizes.scan)
        self.norm = blocks.LayerNorm(sizes.width)
        self.outlet = blocks.Dense(sizes.width, sizes.classes, rngs)

    def __call__(self, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """Features [N, features], edges int32[E] and int32[E] -> logits [N, V]."""
        x = self.inlet(nodes.astype(self.sizes.compute_dtype))

        def call(layer, x):
            return layer(x, senders, receivers)

        return self.outlet(self.norm(blocks.through(self.layers, x, call, self.sizes.remat)))


def loss(params: dict, sizes: Sizes, batch: dict) -> jax.Array:
    """Mean cross-entropy of the class of a node, f32[]."""
    gnn = training.bind(GNN, sizes, params)
    logits = gnn(batch["nodes"], batch["senders"], batch["receivers"])
    return blocks.cross_entropy(logits, batch["labels"])


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One AdamW step on a graph: "nodes" f32[N, features], "senders" and "receivers" int32[E], and
    "labels" int32[N] of `batch`."""
    return training.train_step(loss, state, batch)


def init(size: str | Sizes = "tiny", seed: int = 0) -> tuple[TrainState, dict]:
    sizes = SIZES[size] if isinstance(size, str) else size
    state = TrainState.create(training.init_params(GNN, sizes, seed), sizes)
    keys = jax.random.split(jax.random.key(seed), 3)
    senders, receivers = jax.random.randint(keys[0], (2, sizes.edges), 0, sizes.nodes)
    graph = {
        "nodes": jax.random.normal(keys[1], (sizes.nodes, sizes.features)),
        "senders": senders,
        "receivers": receivers,
        "labels": jax.random.randint(keys[2], (sizes.nodes,), 0, sizes.classes),
    }
    return state, graph


def example_arguments(size: str | Sizes = "tiny") -> tuple[TrainState, dict]:
    return jax.eval_shape(lambda: init(size))
