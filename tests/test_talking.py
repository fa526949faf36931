import dataclasses

import jax
import numpy as np
import pytest
import scripts
import tiny

from dapo_jax.rollout import engine as engines
from dapo_jax.rollout import programs, talking, turns
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import metrics

TABLE = tiny.table()
NEW, BUCKETS = 16, (8,)
STOPS = tuple(range(0, 64, 8))
SCRIPT = scripts.Script(room=NEW)
PLAN = tiny.plan([0, 2, 3, 6, 1], [3, 4, 2, 3, 2], visit=1)
SPEC = dataclasses.replace(tiny.SPEC, layers=1, sliding=(True,), sliding_window=9)
FAMILIES = {
    "llama": tiny.SPEC,
    "qwen": dataclasses.replace(tiny.SPEC, qkv_bias=True, qk_norm=True, tied=False),
    "gemma": dataclasses.replace(
        tiny.SPEC, sliding=(True, False), sliding_window=5, attention_softcap=20.0,
        logit_softcap=30.0, post_norms=True, unit_offset=True, local_rope_base=500.0)}
PLENTY, SCARCE = programs.Room(64, 0, (4, 16)), programs.Room(2, 2, (2,))


@pytest.fixture(scope="module")
def root():
    return jax.random.key(7)


def placed(spec=SPEC):
    return mesh_lib.put(tiny.params(spec), mesh_lib.replicated(tiny.mesh()))


@pytest.fixture(scope="module")
def params():
    return placed()


def talkative(spec=SPEC, *, room=PLENTY, slots=(4,), chunk=5, **changes):
    how = tiny.sampling(max_new_tokens=NEW, stop_ids=STOPS)
    return tiny.engine(spec, how, rows=1, slots=slots, buckets=BUCKETS, chunk=chunk, room=room,
                       **changes)


@pytest.fixture(scope="module")
def engine():
    return talkative(share=4)


@pytest.fixture(scope="module")
def scarce():
    """Another ladder and chunk, and room for 2 contexts here and 2 on the host."""
    return talkative(room=SCARCE, slots=(3,), chunk=2)


def sample(engine, params, root, talk, plan=PLAN):
    return talking.sample(engine, params, plan, table=TABLE, root=root, step=3, talk=talk)


def delays(seed, most=6):
    rng = np.random.default_rng(seed)
    return lambda: int(rng.integers(0, most))


@pytest.fixture(scope="module")
def served(engine, params, root):
    log = []
    return sample(engine, params, root, scripts.talk(SCRIPT, delay=delays(0), log=log)), log


def check_against_whole_forwards(spec, params, samples):
    """Log-probs of every sampled token, from whole sequences through the model without a cache."""
    width = BUCKETS[-1] + NEW
    for row in range(len(samples)):
        prompt, length = TABLE.tokens[samples.prompt[row]], samples.length[row]
        whole = np.concatenate([prompt, samples.tokens[row, :length]])
        tokens = np.zeros((1, width), np.int32)
        tokens[0, :len(whole)] = whole
        logits = np.asarray(tiny.full_logits(spec, params, tokens))[0] / 0.7
        want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        at = np.flatnonzero(samples.loss_mask[row])
        np.testing.assert_allclose(samples.logprobs[row, at],
                                   want[len(prompt) - 1 + at, samples.tokens[row, at]], atol=1e-4)


def test_log_probs_are_those_of_the_whole_sequence(served, params):
    samples = served[0].samples
    assert (turns.turn_numbers(samples.loss_mask).max(axis=1) > 0).sum() > 5
    check_against_whole_forwards(SPEC, params, samples)


def test_tokens_in_are_tokens_out(served):
    samples, log = served[0].samples, served[1]
    for row in range(len(samples)):
        mine = [one for one in log if (one.group, one.sample)
                == (samples.group[row], samples.sample[row])]
        tokens, mask, logprobs = [], [], []
        for one in sorted(mine, key=lambda one: one.turn):
            tokens += one.tokens.tolist()
            mask += [True] * len(one.tokens)
            logprobs += one.logprobs.tolist()
            assert one.length == len(tokens)
            assert one.stopped == (one.tokens[-1] in STOPS)
            told = scripts.reply(SCRIPT, one)
            if told is not None:
                tokens += told.tolist()
                mask += [False] * len(told)
                logprobs += [0.0] * len(told)
        size = samples.length[row]
        assert samples.tokens[row, :size].tolist() == tokens
        assert samples.loss_mask[row].tolist() == mask + [False] * (NEW - size)
        np.testing.assert_array_equal(samples.logprobs[row], np.pad(np.float32(logprobs),
                                                                    (0, NEW - size)))
        assert not samples.tokens[row, size:].any() and samples.stopped[row] == mine[-1].stopped
    assert [one.turn for one in log].count(0) == len(samples)


