// Counts of values in buckets whose width grows with the value: exact below 16, then 16 buckets to each doubling.
#pragma once

#include <cstdint>

extern "C" {
#include "abi.h"
}

namespace inf {

class Histogram {
 public:
    void add(uint64_t value) {
        ++counts_.count;
        counts_.total += value;
        if (value > counts_.max) counts_.max = value;
        ++counts_.buckets[bucket(value)];
    }

    void add_to(inf_histogram *sum) const {
        sum->count += counts_.count;
        sum->total += counts_.total;
        if (counts_.max > sum->max) sum->max = counts_.max;
        for (uint32_t i = 0; i < INF_HISTOGRAM_BUCKETS; ++i) sum->buckets[i] += counts_.buckets[i];
    }

 private:
    static uint32_t bucket(uint64_t value) {
        if (value < 16) return static_cast<uint32_t>(value);
        const uint32_t exponent = 63 - static_cast<uint32_t>(__builtin_clzll(value));
        const uint32_t index = (exponent - 3) * 16 + static_cast<uint32_t>(value >> (exponent - 4) & 15);
        return index < INF_HISTOGRAM_BUCKETS ? index : INF_HISTOGRAM_BUCKETS - 1;
    }

    inf_histogram counts_ = {};
};

}  // namespace inf
