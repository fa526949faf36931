"""How the planner searches for what fits, and within what time it compiles."""

import threading
import time
import types

import pytest

from dapo_jax.planning import compiled, compiler, estimate, fit, memory, spending

FIGURES = compiler.Figures(1, 2, 3, 4.0, 5.0)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 31])
def test_the_largest_number_that_fits_is_found(limit):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= limit
    assert estimate.largest(fits, least=1, most=20) == min(limit, 20)
    assert len(asked) <= 10


@pytest.mark.parametrize(("guess", "fixed", "room", "found"), [
    (7, 0, 55, 5), (5, 0, 55, 5), (2, 30, 85, 5), (9, 0, 85, 8), (3, 100, 90, 0), (1, 0, 999, 9),
    (4, 30, 85, 5)])
def test_the_search_by_compiling_ends_at_the_largest_that_fits(guess, fixed, room, found):
    asked = []

    def compile_at(number):
        asked.append(number)
        if number > 8:
            raise compiler.TooLarge("as the compiler says")
        return fixed + 10.0 * number
    most = 9 if room < 999 else 8
    assert fit.searched(guess, compile_at, {}, room=room, compiles=6, most=most)[0] == min(
        found, most)
    assert len(asked) == len(set(asked)) <= 6


def slots_room(room):
    """What is held and what programs take: 60 bytes are held, two slots take 20 and 3 to draw a
    token; the weights take 30 more while they are made, before there are caches: 90 in all."""
    held = memory.Held(10, 20, 10, 0, 30, 4, 16)
    plan = types.SimpleNamespace(
        cfg=types.SimpleNamespace(rollout=types.SimpleNamespace(slots=(4,), rows=4),
                                  environment=types.SimpleNamespace(name="")),
        phase=types.SimpleNamespace(prompts_per_step=8, samples_per_prompt=4))
    work = {name: estimate.Estimate(size, 0, 0) for name, size in
            {"weights": 30, "prefill": 2, "admit": 1, "decode": 3}.items()}
    return fit.Room(room, held, memory.Split(1, 1, 1, 1, 1, 7, 1), 2, plan), work


@pytest.mark.parametrize(("room", "largest", "one"), [(200, 8, True), (95, 3, True),
                                                      (80, 0, False)])
def test_slots_fit_beside_what_does_not_grow_with_them(room, largest, one):
    found = fit.slots(*slots_room(room), compiles=0, asked=None)
    assert (found["largest slots"], found["one row fits"], found["peak"]) == (largest, one, 90)


def test_a_search_says_what_it_did_not_try():
    asked = lambda number: 10.0 * number  # noqa: E731
    assert fit.searched(4, asked, {}, room=75, compiles=1, most=20) == (
        4, "compiled for 4; 5 to 20 not tried: --compiles=1")
    assert fit.searched(4, asked, {3: 30.0}, room=35, compiles=1, most=20) == (
        3, "compiled for 3, 4")
    assert fit.searched(6, None, {}, room=5, compiles=2, most=20) == (6, "counted from shapes")


def test_a_search_goes_on_where_the_guess_is_what_was_compiled_before():
    assert fit.searched(3, lambda number: 10.0 * number, {3: 30.0}, room=45, compiles=9, most=8
                        ) == (4, "compiled for 3, 4, 5")


def test_a_search_without_time_keeps_what_was_compiled_or_the_guess():
    def asked(number):
        raise spending.OutOfTime(number)
    assert fit.searched(4, asked, {1: 10.0}, room=75, compiles=9, most=8) == (
        1, "compiled for 1; 2 to 8 not tried: time")
    assert fit.searched(4, asked, {}, room=75, compiles=9, most=8) == (
        4, "counted from shapes; none compiled: time")


@pytest.fixture
def bench(monkeypatch):
    """A clock that the compiler moves on by what `seconds` says of the program, and a record."""
    state = types.SimpleNamespace(now=100.0, seconds={}, compiled=[], said=[])

    def compile_it(program, *, text):
        assert text
        state.compiled.append(program)
        state.now += state.seconds[program]
        if program == "huge":
            raise compiler.TooLarge("as the compiler says")
        return FIGURES
    monkeypatch.setattr(compiler, "compiled", compile_it)
    return state


def asked(bench, seconds):
    return spending.within(seconds, begun=90.0, say=bench.said.append, clock=lambda: bench.now)


def test_nothing_is_begun_that_would_end_too_late(bench):
    bench.seconds = {"small": 30, "large": 1}
    ask = asked(bench, 100)  # to 190, and it is 100
    ask(spending.Key("update", 1), lambda: "small")
    ask(spending.Key("update", 2), lambda: "small")  # until 160: the next would end at 190
    with pytest.raises(spending.OutOfTime):
        ask(spending.Key("update", 4), lambda: "small")
    ask(spending.Key("decode", 1), lambda: "large")  # another kind is still begun
    bench.now = 190.0
    with pytest.raises(spending.OutOfTime):
        ask(spending.Key("apply"), lambda: "large")
    assert bench.compiled == ["small"] * 2 + ["large"]
    assert bench.said[0] == "update, 1 slots: compiled in 30 s (40 of 100 s)"


def test_what_takes_longer_than_there_is_time_is_waited_for_no_further(monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(compiler, "compiled", lambda program, *, text: end.wait(30) and FIGURES)
    begun = time.perf_counter()
    ask = spending.within(0.2, begun=begun, say=lambda line: None)
    for kind in ("update", "decode"):  # nothing is begun beside what still runs
        with pytest.raises(spending.OutOfTime):
            ask(spending.Key(kind), lambda: "endless")
    assert time.perf_counter() - begun < 20 and spending.runs_on()
    end.set()
    while spending.runs_on() and time.perf_counter() - begun < 60:
        time.sleep(0.01)
    assert not spending.runs_on()


def test_what_a_compile_raises_is_raised_to_who_asked(bench):
    with pytest.raises(KeyError, match="unheard"):
        asked(bench, 100)(spending.Key("update"), lambda: "unheard")


def test_nothing_is_compiled_twice_and_what_was_too_large_stays_so(bench):
    bench.seconds = {"small": 1, "huge": 1}
    ask, refuse = asked(bench, 100), lambda: pytest.fail("built again")
    assert ask(spending.Key("update", 1), lambda: "small") is FIGURES
    bench.now = 500.0  # what is known costs no time
    assert ask(spending.Key("update", 1), refuse) is FIGURES
    bench.now = 100.0
    for build in (lambda: "huge", refuse):
        with pytest.raises(compiler.TooLarge, match="as the compiler says"):
            ask(spending.Key("update", 2), build)
    assert bench.compiled == ["small", "huge"] and "too large" in bench.said[-1]


def test_the_most_telling_programs_are_compiled_first_and_the_page_is_told_of_the_others(bench):
    counted = {name: estimate.Estimate(7.0, 0, 0) for name in ("apply", "states", "update")}
    made = types.SimpleNamespace()
    bench.seconds = dict.fromkeys(counted, 40)

    def one(made, name, **_):
        return name
    plan = types.SimpleNamespace(spec=types.SimpleNamespace(layers=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.sources, "one", one)
        found = compiled.all_of(plan, made, counted, ask=asked(bench, 85))
    assert bench.compiled == ["update", "states"] and list(found) == list(counted)
    assert found["update"].temporary == FIGURES.temporary + FIGURES.result
    assert (found["apply"].temporary, found["apply"].source) == (
        7.0, "counted from shapes; not compiled: time")
