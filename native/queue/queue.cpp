#include "queue.hpp"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/kernels.hpp"

using inf::Block;
using inf::Edge;
using inf::Lane;
using inf::Task;
using inf::TaskList;

namespace {

constexpr uint64_t kRequestNbytesMax = 1u << 30;   // the kernel moves less than 2 GiB in one call
constexpr uint32_t kDepthMax = 4096, kThreadsMax = 1024;

}  // namespace

inf_queue::~inf_queue() { stop(); }

int inf_queue::open(int backend) {
    workers_.reset(new (std::nothrow) inf::Thread[options_.workers]);
    if (!workers_) return -ENOMEM;
    backend_kind_ = backend;
    while (n_lanes_ < options_.n_paths) {
        std::unique_ptr<Lane> lane(new (std::nothrow) Lane(this, options_));
        if (!lane) return -ENOMEM;
        if (const int error = lane->open(backend)) return error;
        std::lock_guard<std::mutex> lock(mutex_);   // the threads of the lanes so far look at all of them
        lanes_[n_lanes_++] = std::move(lane);
    }
    for (uint32_t i = 0; i < options_.workers; ++i) {
        if (const int error = workers_[i].start<inf_queue, &inf_queue::work>(this, "infinity-kernel")) return error;
    }
    return 0;
}

void inf_queue::stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    while (in_flight_ > 0 || n_waiting_ > 0) ended_.wait(lock);
    stopping_ = true;
    const uint32_t workers = idle_workers_.claim(options_.workers);
    uint32_t rings[INF_PATHS_MAX];
    for (uint32_t i = 0; i < n_lanes_; ++i) rings[i] = lanes_[i]->claim_all();
    lock.unlock();
    idle_workers_.ring(workers);
    for (uint32_t i = 0; i < n_lanes_; ++i) {
        lanes_[i]->backend()->ring(rings[i]);
        lanes_[i]->backend()->join();
    }
    for (uint32_t i = 0; workers_ && i < options_.workers; ++i) workers_[i].join();
}

int inf_queue::check(const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint64_t args_nbytes) const {
    for (uint32_t i = 0; i < n_tasks; ++i) {
        const inf_task &task = tasks[i];
        if (task.priority < 0 || task.priority >= INF_PRIORITIES) return -EINVAL;
        for (uint32_t j = task.after_begin; j < task.after_begin + task.after_count; ++j) {
            const int64_t id = after[j];
            if (id == 0 || (id > 0 ? static_cast<uint64_t>(id) >= next_id_ : -1 - id >= static_cast<int64_t>(i))) return -EINVAL;
        }
        switch (task.op) {
            case INF_READ:
            case INF_WRITE:
                if (task.offset > INT64_MAX || task.nbytes > INT64_MAX - task.offset || task.nbytes > UINT64_MAX - task.address) return -EINVAL;
                break;
            case INF_FLUSH:
                break;
            case INF_KERNEL:
                if (task.args_offset % 8 || task.args_offset > args_nbytes || task.args_nbytes > args_nbytes - task.args_offset) return -EINVAL;
                break;
            default:
                return -EINVAL;
        }
    }
    return 0;
}

Task *inf_queue::live(uint64_t id) const {
    if (id < base_) return nullptr;
    const uintptr_t mark = window_[id];
    return mark == kSucceeded || mark == kFailed ? nullptr : reinterpret_cast<Task *>(mark);
}

bool inf_queue::is_failed(uint64_t id) const {
    if (id >= base_) return window_[id] == kFailed;
    uint64_t begin = 0, end = n_failed_;
    while (begin < end) {
        const uint64_t middle = begin + (end - begin) / 2;
        if (failed_[middle] < id) begin = middle + 1;
        else end = middle;
    }
    return begin < n_failed_ && failed_[begin] == id;
}

Lane *inf_queue::lane(int fd) const {
    const uint8_t path = fd >= 0 && static_cast<uint64_t>(fd) < fds_end_ ? path_of_fd_[static_cast<uint64_t>(fd)] : 0;
    return lanes_[path ? path - 1 : 0].get();
}

