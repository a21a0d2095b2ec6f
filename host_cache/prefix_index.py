"""Finding chunks by what they hold: a chained hash of all tokens up to the chunk's end.

A key covers everything before the chunk too, and begins with the identity of model, dtype and tenant. It
has 128 bits of BLAKE2b, so that two contents under one key are not a risk to be handled.
"""

import hashlib
from array import array

import numpy as np

KEY_BYTES = 16
EMPTY, GONE = -1, -2
"""Slots of the table that never held a chunk, and that held one."""


class Keys:
    """Keys of a conversation's first full chunks, packed."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytearray | None = None) -> None:
        self._packed = bytearray() if packed is None else packed

    def __len__(self) -> int:
        return len(self._packed) // KEY_BYTES

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._packed[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def append(self, key: bytes) -> None:
        """Add the key of the next chunk."""
        self._packed += key

    def cut(self, count: int) -> None:
        """Keep the first `count` keys."""
        del self._packed[count * KEY_BYTES :]

    def first(self, count: int) -> "Keys":
        """A copy of the first `count` keys."""
        return Keys(self._packed[: count * KEY_BYTES])


class PrefixIndex:
    """Key of a full chunk -> the chunk that holds it, for chunks in some tier.

    A hash table with open addressing over arrays: a dictionary of bytes would need several times the
    memory of everything else that is known of a chunk.
    """

    def __init__(self, *, identity: bytes, page_tokens: int) -> None:
        """Args:
        identity: distinguishes models, weights and dtypes.
        page_tokens: tokens of a chunk.
        """
        self._identity = identity
        self._page_tokens = page_tokens
        self._slots = array("i", [EMPTY]) * 64
        """Chunk numbers; the length is a power of two."""
        self._num_used = 0
        """Slots that aren't `EMPTY`."""
        self._num_chunks = 0
        self._keys = bytearray()
        """By chunk number; zeros for a chunk that isn't in the index."""

    def __len__(self) -> int:
        return self._num_chunks

    def extend(self, keys: Keys, tokens: np.ndarray, tenant: str) -> None:
        """Add the keys of all full chunks of a conversation.

        Args:
            keys: of its first chunks; the missing ones are appended.
            tokens: i32[n]: its tokens.
            tenant: whose conversation it is; nothing is shared between tenants.
        """
        known, full = len(keys), len(tokens) // self._page_tokens
        if known >= full:
            return
        if known:
            parent = keys[known - 1]
        else:
            root = hashlib.blake2b(tenant.encode(), key=self._identity[:64], digest_size=KEY_BYTES)
            parent = root.digest()
        width = 4 * self._page_tokens
        data = np.ascontiguousarray(tokens[known * self._page_tokens :], np.int32).tobytes()
        for start in range(0, (full - known) * width, width):
            parent = hashlib.blake2b(parent + data[start : start + width], digest_size=KEY_BYTES).digest()
            keys.append(parent)

    def find(self, key: bytes) -> int | None:
        """The chunk of that key, or None."""
        chunk = self._slots[self._slot(key)]
        return None if chunk == EMPTY else chunk

    def add(self, key: bytes, chunk: int) -> None:
        """Enter a chunk that has become full, unless another one holds the same."""
        slot = self._slot(key)
        if self._slots[slot] != EMPTY:
            return
        if len(self._keys) < (chunk + 1) * KEY_BYTES:
            self._keys.extend(bytes((chunk + 1) * KEY_BYTES - len(self._keys)))
        self._keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES] = key
        self._slots[slot] = chunk
        self._num_used += 1
        self._num_chunks += 1
        if 3 * self._num_used > 2 * len(self._slots):
            self._rebuild()

    def remove(self, chunk: int) -> None:
        """Take a chunk out that is in no tier any more, if it is in."""
        key = self._key(chunk)
        if not any(key):
            return
        self._slots[self._slot(key)] = GONE
        self._keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES] = bytes(KEY_BYTES)
        self._num_chunks -= 1

    def _key(self, chunk: int) -> bytes:
        return bytes(self._keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])

    def _slot(self, key: bytes) -> int:
        """Where a key is, or the empty slot that ends the search for it."""
        slots = self._slots
        mask = len(slots) - 1
        slot = int.from_bytes(key[:8]) & mask
        while (chunk := slots[slot]) != EMPTY:
            if chunk != GONE and self._key(chunk) == key:
                return slot
            slot = (slot + 1) & mask
        return slot

    def _rebuild(self) -> None:
        """Enter all chunks anew, into a table at most a third full."""
        chunks = [chunk for chunk in self._slots if chunk >= 0]
        self._slots = array("i", [EMPTY]) * max(64, 1 << (3 * len(chunks)).bit_length())
        self._num_used = len(chunks)
        for chunk in chunks:
            self._slots[self._slot(self._key(chunk))] = chunk
