"""Episodes of a plan's samples, played on a pool of environments while the device samples.

An episode starts with its record and a seed; `begin` has the first ones started, and each that ends
its first turn has one more started, so that no first turn waits for that. A turn that ended is
decoded and given to the environment; its reply is encoded once and appended. Limits: turns of an
episode, tokens of the sample, and seconds that the episode waits for its environment.
"""

import collections
import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax import types
from dapo_jax.envs import episode_play, episode_pool, episodes, parts
from dapo_jax.rollout import outcomes, turns
from dapo_jax.text import replies

# A worker gets its next call when the pool is looked at. So that quick calls are not made one a
# chunk, a look goes on for QUICK seconds while each further answer comes within NEXT.
QUICK, NEXT = 0.03, 0.002
_SERIAL = itertools.count()  # tells calls of a round from those of an earlier one that are late

Key = tuple[int, int]  # group, sample


@dataclasses.dataclass(frozen=True)
class Scene:
    """What episodes are played with; nothing of it changes during a run."""

    pool: episode_pool.Pool
    encode: replies.Encoder
    decode: Callable[[Sequence[int]], str]
    weights: parts.Weights
    seed: int
    turns: int  # of the model, at most
    turn_tokens: int  # 0: as many as are left
    seconds: float  # that an episode may wait
    by_turn: int = 0  # turns whose rewards are kept apart; 0: none
    lag: int = 0  # chunks from a turn to its reply (turns.steady); 0: as soon as it is there


@dataclasses.dataclass
class Live:
    """One episode and what it waits for."""

    episode: episode_play.Episode
    key: Key
    limit: int  # tokens of the sample
    state: bytes | None = None  # None: not started
    turn: turns.Ended | None = None  # that waits for its reply
    text: str = ""  # of that turn
    waited: float = 0.0  # seconds, in turns before
    since: float = 0.0
    end: str = ""
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # turns and replies
    told: int = 0  # tokens of replies
    cut: int = 0  # turns that did not end by themselves


@dataclasses.dataclass
class Desk:
    """The episodes of one round."""

    scene: Scene
    serial: int
    live: dict[Key, Live]
    queue: dict[Key, None]  # not started, in the plan's order
    calls: dict[tuple, Live] = dataclasses.field(default_factory=dict)  # by ticket
    late: list = dataclasses.field(default_factory=list)  # heap of (deadline, ticket)
    out: list[turns.Reply] = dataclasses.field(default_factory=list)
    waiting: int = 0  # turns handed over whose reply has not been taken
    latency: list[float] = dataclasses.field(default_factory=list)  # seconds of each call


def begin(
    scene: Scene, plan: types.Plan, *, table: types.PromptTable, step: int, limits: np.ndarray,
    ahead: int,
) -> Desk:
    """Seed every sample's episode and start the first `ahead` of them. `limits` i32[n] are tokens
    of a sample of each group."""
    live: dict[Key, Live] = {}
    first = np.zeros(len(plan.size), int) if plan.first is None else plan.first
    for group, prompt, size, begun, limit in zip(
            plan.group.tolist(), plan.prompt.tolist(), plan.size.tolist(), first.tolist(),
            limits.tolist(), strict=True):
        for sample in range(begun, begun + size):
            seed = episodes.seed(scene.seed, step=step, group=group, sample=sample)
            live[group, sample] = Live(
                episode_play.begun(scene.pool.name, table.records[prompt], seed), (group, sample),
                limit)
    desk = Desk(scene, next(_SERIAL), live, dict.fromkeys(live))
    for _ in range(min(ahead, len(live))):
        _start(desk, next(iter(desk.queue)))
    return desk


def talk(desk: Desk) -> turns.Talk:
    """The episodes as the sampler sees them."""
    scene = desk.scene
    longest = max((one.limit for one in desk.live.values()), default=1)
    made = turns.Talk(
        ended=lambda ends: _ended(desk, ends), replies=lambda seconds: _replies(desk, seconds),
        waiting=lambda: desk.waiting, first_budget=min(scene.turn_tokens or longest, longest),
        patience=max(turns.Talk.patience, 2 * scene.seconds),
        attend=lambda seconds: _attend(desk, seconds))
    return turns.steady(made, scene.lag) if scene.lag else made


