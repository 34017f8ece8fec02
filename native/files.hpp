// The table of file operations: counts every call and, for tests, makes chosen ones fail or come short.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

extern "C" {
#include "abi.h"
}

struct inf_files {
    // Counts one call of `op`. True when a fault is set for it; its result is then in `result`.
    bool ask(int op, int64_t *result);

    struct Fault {
        uint64_t first, last;   // calls, both included
        int64_t result;
    };

    std::atomic<uint64_t> calls[INF_FILE_OPS] = {};
    std::atomic<bool> armed[INF_FILE_OPS] = {};
    std::mutex mutex;
    std::vector<Fault> faults[INF_FILE_OPS];
};

namespace inf {

// One transfer: bytes moved (may come short), or -errno. Never continued or retried here.
int64_t read_at(inf_files *files, int fd, void *address, size_t nbytes, uint64_t offset);
int64_t write_at(inf_files *files, int fd, const void *address, size_t nbytes, uint64_t offset);

// What a transfer of `nbytes` really moves when a fault lets it come short after `result` bytes: whole blocks, so that O_DIRECT
// still takes it.
inline size_t short_nbytes(size_t nbytes, int64_t result) {
    const uint64_t blocks = (static_cast<uint64_t>(result) + 4095) / 4096 * 4096;
    return blocks < nbytes ? static_cast<size_t>(blocks) : nbytes;
}

}  // namespace inf
