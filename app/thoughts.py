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
        return prompt.endswith(self.opening)


def find_thoughts(lay_out: Callable[..., str], source: str) -> Thoughts | None:
    """The tags of a chat template's thoughts; None: it knows of none. lay_out: the text that it
    makes of a conversation, or nothing if it fails. Of its tags <…> or […] it is the pair

        around the thoughts of an answer,
        or up to which a later prompt cuts an earlier answer,
        or whose opening ends a prompt, though no answer of a conversation begins with it.
    """
    prompt = lay_out([ASKED], True).rstrip()
    told = lay_out([ASKED, answer(ANSWER, reasoning_content=THOUGHT)])
    head = lay_out([ASKED, answer(ANSWER)]).partition(ANSWER)[0].rstrip()
    opened = re.sub(r"([<\[])/", r"\1", source)
    for tag in dict.fromkeys(re.findall(r"<\w+>|\[\w+\]", opened)):
        tags = Thoughts(tag, f"{tag[0]}/{tag[1:]}")
        opening, closing = map(re.escape, tags)
        thinking = answer(f"{tags.opening}{THOUGHT}{tags.closing}{ANSWER}")
        past = lay_out([ASKED, thinking, ASKED])
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
        self._tags: list[regex.Pattern] = []  # those that are still to come
        if tags is not None:
            opening, closing = (SPACE + regex.escape(tag) for tag in tags)
            self._tags = [regex.compile(closing)]
            if not is_inside:
                self._tags.insert(0, regex.compile(rf"^{opening}"))
        self._skips_space = is_inside

    def feed(self, piece: str, is_last: bool) -> tuple[str, str]:
        """Read the next piece: what is new of the thoughts, and of the answer."""
        self._rest += piece
        thoughts = ""
        while self._tags:
            match = self._tags[0].search(self._rest, partial=not is_last)
            if match is None and len(self._tags) == 2:
                self._tags = []  # the answer does not begin with thoughts
                break
            thoughts += self._take(len(self._rest) if match is None else match.start())
            if match is None or match.partial:
                return thoughts, ""
            self._rest = self._rest[len(match[0]) :]
            self._tags.pop(0)
            self._skips_space = True
        return thoughts, self._take(len(self._rest))

    def _take(self, size: int) -> str:
        """The first characters of the rest, without white space behind a tag."""
        taken = self._rest[:size]
        self._rest = self._rest[size:]
        if self._skips_space:
            taken = taken.lstrip()
            self._skips_space = not taken
        return taken


def after_thoughts(tags: Thoughts, is_inside: bool, answer: str) -> str:
    """The grammar, in Lark, of thoughts and then of an answer: a part of Lark. Where the prompt
    does not begin the thoughts, there need not be any."""
    opening, closing = (re.escape(tag).replace("/", r"\/") for tag in tags)
    thoughts = "thoughts SPACE" if is_inside else "(OPENING thoughts SPACE)?"
    return rf"""start: {thoughts} answer
OPENING: /{SPACE}{opening}/
thoughts[lazy]: /(?s:.*){closing}/
SPACE: /{SPACE}/
answer: {answer}"""
