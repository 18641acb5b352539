"""The model families run, train, and mean the same in every form they can be written in."""

import dataclasses
import functools
import importlib
import operator
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import blocks, decode, dpsgd, gnn, gpt, lora, mlp, moe, training

TRAINED = ["mlp", "gpt", "moe", "vit", "unet", "encdec", "lstm", "ssm", "gnn", "dlrm"]
TRAINED += ["lora", "dpsgd", "gan"]
SCANNED = ["mlp", "gpt", "moe", "vit", "encdec", "ssm", "gnn"]
FOLDER = pathlib.Path(models.__path__[0])


def family(name):
    return importlib.import_module(f"models.{name}")


@functools.cache
def arguments(name, size="tiny"):
    return quick_jit(lambda: family(name).init(size))()


def quick_jit(function):
    """Compiles without the optimizations that these few small steps would not repay."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def types(tree):
    """Shape, dtype and weak type of every leaf, in the structure of the tree."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, bool(getattr(x, "weak_type", False))), tree)


def assert_close(a, b, rtol):
    """Compares leaf by leaf in the Euclidean norm: another order of sums moves single elements."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        difference = np.linalg.norm(np.asarray(x) - np.asarray(y))
        assert difference <= rtol * np.linalg.norm(np.asarray(y)) + 1e-7, jax.tree_util.keystr(path)


def test_each_file_is_listed_here():
    shared = {"__init__", "blocks", "training"}
    assert {f.stem for f in FOLDER.glob("*.py")} - shared == {*TRAINED, "decode"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda f: f.stem)
def test_models_never_mention_how_they_are_distributed(file):
    text = file.read_text().replace('"GShard"', "")  # the title of a paper
    assert not re.findall(r"shard|mesh|partition|pjit|device|collective|psum", text, re.I)


@pytest.mark.parametrize("name", [*TRAINED, "decode"])
def test_example_arguments_match_the_real_ones(name):
    assert types(family(name).example_arguments()) == types(arguments(name))


@pytest.mark.parametrize("name", [*TRAINED, "decode"])
def test_a_step_returns_the_types_it_took(name):
    module = family(name)
    for size in dict.fromkeys(["tiny", *list(module.SIZES)[-1:]]):
        abstract = module.example_arguments(size)
        (donated,) = module.donate_argnums
        step = module.serve_step if module is decode else module.train_step
        result, _ = jax.eval_shape(step, *abstract)
        assert types(result) == types(abstract[donated]), size


@pytest.mark.parametrize("name", TRAINED)
def test_training_on_one_batch_lowers_the_loss(name):
    state, batch = arguments(name)
    step = quick_jit(family(name).train_step)
    losses = []
    for _ in range(12):
        state, loss = step(state, batch)
        losses.append(loss)
    assert all(np.isfinite(jax.tree.leaves(losses)))
    if name != "gan":  # its losses are a tug of war
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SCANNED)
def test_unrolled_layers_equal_scanned_ones(name):
    forms = [dataclasses.replace(family(name).SIZES["tiny"], scan=scan) for scan in (True, False)]
    scanned, unrolled = (quick_jit(loss_of(name, form))(stacked_params(name)) for form in forms)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5)


@pytest.mark.parametrize(("scan", "remat"), [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_scan_and_remat_change_no_gradient(name, scan, remat):
    tiny = dataclasses.replace(family(name).SIZES["tiny"], scan=True, remat=False)
    got = loss_and_gradients(name, dataclasses.replace(tiny, scan=scan, remat=remat))
    assert_close(got, loss_and_gradients(name, tiny), rtol=2e-5)


@functools.cache
def loss_and_gradients(name, sizes):
    """Both at the parameters of the size "tiny"; the layers' gradients stacked, as a scan's are."""
    return quick_jit(jax.value_and_grad(loss_of(name, sizes)))(stacked_params(name))


def loss_of(name, sizes):
    """Returns the loss as a function of parameters stacked by layer, whatever form `sizes` has."""
    _, batch = arguments(name)

    def loss(params):
        params = params if sizes.scan else unstacked(params)
        return family(name).loss(params, sizes, batch)

    return loss


def stacked_params(name):
    params = arguments(name)[0].params
    return params if is_stacked(params) else stacked(params)


def is_stacked(params):
    return not any(0 in group for group in params.values() if isinstance(group, dict))


def stacked(params):
    """The layers 0, 1, ... of each group of `params` as one tree of arrays with a leading dim."""

    def of(group):
        if not (isinstance(group, dict) and 0 in group):
            return group
        return jax.tree.map(lambda *layers: jnp.stack(layers), *group.values())

    return {name: of(group) for name, group in params.items()}


def unstacked(params):
    """The inverse of `stacked`, for two layers."""

    def of(name, group):
        if name not in ("layers", "encoder", "decoder"):
            return group
        return {i: jax.tree.map(operator.itemgetter(i), group) for i in range(2)}

    return {name: of(name, group) for name, group in params.items()}


def test_scanned_and_unrolled_layers_start_equal():
    tiny = mlp.SIZES["tiny"]
    forms = [dataclasses.replace(tiny, scan=scan) for scan in (True, False)]
    scanned, unrolled = (arguments("mlp", form)[0].params for form in forms)
    assert is_stacked(scanned) and not is_stacked(unrolled)
    assert_close(stacked(unrolled), scanned, rtol=0)


def test_remat_is_in_the_program():
    for remat, scan in [(True, True), (True, False), (False, True), (False, False)]:
        sizes = dataclasses.replace(gpt.SIZES["tiny"], remat=remat, scan=scan)
        jaxpr = str(jax.make_jaxpr(gpt.train_step)(*gpt.example_arguments(sizes)))
        assert ("checkpoint" in jaxpr or "remat" in jaxpr) == remat
        assert (" scan[" in jaxpr) == scan


def test_bfloat16_compute_keeps_float32_state():
    sizes = dataclasses.replace(gpt.SIZES["tiny"], compute_dtype="bfloat16")
    state, batch = arguments("gpt")
    want, _ = loss_and_gradients("gpt", state.sizes)
    state = dataclasses.replace(state, sizes=sizes)
    got_state, got = quick_jit(gpt.train_step)(state, batch)
    np.testing.assert_allclose(got, want, rtol=2e-2)
    assert {x.dtype for x in jax.tree.leaves(got_state.params)} == {jnp.dtype("float32")}
    assert "bf16[8,32,256]" in str(jax.make_jaxpr(gpt.train_step)(state, batch))  # the logits


@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [
        ("gpt", "8b", 8_030),  # Llama 3 8B, 70B and 405B, as their model cards count them
        ("gpt", "70b", 70_554),
        ("gpt", "405b", 405_853),
        ("moe", "8x7b", 46_703),  # Mixtral 8x7B
        ("vit", "b16", 86.5),
        ("vit", "h14", 632),
        ("encdec", "big", 214),
        ("lstm", "large", 66),
        ("ssm", "130m", 129),
        ("dlrm", "criteo", 24_037),
    ],
)
def test_named_sizes_have_the_published_parameter_counts(name, size, millions):
    state, _ = family(name).example_arguments(size)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


def test_argument_paths_read_well():
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(arguments("gpt")[0])]
    assert ".params['layers']['attention']['wq']" in paths
    assert ".opt_state[0].mu['layers']['mlp']['w_down']" in paths


def test_attention_is_causal():
    sizes = gpt.SIZES["tiny"]
    state, batch = arguments("gpt")
    model = quick_jit(training.bind(gpt.GPT, sizes, state.params))
    changed = batch["tokens"].at[:, 20].add(1) % sizes.vocab
    logits, other = model(batch["tokens"]), model(changed)
    np.testing.assert_array_equal(logits[:, :20], other[:, :20])
    assert np.all(np.abs(logits[:, 20:] - other[:, 20:]).max(axis=-1) > 0)


def test_rotated_scores_depend_on_relative_positions_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 1, 8))
    scores = [
        jnp.einsum("bskh,btkh->st", *(blocks.rotate(x, jnp.arange(6) + shift, 1e4) for x in (q, k)))
        for shift in (0, 37)
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_grouped_attention_equals_attention_with_repeated_heads():
    q = jax.random.normal(jax.random.key(0), (2, 5, 2, 3, 4))  # [B, S, K, G, H]
    k, v = jax.random.normal(jax.random.key(1), (2, 2, 7, 2, 4))  # [B, T, K, H]
    got = quick_jit(blocks.attend)(q, k, v)
    flat = q.reshape(2, 5, 6, 4)
    want = quick_jit(jax.nn.dot_product_attention)(
        flat, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2)
    )
    np.testing.assert_allclose(got.reshape(2, 5, 6, 4), want, rtol=1e-5, atol=1e-6)


def test_cross_entropy_equals_its_definition():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 5))
    labels = jnp.arange(12).reshape(3, 4) % 5
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = -np.log(np.take_along_axis(p, np.asarray(labels)[..., None], -1)).mean()
    np.testing.assert_allclose(blocks.cross_entropy(logits, labels), want, rtol=1e-6)


def test_experts_agree_between_slots_and_ragged_rows():
    """With slots for everybody nothing is dropped, so both ways compute the same."""
    roomy = dataclasses.replace(moe.SIZES["tiny"], capacity_factor=4.0)
    assert roomy.capacity == roomy.length
    ragged = dataclasses.replace(roomy, dispatch="ragged")
    assert_close(loss_and_gradients("moe", roomy), loss_and_gradients("moe", ragged), rtol=2e-5)


def test_full_experts_drop_the_last_tokens():
    hits = jnp.zeros((1, 4, 1, 2)).at[0, :, 0, 0].set(1)  # four tokens, all to expert 0
    combine = moe.slots(jnp.ones((1, 4, 1)), hits, capacity=3)
    want = np.zeros((1, 4, 2, 3))
    want[0, [0, 1, 2], 0, [0, 1, 2]] = 1
    np.testing.assert_array_equal(combine, want)


def test_decoding_token_by_token_gives_the_logits_of_the_whole_text():
    params, cache, _ = arguments("decode")
    tokens = arguments("gpt")[1]["tokens"]
    want = quick_jit(training.bind(gpt.GPT, gpt.SIZES["tiny"], params))(tokens)
    step = quick_jit(decode.serve_step)
    for s in range(8):
        cache, logits = step(params, cache, tokens[:, s])
        np.testing.assert_allclose(logits, want[:, s], rtol=1e-4, atol=1e-4)
    assert cache.position == 8


def test_adapters_start_as_no_change_and_leave_the_base_alone():
    state, batch = arguments("lora")
    trained, loss = quick_jit(lora.train_step)(state, batch)
    want = quick_jit(lambda base: gpt.loss(base, gpt.SIZES["tiny"], batch))(state.base)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, trained.base, state.base)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), trained.params, state.params)
    assert all(jax.tree.leaves(changed["layers"]["attention"]["q_up"]))


def test_private_gradients_are_the_mean_of_clipped_ones(monkeypatch):
    monkeypatch.setattr(dpsgd, "NOISE", 0.0)
    state, batch = arguments("dpsgd")
    batch = {**batch, "y": batch["y"].at[3].mul(100)}  # one example that needs clipping

    def gradient(x, y):
        return jax.grad(mlp.loss)(state.params, state.sizes, {"x": x[None], "y": y[None]})

    gradient = quick_jit(gradient)
    grads = [gradient(x, y) for x, y in zip(batch["x"], batch["y"], strict=True)]
    each = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    norms = [np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(tree))) for tree in grads]
    assert max(norms) > dpsgd.CLIP
    scale = [min(1.0, dpsgd.CLIP / norm) for norm in norms]
    want = jax.tree.map(lambda *g: sum(s * x for s, x in zip(scale, g, strict=True)) / 8, *grads)
    assert_close(dpsgd.privatize(each, state.key), want, rtol=1e-5)


def test_messages_reach_receivers_only():
    sizes = gnn.SIZES["tiny"]
    state, graph = arguments("gnn")
    model = quick_jit(training.bind(gnn.GNN, sizes, state.params))
    senders, receivers = jnp.arange(1, 5), jnp.zeros(4, jnp.int32)  # a star into node 0
    logits = model(graph["nodes"], senders, receivers)
    other = model(graph["nodes"].at[3].add(1.0), senders, receivers)
    changed = np.abs(logits - other).max(axis=-1) > 0
    assert list(np.flatnonzero(changed)) == [0, 3]
