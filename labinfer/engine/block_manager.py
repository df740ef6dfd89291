"""BlockManager: reference counts of KV blocks, and the prefix cache of full blocks. Workers hold the contents."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from labinfer.engine.eviction import LRU, Eviction

DIGEST_BYTES = 16
"""Size of a block's digest: among 2**32 blocks, two collide with probability 2**-65."""


class BlockManager:
    """Pool of equal-sized blocks with reference counts. Full blocks can be looked up by the digest of their tokens.

    A block is free, in use (referenced by sequences) or evictable (cached, and referenced by none).

    Args:
        num_blocks: blocks on every rank.
        block_size: tokens in a block.
        prefix_caching: whether full blocks are registered and looked up.
        eviction: makes the object that chooses which evictable block is evicted next.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool = True, eviction: Callable[[], Eviction] = LRU
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = prefix_caching
        # A stack: the block freed last is reused first, so that unneeded memory is never touched.
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts: dict[int, int] = {}  # block in use → number of its references
        self._eviction = eviction()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of free and evictable blocks."""
        return self.num_blocks - len(self._ref_counts)

    @property
    def evictable(self) -> set[int]:
        """Cached blocks that no sequence references."""
        return self._digest_of.keys() - self._ref_counts.keys()

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return len(self._ref_counts) / self.num_blocks if self.num_blocks else 0.0

    # Conversions between numbers of tokens and of blocks.

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def full_blocks(self, num_tokens: int) -> int:
        """Number of full blocks among the first ``num_tokens`` tokens."""
        return num_tokens // self.block_size

    def tokens_in(self, num_blocks: int) -> int:
        """Capacity of ``num_blocks`` blocks, in tokens."""
        return num_blocks * self.block_size

    def partial_block(self, num_tokens: int) -> int | None:
        """Index of the last block of ``num_tokens`` tokens if that block is partially filled; None if it is full."""
        index, num_inside = divmod(num_tokens, self.block_size)
        return index if num_inside else None

    # Allocation and reference counts.

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, evicting as many as needed. Returns None if fewer are free and evictable."""
        if count > self.num_free:
            return None
        free = self._free
        blocks = [free.pop() if free else self._evict() for _ in range(count)]
        self._ref_counts.update(dict.fromkeys(blocks, 1))
        return blocks

    def acquire(self, cached: Sequence[int], count: int) -> list[int] | None:
        """Share the blocks ``cached``, a cache hit, and allocate ``count`` more after them. Returns None if there is no room."""
        ref_counts = self._ref_counts
        num_evictable = len(cached) - sum(map(ref_counts.__contains__, cached))
        if count > self.num_free - num_evictable:
            return None
        for block in cached:
            ref_counts[block] = ref_counts.get(block, 0) + 1
        if cached:
            self._eviction.use(cached)
        return [*cached, *self.allocate(count)]

    def fork(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which are in use: a sequence is forked."""
        for block in blocks:
            self._ref_counts[block] += 1

    def is_used(self, block: int) -> bool:
        """Whether a sequence references a block."""
        return block in self._ref_counts

    def is_shared(self, block: int) -> bool:
        """Whether a block in use has several references, so that no sequence may write to it."""
        return self._ref_counts[block] > 1

    def free(self, blocks: Sequence[int]) -> None:
        """Release a reference to each of ``blocks``, which are in the order of their tokens."""
        ref_counts, digest_of, evictable = self._ref_counts, self._digest_of, []
        for block in reversed(blocks):
            ref_counts[block] -= 1  # KeyError: freed twice
            if ref_counts[block]:
                continue
            del ref_counts[block]
            (evictable if block in digest_of else self._free).append(block)
        if evictable:
            self._eviction.add(evictable)

    # The prefix cache.

    def extend_chain(self, chain: list[bytes], token_ids: Sequence[int], salt: str, num_blocks: int) -> None:
        """Append digests until ``chain`` covers the first ``num_blocks`` full blocks of ``token_ids``.

        The digest of a block is BLAKE2b (RFC 7693) over its parent's digest and its token ids, so it identifies the
        whole prefix. The first parent is the digest of ``salt``: requests with different salts share no blocks.
        """
        size = self.block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else _digest(salt.encode(errors="surrogatepass"))
            chain.append(_digest(parent + array("q", token_ids[index * size : (index + 1) * size]).tobytes()))

    def register(self, block: int, digest: bytes) -> None:
        """Add a full block to the prefix cache. Does nothing if a block with this digest is cached already."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def unregister(self, block: int) -> None:
        """Remove a block in use from the prefix cache, before its tokens are overwritten."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self._eviction.forget(block)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Look up the cached blocks of the longest prefix of ``digests``, for ``acquire``."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block = self._eviction.evict()
        digest = self._digest_of.pop(block, None)
        assert digest is not None and block not in self._ref_counts, (
            f"{type(self._eviction).__name__}.evict() gave block {block!r:.60}, which is not evictable (see engine/eviction.py)"
        )
        del self._block_of[digest]
        return block

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state (free, evictable or in use), and that the maps block → digest and digest → block agree."""
        free, used = set(self._free), self._ref_counts.keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used, "a block is in two states"
        assert len(free) + len(self.evictable) + len(used) == self.num_blocks, "a block is lost"
        assert all(count > 0 for count in self._ref_counts.values()), "a block in use has no reference"
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, "digests disagree"
        assert not free & self._digest_of.keys(), "a free block can be found"

    def check_ref_counts(self, blocks: Iterable[int]) -> None:
        """Assert the reference counts: ``blocks`` lists each block in use once per reference."""
        assert Counter(blocks) == self._ref_counts, "reference counts disagree"


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
