import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
import tiny
import torch_model

from dapo_jax import config
from dapo_jax.models import gguf, layers, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import decode
from dapo_jax.text import chat, gguf_vocabulary

LLAMA3 = specs.RopeScaling("llama3", factor=8.0, original_context=16)
LINEAR = specs.RopeScaling("linear", factor=4.0)
SPECS = {
    "grouped": tiny.SPEC,
    "untied": dataclasses.replace(tiny.SPEC, tied=False, kv_heads=4, norm_eps=1e-3),
    "llama3": dataclasses.replace(tiny.SPEC, rope_scaling=LLAMA3, head_size=16, kv_heads=1),
    "linear": dataclasses.replace(tiny.SPEC, rope_scaling=LINEAR, rope_base=100.0, head_size=6),
}
TOKENS = np.random.default_rng(3).integers(0, 64, (2, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


def prompts(*rows, width=8, fill=0):
    """Right-padded tokens i32[S, width] and their lengths."""
    padded = np.full((len(rows), width), fill, np.int32)
    for target, row in zip(padded, rows):
        target[:len(row)] = row
    return padded, np.array([len(row) for row in rows], np.int32)


prefill = jax.jit(transformer.prefill, static_argnums=0)
extend = jax.jit(transformer.extend, static_argnums=0)


# ------------------------------------------------------------------- against other implementations


def frequencies(spec):
    plain = [spec.rope_base ** (-2 * i / spec.head_size) for i in range(spec.head_size // 2)]
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    return [plain_model.llama3_frequency(f, factor=scaling.factor, low=scaling.low_frequency,
                                         high=scaling.high_frequency,
                                         context=scaling.original_context) for f in plain]


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_a_plain_numpy_forward_at_every_position(name):  # B82
    spec = SPECS[name]
    tree = tiny.params(spec)
    got = np.asarray(tiny.full_logits(spec, tree, TOKENS))
    for row, tokens in zip(got, TOKENS):
        want = plain_model.forward(tree, tokens, frequencies=frequencies(spec), eps=spec.norm_eps,
                                   head=tree.get("head"))
        np.testing.assert_allclose(row, want, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_transformers_llama_at_every_position(name):  # B82
    spec = SPECS[name]
    tree = tiny.params(spec)
    model = torch_model.llama(spec, tree)
    torch = torch_model.torch()
    with torch.no_grad():
        want = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(tiny.full_logits(spec, tree, TOKENS), want, atol=1e-4)


def test_smollm2_equals_transformers_reading_the_same_file(smollm2):
    torch = torch_model.torch()
    library = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers reads GGUF files with it
    tokenizer = gguf_vocabulary.from_gguf(smollm2.metadata)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = chat.render(chat.configured(config.Tokenizer(kind="gguf"), tokenizer), question)
    asked = tokenizer.encode(rendered)
    plain = tokenizer.encode("The capital of France is Paris; 12 + 35 = 47.\n" * 9)[:len(asked)]
    tokens = np.array([plain, asked])
    model = library.AutoModelForCausalLM.from_pretrained(
        str(smollm2.path.parent), gguf_file=smollm2.path.name, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    del model
    gc.collect()
    spec = gguf.spec(smollm2)
    tree = tiny.gathered(spec, gguf.pieces(smollm2, spec))
    got = np.asarray(tiny.full_logits(spec, tree, tokens.astype(np.int32)))
    # Two float32 sums of 30 layers in other orders; logits reach about 38.
    np.testing.assert_allclose(got, want, atol=5e-4)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


# -------------------------------------------------------------------------- three ways, one result


def test_prefill_then_extend_equals_the_whole_sequence_at_once(params):
    whole = np.asarray(tiny.full_hidden(tiny.SPEC, params, TOKENS))
    cut = (3, 7)
    tokens, length = prompts(*(row[:at] for row, at in zip(TOKENS, cut)), fill=9)
    last, cache = prefill(tiny.SPEC, params, tokens, length)
    rows = np.stack([row[at:at + 5] for row, at in zip(TOKENS, cut)])[:, None]
    rows = np.concatenate([np.full_like(rows, 5), rows], axis=1)  # a neighbour in each slot
    states = np.asarray(extend(tiny.SPEC, params, rows, cache))
    for slot, at in enumerate(cut):
        np.testing.assert_allclose(last[slot], whole[slot, at - 1], atol=1e-5)
        np.testing.assert_allclose(states[slot, 1], whole[slot, at:at + 5], atol=1e-5)


def test_prefill_then_decode_by_token_equals_the_whole_sequence_at_once(params):
    whole = np.asarray(tiny.full_hidden(tiny.SPEC, params, TOKENS))
    cut, spec = (3, 7), tiny.SPEC
    _, cache = prefill(spec, params, *prompts(*(r[:at] for r, at in zip(TOKENS, cut)), fill=9))

    @jax.jit
    def one(tree, tokens, own, index):
        return transformer.decode(spec, transformer.unstack(spec, tree), tokens, cache, own,
                                  column=index, position=jnp.full(tokens.shape, index))

    own = decode.empty(spec, slots=2, rows=2, width=1, new=6).own
    for index in range(5):
        tokens = np.array([[row[at + index], 5] for row, at in zip(TOKENS, cut)], np.int32)
        state, own = one(params, tokens, own, jnp.int32(index))
        for slot, at in enumerate(cut):
            np.testing.assert_allclose(state[slot, 0], whole[slot, at + index], atol=1e-5)


def test_padding_changes_nothing_whatever_its_tokens_and_its_batch(params):  # B52
    short, long = TOKENS[0, :3], TOKENS[1, :8]
    rows = np.broadcast_to(TOKENS[0, 3:8], (1, 2, 5))
    alone, cache = prefill(tiny.SPEC, params, *prompts(short, width=3))
    want = np.asarray(extend(tiny.SPEC, params, rows, cache))[0]
    for fill in (0, tiny.STOP, 63):
        mixed, cache = prefill(tiny.SPEC, params, *prompts(long, short, width=9, fill=fill))
        got = extend(tiny.SPEC, params, np.concatenate([rows, rows]), cache)[1]
        np.testing.assert_allclose(mixed[1], alone[0], atol=1e-5)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_no_token_sees_a_later_one_nor_another_row_or_slot(params):
    tokens, length = prompts(TOKENS[0, :4], TOKENS[1, :6])
    rows = np.random.default_rng(0).integers(0, 64, (2, 2, 5)).astype(np.int32)
    table = params["embedding"]

    def state(inputs, slot, row, at):
        # Ids become distinct, so that the gradient of the table is by place in the input.
        tree = params | {"embedding": inputs}
        ids = np.arange(tokens.size).reshape(tokens.shape)
        row_ids = tokens.size + np.arange(rows.size).reshape(rows.shape)
        _, cache = transformer.prefill(tiny.SPEC, tree, ids, length)
        return transformer.extend(tiny.SPEC, tree, row_ids, cache)[slot, row, at].sum()

    used = np.concatenate([tokens.ravel(), rows.ravel()])
    inputs = np.concatenate([table[used], table[len(used):]])
    gradient = np.asarray(jax.jit(jax.grad(state))(inputs, 1, 0, 2))
    seen = np.abs(gradient).sum(axis=1) > 0
    in_prompts = seen[:tokens.size].reshape(2, 8)
    in_rows = seen[tokens.size:tokens.size + rows.size].reshape(2, 2, 5)
    np.testing.assert_array_equal(in_prompts, [[0] * 8, [1] * 6 + [0] * 2])
    np.testing.assert_array_equal(in_rows, [[[0] * 5] * 2, [[1, 1, 1, 0, 0], [0] * 5]])


# --------------------------------------------------------------------------------------- the rest


SLIDING = dataclasses.replace(tiny.SPEC, sliding_window=3, sliding=(True, False),
                              local_rope_base=20.0, post_norms=True, qk_norm=True)


@pytest.mark.parametrize(("spec", "remat"), [(tiny.SPEC, "full"), (SLIDING, "full"),
                                               (tiny.SPEC, "dots")])
def test_recomputing_blocks_changes_no_gradient(spec, remat):
    params = tiny.params(spec)

    def gradient(spec):
        return jax.jit(jax.grad(lambda tree: tiny.full_logits(spec, tree, TOKENS).var()))(params)
    plain = gradient(spec)
    remade = gradient(dataclasses.replace(spec, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                 plain, remade)


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_axis_has_a_logical_name(name):
    made = jax.eval_shape(lambda: transformer.init(SPECS[name], jax.random.key(0)))
    axes = transformer.logical_axes(SPECS[name])
    ranks = jax.tree.map(lambda leaf, names: (leaf.ndim, len(names)), made, axes)
    for rank, named in jax.tree.leaves(ranks, is_leaf=lambda x: isinstance(x, tuple)):
        assert rank == named
    known = {"layers", "embed", "vocab", "heads", "head", "ff"}
    assert {n for leaf in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
            for n in leaf} == known
    assert axes["blocks"]["attention"]["query"] == ("layers", "embed", "heads", "head")


def test_parameters_start_at_the_scale_of_their_fan_in():
    spec = dataclasses.replace(tiny.SPEC, d_model=256, ff=512, heads=8, kv_heads=8, head_size=16)
    tree = jax.jit(transformer.init, static_argnums=0)(spec, jax.random.key(1))
    attention, mlp = tree["blocks"]["attention"], tree["blocks"]["mlp"]
    for leaf, fan_in in ((attention["query"], 256), (attention["out"], 128), (mlp["gate"], 256),
                         (mlp["down"], 512), (tree["embedding"], 256)):
        assert np.std(leaf) == pytest.approx(fan_in ** -0.5, rel=0.05)
    assert (tree["norm"] == 1).all() and not np.allclose(mlp["gate"][0], mlp["gate"][1])


def test_half_precision_stays_near_single(params):
    half = dataclasses.replace(tiny.SPEC, compute_dtype="bfloat16")
    single, coarse = (np.asarray(tiny.full_logits(spec, params, TOKENS))
                      for spec in (tiny.SPEC, half))
    assert coarse.dtype == np.float32 and not np.array_equal(single, coarse)
    # Three significant digits in the products: an error of 1 % of the logits' scale.
    assert np.abs(single - coarse).max() < 0.03 * np.abs(single).max()


def test_attention_over_two_parts_is_one_softmax():
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    query, keys, values = make(1, 1, 2, 2, 4), make(1, 1, 1, 4, 2), make(1, 1, 1, 2, 4)
    prompt = make(1, 1, 4, 3), make(1, 1, 3, 4)
    got = layers.attend(query, (keys, values), np.tril(np.ones((1, 1, 2, 2), bool)),
                        prompt, np.array([[[[True, True, False]]]]))
    for t in range(2):
        for h in range(2):
            k = np.concatenate([prompt[0][0, 0, :, :2], keys[0, 0, 0, :, :t + 1]], axis=1)
            v = np.concatenate([prompt[1][0, 0, :2], values[0, 0, 0, :t + 1]])
            mass = np.exp(query[0, 0, t, h] @ k / 2)
            np.testing.assert_allclose(got[0, 0, t, h], mass @ v / mass.sum(), atol=1e-6)
