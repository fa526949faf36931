"""Complete prompts with a model: text in, text out.

    python -m dapo_jax.generate --config=configs/quickstart.py --workdir=DIR --prompt=12+35=
    python -m dapo_jax.generate --config=configs/quickstart.py --workdir=DIR --prompt=- --greedy=1

`--prompt=-` reads a prompt from each line of standard input; "\\n" in a prompt is a new line. With
`task.chat` a prompt is the user's message. Without --workdir the model is the configuration's own,
untrained. Temperature, top-k, top-p, stops and limits are those of config.rollout. Completions go
to standard output, speed to standard error.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np

from dapo_jax import command_line, config, evaluate, setup, types
from dapo_jax.data import prompts
from dapo_jax.rollout import collect, stops
from dapo_jax.rollout import engine as engines
from dapo_jax.text import chat as chats

VISIT = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completion as text."""

    prompt: int  # place among the prompts
    text: str
    tokens: int
    stopped: bool  # false: cut at the limit


def generate(
    model: setup.Model, params: types.Tree, texts: Sequence[str], *, samples: int, greedy: bool
) -> tuple[list[Completion], float]:
    """`samples` completions of each text and the seconds they took, compiling left out.

    The same seed gives the same completions of a text, whatever texts stand beside it but not
    before it. Raises ConfigError for a prompt that is too long or cannot be encoded.
    """
    table = _table(model, texts)
    changes = {"temperature": 0.0} if greedy else {}
    engine = engines.compile_engine(
        model.spec, setup.sampling(model, **changes), model.mesh,
        **setup.engine_shape(model, samples))
    ids = np.arange(len(table), dtype=np.int32)
    plan = types.Plan(prompt=ids, visit=np.full_like(ids, VISIT), group=ids,
                      size=np.full_like(ids, samples))
    begun = time.perf_counter()
    drawn = engines.run(engine, params, plan, table=table, root=setup.key(model, setup.EVALUATION),
                        step=0)
    seconds = time.perf_counter() - begun
    drawn = stops.cut(drawn, model.tokenizer.spelled, model.stop_texts)
    return [Completion(int(drawn.prompt[row]), collect.decode(model.tokenizer, drawn, row),
                       int(drawn.length[row]), bool(drawn.stopped[row]))
            for row in range(len(drawn))], seconds


def _table(model: setup.Model, texts: Sequence[str]) -> types.PromptTable:
    if not texts:
        raise config.ConfigError("there is no prompt: give --prompt=TEXT, or lines on standard "
                                 "input with --prompt=-")
    # Equal prompts are asked for twice on purpose: the answer field keeps them apart.
    records: Sequence[prompts.Record] = [
        {"prompt": text, "answer": str(place)} for place, text in enumerate(texts)]
    chat = chats.configured(model.cfg.tokenizer, model.tokenizer)
    records = prompts.in_chat(records, chat, wrap=model.cfg.task.chat)
    limits = dataclasses.replace(model.cfg.prompts, too_long="error")
    table, _ = prompts.table(records, model.tokenizer, limits, stop_id=model.stop_ids[0])
    return table


def _texts(given: str) -> list[str]:
    lines = sys.stdin.read().splitlines() if given == "-" else [given]
    return [line.replace("\\n", "\n") for line in lines if line]


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.generate", purpose=__doc__, extra={
            "prompt": command_line.Flag(None, "a prompt; -: one from each line of standard input"),
            "workdir": command_line.Flag("", "directory of a run; empty: the untrained model"),
            "checkpoint": command_line.Flag(-1, "step; -1: the newest"),
            "samples": command_line.Flag(1, "completions of each prompt"),
            "greedy": command_line.Flag(0, "1: the likeliest token at each place")})
    if flags["samples"] < 1:
        raise config.ConfigError(f"--samples={flags['samples']}: at least 1")
    if cfg.environment.name:
        raise config.ConfigError(
            "config.environment.name is set, but a prompt alone has no right answer to play an "
            "episode with: add --config.environment.name= for the model's first turn, or look at "
            "DIR/eval, whose pages show episodes")
    texts = _texts(flags["prompt"])
    model = setup.open_model(cfg)
    _, params = evaluate.starting_point(model, flags["workdir"] or evaluate.UNTRAINED,
                                        wanted=flags["checkpoint"])
    made, seconds = generate(model, params, texts, samples=flags["samples"],
                             greedy=bool(flags["greedy"]))
    for one in made:
        print(one.text.rstrip("\n") + ("" if one.stopped else " [cut at the limit]"))
    tokens = sum(one.tokens for one in made)
    print(f"{len(made)} completions, {tokens} tokens in {seconds:.2f} s: "
          f"{tokens / max(seconds, 1e-9):.0f} tokens per second", file=sys.stderr)
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
