"""The reference of the configuration holds every field as a configuration file would find it."""

import re

import pytest
from conftest import ROOT

from dapo_jax import command_line, config, config_file, config_reference

PAGE = ROOT / "docs" / "configuration.md"


def flat(values, prefix=""):
    """Dotted names and values of a ConfigDict; a placeholder's value is None."""
    found = {}
    for name in values:
        value = values[name]
        found |= flat(value, f"{prefix}{name}.") if hasattr(value, "keys") else {
            prefix + name: value}
    return found


def test_the_page_is_what_the_command_writes(tmp_path, capsys):
    assert config_reference.main([f"--out={tmp_path / 'page.md'}"]) == command_line.DONE
    made = (tmp_path / "page.md").read_text()
    assert PAGE.read_text() == made, "run python -m dapo_jax.config_reference --out=" + str(PAGE)
    assert config_reference.main([]) == command_line.DONE and capsys.readouterr().out == made
    with pytest.raises(config.ConfigError, match="--out=.*no_folder"):
        config_reference.main([f"--out={tmp_path / 'no_folder' / 'page.md'}"])


def test_every_field_has_one_row_with_its_default_its_help_and_its_choices():
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.+) \|$", PAGE.read_text(), re.M)
    fields, values = config_file.field_names(), flat(config.default())
    assert sorted(name for name, _, _ in rows) == sorted(values)
    for name, default, text in rows:
        assert default == ("preset" if values[name] is None else f"`{values[name]!r}`"), name
        text = text.replace("\\", "")
        assert fields[name].metadata["help"].replace("\\", "") in text, name
        assert all(f"`{choice}`" in text for choice in fields[name].metadata["choices"]), name


def test_help_and_reference_say_the_same_defaults(capsys):
    """A section may be made with other values than its record's: sft.samples_per_prompt is 1."""
    text = command_line.describe("x", "y", {})
    for name, value in flat(config.default()).items():
        assert f"  {name} = {'preset' if value is None else repr(value)}\n" in text, name