int inf_queue::submit(const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint32_t n_after, const uint8_t *args, uint64_t args_nbytes,
                      uint64_t *first_id) {
    if (args_nbytes > UINT32_MAX * uint64_t{16}) return -EINVAL;
    // One allocation: the block, its tasks, its edges, the arguments. Dependencies may share ranges of `after`, so they are counted.
    uint64_t n_edges = 0;
    for (uint32_t i = 0; i < n_tasks; ++i) {
        if (tasks[i].after_begin > n_after || tasks[i].after_count > n_after - tasks[i].after_begin) return -EINVAL;
        n_edges += tasks[i].after_count;
        if (n_edges > UINT32_MAX) return -EINVAL;
    }
    const uint64_t tasks_at = (sizeof(Block) + 15) / 16 * 16;
    const uint64_t edges_at = tasks_at + (n_tasks * sizeof(Task) + 15) / 16 * 16;
    const uint64_t args_at = edges_at + (n_edges * sizeof(Edge) + 15) / 16 * 16;
    uint8_t *memory = n_tasks ? static_cast<uint8_t *>(std::malloc(args_at + args_nbytes)) : nullptr;
    if (n_tasks && !memory) return -ENOMEM;
    if (n_tasks && args_nbytes) memcpy(memory + args_at, args, args_nbytes);
    Block *block = reinterpret_cast<Block *>(memory);
    Task *const block_tasks = reinterpret_cast<Task *>(memory + tasks_at);
    Edge *edge = reinterpret_cast<Edge *>(memory + edges_at);

    std::unique_lock<std::mutex> lock(mutex_);
    int error = closing_ ? -ESHUTDOWN : check(tasks, n_tasks, after, args_nbytes);
    const uint64_t end_id = next_id_ + n_tasks;
    if (!error) {
        const bool room = window_.reserve(end_id - base_, base_, next_id_) &&
                          failed_.reserve(n_failed_ + (end_id - base_), 0, n_failed_) &&
                          completions_.reserve(completions_end_ - completions_begin_ + in_flight_ + n_tasks, completions_begin_, completions_end_);
        if (!room) error = -ENOMEM;
    }
    if (error || n_tasks == 0) {
        *first_id = next_id_;
        lock.unlock();
        std::free(memory);
        return error;
    }

    block->alive = n_tasks;
    *first_id = next_id_;
    TaskList ended;
    for (uint32_t i = 0; i < n_tasks; ++i) {
        const inf_task &from = tasks[i];
        Task *task = new (&block_tasks[i]) Task{};
        task->block = block;
        task->id = next_id_ + i;
        task->op = from.op;
        task->fd = from.fd;
        task->kernel = from.kernel;
        task->priority = from.priority;
        if (from.op != INF_KERNEL) task->lane = lane(from.fd);
        if (from.op == INF_KERNEL) {
            task->args = memory + args_at + from.args_offset;
            task->args_nbytes = from.args_nbytes;
        } else if (from.op != INF_FLUSH) {
            task->offset = from.offset;
            task->nbytes = from.nbytes;
            task->address = from.address;
        }
        window_[task->id] = reinterpret_cast<uintptr_t>(task);
        task->needs = edge;
        for (uint32_t j = from.after_begin; j < from.after_begin + from.after_count; ++j) {
            const uint64_t id = after[j] < 0 ? next_id_ + static_cast<uint64_t>(-1 - after[j]) : static_cast<uint64_t>(after[j]);
            if (Task *earlier = live(id)) {
                *edge = {task, earlier, earlier->dependents};
                earlier->dependents = edge++;
                ++task->n_needs;
            } else if (is_failed(id)) {
                task->doomed = true;
            }
        }
        task->pending = task->n_needs;
    }
    next_id_ = end_id;
    in_flight_ += n_tasks;
    // Only now, when all ids are known: a task may end here and now (cancelled, or of no bytes), and take others of the batch along.
    for (uint32_t i = 0; i < n_tasks; ++i) {
        if (block_tasks[i].pending == 0) make_ready(&block_tasks[i], &ended);
    }
    complete(&ended);
    unlock_and_ring(lock);
    return 0;
}

