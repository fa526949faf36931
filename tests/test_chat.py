"""Chat templates: rendered as `transformers` renders them, and harmless whoever wrote them."""

import dataclasses

import numpy as np
import pytest
import vocabularies

from dapo_jax import config
from dapo_jax.text import chat, folder, gguf_vocabulary, tokenizer

# Small ones in the manner of three families.
CHATML = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "no day" %}
{%- if tools is not none %}{{ raise_exception("no tools here") }}{% endif %}
{{- "<|im_start|>system<|im_end|>\\n\\nToday: " + date + "\\n" }}
{%- for m in messages %}
{%- set text = m['content'] | trim %}
    {{- '<|im_start|>' + m['role'] + "<|im_end|>\\n\\n" + text + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\\n\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate: user, assistant, ...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start>' + role + '\n' + message['content'] | trim + '<end>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start>model' }}
{% endif %}
"""
BLOCKS = """{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
HELPERS = """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% set ns = namespace(n=0) %}{% for c in m.content %}{% set ns.n = ns.n + 1 %}
{% if ns.n > 3 %}{% break %}{% endif %}{% endfor %}
{{ ns.n }} {{ m | tojson }} {{ {'k': "<é'&>"} | tojson(indent=2) }} {{ pad_token }}
{{ m.content[::-1] }}
{% endfor %}"""

USER = {"role": "user", "content": " What is 2+2? "}
ANSWER = {"role": "assistant", "content": "It is <4>."}
CHATS = ([USER], [USER, ANSWER, {"role": "user", "content": "日本\nand é?"}],
         [USER, ANSWER], [{"role": "system", "content": "S"}, USER])


def made(template, **changes):
    return chat.Chat(template, (("bos_token", "<s>"), ("eos_token", "</s>")), **changes)


# ---------------------------------------------------------------------------------- as transformers


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, BLOCKS, HELPERS])
@pytest.mark.parametrize("prompted", [True, False])
def test_texts_and_ids_equal_those_of_transformers(tmp_path, template, prompted):
    transformers = pytest.importorskip("transformers")
    path = vocabularies.folder(tmp_path, "bytes", adds_bos=True, chat_template=template)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    ours = folder.from_folder(str(path))
    asked = chat.configured(config.Tokenizer(), ours)
    if template == LLAMA3:  # today is not the same tomorrow
        asked = dataclasses.replace(asked, date="2024-02-03")
    for messages in CHATS:
        try:
            wanted = reference.apply_chat_template(messages, tokenize=False,
                                                   add_generation_prompt=prompted)
        except Exception as error:
            assert "alternate" in str(error)
            with pytest.raises(config.ConfigError, match="alternate"):
                chat.render(asked, messages, add_generation_prompt=prompted)
            continue
        text = chat.render(asked, messages, add_generation_prompt=prompted)
        if template == LLAMA3:
            assert "Today: 03 Feb 2024" in text
            at = text.index("03 Feb")
            wanted = wanted[:at] + "03 Feb 2024" + wanted[at + 11:]
        assert text == wanted
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text)[ours.encode(text)[0] == 1:] == ids[ids[0] == 1:]


def test_smollm2s_own_template_equals_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")  # its GGUF reader wants it
    reference = transformers.AutoTokenizer.from_pretrained(
        str(smollm2.path.parent), gguf_file=smollm2.path.name)
    ours = gguf_vocabulary.from_gguf(smollm2.metadata)
    asked = chat.configured(config.Tokenizer(), ours)
    for messages in CHATS:
        text = chat.render(asked, messages)
        assert text == reference.apply_chat_template(messages, tokenize=False,
                                                     add_generation_prompt=True)
        assert ours.encode(text) == reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False)


def test_exactly_one_bos_however_template_and_encoder_are_combined(tmp_path):
    for adds in (False, True):
        path = vocabularies.folder(tmp_path, "bytes", adds_bos=adds)
        kind = folder.from_folder(str(path))
        with_bos, without = (chat.render(made(t), [USER]) for t in (LLAMA3, CHATML))
        assert [kind.encode(with_bos)[:2].count(1), kind.encode(with_bos)[0]] == [1, 1]
        assert kind.encode(without).count(1) == adds
        assert kind.encode("raw").count(1) == adds


# -------------------------------------------------------------------------- what the assistant says

TALK = [USER, ANSWER, {"role": "user", "content": "More"}, {"role": "assistant", "content": "5"}]


def generated(parts):
    return [text for text, mine in parts if mine]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, BLOCKS])
def test_segments_make_up_the_conversation_and_begin_with_the_rollouts_prompt(template):
    asked = made(template)
    parts = chat.segments(asked, TALK, first=1)
    assert parts[0] == (chat.render(asked, TALK[:1]), False)
    assert "".join(text for text, _ in parts) == chat.render(
        asked, TALK, add_generation_prompt=False)
    assert [text[:len(said)] for text, said in zip(generated(parts), ("It is <4>.", "5"))] == [
        "It is <4>.", "5"]
    later = chat.segments(asked, TALK, first=3)
    assert later[0] == (chat.render(asked, TALK[:3]), False)
    assert generated(later) == generated(parts)[1:]


