"""Which text has which place of a batch."""
from batcher import Batcher
from kvcache import KVCache
from measure.pair import random_request
from measure.traffic import Blank, timeline
from speculative import Decoder


def test_the_timeline_shows_who_had_which_place_and_what_was_in_vain():
    batch, requests = Batcher(Decoder(Blank(), KVCache(1, 1, 1, 8, 2), 2), 2), [random_request(4, n, n) for n in (3, 1, 2)]
    assert timeline(batch, requests, [3, 1, 1], first=1) == ["bbb", "cd·"]
