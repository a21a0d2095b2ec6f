"""Finding chunks by what they hold: a chained hash of all tokens up to the chunk's end.

A key covers everything before the chunk too, and begins with the identity of model, dtype and tenant. It
has 128 bits of BLAKE2b, so that two contents under one key are not a risk to be handled.
"""

import hashlib

import numpy as np

KEY_BYTES = 16
NOT_IN = -1
"""Home of a chunk that isn't in the index."""


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

    A hash table with linear probing over arrays: a dictionary of bytes would need several times the memory of
    everything else that is known of a chunk. It is as large as it will ever have to be from the start, and
    entries move up when one is taken out, so that no operation is ever slow.
    """

    def __init__(self, *, identity: bytes, page_tokens: int, most_chunks: int) -> None:
        """Args:
        identity: distinguishes models, weights and dtypes.
        page_tokens: tokens of a chunk.
        most_chunks: chunks are numbers below this.
        """
        self._identity = identity
        self._page_tokens = page_tokens
        num_slots = 1 << (most_chunks * 3 // 2).bit_length()
        self._slots = memoryview(np.zeros(num_slots, np.int32))
        """Chunk numbers plus 1; 0 where there is none."""
        self._mask = num_slots - 1
        self._num_chunks = 0
        self._keys = memoryview(np.zeros(most_chunks * KEY_BYTES, np.uint8))
        """By chunk number, for those that are in the index."""
        self._homes = memoryview(np.full(most_chunks, NOT_IN, np.int32))
        """By chunk number: the slot where the search for its key begins."""

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
        entry = self._slots[self._slot(key)]
        return entry - 1 if entry else None

    def add(self, key: bytes, chunk: int) -> None:
        """Enter a chunk that has become full, unless another one holds the same."""
        slot = self._slot(key)
        if not self._slots[slot]:
            self._keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES] = key
            self._homes[chunk] = self._home(key)
            self._slots[slot] = chunk + 1
            self._num_chunks += 1

    def remove(self, chunk: int) -> None:
        """Take a chunk out that is in no tier any more, if it is in."""
        slot = self._homes[chunk]
        if slot == NOT_IN:
            return
        self._homes[chunk] = NOT_IN
        self._num_chunks -= 1
        while self._slots[slot] != chunk + 1:
            slot = (slot + 1) & self._mask
        self._close_up(slot)

    def _home(self, key: bytes) -> int:
        return int.from_bytes(key[:8]) & self._mask

    def _slot(self, key: bytes) -> int:
        """Where a key is, or the empty slot that ends the search for it."""
        slots, mask, keys = self._slots, self._mask, self._keys
        slot = self._home(key)
        while (entry := slots[slot]) and keys[(entry - 1) * KEY_BYTES : entry * KEY_BYTES] != key:
            slot = (slot + 1) & mask
        return slot

    def _close_up(self, hole: int) -> None:
        """Empty a slot, and move the entries up that are found only past it."""
        slots, mask = self._slots, self._mask
        slot = (hole + 1) & mask
        while entry := slots[slot]:
            if (slot - self._homes[entry - 1]) & mask >= (slot - hole) & mask:
                slots[hole] = entry
                hole = slot
            slot = (slot + 1) & mask
        slots[hole] = 0
