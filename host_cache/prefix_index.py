"""Finding chunks by what they hold: a chained hash of all tokens up to the chunk's end.

A key covers everything before the chunk too, and begins with the identity of model, dtype and tenant. It
has 128 bits of BLAKE2b, so that two contents under one key are not a risk to be handled.
"""

import hashlib

import numpy as np

DIGEST_BYTES = 16


class PrefixIndex:
    """Key of a full chunk -> the chunk that holds it, for chunks in some tier."""

    def __init__(self, *, identity: bytes, page_tokens: int) -> None:
        """Args:
        identity: distinguishes models, weights and dtypes.
        page_tokens: tokens of a chunk.
        """
        self._identity = identity
        self._page_tokens = page_tokens
        self._chunks: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        """By chunk number; None for a chunk that isn't in the index."""

    def __len__(self) -> int:
        return len(self._chunks)

    def extend(self, keys: list[bytes], tokens: np.ndarray, tenant: str) -> None:
        """Add the keys of all full chunks of a conversation.

        Args:
            keys: of its first chunks; the missing ones are appended.
            tokens: i32[n]: its tokens.
            tenant: whose conversation it is; nothing is shared between tenants.
        """
        size = self._page_tokens
        full = len(tokens) // size
        if len(keys) >= full:
            return
        parent = (
            keys[-1]
            if keys
            else hashlib.blake2b(tenant.encode(), key=self._identity[:64], digest_size=DIGEST_BYTES).digest()
        )
        data = np.ascontiguousarray(tokens[len(keys) * size : full * size], np.int32).tobytes()
        width = size * 4
        for start in range(0, len(data), width):
            parent = hashlib.blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
            keys.append(parent)

    def find(self, key: bytes) -> int | None:
        """The chunk of that key, or None."""
        return self._chunks.get(key)

    def add(self, key: bytes, chunk: int) -> None:
        """Enter a chunk that has become full, unless another one holds the same."""
        if key in self._chunks:
            return
        self._chunks[key] = chunk
        if chunk >= len(self._keys):
            self._keys.extend([None] * (chunk + 1 - len(self._keys)))
        self._keys[chunk] = key

    def remove(self, chunk: int) -> None:
        """Take a chunk out that is in no tier any more, if it is in."""
        if chunk < len(self._keys):
            key = self._keys[chunk]
            if key is not None:
                del self._chunks[key]
                self._keys[chunk] = None
