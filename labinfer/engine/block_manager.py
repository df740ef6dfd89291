"""BlockManager: who owns which KV block, and which blocks hold tokens worth finding again. The blocks are the workers'."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
"""Among four thousand million blocks two have the same digest with probability 2**-65."""


class BlockManager:
    """A pool of equal blocks, shared by count and taken back; full ones can be found by what they hold.

    A block that nobody holds any more keeps its tokens until its room is needed: the least recently used goes first.

    Args:
        num_blocks: blocks on every rank.
        block_size: tokens in a block.
        prefix_caching: whether blocks are found again at all.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = prefix_caching
        # A stack: what was used last is used next, so that memory the run does not need is never touched.
        self._free = list(reversed(range(num_blocks)))
        self._holders: dict[int, int] = {}  # of the blocks in use: how many hold each
        self._idle: dict[int, None] = {}  # held by nobody but known by digest; least recently used first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those that would first forget what they hold included."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return len(self._holders) / self.num_blocks if self.num_blocks else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks for one holder, or None where there is no room."""
        if count > self.num_free:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def hold(self, shared: Sequence[int], count: int) -> list[int] | None:
        """Add a holder to the blocks ``shared``, and allocate ``count`` more behind them; None where there is no room."""
        if count > self.num_free - sum(block in self._idle for block in shared):
            return None
        for block in shared:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._idle.pop(block, None)
        return [*shared, *self.allocate(count)]

    def is_used(self, block: int) -> bool:
        """Whether anybody holds a block."""
        return block in self._holders

    def is_shared(self, block: int) -> bool:
        """Whether a block in use has more than one holder, so that none of them may write to it."""
        return self._holders[block] > 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one holder away. ``blocks`` are in the order of their tokens, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            self._holders[block] -= 1  # KeyError: freed twice
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    # Finding blocks by what they hold.

    def register(self, block: int, digest: bytes) -> None:
        """The block is full with the tokens of this digest; if another one is too, that one stays the known one."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def unregister(self, block: int) -> None:
        """The block is about to hold something else."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The known blocks of the longest prefix of this chain; not held by the caller before it calls ``hold``."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        del self._block_of[self._digest_of.pop(block)]
        return block

    def check_integrity(self) -> None:
        """Assert that every block is free, idle or in use, and only one of these; that digests lead to their blocks and back."""
        free, idle, used = set(self._free), set(self._idle), set(self._holders)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & used or idle & used), "a block is in two states"
        assert len(free) + len(idle) + len(used) == self.num_blocks, "a block is lost"
        assert all(count > 0 for count in self._holders.values()), "a block in use has no holder"
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, "digests disagree"
        assert idle <= set(self._digest_of), "an idle block cannot be found"
        assert not free & set(self._digest_of), "a free block can be found"

    def check_holders(self, blocks: Iterable[int]) -> None:
        """Assert that the blocks in use are these, each as often as it has holders."""
        assert Counter(blocks) == self._holders, "holders disagree with the count"


def extend_chain(chain: list[bytes], token_ids: Sequence[int], block_size: int, salt: str, num_blocks: int) -> None:
    """Append digests until ``chain`` covers the first ``num_blocks`` full blocks of these tokens.

    The digest of a block is BLAKE2b (RFC 7693) over its parent's digest and its token ids, so that it stands for the
    whole prefix; the first parent is that of the salt, so that requests with different salts share nothing.
    """
    for index in range(len(chain), num_blocks):
        parent = chain[-1] if chain else blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        chain.append(blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest())
