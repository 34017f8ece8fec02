// The table of file operations: counts every call and, for tests, makes chosen ones fail, come short, late, out of order or wrong.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

extern "C" {
#include "abi.h"
}

struct inf_files {
    // Counts one call of `op`. True when a fault is set for it, which is then in `fault`.
    bool ask(int op, inf_fault *fault);

    // For who may sleep: as long as `fault` keeps a call from beginning.
    void wait(const inf_fault &fault);

    // A call of the queue has ended: those that are held may go on.
    void ended() {
        if (holding.load(std::memory_order_relaxed)) note_ended();
    }

    struct Fault {
        uint64_t first, last;   // calls, both included
        inf_fault what;
    };

    std::atomic<uint64_t> calls[INF_FILE_OPS] = {};
    std::atomic<bool> armed[INF_FILE_OPS] = {};
    std::mutex mutex;
    std::vector<Fault> faults[INF_FILE_OPS];

 private:
    void note_ended();

    std::atomic<uint32_t> holding = {};   // calls that wait for others to end
    uint64_t n_ended = 0;                 // while any was held
    std::condition_variable others_ended;
};

namespace inf {

// One call of READ, WRITE or DATASYNC, for who carries it out. Without a fault it is carried out as it was given.
class Call {
 public:
    Call() = default;
    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;
    ~Call() { forget(); }

    // Counts it. Never continued or retried here.
    void begin(inf_files *files, int op, int fd, void *address, size_t nbytes, uint64_t offset);

    // Is it not to be carried out, because `answer` is its result?
    bool answered() const { return answered_; }
    int64_t answer() const { return answer_; }

    // Above 0: carried out only so many microseconds later, or, where that is not 0, when wait_calls() others have ended.
    uint64_t wait_us() const { return fault_.us; }
    uint32_t wait_calls() const { return fault_.kind == INF_FAULT_HOLD ? static_cast<uint32_t>(fault_.value) : 0; }
    void wait() {
        if (fault_.us) files_->wait(fault_);
    }

    // What is moved, and from or to where.
    void *address() const { return address_; }
    size_t nbytes() const { return nbytes_; }

    // What it gave (bytes moved, 0 for DATASYNC, or -errno), made into what its caller is told.
    int64_t end(int64_t result);

 private:
    void answer(int64_t result) {
        answered_ = true;
        answer_ = result;
    }
    void forget();
    void falsify(int fd, size_t nbytes, uint64_t offset);

    inf_files *files_ = nullptr;
    int op_ = 0;
    inf_fault fault_ = {};
    void *address_ = nullptr;
    size_t nbytes_ = 0;
    void *copy_ = nullptr;   // what is written in place of the caller's bytes
    bool answered_ = false;
    int64_t answer_ = 0;
};

// One transfer: bytes moved (may come short), or -errno.
int64_t read_at(inf_files *files, int fd, void *address, size_t nbytes, uint64_t offset);
int64_t write_at(inf_files *files, int fd, const void *address, size_t nbytes, uint64_t offset);

}  // namespace inf
