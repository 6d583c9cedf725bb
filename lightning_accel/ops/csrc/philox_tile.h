// Random words in the order of their counters, as many at a time as keep the CPU's vectors busy.
#pragma once
#include "philox.h"

#include <cstring>

namespace lightning_accel {

constexpr int64_t kTile = 128;  // words of a tile, four of each counter

// Writes the words of `kTile / 4` counters from `counter` on, in their order.
inline void random_tile(uint64_t counter, uint64_t key, uint32_t* words) {
  constexpr int kCounters = 4;
  for (int start = 0; start < kTile / 4; start += kLanes * kCounters) {
    Lanes word[4][kCounters] = {};
    uint64_t counters[kCounters][kLanes];
    for (int j = 0; j < kCounters * kLanes; ++j) counters[j / kLanes][j % kLanes] = counter + start + j;
    memcpy(word[0], counters, sizeof counters);
    for (int i = 0; i < kCounters; ++i) word[1][i] = word[0][i] >> 32;
    philox(word, key);
    for (int i = 0; i < kCounters; ++i) {
      const Lanes low = (word[0][i] & 0xFFFFFFFFu) | (word[1][i] << 32);
      const Lanes high = (word[2][i] & 0xFFFFFFFFu) | (word[3][i] << 32);
      store_in_turns(low, high, words + 4 * (start + i * kLanes));
    }
  }
}

}  // namespace lightning_accel