// All its dependencies are complete.
void inf_queue::make_ready(Task *task, TaskList *ended) {
    if (task->doomed) {
        task->status = -ECANCELED;
        ended->push(task);
    } else if (task->op == INF_KERNEL) {
        kernels_.push(task, 1);
    } else if (task->op != INF_FLUSH && task->nbytes == 0) {
        ended->push(task);
    } else {
        task->lane->push(task);
    }
}

// Q6. A stack of links in the tasks, because chains are long.
void inf_queue::raise(Task *task) {
    if (task->raised) return;
    task->raised = true;
    task->next_raised = nullptr;
    for (Task *top = task; top;) {
        task = top;
        top = task->next_raised;
        if (task->priority != INF_DEMAND) task->lane ? task->lane->raise(task) : kernels_.raise(task);
        for (uint32_t i = 0; i < task->n_needs; ++i) {
            Task *earlier = task->needs[i].earlier;
            if (!earlier || earlier->raised) continue;
            earlier->raised = true;
            earlier->next_raised = top;
            top = earlier;
        }
    }
}

void inf_queue::raise(const uint64_t *ids, uint32_t n_ids) {
    for (uint32_t i = 0; i < n_ids; ++i) {
        Task *task = ids[i] < next_id_ ? live(ids[i]) : nullptr;
        if (task) raise(task);
    }
}

void inf_queue::cancel(Task *task, TaskList *ended) {
    if (task->pending > 0) {
        task->doomed = true;
    } else if (task->unissued > 0) {
        task->lane ? task->lane->drop(task) : kernels_.drop(task);
        if (task->status == 0) task->status = -ECANCELED;
        if (task->requests == 0) ended->push(task);
    }
}

void inf_queue::complete(Task *task) {
    TaskList ended;
    ended.push(task);
    complete(&ended);
}

// Ends each task of the list and, in turn, those that end with it.
void inf_queue::complete(TaskList *ended) {
    while (!ended->empty()) {
        Task *task = ended->pop();
        completions_[completions_end_++] = {task->id, task->value, task->status, task->retries};
        window_[task->id] = task->status < 0 ? kFailed : kSucceeded;
        --in_flight_;
        if (task->watched || (closing_ && in_flight_ == 0)) ring_ended_ = true;
        switch (task->op) {
            case INF_READ: ++stats_.reads; break;
            case INF_WRITE: ++stats_.writes; break;
            case INF_FLUSH: ++stats_.flushes; break;
            default: ++stats_.kernels; break;
        }
        // The list was built back to front; dependents become ready in the order of their ids.
        Edge *in_order = nullptr;
        for (Edge *edge = task->dependents; edge;) {
            Edge *next = edge->next;
            edge->earlier = nullptr;
            edge->next = in_order;
            in_order = edge;
            edge = next;
        }
        for (Edge *edge = in_order; edge;) {
            Task *dependent = edge->dependent;
            edge = edge->next;
            if (task->status < 0) dependent->doomed = true;
            if (--dependent->pending == 0) make_ready(dependent, ended);
        }
        if (--task->block->alive == 0) std::free(task->block);
    }
    for (; base_ < next_id_; ++base_) {
        const uintptr_t mark = window_[base_];
        if (mark != kSucceeded && mark != kFailed) break;
        if (mark == kFailed) failed_[n_failed_++] = base_;
    }
}

