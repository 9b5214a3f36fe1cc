"""Look-up drafts: what followed the same tokens before, in this request or in any other.

Requests repeat parts of their prompts, of each other and of themselves. So the last tokens of a
request have often occurred before, and the tokens that followed them then are a draft that costs
almost nothing. A `History` keeps the tokens of all requests, and an index from each pair of tokens
to the places after it:

    places    those after the last two tokens, each compared backwards: only the longest match
              stays, and among equal ones those in the request itself
    a vote    of the tokens there; places that voted for another are dropped, and the rest vote on
              the next token, and so on
    a chance  how often a vote of its class was right so far: (length of the match, share of votes)
    k         drafts: the best (1 + P_1 + … + P_k) / cost(k), where P_j is the product of the
              first j chances (gamma.py). Often that is 0

The chances are measured on every token, drafted or not, because the output itself shows which votes
were right. So there are no thresholds, and no trial drafts are needed.

These drafts have one-hot distributions. A draft x is then accepted with probability p(x) token by
token, as a block and in coupled mode alike: min(1, p(x) / 1) = p(x), and the target's own pick is x
with probability p(x). So they are always verified in coupled mode, which needs no q, and the output
is that of plain decoding with the same seed. It does not depend on what was drafted, and therefore
not on the other requests in the history.

Invariant: matches never cross from one request into another. A place at the end of its request has
no follower, and does not vote.
Cost: 0.01 ms of plain Python where little matches, 0.05 ms where much does, and 0.4 ms where all
MOST_PLACES places match. A token in the history takes about 300 bytes. Of requests that have ended,
only MOST_TOKENS tokens are kept; the oldest requests are dropped first, each as a whole.

If clients share a history, one client could find out what another has asked, because accepted
drafts arrive faster (arXiv:2411.01076). So the server shares a history only if clients need its
--api-key; otherwise each request has one of its own, and only the chances are shared.

Prompt look-up: Saxena 2023; Yang et al. 2023, LLMA (arXiv:2304.04487). Across requests: Oliaro et
al. 2024, SuffixDecoding (arXiv:2411.04975).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from devices import send
from drafters import Drafter
from gamma import MAX_GAMMA
from model import Features
from request import Request
from speculative import Proposal, Round

if TYPE_CHECKING:
    from runner import ScheduledRequest

LONGEST = 24  # tokens of a match that are compared
MOST_PLACES = 64  # the newest ones of each pair
MOST_TOKENS = 2**17  # of requests that have ended
LEAST_CHANCE = 0.05  # that all drafts so far are accepted; below it, no more are looked up

Place = tuple[list[int], int]  # a request's tokens, and the index after a pair
Votes = tuple[int, int]  # a class of votes: length of the match, share in quarters
FORCED: Votes = (0, 0)  # tokens that a grammar forces


class Found(NamedTuple):
    """Drafts that were looked up."""

    tokens: list[int]
    classes: list[Votes]
    chances: list[float]  # P_j: that this draft and all before it are accepted


class History:
    """The tokens of requests. Their lists are kept, not copied: they grow with the requests."""

    def __init__(self, is_shared: bool = True):
        self.is_shared = is_shared  # False: each request gets one for itself (`LookupDrafter`)
        self.places = defaultdict[tuple[int, int], list[Place]](list)  # after a pair of tokens
        # By the id of a list: the list, and how many of its tokens are in `places`.
        self.texts: dict[int, tuple[list[int], int]] = {}
        self.ended: dict[int, int] = {}  # the number of tokens of those that have ended
        # Of each class, how many votes were right, and how many there were; before the first, as if
        # one of three had been right.
        self.right = defaultdict[Votes, list[float]](lambda: [1.0, 3.0])

    def update(self, text: list[int], stop: int | None = None) -> None:
        """Index the tokens that are new: all, or those before `stop`."""
        _, start = self.texts.get(id(text), (text, 1))
        stop = max(start, stop or len(text))
        for end in range(start + 1, stop + 1):
            places = self.places[text[end - 2], text[end - 1]]
            places.append((text, end))
            if len(places) > 2 * MOST_PLACES:
                del places[:MOST_PLACES]
        self.texts[id(text)] = text, stop
        self.ended.pop(id(text), None)  # it goes on, after a preemption

    def end(self, text: list[int]) -> None:
        """A request has ended, or is preempted: it may be forgotten."""
        self.update(text, stop=1)  # it is known, even if nothing was read of it
        self.ended[id(text)] = len(text)
        while sum(self.ended.values()) > MOST_TOKENS:
            self._forget(next(iter(self.ended)))

    def _forget(self, key: int) -> None:
        del self.ended[key]
        text, _ = self.texts.pop(key)
        for pair in {*zip(text, text[1:])}:
            places = self.places[pair]
            places[:] = [place for place in places if place[0] is not text]
            if not places:
                del self.places[pair]

    def longest(self, text: list[int]) -> tuple[int, list[Place]]:
        """The length of the longest match of the last tokens, and the places after it: those of
        the request itself, if there are any; none if the last two tokens were never seen."""
        best = 0
        found: list[Place] = []
        for place in self.places.get((*text[-2:],), ())[-MOST_PLACES:]:
            length = match_length(text, *place)
            if length > best:
                best = length
                found = []
            if length == best > 0:
                found.append(place)
        own = [place for place in found if place[0] is text]
        return best, own or found

    def look_up(self, text: list[int], count: int) -> Found:
        """At most `count` drafts."""
        found = Found([], [], [])
        length, places = self.longest(text)
        chance = 1.0
        while places and len(found.tokens) < count and chance >= LEAST_CHANCE:
            followers = [other[end] for other, end in places]
            newest_first = dict.fromkeys(reversed(followers))  # `max` takes the first of equal ones
            token = max(newest_first, key=followers.count)
            share = 4 * followers.count(token) // len(followers)
            kind = min(length + len(found.tokens), LONGEST // 2), share
            chance *= self.chance(kind)
            found.tokens.append(token)
            found.classes.append(kind)
            found.chances.append(chance)
            places = [
                (other, end + 1)
                for (other, end), follower in zip(places, followers)
                if follower == token and end + 1 < len(other)
            ]
        return found

    def chance(self, kind: Votes) -> float:
        """How often a vote of this class is right."""
        right, total = self.right[kind]
        return right / total

    def learn(self, found: Found, new: Sequence[int]) -> None:
        """new: the tokens that were generated where these drafts were looked up."""
        for kind, token, follower in zip(found.classes, found.tokens, new):
            votes = self.right[kind]
            votes[1] += 1
            if token != follower:
                return  # the votes after it were about another text
            votes[0] += 1


def match_length(text: Sequence[int], other: Sequence[int], end: int) -> int:
    """How many of the last tokens, at most LONGEST, are those before this place, where at least two
    are; 0 if nothing follows there."""
    if end == len(other):
        return 0
    length = 2
    most = min(LONGEST, end, len(text))
    while length < most and other[end - length - 1] == text[-length - 1]:
        length += 1
    return length


class LookupDrafter(Drafter):
    """Looks up drafts in a history. What a grammar forces comes first."""

    is_coupled = True
    sees_each_token = True  # the next one may have a match

    def __init__(self, history: History | None = None):
        super().__init__()
        self.history = history or History()
        self.histories: dict[Request, History] = {}  # of each request that is open
        self.found: dict[Request, tuple[int, Found]] = {}  # at which length of the text

    def history_of(self, request: Request) -> History:
        if request not in self.histories:
            history = self.history
            if not history.is_shared:
                history = History()
                history.right = self.history.right
            self.histories[request] = history
        return self.histories[request]

    def look_up(self, request: Request) -> Found:
        """The drafts of the next round, at most MAX_GAMMA unless the request asks for more."""
        length, found = self.found.get(request, (0, None))
        if length != len(request.tokens):
            history = self.history_of(request)
            history.update(request.tokens)
            count = max(MAX_GAMMA, request.settings.gamma or 0)
            found = self._look_up(request, history, count)
            self.found[request] = len(request.tokens), found
        return found

    def _look_up(self, request: Request, history: History, count: int) -> Found:
        state = request.grammar_state
        if state is None:
            return history.look_up(request.tokens, count)
        forced = state.forced(count)
        if forced:
            chance = history.chance(FORCED)
            chances = [chance**j for j in range(1, len(forced) + 1)]
            return Found(forced, [FORCED] * len(forced), chances)
        found = history.look_up(request.tokens, count)
        return found._replace(tokens=state.allowed(found.tokens))

    def chances(self, request: Request) -> list[float]:
        found = self.look_up(request)
        return found.chances[: len(found.tokens)]

    def most(self, request: Request, wanted: int) -> int:
        return min(wanted, len(self.look_up(request).tokens))

    def propose(self, round: Round) -> Proposal:
        rows = []
        for request, count in zip(round.requests, round.num_drafts):
            tokens = self.look_up(request).tokens[:count] if count else []
            padding = [-1] * (round.width - 1 - len(tokens))
            rows.append(tokens + padding)
        return Proposal(send(rows, round.device), None)

    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features | None) -> None:
        for item in scheduled:
            request = item.request
            history = self.history_of(request)
            if request in self.found:
                length, found = self.found.pop(request)
                history.learn(found, request.tokens[length:])
            # Of a prompt, as much as the target reads in a step: indexing a long one takes a while.
            history.update(request.tokens, None if item.samples else item.stop)

    def close(self, request: Request) -> None:
        self.found.pop(request, None)
        if request in self.histories:
            self.histories.pop(request).end(request.tokens)


class FirstLookUp(Drafter):
    """Two drafters: of each request, the one whose first draft is likelier to be accepted. A
    look-up costs nothing, so it is preferred if they are equal.

    The other drafts for a request with a grammar: the masks of a round are filled for the drafts of
    one drafter.
    """

    is_coupled = True  # the history decides who drafts, and must not change an output
    sees_each_token = True

    def __init__(self, lookup: LookupDrafter, other: Drafter):
        super().__init__()
        self.lookup = lookup
        self.other = other
        self.shares_target_cache = other.shares_target_cache
        self.feature_layers = other.feature_layers
        self.chosen: dict[Request, tuple[int, Drafter]] = {}  # at which length of the output

    def drafter_of(self, request: Request) -> Drafter:
        """The one that drafts in the next round."""
        length, drafter = self.chosen.get(request, (0, self.other))
        if length != len(request.tokens):
            drafter = self._choose(request)
            self.chosen[request] = len(request.tokens), drafter
        return drafter

    def _choose(self, request: Request) -> Drafter:
        if request.settings.follows is not None:
            return self.other
        found = self.lookup.chances(request)
        if not found:
            return self.other
        can_draft = self.other.most(request, 1) > 0
        if can_draft and self.other.chances(request)[0] > found[0]:
            return self.other
        return self.lookup

    def chances(self, request: Request) -> Sequence[float]:
        return self.drafter_of(request).chances(request)

    def most(self, request: Request, wanted: int) -> int:
        return self.drafter_of(request).most(request, wanted)

    def of_other(self, item: ScheduledRequest) -> ScheduledRequest:
        """A plan, with the drafts of the other drafter alone."""
        is_others = self.drafter_of(item.request) is self.other
        return item if is_others else item._replace(num_drafts=0)

    def num_to_read(self, item: ScheduledRequest) -> int:
        return self.other.num_to_read(self.of_other(item))

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        return self.other.fits([*map(self.of_other, scheduled)])

    def propose(self, round: Round) -> Proposal:
        proposal = round.no_drafts()
        for drafter in (self.lookup, self.other):
            num_drafts = []
            for request, count in zip(round.requests, round.num_drafts):
                num_drafts.append(count if self.drafter_of(request) is drafter else 0)
            if any(num_drafts):
                drafts = drafter.propose(round.with_drafts(num_drafts)).tokens
                columns = proposal.tokens[:, : drafts.shape[1]]
                torch.maximum(columns, drafts, out=columns)  # −1 is no draft
        return proposal

    def observe(self, request: Request) -> None:
        _, drafter = self.chosen.get(request, (0, self.other))
        drafter.observe(request)

    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features | None) -> None:
        self.lookup.learn(scheduled, features)
        self.other.learn(scheduled, features)

    def close(self, request: Request) -> None:
        self.chosen.pop(request, None)
        self.lookup.close(request)
        self.other.close(request)


def main() -> None:
    """Demonstration: the same question about other names, again and again, at temperature 0. The
    more was answered before, the more of an answer is looked up."""
    model = Model.load("tiny")
    for name in ("Tom", "Lily", "Ben", "Mia", "Sam"):
        prompt = f"One day, {name} went to the park with a big red ball."
        drafts = generate(prompt, model, draft="ngram", temperature=0, max_tokens=80, gamma=8)
        print(f"{name:5} {drafts.speculation.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    from generate import generate
    from loading import Model

    main()
