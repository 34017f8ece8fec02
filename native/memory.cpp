// The arena of frames, and the address ranges of the CPU device.
//
// [Note: memory moved behind addresses]
// A pool is one mapping, its home, cut into grains of 2 MiB. A range is an address for life, PROT_NONE while it is drained. To fill it,
// free extents of the home are moved behind it with mremap; to drain it, they are moved back to where they came from. Three facts make
// this hold:
//   * MREMAP_DONTUNMAP, always: the addresses that the pages leave stay mapped, so no other thread's mmap can land there.
//   * The kernel remembers where pages were first mapped (vm_pgoff, anon_vma). Pages that return to their own place melt into one
//     mapping with their neighbours, and an extent that spans earlier extents can then be moved in one call. The first byte of the home
//     is touched before anything moves, because memory without an anon_vma forgets its place when it moves.
//   * What a fill gives is undefined, so memory that cannot be moved (the map count is exhausted, the kernel has no MREMAP_DONTUNMAP) may
//     be thrown away instead: the extents give their pages back to the kernel and the range gets fresh ones. Slower, never over budget.
// Everything is MADV_DONTFORK: a forked loader worker must neither copy this memory nor make its owner copy it.

extern "C" {
#include <cstdint>

#include "abi.h"
}

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace {

constexpr uint64_t kGrain = uint64_t{2} << 20;

uint64_t page_nbytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t round_up(uint64_t nbytes, uint64_t grain) { return (nbytes + grain - 1) / grain * grain; }

char *at(void *base, uint64_t offset) { return static_cast<char *>(base) + offset; }

// Anonymous memory aligned to the grain: maps more, and gives the ends back.
int map_aligned(uint64_t nbytes, int protection, char **base) {
    if (nbytes == 0 || nbytes > UINT64_MAX / 4) return -EINVAL;
    void *mapped = mmap(nullptr, nbytes + kGrain, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return -errno;
    const uint64_t start = reinterpret_cast<uint64_t>(mapped);
    const uint64_t aligned = round_up(start, kGrain);
    const uint64_t end = round_up(aligned + nbytes, page_nbytes());
    if (aligned > start) munmap(mapped, aligned - start);
    if (start + nbytes + kGrain > end) munmap(reinterpret_cast<void *>(end), start + nbytes + kGrain - end);
    *base = reinterpret_cast<char *>(aligned);
    madvise(*base, nbytes, MADV_HUGEPAGE);   // advice: a kernel without huge pages is slower, no more
    if (madvise(*base, nbytes, MADV_DONTFORK) != 0) {
        const int code = -errno;
        munmap(*base, nbytes);
        return code;
    }
    return 0;
}

// One empty mapping again, whatever is there.
int remap(void *base, uint64_t nbytes, int protection) {
    if (mmap(base, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        const int code = -errno;
        madvise(base, nbytes, MADV_DONTNEED);
        mprotect(base, nbytes, protection);
        return code;
    }
    madvise(base, nbytes, MADV_HUGEPAGE);
    return madvise(base, nbytes, MADV_DONTFORK) == 0 ? 0 : -errno;
}

// An eighth of the mappings that this process may have: an extent that is away costs up to three.
uint64_t most_pieces() {
    uint64_t limit = 65530;
    if (FILE *file = std::fopen("/proc/sys/vm/max_map_count", "re")) {
        unsigned long long read = 0;
        if (std::fscanf(file, "%llu", &read) == 1 && read > 0) limit = read;
        std::fclose(file);
    }
    return std::max<uint64_t>(limit / 8, 1);
}

struct Extent {
    uint64_t offset;   // in the home
    uint64_t nbytes;
};

struct Range {
    uint64_t nbytes = 0;
    std::vector<Extent> extents;   // the home's extents behind it, in order; empty while drained
    bool moved = false;            // their pages are here; else the range has pages of its own
};

}  // namespace

struct inf_pool {
    mutable std::mutex mutex;   // a finalizer may close a range on another thread
    char *home = nullptr;
    uint64_t capacity = 0;
    uint64_t free_nbytes = 0;
    uint64_t max_pieces = 0;
    uint64_t pieces = 0;
    std::vector<bool> warm;        // per grain of the home: it may have pages
    uint64_t warm_grains = 0;
    bool can_move = true;
    bool closed = false;
    std::map<uint64_t, uint64_t> free_extents;   // offset -> nbytes; no two adjacent
    std::map<void *, Range> ranges;

    // The smallest extent that holds all; where there is none, the largest ones, and the smallest that holds the rest.
    std::vector<Extent> take(uint64_t nbytes) {
        std::vector<Extent> taken;
        while (nbytes > 0) {
            auto best = free_extents.end();
            for (auto extent = free_extents.begin(); extent != free_extents.end(); ++extent) {
                if (best == free_extents.end()) {
                    best = extent;
                } else if (best->second < nbytes ? extent->second > best->second
                                                 : extent->second >= nbytes && extent->second < best->second) {
                    best = extent;
                }
            }
            const Extent extent{best->first, std::min(nbytes, best->second)};
            const uint64_t left = best->second - extent.nbytes;
            free_extents.erase(best);
            if (left > 0) free_extents.emplace(extent.offset + extent.nbytes, left);
            taken.push_back(extent);
            nbytes -= extent.nbytes;
            free_nbytes -= extent.nbytes;
        }
        return taken;
    }

    void put_back(const Extent &extent) {
        Extent whole = extent;
        auto after = free_extents.lower_bound(extent.offset);
        if (after != free_extents.end() && extent.offset + extent.nbytes == after->first) {
            whole.nbytes += after->second;
            after = free_extents.erase(after);
        }
        if (after != free_extents.begin()) {
            auto before = std::prev(after);
            if (before->first + before->second == whole.offset) {
                whole.offset = before->first;
                whole.nbytes += before->second;
                free_extents.erase(before);
            }
        }
        free_extents[whole.offset] = whole.nbytes;
        free_nbytes += extent.nbytes;
    }

    void set_warm(const Extent &extent, bool is_warm) {
        for (uint64_t grain = extent.offset / kGrain; grain < (extent.offset + extent.nbytes) / kGrain; ++grain) {
            if (warm[grain] == is_warm) continue;
            warm[grain] = is_warm;
            warm_grains += is_warm ? uint64_t{1} : ~uint64_t{0};
        }
    }

    bool move_out(void *base, const std::vector<Extent> &extents) {
        if (!can_move || pieces + extents.size() > max_pieces) return false;
        uint64_t offset = 0;
        for (size_t i = 0; i < extents.size(); ++i) {
            char *from = home + extents[i].offset;
            if (mremap(from, extents[i].nbytes, extents[i].nbytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, at(base, offset)) ==
                MAP_FAILED) {
                if (errno == EINVAL) can_move = false;   // a kernel before 5.7
                move_home(base, std::vector<Extent>(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(i)));
                return false;
            }
            mprotect(from, extents[i].nbytes, PROT_NONE);
            offset += extents[i].nbytes;
        }
        pieces += extents.size();
        return true;
    }

    void empty(void *base, Range &range) {
        if (!closed) {
            if (range.moved) {
                move_home(base, range.extents);
                pieces -= range.extents.size();
            }
            for (const Extent &extent : range.extents) {
                put_back(extent);
                if (!range.moved) set_warm(extent, false);
            }
        }
        range.extents.clear();
    }

    // Never fails: pages that cannot be moved are thrown away.
    void move_home(void *base, const std::vector<Extent> &extents) {
        uint64_t offset = 0;
        for (const Extent &extent : extents) {
            char *to = home + extent.offset;
            if (mremap(at(base, offset), extent.nbytes, extent.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == MAP_FAILED)
                remap(to, extent.nbytes, PROT_READ | PROT_WRITE);
            offset += extent.nbytes;
        }
    }
};

extern "C" {

int inf_arena_open(uint64_t nbytes, int lock, void **base) {
    char *mapped = nullptr;
    const uint64_t rounded = round_up(nbytes, page_nbytes());
    const int code = map_aligned(rounded, PROT_READ | PROT_WRITE, &mapped);
    if (code != 0) return code;
    if (lock && mlock(mapped, rounded) != 0) {
        const int refused = -errno;
        munmap(mapped, rounded);
        return refused;
    }
    *base = mapped;
    return 0;
}

int inf_arena_close(void *base, uint64_t nbytes) { return munmap(base, round_up(nbytes, page_nbytes())) == 0 ? 0 : -errno; }

int inf_pool_open(uint64_t capacity_nbytes, inf_pool **pool) {
    if (capacity_nbytes == 0 || capacity_nbytes % kGrain != 0) return -EINVAL;
    inf_pool *opened = new (std::nothrow) inf_pool;
    if (opened == nullptr) return -ENOMEM;
    const int code = map_aligned(capacity_nbytes, PROT_READ | PROT_WRITE, &opened->home);
    if (code != 0) {
        delete opened;
        return code;
    }
    *const_cast<volatile char *>(opened->home) = 0;   // see the note: this memory now knows its place
    opened->warm.assign(capacity_nbytes / kGrain, false);
    opened->set_warm({0, kGrain}, true);
    opened->capacity = opened->free_nbytes = capacity_nbytes;
    opened->max_pieces = most_pieces();
    opened->free_extents.emplace(0, capacity_nbytes);
    *pool = opened;
    return 0;
}

void inf_pool_close(inf_pool *pool) {
    bool last = false;
    {
        std::lock_guard<std::mutex> guard(pool->mutex);
        munmap(pool->home, pool->capacity);
        pool->closed = true;
        last = pool->ranges.empty();
    }
    if (last) delete pool;
}

int inf_range_open(inf_pool *pool, uint64_t nbytes, void **base) {
    if (nbytes == 0 || nbytes % kGrain != 0) return -EINVAL;
    std::lock_guard<std::mutex> guard(pool->mutex);
    if (pool->closed) return -EBADF;
    char *mapped = nullptr;
    const int code = map_aligned(nbytes, PROT_NONE, &mapped);
    if (code != 0) return code;
    pool->ranges[mapped].nbytes = nbytes;
    *base = mapped;
    return 0;
}

int inf_range_close(inf_pool *pool, void *base) {
    bool last = false;
    {
        std::lock_guard<std::mutex> guard(pool->mutex);
        auto found = pool->ranges.find(base);
        if (found == pool->ranges.end()) return -EINVAL;
        Range &range = found->second;
        pool->empty(base, range);
        munmap(base, range.nbytes);
        pool->ranges.erase(found);
        last = pool->closed && pool->ranges.empty();
    }
    if (last) delete pool;
    return 0;
}

int inf_range_fill(inf_pool *pool, void *base) {
    std::lock_guard<std::mutex> guard(pool->mutex);
    auto found = pool->ranges.find(base);
    if (found == pool->ranges.end()) return -EINVAL;
    if (pool->closed) return -EBADF;
    Range &range = found->second;
    if (!range.extents.empty()) return -EALREADY;
    if (range.nbytes > pool->free_nbytes) return -ENOMEM;
    range.extents = pool->take(range.nbytes);
    for (const Extent &extent : range.extents) pool->set_warm(extent, true);
    range.moved = pool->move_out(base, range.extents);
    if (range.moved) return 0;
    // Its extents give their pages to the kernel, and count as warm for the range's own.
    for (const Extent &extent : range.extents) madvise(pool->home + extent.offset, extent.nbytes, MADV_DONTNEED);
    const int code = remap(base, range.nbytes, PROT_READ | PROT_WRITE);
    if (code == 0) return 0;
    pool->empty(base, range);
    return code;
}

int inf_range_drain(inf_pool *pool, void *base) {
    std::lock_guard<std::mutex> guard(pool->mutex);
    auto found = pool->ranges.find(base);
    if (found == pool->ranges.end()) return -EINVAL;
    Range &range = found->second;
    if (range.extents.empty()) return -EALREADY;
    pool->empty(base, range);
    return remap(base, range.nbytes, PROT_NONE);
}

uint64_t inf_pool_free_nbytes(const inf_pool *pool) {
    std::lock_guard<std::mutex> guard(pool->mutex);
    return pool->free_nbytes;
}

uint64_t inf_pool_warm_nbytes(const inf_pool *pool) {
    std::lock_guard<std::mutex> guard(pool->mutex);
    return pool->warm_grains * kGrain;
}

int inf_pool_trim(inf_pool *pool, uint64_t warm_nbytes) {
    std::lock_guard<std::mutex> guard(pool->mutex);
    if (pool->closed) return -EBADF;
    for (auto extent = pool->free_extents.rbegin(); extent != pool->free_extents.rend(); ++extent) {
        for (uint64_t end = extent->first + extent->second; end > extent->first; end -= kGrain) {
            if (pool->warm_grains * kGrain <= warm_nbytes) return 0;
            if (!pool->warm[(end - kGrain) / kGrain]) continue;
            if (madvise(pool->home + end - kGrain, kGrain, MADV_DONTNEED) != 0) return -errno;
            pool->set_warm({end - kGrain, kGrain}, false);
        }
    }
    return 0;
}

}  // extern "C"
