"""Calls of a tool that stand in a text between tags, and replies that cannot be taken for one."""

import re
from collections.abc import Iterable

MOST_CALLS = 8  # answered in one turn; what is beyond them is told so


def calls(text: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, in order; a call that is not closed is none."""
    begin, end = f"<{tag}>", f"</{tag}>"
    found, at = [], text.find(begin)
    # A regular expression would look for the end again after each of many tags that none follows.
    while at >= 0 and (stop := text.find(end, at + len(begin))) >= 0:
        found.append(text[at + len(begin):stop])
        at = text.find(begin, stop + len(end))
    return found


def reply(results: Iterable[str], tag: str) -> str:
    """Results between <tag> and </tag>, a line each."""
    return "".join(f"<{tag}>{plain(result)}</{tag}>\n" for result in results)


def plain(text: str) -> str:
    """The text with nothing in it that looks like a tag or a chat's own mark.

    A tool's output is a stranger's: it must not close its own tag, open a call, or pass for the
    start of a message. That it holds no special *tokens* is for whoever encodes it.
    """
    return re.sub(r"<(?=[/|\uff5cA-Za-z])|\[(?=/?INST\])", lambda found: found[0] + " ", text)