def test_a_turn_ends_at_a_stop_or_at_its_budget(served):
    for one in served[1]:
        assert 1 <= len(one.tokens) <= SCRIPT.turn_budget
        assert not np.isin(one.tokens[:-1], STOPS).any()
        assert one.stopped or len(one.tokens) == SCRIPT.turn_budget or one.length == NEW


def test_samples_depend_neither_on_delays_nor_on_room_slots_or_chunks(served, scarce, engine,
                                                                      params, root):
    want = served[0].samples
    for one, seed, most in ((scarce, 1, 9), (scarce, 2, 2), (engine, 3, 1)):
        got = sample(one, params, root, scripts.talk(SCRIPT, delay=delays(seed, most)))
        for name in ("tokens", "loss_mask", "length", "stopped", "group", "sample", "valid"):
            np.testing.assert_array_equal(getattr(got.samples, name), getattr(want, name), name)
        np.testing.assert_allclose(got.samples.logprobs, want.logprobs, atol=1e-5)
    use = sample(scarce, params, root, scripts.talk(SCRIPT, delay=delays(1, 9))).use
    assert use.parked and use.parked_host and use.unkept and use.rerun_tokens


def test_of_a_steady_talk_log_probs_are_equal_to_the_bit(engine, params, root):
    one, other = (sample(engine, params, root, turns.steady(
        scripts.talk(SCRIPT, delay=delays(6, most)), 2)).samples for most in (1, 20))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_only_replies_are_run_where_contexts_are_kept(served):
    use, samples = served[0].use, served[0].samples
    told = sum(int((~samples.loss_mask[row, :samples.length[row]]).sum())
               for row in range(len(samples)))
    assert use.reply_tokens == told and not use.rerun_tokens
    assert use.parked == len(served[1]) and not use.parked_host and not use.unkept
    assert use.live == samples.loss_mask.sum()


def test_of_one_turn_each_samples_are_those_of_the_engine_for_one_turn(engine, params, root):
    want = engines.run(engine, params, PLAN, table=TABLE, root=root, step=3)
    script = dataclasses.replace(SCRIPT, most=1, turn_budget=NEW)
    got = sample(engine, params, root, scripts.talk(script, delay=delays(0))).samples
    assert got.valid.all()
    for name in vars(want):
        if name != "valid":  # not scored yet
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_log_probs_of_every_family_are_those_of_the_whole_sequence(spec, root):
    params = placed(spec)
    for room in (PLENTY, SCARCE):
        some = talkative(spec, room=room, slots=(2, 4))
        got = sample(some, params, root, scripts.talk(SCRIPT, delay=delays(4))).samples
        check_against_whole_forwards(spec, params, got)
    # With a ring as long as a sample, and nothing parked.
    plain = tiny.engine(spec, some.sampling, slots=(4,), rows=1, buckets=BUCKETS)
    want = engines.run(plain, params, PLAN, table=TABLE, root=root, step=3)
    script = dataclasses.replace(SCRIPT, most=1, turn_budget=NEW)
    got = sample(some, params, root, scripts.talk(script)).samples
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(4, 1, 1), (1, 2, 2)])
def test_samples_of_several_turns_do_not_depend_on_the_mesh(served, root, parts):  # promise 3
    mesh = tiny.mesh(*parts)
    placed = mesh_lib.put(tiny.params(SPEC), mesh_lib.param_shardings(mesh, SPEC))
    for room in (PLENTY, programs.Room(4, 2, (4,))):
        spread = talkative(room=room, on=mesh, slots=(4, 8))
        got = sample(spread, placed, mesh_lib.put(root, mesh_lib.replicated(mesh)),
                     scripts.talk(SCRIPT, delay=delays(5)))
        assert got.use.parked and (room is PLENTY or got.use.parked_host and got.use.rerun_tokens)
        np.testing.assert_array_equal(got.samples.tokens, served[0].samples.tokens)
        np.testing.assert_allclose(got.samples.logprobs, served[0].samples.logprobs, atol=1e-5)


