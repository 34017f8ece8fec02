// What a task is while the queue has it, and the lists of those that could run.
#pragma once

#include <cstdint>

extern "C" {
#include "abi.h"
}

namespace inf {

struct Block;
struct Task;
class Lane;

// "`dependent` waits for `earlier`." Owned by the dependent; in the list of the earlier one, and null there once that has ended.
struct Edge {
    Task *dependent;
    Task *earlier;
    Edge *next;
};

struct Task {
    Task *next, *prev;   // in a ready list; `next` also among those that just ended
    Task *next_raised;   // among those whose dependencies are yet to be raised
    Edge *dependents;
    Edge *needs;         // one for each dependency that was not complete at submit
    Block *block;        // the memory this lies in
    Lane *lane;          // READ, WRITE, FLUSH
    const uint8_t *args;
    uint64_t id;
    uint64_t offset, nbytes, address;
    uint64_t ready_ns;
    uint64_t issued;     // READ, WRITE: bytes handed to the backend
    uint64_t unissued;   // pieces not begun: requests, or one for a kernel; in a ready list while there are any
    uint64_t value;
    uint32_t args_nbytes;
    uint32_t n_needs;
    uint32_t pending;    // dependencies not complete
    uint32_t requests;   // at the backend
    uint32_t retries;
    int32_t op, fd, kernel, priority, status;
    bool doomed;         // cancelled, or a dependency failed
    bool watched;        // somebody waits for it
    bool raised;         // it is DEMAND, and so is everything that it depends on
    bool running;        // a kernel on a worker
};

// What one submit allocated: its tasks, edges and arguments. Freed with its last task.
struct Block {
    uint64_t alive;
};

// First in, first out; any can be taken from between.
class TaskList {
 public:
    Task *front() const { return head_; }
    bool empty() const { return head_ == nullptr; }

    void push(Task *task) {
        task->next = nullptr;
        task->prev = tail_;
        (tail_ ? tail_->next : head_) = task;
        tail_ = task;
    }

    void remove(Task *task) {
        (task->prev ? task->prev->next : head_) = task->next;
        (task->next ? task->next->prev : tail_) = task->prev;
    }

    Task *pop() {
        Task *task = head_;
        remove(task);
        return task;
    }

 private:
    Task *head_ = nullptr, *tail_ = nullptr;
};

// Tasks that could run, by priority. A task is here while it has pieces that were not begun.
class ReadyLists {
 public:
    void push(Task *task, uint64_t pieces) {
        task->unissued = pieces;
        pieces_[task->priority] += pieces;
        lists_[task->priority].push(task);
    }

    // One piece of it was begun.
    void begun(Task *task) {
        skipped_[task->priority] = 0;
        for (int priority = task->priority + 1; priority < INF_PRIORITIES; ++priority) {
            skipped_[priority] = lists_[priority].empty() ? 0 : skipped_[priority] + 1;
        }
        --pieces_[task->priority];
        if (--task->unissued == 0) lists_[task->priority].remove(task);
    }

    // None of its pieces left will begin.
    void drop(Task *task) {
        pieces_[task->priority] -= task->unissued;
        task->unissued = 0;
        lists_[task->priority].remove(task);
    }

    // It is DEMAND from now on, wherever it is.
    void raise(Task *task) {
        if (task->unissued > 0) {
            const uint64_t pieces = task->unissued;
            drop(task);
            task->priority = INF_DEMAND;
            push(task, pieces);
        }
        task->priority = INF_DEMAND;
    }

    // The most urgent one, but one that is less urgent when it was passed over many times, so that none waits for ever.
    // `background`: may it be one that is not DEMAND?
    Task *next(bool background) const {
        Task *first = lists_[INF_DEMAND].front();
        for (int priority = INF_DEMAND + 1; background && priority < INF_PRIORITIES; ++priority) {
            if (!lists_[priority].empty() && (!first || skipped_[priority] >= kSkippedMax)) first = lists_[priority].front();
        }
        return first;
    }

    uint64_t demand() const { return pieces_[INF_DEMAND]; }
    uint64_t background() const {
        uint64_t pieces = 0;
        for (int priority = INF_DEMAND + 1; priority < INF_PRIORITIES; ++priority) pieces += pieces_[priority];
        return pieces;
    }

 private:
    static constexpr uint32_t kSkippedMax = 16;

    TaskList lists_[INF_PRIORITIES];
    uint64_t pieces_[INF_PRIORITIES] = {};
    uint32_t skipped_[INF_PRIORITIES] = {};   // pieces that were more urgent and begun since its last one, while it had any
};

}  // namespace inf