def test_a_template_that_changes_earlier_turns_is_refused_by_message():
    forgetful = CHATML.replace("message.content +", "(message.content if loop.last or "
                               "message.role != 'assistant' else '') +")
    with pytest.raises(config.ConfigError, match=r"earlier text .* message 3.*'It is <4>"):
        chat.segments(made(forgetful), TALK, first=1)
    assert len(chat.segments(made(forgetful), TALK[:2], first=1)) == 2


def test_generation_blocks_tell_even_what_later_turns_change():
    forgetful = BLOCKS.replace("{{ message.content }}", "{% if loop.last %}said {% endif %}"
                               "{{ message.content }}")
    assert generated(chat.segments(made(forgetful), TALK, first=1)) == [
        "It is <4>.<|im_end|>", "said 5<|im_end|>"]
    with pytest.raises(config.ConfigError, match="U\\+FDD0"):
        chat.segments(made(BLOCKS), [{**USER, "content": "\ufdd0"}, ANSWER], first=1)
    nested = BLOCKS.replace("{{ message.content }}", "{% generation %}a{% endgeneration %}")
    with pytest.raises(config.ConfigError, match="in one another"):
        chat.segments(made(nested), TALK, first=1)


def test_masks_equal_those_of_transformers_where_it_has_blocks(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = vocabularies.folder(tmp_path, "bytes", chat_template=BLOCKS, eos_token="<|im_end|>")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    wanted = reference.apply_chat_template(TALK, return_dict=True,
                                           return_assistant_tokens_mask=True)
    ours = folder.from_folder(str(path))
    asked = chat.configured(config.Tokenizer(), ours)
    ids, mask = chat.encode(ours, chat.segments(asked, TALK, first=1), start=True)
    assert ids.tolist() == wanted["input_ids"]
    assert mask.astype(int).tolist() == wanted["assistant_masks"]


def test_a_turn_ends_at_its_stop_and_what_the_template_writes_after_it_is_not_generated(tmp_path):
    kind = folder.from_folder(str(vocabularies.folder(tmp_path, "bytes", eos_token="<|im_end|>")))
    parts = chat.segments(made(CHATML), TALK, first=1)
    ids, mask = chat.encode(kind, parts, start=True)
    assert kind.decode(ids[mask]) == "It is <4>.5"
    assert (ids[mask] == 4).sum() == 2
    whole = [i for at, (text, _) in enumerate(parts) for i in kind.encode(text, start=at == 0)]
    assert ids.tolist() == whole and ids.dtype == np.int32


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("attack", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}", "{{ raise_exception.__globals__ }}",
    "{{ (messages | attr('__class__')).__name__ }}", "{{ ''['__class__'].mro() }}",
    "{{ '{0.__class__.__init__}'.format(messages) }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}", "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id') }}", "{{ self.__init__.__globals__ }}"])
def test_a_template_reaches_nothing_outside_the_sandbox(attack):
    found = ""
    with pytest.raises(config.ConfigError, match="the chat template"):
        found = chat.render(made(attack), [USER])
        if not found.strip():  # an undefined attribute is empty text
            raise config.ConfigError("the chat template shows nothing")
    assert found.strip() == ""


@pytest.mark.parametrize("endless", [
    "{% for i in range(10**9) %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_huge_range_and_endless_recursion_end_in_an_error(endless):
    with pytest.raises(config.ConfigError, match="the chat template fails"):
        chat.render(made(endless), [USER])


def test_messages_are_not_changed_by_rendering():
    messages = [dict(USER), dict(ANSWER)]
    chat.segments(made(BLOCKS), messages, first=1)
    assert messages == [USER, ANSWER]


def test_a_template_that_is_not_jinja_is_refused_with_its_line():
    kind = tokenizer.Tokenizer(None, (), stop_ids=(0,), chat_template="a\n{% for %}")
    with pytest.raises(config.ConfigError, match="the chat template, line 2"):
        chat.configured(config.Tokenizer(), kind)
    without = dataclasses.replace(kind, chat_template=None)
    assert chat.configured(config.Tokenizer(), without) is None


def test_a_refusal_names_the_template_the_roles_and_what_is_missing():
    with pytest.raises(config.ConfigError, match=r"\['user', 'user'\].*roles must alternate"):
        chat.render(made(GEMMA), [USER, USER])
    with pytest.raises(config.ConfigError, match="strftime_now.*set config.tokenizer.chat_date"):
        chat.render(made("{{ strftime_now('%Y') }}"), [USER])
    kind = tokenizer.Tokenizer(None, (), stop_ids=(0,), chat_template="x")
    with pytest.raises(config.ConfigError, match="chat_date"):
        chat.configured(config.Tokenizer(chat_date="today"), kind)
