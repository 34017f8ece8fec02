// One path of the queue: the transfers of its files, in their order, and the backend that carries them out.
//
// The rules, kept by `next` alone (L1 to L3), with what is in flight counted by `take` and `finish`:
//
// L1  At most `depth` requests and `in_flight_nbytes` bytes are at the backend; one request always may be, whatever it moves.
// L2  DEMAND goes before WRITE_BACK before PREFETCH. Requests are taken one at a time, so a long transfer that is less urgent holds
//     nobody up by more than the requests of it that are at the backend.
// L3  What is at the backend cannot be overtaken. So of requests that are not DEMAND (the background) few are let in while one of
//     DEMAND is ready or at the backend, a few more for some time after, for another one may come, and `depth` of them else.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "histogram.hpp"
#include "request.hpp"
#include "task.hpp"

extern "C" {
#include "abi.h"
}

struct inf_queue;

namespace inf {

uint64_t now_ns();

// What carries out the requests of a lane. It asks the lane for them (`take`) and gives each back (`finish`).
class Backend {
 public:
    virtual ~Backend() = default;
    // Starts its threads: 0, or -errno with nothing left behind. May lower the depth of its lane, not after.
    virtual int open() = 0;
    // With the mutex: how many rings `ready` requests call for; `ring` is called without it.
    virtual uint32_t claim(uint64_t ready) = 0;
    virtual void ring(uint32_t n) = 0;
    // After the queue's `stopping`.
    virtual void join() = 0;

    // Files and memory that transfers will use, for backends that gain by knowing them in advance. Without the mutex, one call at a
    // time. What is dropped is not in use, and the kernel has let go of it when the call returns.
    virtual void add_file(int) {}
    virtual void drop_file(int) {}
    virtual void add_memory(void *, uint64_t) {}
    virtual void drop_memory(void *) {}
    // With the mutex: what it could register, and what it has to do without (`files_registered` and what follows it).
    virtual void describe(inf_path_info *) const {}
};

class Lane {
 public:
    Lane(inf_queue *queue, const inf_queue_options &options);
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    int open(int backend);

    // For the queue; all with the mutex held.
    void push(Task *task);
    void drop(Task *task) { ready_.drop(task); }
    void raise(Task *task);
    uint32_t claim() {
        const uint64_t ready = ready_to_go();
        return ready ? backend_->claim(ready) : 0;
    }
    uint32_t claim_all() { return backend_->claim(UINT32_MAX); }
    Backend *backend() const { return backend_.get(); }
    void stats(inf_path_stats *stats) const;
    void describe(inf_path_info *info) const;
    const Histogram &latency(int op, int stage) const { return latency_[op][stage]; }
    const Histogram &depths() const { return depths_; }

    // For backends.
    std::mutex &mutex();
    inf_files *files() const;
    uint32_t io_threads() const { return options_.io_threads; }
    uint32_t depth() const { return depth_; }
    // In `open`: it cannot have as many as were asked for.
    void limit_depth(uint32_t depth) { depth_ = depth < depth_ ? depth : depth_; }
    // With the mutex held:
    bool stopping() const;
    bool has_requests() const { return next() != nullptr; }   // `take` would give one
    bool take(Request *request);
    void finish(const Request &request);
    // Releases the mutex and rings everybody for whom there is work.
    void unlock_and_ring(std::unique_lock<std::mutex> &lock);

 private:
    Task *next() const;
    uint64_t ready_to_go() const;
    uint64_t background_max() const;
    uint64_t background_in_flight() const { return requests_ - requests_demand_; }
    uint64_t next_nbytes(const Task *task) const;

    inf_queue *const queue_;
    const inf_queue_options &options_;
    const uint64_t background_beside_;   // L3: requests beside one of DEMAND
    uint32_t depth_;
    int backend_kind_ = 0;
    std::unique_ptr<Backend> backend_;

    ReadyLists ready_;
    uint64_t requests_ = 0, requests_demand_ = 0, nbytes_ = 0;   // at the backend
    uint64_t transfers_ = 0, busy_since_ns_ = 0;                 // READ and WRITE among them
    uint64_t clock_ns_ = 0;    // when a request was last taken or given back
    uint64_t demand_ns_ = 0;   // ... one of DEMAND given back
    inf_path_stats stats_ = {};
    Histogram latency_[2][INF_STAGES];   // of READ and WRITE
    Histogram depths_;
};

// Null when there is no memory for it.
std::unique_ptr<Backend> new_threads_backend(Lane *lane);
std::unique_ptr<Backend> new_uring_backend(Lane *lane);
std::unique_ptr<Backend> new_libaio_backend(Lane *lane);

}  // namespace inf