void inf_queue::unlock_and_ring(std::unique_lock<std::mutex> &lock) {
    const uint32_t workers = idle_workers_.claim(kernels_.demand() + kernels_.background());
    uint32_t rings[INF_PATHS_MAX];
    const uint32_t n_lanes = n_lanes_;   // more may be opened meanwhile
    for (uint32_t i = 0; i < n_lanes; ++i) rings[i] = lanes_[i]->claim();
    const bool ended = ring_ended_;
    ring_ended_ = false;
    lock.unlock();
    for (uint32_t i = 0; i < n_lanes; ++i) {
        if (rings[i]) lanes_[i]->backend()->ring(rings[i]);
    }
    if (workers) idle_workers_.ring(workers);
    if (ended) ended_.notify_all();
}

void inf_queue::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Task *task = kernels_.next(true);
        if (!task) {
            if (stopping_) return;
            unlock_and_ring(lock);
            lock.lock();
            if (!kernels_.next(true) && !stopping_) idle_workers_.sleep(lock);
            continue;
        }
        kernels_.begun(task);
        task->running = true;
        unlock_and_ring(lock);
        uint64_t value = 0;
        const int status = inf::run_kernel(task->kernel, task->args, task->args_nbytes, &value);
        lock.lock();
        task->value = value;
        task->status = status < 0 ? status : 0;
        complete(task);
    }
}

int inf_queue::poll(inf_completion *completions, uint32_t max) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t n = 0;
    for (; n < max && n < INT32_MAX && completions_begin_ < completions_end_; ++n) completions[n] = completions_[completions_begin_++];
    return static_cast<int>(n);
}

int inf_queue::wait(const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms, For what) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint32_t i = 0; i < n_ids; ++i) {
        if (ids[i] == 0 || ids[i] >= next_id_) return -EINVAL;
    }
    ++n_waiting_;
    bool late = timeout_ms == 0;   // who only asks waits for nothing
    if (!late) {
        raise(ids, n_ids);
        unlock_and_ring(lock);   // for what may go only now
        lock.lock();
    }
    int result = 0;
    for (uint32_t left = n_ids;;) {
        if (what == For::kAll) {
            // From the last on, which tends to complete last: few wakes.
            Task *task = nullptr;
            while (left > 0 && !(task = live(ids[left - 1]))) --left;
            if (left == 0) break;
            task->watched = true;
        } else {
            uint32_t n_live = 0;
            for (Task *task; n_live < n_ids && (task = live(ids[n_live])); ++n_live) task->watched = true;
            if (n_live < n_ids || n_ids == 0) break;
        }
        if (late) {
            result = -ETIMEDOUT;
            break;
        }
        late = ended_.wait_until(lock, deadline) == std::cv_status::timeout;
    }
    if (--n_waiting_ == 0 && closing_) ended_.notify_all();
    return result;
}

void inf_queue::promote(const uint64_t *ids, uint32_t n_ids) {
    std::unique_lock<std::mutex> lock(mutex_);
    raise(ids, n_ids);
    unlock_and_ring(lock);
}

void inf_queue::cancel(const uint64_t *ids, uint32_t n_ids) {
    std::unique_lock<std::mutex> lock(mutex_);
    TaskList ended;
    if (n_ids == 0) {
        for (uint64_t id = base_; id < next_id_; ++id) {
            if (Task *task = live(id)) cancel(task, &ended);
        }
    }
    for (uint32_t i = 0; i < n_ids; ++i) {
        Task *task = ids[i] < next_id_ ? live(ids[i]) : nullptr;
        if (task) cancel(task, &ended);
    }
    complete(&ended);
    unlock_and_ring(lock);
}

int inf_queue::drain(uint32_t timeout_ms) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    ++n_waiting_;
    bool late = timeout_ms == 0;
    while (in_flight_ > 0 && !late) late = ended_.wait_until(lock, deadline) == std::cv_status::timeout;
    const int result = in_flight_ > 0 ? -ETIMEDOUT : 0;
    if (--n_waiting_ == 0) ended_.notify_all();
    return result;
}