def finish(desk: Desk, samples: types.Samples, *, before: collections.Counter
           ) -> tuple[types.Samples, outcomes.Played]:
    """The samples, `stopped` where outcomes.stopped says so, and their episodes.

    `before` are the pool's failures when the round began. A sample whose tokens are not those of
    its episode is invalid: its log-probs would be of something else.
    """
    lives = [desk.live[key] for key in zip(samples.group.tolist(), samples.sample.tolist())]
    for row, live in enumerate(lives):
        if not live.end:
            raise RuntimeError(f"group {live.key[0]}, sample {live.key[1]} came back before its "
                               "episode was over")
        own = samples.tokens[row, :samples.length[row]]
        if not np.array_equal(own, np.concatenate(live.tokens)):
            live.end = outcomes.FAILED
            _fail(live, "turn", "the sample's tokens are not those of its turns and replies")
    known = desk.scene.pool.failures
    whole = [outcomes.stopped(live.end, by_itself=by_itself, length=length, limit=live.limit)
             for live, by_itself, length in zip(lives, samples.stopped.tolist(),
                                                samples.length.tolist(), strict=True)]
    return dataclasses.replace(samples, stopped=np.array(whole, bool)), outcomes.Played(
        tuple(live.episode for live in lives), tuple(live.end for live in lives),
        np.array([live.told for live in lives], np.int32),
        np.array([live.cut for live in lives], np.int32), np.array(desk.latency),
        *(known[name] - before[name] for name in ("retries", "refused")))


# ------------------------------------------------------------------------------------------ calls


def _start(desk: Desk, key: Key) -> None:
    live = desk.live[key]
    del desk.queue[key]
    ticket = (desk.serial, *key, -1)
    desk.calls[ticket] = live
    episode_pool.start(desk.scene.pool, ticket, record=dict(live.episode.record),
                       seed=live.episode.seed)


def _step(desk: Desk, live: Live) -> None:
    assert live.state is not None, "a step follows the answer to a start"
    ticket = _ticket(desk, live)
    desk.calls[ticket] = live
    episode_pool.step(desk.scene.pool, ticket, state=live.state, text=live.text)


def _ticket(desk: Desk, live: Live) -> tuple:
    return (desk.serial, *live.key, len(live.episode.turns))


def _ended(desk: Desk, ends: Sequence[turns.Ended]) -> None:
    """Take turns over: their texts go to the environment."""
    now = time.monotonic()
    for one in ends:
        live = desk.live[one.group, one.sample]
        if live.end or live.turn is not None:
            raise RuntimeError(f"group {one.group}, sample {one.sample}: a turn ended that nobody "
                               "waits for")
        live.turn, live.text, live.since = one, desk.scene.decode(one.tokens.tolist()), now
        live.tokens.append(one.tokens)
        live.cut += not one.stopped
        desk.waiting += 1
        if live.key in desk.queue:
            _start(desk, live.key)
        if one.turn == 0 and desk.queue:
            _start(desk, next(iter(desk.queue)))
        heapq.heappush(desk.late, (now + desk.scene.seconds - live.waited, _ticket(desk, live)))
        if live.episode.failure:
            _close(desk, live, outcomes.FAILED)
        elif live.state is not None:
            _step(desk, live)
    _look(desk, 0.0)  # idle workers get their calls now


def _replies(desk: Desk, seconds: float) -> list[turns.Reply]:
    """Replies since the last call; waits up to `seconds` for a first one."""
    limit = time.monotonic() + seconds
    while True:
        until = min([limit, *(due for due, _ in desk.late[:1])])
        _look(desk, max(0.0, until - time.monotonic()))
        if desk.out or not desk.waiting or time.monotonic() >= limit:
            found, desk.out = desk.out, []
            desk.waiting -= len(found)
            return found


