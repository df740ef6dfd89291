"""LFU eviction of the prefix cache: the block with the fewest cache hits is evicted next, the least recently used one among equals.

A system prompt that many requests share stays in the cache while one-off prompts pass through it. With LRU, enough one-off prompts
between two uses of the system prompt evict it. The choice also holds for snapshots of states and for a draft model's cache.

    python launch.py serve --model DIR --plugin examples/plugins/lfu_eviction.py --prefix-cache-eviction lfu

Hits are never forgotten while a block is cached, so what was popular yesterday stays today. To let them age, halve all counts now and
then, in ``evict``. ``labinfer/engine/eviction.py`` has the contract.
"""

from collections import Counter, OrderedDict, defaultdict

from labinfer import register
from labinfer.engine.eviction import Eviction


@register("prefix_cache_eviction", "lfu")
class LFU(Eviction):
    def __init__(self):
        self._hits = Counter()  # cache hits by block
        self._evictable = defaultdict(OrderedDict)  # blocks by number of hits, the least recently used first

    def add(self, blocks):
        for block in blocks:
            self._evictable[self._hits[block]][block] = None

    def use(self, blocks):
        for block in blocks:
            self._evictable[self._hits[block]].pop(block, None)
            self._hits[block] += 1

    def evict(self):
        fewest = min(hits for hits, blocks in self._evictable.items() if blocks)
        block, _ = self._evictable[fewest].popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block):
        del self._hits[block]