int inf_queue::add_file(int fd, uint32_t path) {
    if (fd < 0 || path >= n_lanes_) return -EINVAL;
    drop_file(fd);
    std::lock_guard<std::mutex> one(adding_);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t end = static_cast<uint64_t>(fd) + 1;
        if (end > fds_end_) {
            if (!path_of_fd_.reserve(end, 0, fds_end_)) return -ENOMEM;
            for (; fds_end_ < end; ++fds_end_) path_of_fd_[fds_end_] = 0;
        }
        path_of_fd_[static_cast<uint64_t>(fd)] = static_cast<uint8_t>(1 + path);
    }
    lanes_[path]->backend()->add_file(fd);
    return 0;
}

void inf_queue::drop_file(int fd) {
    std::lock_guard<std::mutex> one(adding_);
    Lane *of_file = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (fd < 0 || static_cast<uint64_t>(fd) >= fds_end_ || path_of_fd_[static_cast<uint64_t>(fd)] == 0) return;
        of_file = lane(fd);
        path_of_fd_[static_cast<uint64_t>(fd)] = 0;
    }
    of_file->backend()->drop_file(fd);
}

void inf_queue::add_memory(void *base, uint64_t nbytes) {
    std::lock_guard<std::mutex> one(adding_);
    for (uint32_t i = 0; i < n_lanes_; ++i) lanes_[i]->backend()->add_memory(base, nbytes);
}

void inf_queue::drop_memory(void *base) {
    std::lock_guard<std::mutex> one(adding_);
    for (uint32_t i = 0; i < n_lanes_; ++i) lanes_[i]->backend()->drop_memory(base);
}

int inf_queue::pending(uint64_t id, inf_task *answer, int *phase) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Task *task = id > 0 && id < next_id_ ? live(id) : nullptr;
    if (!task) return -ENOENT;
    *answer = inf_task{};
    answer->op = task->op;
    answer->fd = task->fd;
    answer->offset = task->offset;
    answer->nbytes = task->nbytes;
    answer->address = task->address;
    answer->kernel = task->kernel;
    answer->args_nbytes = task->args_nbytes;
    answer->after_count = task->pending;
    *phase = task->pending ? INF_WAITING : task->running || task->requests ? INF_RUNNING : INF_READY;
    return 0;
}

int inf_queue::list(uint64_t *ids, uint32_t max) const {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t n = 0;
    for (uint64_t id = base_; id < next_id_ && n < max && n < INT32_MAX; ++id) {
        if (live(id)) ids[n++] = id;
    }
    return static_cast<int>(n);
}

void inf_queue::stats(inf_queue_stats *stats) const {
    std::lock_guard<std::mutex> lock(mutex_);
    *stats = stats_;
    stats->in_flight = in_flight_;
    if (transfers_) stats->io_busy_ns += inf::now_ns() - busy_since_ns_;
    for (uint32_t i = 0; i < n_lanes_; ++i) {
        inf_path_stats of_path;
        lanes_[i]->stats(&of_path);
        stats->read_nbytes += of_path.read_nbytes;
        stats->write_nbytes += of_path.write_nbytes;
        stats->shorts += of_path.shorts;
        stats->retries += of_path.retries;
    }
}

int inf_queue::path_stats(uint32_t path, inf_path_stats *stats) const {
    if (path >= n_lanes_) return -EINVAL;
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_[path]->stats(stats);
    return 0;
}

int inf_queue::latency(uint32_t path, int op, int stage, inf_histogram *histogram) const {
    if (path >= n_lanes_ || (op != INF_READ && op != INF_WRITE) || stage < 0 || stage >= INF_STAGES) return -EINVAL;
    *histogram = inf_histogram{};
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_[path]->latency(op, stage).add_to(histogram);
    return 0;
}

int inf_queue::depths(uint32_t path, inf_histogram *histogram) const {
    if (path >= n_lanes_) return -EINVAL;
    *histogram = inf_histogram{};
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_[path]->depths().add_to(histogram);
    return 0;
}

int inf_queue::path_info(uint32_t path, inf_path_info *info) const {
    if (path >= n_lanes_) return -EINVAL;
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_[path]->describe(info);
    return 0;
}