def _attend(desk: Desk, seconds: float) -> None:
    """Give workers their next calls as they answer. A chunk of a large model takes seconds, and an
    episode's own limit of time goes on meanwhile."""
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        if not _taken(desk, left) and not episode_pool.unanswered(desk.scene.pool):
            time.sleep(max(0.0, limit - time.monotonic()))


def _taken(desk: Desk, seconds: float) -> bool:
    """Take what the pool answers, waiting up to so many seconds for a first answer."""
    found = episode_pool.poll(desk.scene.pool, seconds=seconds)
    for answer in found:
        _take(desk, answer)
    return bool(found)


def _look(desk: Desk, seconds: float) -> None:
    """Take answers, waiting up to so many seconds for a first one; end the wait of what is late."""
    quick = time.monotonic() + QUICK
    more = _taken(desk, NEXT if desk.out else max(seconds, NEXT))
    while more and time.monotonic() < quick and episode_pool.unanswered(desk.scene.pool):
        more = _taken(desk, NEXT)
    now = time.monotonic()
    while desk.late and desk.late[0][0] <= now:
        _, ticket = heapq.heappop(desk.late)
        live = desk.live[ticket[1:3]]
        if live.turn is not None and _ticket(desk, live) == ticket:
            for stale in [name for name, one in desk.calls.items() if one is live]:
                del desk.calls[stale]  # its answer, if one comes, is nobody's
            _fail(live, "timeout", f"{desk.scene.pool.name}: the episode waited for more than "
                  f"{desk.scene.seconds:g} s")
            _close(desk, live, outcomes.FAILED)


def _take(desk: Desk, answer: episode_pool.Answer) -> None:
    live = desk.calls.pop(answer.ticket, None)
    if live is None:
        return
    desk.latency.append(answer.seconds)
    live.episode = episode_play.advanced(live.episode, live.text, answer)
    live.state = None if live.episode.failure else episode_play.state_of(answer)
    if answer.ticket[-1] < 0 and not live.episode.failure:
        _check_told(live)
    if live.turn is None:
        return
    if live.episode.failure:
        _close(desk, live, outcomes.FAILED)
    elif answer.ticket[-1] < 0:
        _step(desk, live)
    else:
        _answer(desk, live, live.turn)


def _check_told(live: Live) -> None:
    """The model goes on from the record's prompt, so that is what a start has to tell."""
    told = episodes.told(live.episode.record["prompt"])
    if [dict(message) for message in live.episode.messages] != told:
        _fail(live, "turn", f"start told {live.episode.messages!r:.120}, but the prompt is "
              f"{told!r:.120}")


# ---------------------------------------------------------------------------------------- outcomes


def _answer(desk: Desk, live: Live, turn: turns.Ended) -> None:
    """What the sampler is told after a turn that the environment took."""
    scene = desk.scene
    found = outcomes.after(live.episode, turn, encode=scene.encode, limit=live.limit,
                           most_turns=scene.turns, turn_tokens=scene.turn_tokens)
    if found.fault:
        _fail(live, "turn", f"{scene.pool.name}: {found.fault}")
    if found.end:
        _close(desk, live, found.end)
        return
    live.tokens.append(found.tokens)
    live.told += len(found.tokens)
    _put(desk, live, turns.Reply(*live.key, found.tokens, over=False, budget=found.budget))


def _close(desk: Desk, live: Live, end: str) -> None:
    assert live.turn is not None, "an episode is closed at a turn"
    live.end = end
    _put(desk, live, turns.Reply(*live.key, outcomes.NOTHING, over=True,
                                 budget=live.turn.length, valid=end != outcomes.FAILED))


def _put(desk: Desk, live: Live, reply: turns.Reply) -> None:
    live.waited += time.monotonic() - live.since
    live.turn, live.text = None, ""
    desk.out.append(reply)


def _fail(live: Live, kind: str, message: str) -> None:
    live.episode = dataclasses.replace(live.episode, failure=kind, message=message,
                                       last_text=live.text)
