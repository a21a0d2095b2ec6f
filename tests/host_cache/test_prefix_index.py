"""The index of chunks by content, against a dictionary."""

import random

import numpy as np

from host_cache.prefix_index import Keys, PrefixIndex


def test_like_a_dictionary():
    index, rng = PrefixIndex(identity=b"m", page_tokens=4, most_chunks=10_000), random.Random(0)
    known = {}
    for _ in range(4_000):
        key = rng.randrange(1, 4000).to_bytes(8, "little") * 2
        if rng.random() < 0.6:
            chunk = rng.randrange(10_000)
            if chunk not in known.values():
                index.add(key, chunk)
                known.setdefault(key, chunk)
        elif known:
            gone = rng.choice(list(known))
            index.remove(known.pop(gone))
        assert index.find(key) == known.get(key)
    assert len(index) == len(known) > 100
    assert all(index.find(key) == chunk for key, chunk in known.items())


def test_keys_depend_on_everything_before_and_on_whose_they_are():
    def keys(tokens, *, identity=b"model", tenant=""):
        made = Keys()
        PrefixIndex(identity=identity, page_tokens=4, most_chunks=9).extend(
            made, np.array(tokens, np.int32), tenant
        )
        return [made[i] for i in range(len(made))]

    base = keys(range(12))
    assert len(base) == 3
    assert keys(range(11)) == base[:2]
    assert keys([9, *range(1, 12)])[1] != base[1], "an earlier chunk counts"
    assert keys(range(12), identity=b"other")[0] != base[0]
    assert keys(range(12), tenant="other")[0] != base[0]


def test_keys_are_extended_cut_and_copied():
    index, keys, tokens = (
        PrefixIndex(identity=b"", page_tokens=4, most_chunks=9),
        Keys(),
        np.arange(40, dtype=np.int32),
    )
    index.extend(keys, tokens[:9], "")
    index.extend(keys, tokens, "")
    whole = Keys()
    index.extend(whole, tokens, "")
    assert [keys[i] for i in range(10)] == [whole[i] for i in range(10)]
    copy = keys.first(3)
    keys.cut(1)
    assert (len(keys), len(copy)) == (1, 3)
