/* The checksums of pages that a kernel takes while it works on them (inf_check), so that they make no pass over memory of their own.
 *
 * A kernel that has checks works in pieces that fit the cache: `before` for what it will read or change of the piece, then its work, then
 * `after` for the same ranges; and `close` at its end, for the bytes that no piece had. */

#pragma once

#include <cerrno>
#include <cstdint>

extern "C" {
#include "abi.h"
}

namespace inf {

struct Range {
    uint64_t address, nbytes;
};

/* Asks for memory that will be wanted soon. Never faults. */
inline void fetch_ahead(uint64_t address, uint64_t nbytes) {
    for (uint64_t at = 0; at < nbytes; at += 64) __builtin_prefetch(reinterpret_cast<const void *>(uintptr_t(address + at)), 0, 2);
}

class Checks {
  public:
    /* Bytes of one array in a piece, where the kernel does not know better: they stay in the first-level cache, or at least the second. */
    static constexpr uint64_t kPieceNbytes = 32768;

    /* Takes the checks of a kernel's arguments; false if they cannot be right. */
    bool open(const void *checks, uint64_t nbytes) {
        first_ = static_cast<const inf_check *>(checks);
        if (nbytes % sizeof(inf_check) != 0 || nbytes / sizeof(inf_check) > INF_CHECKS_MAX) return false;
        count_ = static_cast<uint32_t>(nbytes / sizeof(inf_check));
        for (uint32_t i = 0; i < count_; ++i) {
            const inf_check &check = first_[i];
            if (check.flags == 0 || (check.flags & ~uint32_t(INF_CHECK_BEFORE | INF_CHECK_AFTER)) != 0) return false;
            if ((check.flags & INF_CHECK_AFTER) != 0 && check.result == 0) return false;
            if (check.address + check.nbytes < check.address) return false;
            for (uint32_t j = 0; j < i; ++j) {
                if (check.address < first_[j].address + first_[j].nbytes && first_[j].address < check.address + check.nbytes) return false;
            }
            pages_[i] = Page{};
        }
        return true;
    }

    bool empty() const { return count_ == 0; }

    /* The kernel is about to read or change these bytes: 0, -EBADMSG if a page turns out not to be what was expected (`*value` says
     * which), or -EINVAL if not all of them are of one page, or were left already and are in its crc_after. */
    template <int n> int before(const Range (&ranges)[n], uint64_t *value) {
        if (empty()) return 0;
        for (const Range &range : ranges) {
            const int status = reach(range, value);
            if (status != 0) return status;
        }
        return 0;
    }

    /* These bytes, which `before` was told of, stay as they are now. */
    template <int n> void after(const Range (&ranges)[n]) {
        if (empty()) return;
        for (const Range &range : ranges) {
            const uint32_t i = find(range);
            if (i != count_) leave(i, range.address - first_[i].address + range.nbytes);
        }
    }

    /* The rest of every page, and the results: 0, or -EBADMSG as `before`. */
    int close(uint64_t *value) {
        for (uint32_t i = 0; i < count_; ++i) {
            skip_to(i, first_[i].nbytes);
            const int status = seen_whole(i, value);
            if (status != 0) return status;
        }
        for (uint32_t i = 0; i < count_; ++i) {
            if ((first_[i].flags & INF_CHECK_AFTER) != 0) *reinterpret_cast<uint32_t *>(uintptr_t(first_[i].result)) = pages_[i].crc_after;
        }
        return 0;
    }

  private:
    /* How far a page has come: the first `seen` bytes are in crc_before, the first `left` (at most `seen`) in crc_after. */
    struct Page {
        uint64_t seen, left;
        uint32_t crc_before, crc_after;
    };

    /* The first check whose page has any of these bytes, or count_. */
    uint32_t find(const Range &range) const {
        uint32_t i = 0;
        while (i < count_ && (range.address >= first_[i].address + first_[i].nbytes || first_[i].address >= range.address + range.nbytes)) ++i;
        return i;
    }

    int reach(const Range &range, uint64_t *value) {
        const uint32_t i = find(range);
        if (i == count_) return 0;
        if (range.address < first_[i].address) return -EINVAL;
        const uint64_t begin = range.address - first_[i].address, end = begin + range.nbytes;
        if (end > first_[i].nbytes) return -EINVAL;
        if (begin < pages_[i].left && (first_[i].flags & INF_CHECK_AFTER) != 0) return -EINVAL;
        skip_to(i, begin);
        see(i, end);
        return seen_whole(i, value);
    }

    uint32_t sum(uint32_t i, uint64_t begin, uint64_t end, uint32_t crc) const {
        return inf_crc32c(reinterpret_cast<const void *>(uintptr_t(first_[i].address + begin)), end - begin, crc);
    }

    void see(uint32_t i, uint64_t end) {
        Page &page = pages_[i];
        if (end <= page.seen) return;
        if ((first_[i].flags & INF_CHECK_BEFORE) != 0) page.crc_before = sum(i, page.seen, end, page.crc_before);
        page.seen = end;
    }

    void leave(uint32_t i, uint64_t end) {
        Page &page = pages_[i];
        if (end <= page.left) return;
        if ((first_[i].flags & INF_CHECK_AFTER) != 0) page.crc_after = sum(i, page.left, end, page.crc_after);
        page.left = end;
    }

    /* Bytes that the kernel does not change. */
    void skip_to(uint32_t i, uint64_t end) {
        while (pages_[i].left < end) {
            const uint64_t rest = end - pages_[i].left, stop = pages_[i].left + (rest < kPieceNbytes ? rest : kPieceNbytes);
            see(i, stop);
            leave(i, stop);
        }
    }

    int seen_whole(uint32_t i, uint64_t *value) const {
        if ((first_[i].flags & INF_CHECK_BEFORE) == 0 || pages_[i].seen < first_[i].nbytes) return 0;
        if (pages_[i].crc_before == first_[i].expected) return 0;
        *value = uint64_t(first_[i].tag) << 32 | pages_[i].crc_before;
        return -EBADMSG;
    }

    const inf_check *first_ = nullptr;
    uint32_t count_ = 0;
    Page pages_[INF_CHECKS_MAX];
};

}  // namespace inf