extern "C" {

int inf_queue_open(inf_files *files, const inf_queue_options *options, inf_queue **queue) {
    *queue = nullptr;
    inf_queue_options o = *options;
    if (o.backend < INF_BACKEND_THREADS || o.backend > INF_BACKEND_LIBAIO) return -EINVAL;
    if (o.depth == 0 || o.depth > kDepthMax || o.block_nbytes == 0) return -EINVAL;
    if (o.n_paths == 0 || o.n_paths > INF_PATHS_MAX || o.in_flight_nbytes == 0) return -EINVAL;
    if (o.workers == 0 || o.workers > kThreadsMax || o.io_threads == 0 || o.io_threads > kThreadsMax) return -EINVAL;
    if (o.block_nbytes > kRequestNbytesMax) o.block_nbytes = kRequestNbytesMax;
    std::unique_ptr<inf_queue> opened(new (std::nothrow) inf_queue(files, o));
    if (!opened) return -ENOMEM;
    if (const int error = opened->open(o.backend)) return error;
    *queue = opened.release();
    return 0;
}

int inf_queue_backend(const inf_queue *queue) { return queue->backend(); }

void inf_queue_close(inf_queue *queue) { delete queue; }

int inf_queue_submit(inf_queue *queue, const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint32_t n_after, const uint8_t *args,
                     uint64_t args_nbytes, uint64_t *first_id) {
    return queue->submit(tasks, n_tasks, after, n_after, args, args_nbytes, first_id);
}

int inf_queue_poll(inf_queue *queue, inf_completion *completions, uint32_t max) { return queue->poll(completions, max); }

int inf_queue_wait(inf_queue *queue, const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms) {
    return queue->wait(ids, n_ids, timeout_ms, inf_queue::For::kAll);
}

int inf_queue_wait_any(inf_queue *queue, const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms) {
    return queue->wait(ids, n_ids, timeout_ms, inf_queue::For::kAny);
}

int inf_queue_pending(const inf_queue *queue, uint64_t id, inf_task *task, int *phase) { return queue->pending(id, task, phase); }

int inf_queue_list(const inf_queue *queue, uint64_t *ids, uint32_t max) { return queue->list(ids, max); }

int inf_queue_promote(inf_queue *queue, const uint64_t *ids, uint32_t n_ids) {
    queue->promote(ids, n_ids);
    return 0;
}

int inf_queue_cancel(inf_queue *queue, const uint64_t *ids, uint32_t n_ids) {
    queue->cancel(ids, n_ids);
    return 0;
}

int inf_queue_drain(inf_queue *queue, uint32_t timeout_ms) { return queue->drain(timeout_ms); }

int inf_queue_add_file(inf_queue *queue, int fd, uint32_t path) { return queue->add_file(fd, path); }

int inf_queue_drop_file(inf_queue *queue, int fd) {
    queue->drop_file(fd);
    return 0;
}

int inf_queue_add_memory(inf_queue *queue, void *base, uint64_t nbytes) {
    queue->add_memory(base, nbytes);
    return 0;
}

int inf_queue_drop_memory(inf_queue *queue, void *base) {
    queue->drop_memory(base);
    return 0;
}

int inf_queue_get_stats(const inf_queue *queue, inf_queue_stats *stats) {
    queue->stats(stats);
    return 0;
}

int inf_queue_get_path_stats(const inf_queue *queue, uint32_t path, inf_path_stats *stats) { return queue->path_stats(path, stats); }

int inf_queue_get_latency(const inf_queue *queue, uint32_t path, int op, int stage, inf_histogram *histogram) {
    return queue->latency(path, op, stage, histogram);
}

int inf_queue_get_depths(const inf_queue *queue, uint32_t path, inf_histogram *histogram) { return queue->depths(path, histogram); }

int inf_queue_get_path_info(const inf_queue *queue, uint32_t path, inf_path_info *info) { return queue->path_info(path, info); }

}  // extern "C"
