// Partition of an attention call into tiles (work items), some of which several threads share.
#pragma once

#include <algorithm>
#include <vector>

#include "kv_view.h"

namespace {

constexpr int64_t ROWS_OF_TILE = 512;  // maximum query rows per tile: their sums stay in the cache
constexpr int64_t PARTS = 4;           // work items per thread when a sequence's keys are split among threads
constexpr int64_t PAGE = 4096;         // bytes of a memory page
constexpr int MOST_TOGETHER = 2;       // maximum KV heads of a tile

// Tile whose spans are split among threads, and the memory of its partial results.
struct SplitTile {
  Tile tile;
  int64_t memory;  // offset of the first span's results, in floats: sums, maximum scores, masses
  int pending;     // parts that are not finished
};

// Number of KV heads per tile: MOST_TOGETHER if their units share a page and each head has few rows, else 1. Also 1 in the cases that were
// measured to be slower: contexts of fewer than two spans, blocks that are not adjacent in memory, and so few spans that a thread would get
// over an eighth more than its share.
template <typename Kernel>
int64_t heads_together(const Batch& batch, int64_t sequences, int threads) {
  using Element = typename Kernel::Element;
  bool in_place = batch.tiled && batch.block_size == UNIT && batch.keys.dtype == dtype_of((const Element*)nullptr);
  int64_t spans = 0, tokens = 0, most_rows = 0;
  if (!Kernel::FEW || !in_place || batch.kv_heads < MOST_TOGETHER) return 1;
  if (MOST_TOGETHER * UNIT * batch.size * int64_t(sizeof(Element)) > PAGE) return 1;
  for (int64_t kv = 0; kv < batch.kv_heads; ++kv) {
    if (!batch.group(kv)) return 1;
    most_rows = std::max(most_rows, batch.group(kv));
  }
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    int64_t num_new = batch.row_ptr[sequence + 1] - batch.row_ptr[sequence], seen = batch.context_lens[sequence];
    if (!num_new) continue;
    if (num_new * most_rows > Kernel::FEW) return 1;
    if (batch.window) seen = std::min(seen, batch.window + num_new);
    if (seen < 2 * SPAN) return 1;
    const int64_t *end = batch.tables + batch.table_ptr[sequence] + up_to(batch.context_lens[sequence], UNIT) / UNIT, *begin = end - seen / UNIT;
    int64_t breaks = 0;
    for (const int64_t* block = begin + 1; block < end; ++block) breaks += *block != block[-1] + 1;
    if (4 * breaks > end - begin) return 1;
    spans += up_to(seen, SPAN) / SPAN * (batch.kv_heads / MOST_TOGETHER), tokens += seen * (batch.kv_heads / MOST_TOGETHER);
  }
  bool is_even = threads == 1 || 8 * SPAN * up_to(spans, threads) <= 9 * tokens;
  return is_even || spans >= 2 * PARTS * threads ? MOST_TOGETHER : 1;
}

// Partitions a call into tiles, largest first. A tile with more than half of a thread's share of the work is split by spans.
inline void partition(const Batch& batch, int64_t sequences, int64_t together, int threads, std::vector<Tile>& tiles, std::vector<SplitTile>& split_tiles,
          std::vector<float>& memory) {
  tiles.clear();
  split_tiles.clear();
  auto work = [&](const Tile& tile) { return batch.rows(tile) * (tile.end_span - tile.first_span); };
  int64_t all = 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    int64_t num_new = batch.row_ptr[sequence + 1] - batch.row_ptr[sequence];
    for (int64_t kv = 0, heads; kv < batch.kv_heads; kv += heads) {
      heads = std::min(together, batch.kv_heads - kv);
      if (!batch.group(kv, heads)) continue;
      int64_t most = std::max<int64_t>(1, ROWS_OF_TILE / batch.group(kv, heads));
      for (int64_t first = 0; first < num_new; first += most) {
        int64_t count = std::min(most, num_new - first), position = batch.context_lens[sequence] - num_new + first;
        int64_t begin = batch.window ? std::max<int64_t>(0, position - batch.window + 1) : 0, end = position + count;
        tiles.push_back({sequence, kv, heads, first, count, begin, end, begin / SPAN, (end + SPAN - 1) / SPAN, -1});
        all += work(tiles.back());
      }
    }
  }
  int64_t floats = 0;
  size_t undivided = tiles.size();
  for (size_t i = 0; threads > 1 && i < undivided; ++i) {
    Tile tile = tiles[i];
    int64_t spans = tile.end_span - tile.first_span;
    if (work(tile) * threads * 2 <= all || spans == 1) continue;
    int64_t pieces = std::min(spans, (work(tile) * threads * PARTS + all - 1) / all);
    tile.split = split_tiles.size();
    split_tiles.push_back({tile, floats, int(pieces)});
    floats += spans * batch.rows(tile) * (batch.width() + 2);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      Tile part = tile;
      part.first_span = tile.first_span + spans * piece / pieces;
      part.end_span = tile.first_span + spans * (piece + 1) / pieces;
      if (piece) tiles.push_back(part);
      else tiles[i] = part;
    }
  }
  room(memory, floats);
  std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return work(a) > work(b); });
}

}  // namespace