def test_an_episode_that_failed_comes_back_invalid(engine, params, root, served):
    failed = lambda one: one.sample == 1 and one.turn == 1  # noqa: E731
    got = sample(engine, params, root, scripts.talk(SCRIPT, failed=failed)).samples
    of_two = turns.turn_numbers(served[0].samples.loss_mask).max(axis=1) > 0
    np.testing.assert_array_equal(~got.valid, (got.sample == 1) & of_two)
    assert 0 < (~got.valid).sum() < len(got)


def test_nothing_compiles_while_turns_are_served(engine, params, root):  # promise 2
    sample(engine, params, root, scripts.talk(SCRIPT))
    metrics.count_compiles()
    before = metrics.compile_count()
    for seed in range(3):
        script = dataclasses.replace(SCRIPT, seed=seed)
        sample(engine, params, root, scripts.talk(script, delay=delays(seed)))
    assert metrics.compile_count() == before


def answered(engine, params, root, change):
    """Serve with replies that `change` has had its way with."""
    talk = scripts.talk(SCRIPT)
    return sample(engine, params, root, dataclasses.replace(
        talk, replies=lambda seconds: change(talk.replies(seconds))))


def test_a_reply_that_cannot_be_is_refused_by_its_sample(engine, params, root):
    def altered(**fields):
        return lambda found: [one if one.over else dataclasses.replace(one, **fields)
                              for one in found]

    with pytest.raises(ValueError, match=r"group \d, sample \d: a reply of 0 tokens"):
        answered(engine, params, root, altered(tokens=np.zeros(0, np.int32)))
    with pytest.raises(ValueError, match="a reply of 15 tokens after"):
        answered(engine, params, root, altered(tokens=np.zeros(15, np.int32)))
    with pytest.raises(ValueError, match="sample 77: a reply, but no turn of it waits"):
        answered(engine, params, root, altered(sample=77))
    with pytest.raises(ValueError, match="no turn of it waits"):
        answered(engine, params, root, lambda found: [*found, *found])


def test_groups_that_a_feed_drops_come_back_as_far_as_they_got(engine, params, root, served):
    boundaries = []

    def feed(boundary):
        boundaries.append(boundary)
        if len(boundary.in_flight) < len(PLAN.group) and len(boundaries) > 1:
            return None
        return PLAN if len(boundaries) == 1 else jax.tree.map(lambda x: x[:0], PLAN)

    got = talking.serve(engine, params, table=TABLE, root=root, step=3, feed=feed,
                        talk=scripts.talk(SCRIPT))
    want, dropped = served[0].samples, boundaries[-1].in_flight
    assert 0 < len(dropped) < len(PLAN.group) and set(got.partial.group) == set(dropped)
    assert set(boundaries[-1].finished.group) == set(got.samples.group)
    np.testing.assert_array_equal(got.samples.tokens, want.tokens[~np.isin(want.group, dropped)])
    for row, length in enumerate(got.partial.length):
        np.testing.assert_array_equal(got.partial.tokens[row, :length],
                                      want.tokens[np.isin(want.group, dropped)][row, :length])


def test_replies_that_never_come_are_an_error_and_no_hang(engine, params, root):
    talk = dataclasses.replace(scripts.talk(SCRIPT), replies=lambda seconds: [], patience=0.05)
    with pytest.raises(RuntimeError, match="14 samples wait for replies .* still have 14 turns"):
        sample(engine, params, root, talk)
    with pytest.raises(RuntimeError, match=r"group \d, sample \d and \d+ more wait for replies"):
        sample(engine, params, root, turns.steady(talk, 1))
    with pytest.raises(RuntimeError, match="still have 0 turns"):
        sample(engine, params, root, dataclasses.replace(talk, waiting=lambda: 0, patience=60.0))


def test_environments_are_attended_to_until_the_device_has_drawn(engine, params, root, monkeypatch):
    """Three looks at each chunk here, whatever it took."""
    looks, attended = [], []
    monkeypatch.setattr(mesh_lib, "ready", lambda chunk: looks.append(1) or len(looks) % 4 == 0)
    talk = dataclasses.replace(scripts.talk(SCRIPT), attend=attended.append)
    served = sample(engine, params, root, talk)
    assert len(attended) == 3 * len(looks) // 4 and set(attended) == {turns.BEAT}
    assert served.use.chunks * 4 == len(looks)
