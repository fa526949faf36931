import signal
import threading
import time

from dapo_jax.studies import jobs


def silent(text):
    """A display that shows nothing."""


def job(folder, name, code="", made=True):
    """A process that runs `code`, then makes the file that says that it is done."""
    target = folder / name
    making = f"import pathlib; pathlib.Path({str(target)!r}).write_text('x')" if made else ""
    return jobs.Job(name, ("-c", f"{code}\n{making}"), folder / "logs" / f"{name}.txt",
                    done=target.is_file)


def test_what_is_done_is_not_started_and_the_rest_is(tmp_path):
    (tmp_path / "old").write_text("as it was")
    found = jobs.run([job(tmp_path, "old"), job(tmp_path, "new", "print('hello')")], at_once=1,
                     signals=[], show=silent)
    assert not found
    assert (tmp_path / "old").read_text() == "as it was" and (tmp_path / "new").is_file()
    assert not (tmp_path / "logs/old.txt").exists()
    assert (tmp_path / "logs/new.txt").read_text() == "hello\n"


def test_a_failure_is_reported_with_what_it_said_and_stops_nothing(tmp_path):
    chosen = [job(tmp_path, "bad", "raise SystemExit('no such luck')"),
              job(tmp_path, "idle", made=False), job(tmp_path, "good")]
    bad, idle = jobs.run(chosen, at_once=2, signals=[], show=silent)
    assert bad.name == "bad" and "exit status 1" in bad.text and "no such luck" in bad.text
    assert idle.name == "idle" and "without a result" in idle.text
    assert (tmp_path / "good").is_file()


def test_a_signal_ends_what_runs_in_order_and_starts_nothing_else(tmp_path):
    signals, begun = [], time.monotonic()
    saving = ("import pathlib, signal, sys, time\n"
              "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("
              f"{str(tmp_path / 'saved')!r}).write_text('x'), sys.exit(143)))\n"
              "time.sleep(60)")
    threading.Timer(1.5, signals.append, [signal.SIGTERM]).start()
    found = jobs.run([job(tmp_path, "long", saving), job(tmp_path, "next")], at_once=1,
                     signals=signals, show=silent)
    assert not found and time.monotonic() - begun < 30
    assert (tmp_path / "saved").is_file() and not (tmp_path / "next").is_file()


def test_only_so_many_run_at_once(tmp_path):
    stamps = ("import time, pathlib\nbegun = time.time()\ntime.sleep(0.3)\n"
              "pathlib.Path({!r}).write_text(f'{{begun}} {{time.time()}}')")
    chosen = [job(tmp_path, name, stamps.format(str(tmp_path / f"{name}_when")))
              for name in ("a", "b", "c")]
    jobs.run(chosen, at_once=1, signals=[], show=silent)
    spans = sorted(tuple(map(float, (tmp_path / f"{name}_when").read_text().split()))
                   for name in ("a", "b", "c"))
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:]))
