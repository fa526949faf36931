"""The table of prompts of a split: small data is made in memory, large data by several processes
and once, since it is kept by its content."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence

from dapo_jax import config, types
from dapo_jax.data import encoding, files, origins, prompts, shown, sources, store, workers
from dapo_jax.envs import environments, templates
from dapo_jax.text import chat as chats
from dapo_jax.text import load as tokenizer_files
from dapo_jax.text import tokenizer as tokenizers

LOG = logging.getLogger(__name__)


def load(
    cfg: config.Config, split: str, *, tokenizer: tokenizers.Tokenizer,
    recipe: tokenizer_files.Recipe, chat: chats.Chat | None, stop_id: int,
) -> tuple[types.PromptTable, dict[str, int]]:
    """The prompts of `split`, "train" or "eval", and counts of records left out by reason.

    `recipe` is what `tokenizer` was made from. ConfigError names what cannot be used.
    """
    wrap = cfg.task.chat or templates.named(cfg.task.template).chat
    writing = encoding.Writing(cfg.task.template, chat, wrap, cfg.prompts, stop_id)
    found = _files(cfg, split)
    own = cfg.environment
    learned = bool(own.name) and split == "train" and bool(cfg.sft.steps or cfg.sft.epochs)
    if found and origins.large(found):
        if learned:
            _check_nothing_shown(own)
        return _kept(cfg, split, recipe, writing, found)
    names: list[str] = []
    records: Sequence[prompts.Record]
    if found:
        placed, counts = sources.from_places(cfg, split)
        names, records = [name for name, _ in placed], [record for _, record in placed]
    else:
        records, counts = sources.load(cfg, split)
    if learned:
        records = shown.with_episodes(records, environments.environment(own.name), own)
    records = prompts.in_chat(records, chat, wrap=wrap, names=names)
    table, more = prompts.table(records, tokenizer, cfg.prompts, stop_id=stop_id, names=names)
    return table, {name: counts.get(name, 0) + more.get(name, 0) for name in counts | more}


def _check_nothing_shown(own: config.Environment) -> None:
    """ConfigError: the environment has episodes to learn from, which large files are not given."""
    if own.demonstrated and environments.environment(own.name).shown:
        raise config.ConfigError(
            f"config.environment.demonstrated = {own.demonstrated:g}, but the training files are "
            f"of {origins.LARGE >> 20} MB or more, whose demonstrations no environment plays: set "
            "it to 0 to learn those of the files, or name smaller files")


def _files(cfg: config.Config, split: str) -> tuple[origins.Source, ...]:
    """What the split's prompts are taken from, where that is files."""
    if cfg.task.name not in sources.CONVERT:
        return ()
    return sources.used(cfg.task, split)[0]


def _kept(cfg: config.Config, split: str, recipe: tokenizer_files.Recipe,
          writing: encoding.Writing, found: tuple[origins.Source, ...]
          ) -> tuple[types.PromptTable, dict[str, int]]:
    name = _name(cfg, split, recipe, writing, found)
    kept = store.load(name)
    if kept is None:
        selected, counts = sources.select(cfg, split)
        kept = store.save(name, _encoded(selected, recipe, writing, split), order=selected.order,
                          notes=counts)
        LOG.info("%s: %d prompts prepared", split, len(kept[0]))
    return kept


def _encoded(selected: sources.Selected, recipe: tokenizer_files.Recipe,
             writing: encoding.Writing, split: str) -> Iterator[encoding.Encoded]:
    return workers.ordered(encoding.encode_chunk, selected.jobs, prepare=encoding.prepared,
                           given=(recipe, writing), title=f"preparing prompts ({split})")


def _name(cfg: config.Config, split: str, recipe: tokenizer_files.Recipe,
          writing: encoding.Writing, found: tuple[origins.Source, ...]) -> str:
    """A digest of all that the table depends on."""
    settings = [store.FORMAT, split, cfg.seed, cfg.eval.prompts, dataclasses.asdict(cfg.task),
                dataclasses.asdict(writing), tokenizer_files.fingerprint(recipe),
                sources.conversion(cfg.task)]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=20)
    paths = [source.path for source in found]
    for path in [*paths, *([cfg.task.pass_rates] if cfg.task.pass_rates else [])]:
        files.add_content(digest, path)
    return digest.hexdigest()
