"""BlockManager: reference counts of KV blocks, and the prefix cache of full blocks. The blocks' contents are the workers'."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from labinfer.engine.eviction import LRU, Eviction

DIGEST_BYTES = 16
"""Among four thousand million blocks two have the same digest with probability 2**-65."""


class BlockManager:
    """A pool of equal blocks with reference counts. Full blocks can be found by the digest of their tokens.

    A block is free, in use (referenced by sequences) or evictable (cached, and referenced by none).

    Args:
        num_blocks: blocks on every rank.
        block_size: tokens in a block.
        prefix_caching: whether blocks are found again at all.
        eviction: makes the object that chooses which evictable block is evicted next.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool = True, eviction: Callable[[], Eviction] = LRU
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = prefix_caching
        # A stack: what was used last is used next, so that memory the run does not need is never touched.
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts: dict[int, int] = {}  # of the blocks in use
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

    # Tokens of a sequence, counted in blocks.

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def full_blocks(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill to the end."""
        return num_tokens // self.block_size

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens that this many blocks hold."""
        return num_blocks * self.block_size

    def partial_block(self, num_tokens: int) -> int | None:
        """Index of the last block of this many tokens if they do not fill it; None if they fill all their blocks."""
        index, num_inside = divmod(num_tokens, self.block_size)
        return index if num_inside else None

    # Which blocks are free, and who holds the others.

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, evicting as many as needed. Returns None if fewer are free and evictable."""
        if count > self.num_free:
            return None
        free = self._free
        blocks = [free.pop() if free else self._evict() for _ in range(count)]
        self._ref_counts.update(dict.fromkeys(blocks, 1))
        return blocks

    def acquire(self, cached: Sequence[int], count: int) -> list[int] | None:
        """Share the blocks ``cached``, a cache hit, and allocate ``count`` more behind them. Returns None if there is no room."""
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
        """Add a reference to blocks in use, cached or not: a sequence goes on as two."""
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

    # Finding blocks by what they hold.

    def extend_chain(self, chain: list[bytes], token_ids: Sequence[int], salt: str, num_blocks: int) -> None:
        """Append digests until ``chain`` covers the first ``num_blocks`` full blocks of ``token_ids``.

        The digest of a block is BLAKE2b (RFC 7693) over its parent's digest and its token ids, so that it stands for the
        whole prefix; the first parent is that of the salt, so that requests with different salts share nothing.
        """
        size = self.block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else _digest(salt.encode(errors="surrogatepass"))
            chain.append(_digest(parent + array("q", token_ids[index * size : (index + 1) * size]).tobytes()))

    def register(self, block: int, digest: bytes) -> None:
        """The block is full with the tokens of this digest; if another one is too, that one stays the known one."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def unregister(self, block: int) -> None:
        """A block in use is about to hold other tokens."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self._eviction.forget(block)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The known blocks of the longest prefix of this chain; to be shared by ``acquire``."""
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
        """Assert that every block is free, evictable or in use, and only one of these; that digests lead to their blocks and back."""
        free, used = set(self._free), self._ref_counts.keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used, "a block is in two states"
        assert len(free) + len(self.evictable) + len(used) == self.num_blocks, "a block is lost"
        assert all(count > 0 for count in self._ref_counts.values()), "a block in use has no reference"
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, "digests disagree"
        assert not free & self._digest_of.keys(), "a free block can be found"

    def check_ref_counts(self, blocks: Iterable[int]) -> None:
        """Assert that the blocks in use are ``blocks``, where each is named once for every reference."""
        assert Counter(blocks) == self._ref_counts, "reference counts disagree"


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
