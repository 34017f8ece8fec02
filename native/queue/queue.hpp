// The task queue: dependencies, promotion, accounting. Which thread does what:
//
//   submit, poll, wait      the caller's threads
//   kernels                 `workers` threads of the queue
//   reads, writes, flushes  one lane for each path (lane.hpp): a pool of threads, or one dispatcher that alone touches the ring
//
// One mutex guards everything here and in the lanes; no I/O and no kernel runs under it. Whoever ends a task makes its dependents
// ready in the same critical section and takes one of them itself where it can.
//
// The life of a task, and what moves it:
//
//   submit --> WAITING --the last dependency ended--> READY --take--> RUNNING --finish (the last piece)--> complete
//                 |                                     ^                |
//                 |                                     +--- take: more requests than are at the backend
//                 +--doomed: a dependency failed, or cancel--> complete (-ECANCELED), when all its dependencies have ended
//              READY --cancel--> complete (-ECANCELED)
//              RUNNING --cancel, or a request failed--> no further request is taken; complete when those at the backend have ended
//
// Q1  A task is ready when all its dependencies are complete. If one of them failed, it ends with -ECANCELED instead of running; it
//     still ends only after all of them, so "the last task of a frame is complete" means that nothing touches the frame any more.
// Q2  A task completes once: whole, or with an errno and with nothing of it left at the backend.
// Q3  After submit returned, nothing here allocates: room for completions and failures is made there, so it is all or nothing.
// Q4  A transfer belongs to one lane from submit on, that of its file then. Lanes share nothing but the mutex: a path that is slow,
//     or stands still, holds up no transfer of another one that does not depend on it.
// Q5  Of what is ready the most urgent goes first (lane.hpp says what "goes" means for transfers); nothing waits for ever.
// Q6  What somebody waits for is DEMAND, and so is everything that it depends on. A task is raised once, so a wait costs what is new.
// Q7  Cancelling begins nothing and breaks nothing off: a kernel that runs and requests at the backend go to their end.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "lane.hpp"
#include "task.hpp"
#include "thread.hpp"

extern "C" {
#include "abi.h"
}

namespace inf {

// A power-of-two array of plain values that grows without exceptions. Indexed by ever-growing counters.
template <typename T>
class Ring {
 public:
    Ring() = default;
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;
    ~Ring() { std::free(items_); }

    T &operator[](uint64_t index) { return items_[index & (capacity_ - 1)]; }
    const T &operator[](uint64_t index) const { return items_[index & (capacity_ - 1)]; }

    // Room for `count` values, of which those in [begin, end) are kept. False: no memory, nothing changed.
    bool reserve(uint64_t count, uint64_t begin, uint64_t end) {
        if (count <= capacity_) return true;
        uint64_t capacity = capacity_ ? capacity_ : 64;
        while (capacity < count) capacity *= 2;
        T *items = static_cast<T *>(std::malloc(capacity * sizeof(T)));
        if (!items) return false;
        for (uint64_t index = begin; index < end; ++index) items[index & (capacity - 1)] = (*this)[index];
        std::free(items_);
        items_ = items;
        capacity_ = capacity;
        return true;
    }

 private:
    T *items_ = nullptr;
    uint64_t capacity_ = 0;
};

}  // namespace inf

struct inf_queue {
 public:
    inf_queue(inf_files *files, const inf_queue_options &options) : files_(files), options_(options) {}
    ~inf_queue();
    inf_queue(const inf_queue &) = delete;
    inf_queue &operator=(const inf_queue &) = delete;

    int open(int backend);
    int backend() const { return backend_kind_; }
    int submit(const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint32_t n_after, const uint8_t *args, uint64_t args_nbytes,
               uint64_t *first_id);
    int poll(inf_completion *completions, uint32_t max);
    enum class For { kAll, kAny };
    int wait(const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms, For what);
    int pending(uint64_t id, inf_task *task, int *phase) const;
    int list(uint64_t *ids, uint32_t max) const;
    void promote(const uint64_t *ids, uint32_t n_ids);
    void cancel(const uint64_t *ids, uint32_t n_ids);
    int drain(uint32_t timeout_ms);
    int add_file(int fd, uint32_t path);
    void drop_file(int fd);
    void add_memory(void *base, uint64_t nbytes);
    void drop_memory(void *base);
    void stats(inf_queue_stats *stats) const;
    int path_stats(uint32_t path, inf_path_stats *stats) const;
    int latency(uint32_t path, int op, int stage, inf_histogram *histogram) const;
    int depths(uint32_t path, inf_histogram *histogram) const;
    int path_info(uint32_t path, inf_path_info *info) const;

 private:
    friend class inf::Lane;

    enum Mark : uintptr_t { kSucceeded = 0, kFailed = 1 };   // else a Task *

    int check(const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint64_t args_nbytes) const;
    bool is_failed(uint64_t id) const;
    inf::Task *live(uint64_t id) const;
    inf::Lane *lane(int fd) const;
    void make_ready(inf::Task *task, inf::TaskList *ended);
    void raise(const uint64_t *ids, uint32_t n_ids);
    void raise(inf::Task *task);
    void cancel(inf::Task *task, inf::TaskList *ended);
    void complete(inf::TaskList *ended);
    void complete(inf::Task *task);
    // Releases the mutex and rings everybody for whom there is work.
    void unlock_and_ring(std::unique_lock<std::mutex> &lock);
    void work();
    void stop();

    inf_files *const files_;
    const inf_queue_options options_;

    mutable std::mutex mutex_;
    std::condition_variable ended_;   // a watched task, or the last in flight
    uint32_t n_waiting_ = 0;          // threads in wait and drain
    bool ring_ended_ = false;
    bool stopping_ = false;
    bool closing_ = false;

    // Tasks by id: window_[id] for id in [base_, next_id_). Older ones succeeded unless they are in failed_, which is sorted.
    uint64_t base_ = 1, next_id_ = 1, in_flight_ = 0;
    inf::Ring<uintptr_t> window_;
    uint64_t n_failed_ = 0;
    inf::Ring<uint64_t> failed_;

    uint64_t completions_begin_ = 0, completions_end_ = 0;
    inf::Ring<inf_completion> completions_;

    inf::ReadyLists kernels_;
    inf::Sleepers idle_workers_;
    std::unique_ptr<inf::Thread[]> workers_;

    std::unique_ptr<inf::Lane> lanes_[INF_PATHS_MAX];
    uint32_t n_lanes_ = 0;
    std::mutex adding_;   // one file or memory at a time; taken before mutex_
    inf::Ring<uint8_t> path_of_fd_;   // 1 + the path of an added file
    uint64_t fds_end_ = 0;

    inf_queue_stats stats_ = {};
    uint64_t transfers_ = 0, busy_since_ns_ = 0;   // READ and WRITE requests at the backends

    int backend_kind_ = 0;
};
