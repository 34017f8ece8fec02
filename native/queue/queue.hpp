// The task queue: dependencies, splitting, accounting. Which thread does what:
//
//   submit, poll, wait      the caller's threads
//   kernels                 `workers` threads of the queue
//   reads, writes, flushes  the backend: a pool of threads, or one dispatcher that alone touches the ring
//
// One mutex guards everything here; no I/O and no kernel runs under it. Whoever ends a task makes its dependents ready in the same
// critical section and takes one of them itself where it can.
//
// Q1  A task is ready when all its dependencies are complete. If one of them failed, it ends with -ECANCELED instead of running; it
//     still ends only after all of them, so "the last task of a frame is complete" means that nothing touches the frame any more.
// Q2  A task completes once: whole, or with an errno and with nothing of it left at the backend.
// Q3  After submit returned, nothing here allocates: room for completions and failures is made there, so it is all or nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "request.hpp"
#include "thread.hpp"

extern "C" {
#include "abi.h"
}

namespace inf {

struct Block;

// "`dependent` waits for the task in whose list this is." Owned by the dependent.
struct Edge {
    Task *dependent;
    Edge *next;
};

struct Task {
    Task *next;          // in a ready list, or among those that just ended
    Edge *dependents;
    Block *block;        // the memory this lies in
    const uint8_t *args;
    uint64_t id;
    uint64_t offset, nbytes, address;
    uint64_t issued;     // READ, WRITE: bytes handed to the backend
    uint64_t unissued;   // requests not handed to it yet
    uint64_t value;
    uint32_t args_nbytes;
    uint32_t pending;    // dependencies not complete
    uint32_t requests;   // at the backend
    uint32_t retries;
    int32_t op, fd, kernel, status;
    bool doomed;         // a dependency failed
    bool watched;        // somebody waits for it
    bool running;        // a kernel on a worker
};

// What one submit allocated: its tasks, edges and arguments. Freed with its last task.
struct Block {
    uint64_t alive;
};

// First in, first out.
class TaskList {
 public:
    Task *front() const { return head_; }
    bool empty() const { return head_ == nullptr; }

    void push(Task *task) {
        task->next = nullptr;
        if (head_) tail_->next = task;
        else head_ = task;
        tail_ = task;
    }

    Task *pop() {
        Task *task = head_;
        head_ = task->next;
        return task;
    }

 private:
    Task *head_ = nullptr, *tail_ = nullptr;
};

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

// What carries out requests. It asks the queue for them (`take`) and gives each back (`finish`).
class Backend {
 public:
    virtual ~Backend() = default;
    // Starts its threads: 0, or -errno with nothing left behind.
    virtual int open() = 0;
    // With the mutex: how many rings `ready` requests call for; `ring` is called without it.
    virtual uint32_t claim(uint64_t ready) = 0;
    virtual void ring(uint32_t n) = 0;
    // After the queue's `stopping`.
    virtual void join() = 0;
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
    int wait(const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms);
    int pending(uint64_t id, inf_task *task, int *phase) const;
    void stats(inf_queue_stats *stats) const;

    // For backends: all with the mutex held.
    std::mutex &mutex() { return mutex_; }
    inf_files *files() const { return files_; }
    uint32_t depth() const { return options_.depth; }
    uint32_t io_threads() const { return options_.io_threads; }
    bool stopping() const { return stopping_; }
    bool has_requests() const { return requests_ready_ > 0; }
    bool take(inf::Request *request);
    void finish(const inf::Request &request);
    // Releases the mutex and rings everybody for whom there is work.
    void unlock_and_ring(std::unique_lock<std::mutex> &lock);

 private:
    enum Mark : uintptr_t { kSucceeded = 0, kFailed = 1 };   // else a Task *

    int check(const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint64_t args_nbytes) const;
    bool is_failed(uint64_t id) const;
    inf::Task *live(uint64_t id) const;
    void make_ready(inf::Task *task, inf::TaskList *ended);
    void complete(inf::TaskList *ended);
    void complete(inf::Task *task);
    void work();
    void stop();

    inf_files *const files_;
    const inf_queue_options options_;

    mutable std::mutex mutex_;
    std::condition_variable ended_;   // a watched task, or the last in flight
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

    inf::TaskList io_ready_, kernels_ready_;
    uint64_t requests_ready_ = 0, n_kernels_ready_ = 0;   // a task of n requests counts n
    inf::Sleepers idle_workers_;

    inf_queue_stats stats_ = {};
    uint64_t transfers_ = 0, busy_since_ns_ = 0;   // READ and WRITE requests at the backend

    int backend_kind_ = 0;
    std::unique_ptr<inf::Backend> backend_;
    std::unique_ptr<inf::Thread[]> workers_;
};

namespace inf {

// Null when there is no memory for it.
std::unique_ptr<Backend> new_threads_backend(inf_queue *queue);
std::unique_ptr<Backend> new_uring_backend(inf_queue *queue);

}  // namespace inf
