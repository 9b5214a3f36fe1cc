"""Thoughts: what a reasoning model writes before its answer.

    <think>                    or, where the prompt ends with <think>:    hm
    hm                                                                     </think>
    </think>
                                                                           Hi
    Hi

`find_thoughts` asks the model's chat template for the tags, `ThoughtReader` divides an answer that
comes in pieces, and `after_thoughts` makes a grammar begin behind the thoughts. So a call that is
drafted in thoughts is none, and a schema is for the answer alone.

Invariant: thoughts and answer do not depend on how a text is cut into pieces.
Not covered: thoughts that come later than at the beginning; tags that are control tokens, which no
text spells (Magistral, gpt-oss).
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import regex  # it matches texts that break off amid a pattern; `re` does not

SPACE = r"\s{0,9}"  # bounded: a reader holds back what may become a tag
ASKED = {"role": "user", "content": "zqasked"}  # texts that no template has
THOUGHT = "zqthought"
ANSWER = "zqanswer"


class Thoughts(NamedTuple):
    """What thoughts stand between."""

    opening: str
    closing: str

    def begin_in(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins amid the thoughts."""
        return prompt.rstrip().endswith(self.opening)


def find_thoughts(lay_out: Callable[..., str], source: str) -> Thoughts | None:
    """The tags of a chat template's thoughts; None: it knows of none. lay_out: the text that it
    makes of a conversation, or nothing if it fails. Of its tags <…> or […] it is the pair

        around the thoughts of an answer,
        or up to which a later prompt cuts an earlier answer,
        or whose opening ends a prompt, though no answer of a conversation begins with it.
    """
    prompt = lay_out([ASKED], True)
    told = lay_out([ASKED, answer(ANSWER, reasoning_content=THOUGHT)])
    head = lay_out([ASKED, answer(ANSWER)]).partition(ANSWER)[0]
    found = re.findall(r"(<)/?(\w+)(>)|(\[)/?(\w+)(\])", source)
    for left, word, right in dict.fromkeys(tag[:3] if tag[0] else tag[3:] for tag in found):
        tags = Thoughts(left + word + right, f"{left}/{word}{right}")
        opening, closing = map(re.escape, tags)
        past = lay_out([ASKED, answer(f"{tags.opening}{THOUGHT}{tags.closing}{ANSWER}"), ASKED])
        is_around = re.search(rf"{opening}\s*{THOUGHT}\s*{closing}", told)
        is_cut = ANSWER in past and THOUGHT not in past
        begins = tags.begin_in(prompt) and not tags.begin_in(head)
        if is_around or is_cut or begins:
            return tags
    return None


def answer(content: str, **fields: str) -> dict[str, str]:
    return {"role": "assistant", "content": content} | fields


class ThoughtReader:
    """Divides an answer, which comes in pieces. is_inside: it begins amid the thoughts."""

    def __init__(self, tags: Thoughts | None, is_inside: bool):
        self._rest = ""  # the end of the text, which is not divided yet
        self._skips_space = is_inside
        self._is_before = tags is not None and not is_inside
        self._is_inside = is_inside
        if tags is not None:
            opening, closing = map(regex.escape, tags)
            self._opening = regex.compile(SPACE + opening)
            self._closing = regex.compile(SPACE + closing)

    def feed(self, piece: str, is_last: bool) -> tuple[str, str]:
        """Read the next piece: what is new of the thoughts, and of the answer."""
        self._rest += piece
        thoughts = ""
        if self._is_before:
            match = self._opening.match(self._rest, partial=not is_last)
            if match is not None and match.partial:
                return "", ""
            self._is_before = False
            if match is not None:
                self._rest = self._rest[match.end() :]
                self._is_inside = self._skips_space = True
        if self._is_inside:
            match = self._closing.search(self._rest, partial=not is_last)
            size = len(self._rest) if match is None else match.start()
            thoughts = self._take(size)
            if match is None or match.partial:
                return thoughts, ""
            self._rest = self._rest[match.end() - match.start() :]
            self._is_inside = False
            self._skips_space = True
        return thoughts, self._take(len(self._rest))

    def _take(self, size: int) -> str:
        """So much of the rest, without white space behind a tag."""
        taken = self._rest[:size]
        self._rest = self._rest[size:]
        if self._skips_space:
            taken = taken.lstrip()
            self._skips_space = not taken
        return taken


def after_thoughts(tags: Thoughts, is_inside: bool, lark: str) -> str:
    """The grammar, in Lark, of thoughts and then of what another one, in Lark, takes. Where the
    prompt does not begin the thoughts, the answer need not have any."""
    opening, closing = (re.escape(tag).replace("/", r"\/") for tag in tags)
    thoughts = "thoughts SPACE" if is_inside else "(OPENING thoughts SPACE)?"
    return rf"""start: {thoughts} answer
OPENING: /{SPACE}{opening}/
thoughts[lazy]: /(?s:.*){closing}/
SPACE: /{SPACE}/
answer: %lark {{
{lark}
}}"""
