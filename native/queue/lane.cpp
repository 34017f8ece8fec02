#include "lane.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "queue.hpp"

namespace inf {

namespace {

constexpr uint64_t kBackgroundNbytes = 1u << 20;   // in requests of block_nbytes, and one at least
constexpr uint64_t kCalmNs = 50000000;             // after the last request of DEMAND another is not expected

static_assert(INF_READ == 0 && INF_WRITE == 1, "they are indices of histograms");

bool transfers(int op) { return op == INF_READ || op == INF_WRITE; }

}  // namespace

uint64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

Lane::Lane(inf_queue *queue, const inf_queue_options &options)
    : queue_(queue),
      options_(options),
      background_beside_(std::max<uint64_t>(1, kBackgroundNbytes / options.block_nbytes)),
      depth_(options.depth) {}

int Lane::open(int backend) {
    switch (backend) {
        case INF_BACKEND_THREADS: backend_ = new_threads_backend(this); break;
        case INF_BACKEND_URING: backend_ = new_uring_backend(this); break;
        case INF_BACKEND_LIBAIO: backend_ = new_libaio_backend(this); break;
        default: return -ENOSYS;
    }
    if (!backend_) return -ENOMEM;
    backend_kind_ = backend;
    const int error = backend_->open();
    if (error) backend_.reset();
    return error;
}

void Lane::push(Task *task) {
    task->ready_ns = now_ns();
    ready_.push(task, task->op == INF_FLUSH ? 1 : (task->nbytes - 1) / options_.block_nbytes + 1);
}

void Lane::raise(Task *task) {
    ready_.raise(task);
    requests_demand_ += task->requests;
}

uint64_t Lane::next_nbytes(const Task *task) const {
    return transfers(task->op) ? std::min(task->nbytes - task->issued, options_.block_nbytes) : 0;
}

uint64_t Lane::background_max() const {
    if (ready_.demand() > 0 || requests_demand_ > 0) return background_beside_;
    return demand_ns_ != 0 && clock_ns_ - demand_ns_ < kCalmNs ? 2 * background_beside_ : depth_;
}

// The task whose request goes next; null when none may go now.
Task *Lane::next() const {
    if (requests_ >= depth_) return nullptr;
    Task *task = ready_.next(background_in_flight() < background_max());
    const bool fits = task && (nbytes_ == 0 || nbytes_ + next_nbytes(task) <= options_.in_flight_nbytes);
    return fits ? task : nullptr;
}

// How many requests may go now: 0 just when `next` is null, and not more than there is room for.
uint64_t Lane::ready_to_go() const {
    if (!next()) return 0;
    const uint64_t max = background_max(), in_flight = background_in_flight();
    const uint64_t background = std::min(ready_.background(), max > in_flight ? max - in_flight : 0);
    return std::min(ready_.demand() + background, depth_ - requests_);
}

bool Lane::take(Request *request) {
    Task *task = next();
    if (!task) return false;
    clock_ns_ = now_ns();
    *request = Request{};
    request->task = task;
    request->op = task->op;
    request->fd = task->fd;
    request->issued_ns = clock_ns_;
    if (transfers(task->op)) {
        request->offset = task->offset + task->issued;
        request->address = task->address + task->issued;
        request->nbytes = next_nbytes(task);
        task->issued += request->nbytes;
        nbytes_ += request->nbytes;
        if (transfers_++ == 0) busy_since_ns_ = clock_ns_;
        if (queue_->transfers_++ == 0) queue_->busy_since_ns_ = clock_ns_;
        latency_[task->op][INF_SUBMISSION].add(clock_ns_ - task->ready_ns);
    }
    depths_.add(++requests_);
    if (task->priority == INF_DEMAND) ++requests_demand_;
    ++task->requests;
    ready_.begun(task);
    return true;
}

void Lane::finish(const Request &request) {
    Task *task = request.task;
    clock_ns_ = now_ns();
    --requests_;
    --task->requests;
    if (task->priority == INF_DEMAND) {
        --requests_demand_;
        demand_ns_ = clock_ns_;
    }
    if (transfers(request.op)) {
        nbytes_ -= request.nbytes;
        if (--transfers_ == 0) stats_.busy_ns += clock_ns_ - busy_since_ns_;
        latency_[task->op][INF_COMPLETION].add(clock_ns_ - request.issued_ns);
        latency_[task->op][INF_TOTAL].add(clock_ns_ - task->ready_ns);
        if (--queue_->transfers_ == 0) queue_->stats_.io_busy_ns += clock_ns_ - queue_->busy_since_ns_;
    }
    switch (request.op) {
        case INF_READ:
            ++stats_.reads;
            stats_.read_nbytes += request.done;
            break;
        case INF_WRITE:
            ++stats_.writes;
            stats_.write_nbytes += request.done;
            break;
        default:
            ++stats_.flushes;
    }
    stats_.shorts += request.shorts;
    stats_.retries += request.retries;
    task->value += request.done;
    task->retries += request.shorts + request.retries;
    if (request.status < 0 && task->status == 0) {
        task->status = request.status;
        if (task->unissued > 0) ready_.drop(task);
    }
    if (task->requests == 0 && task->unissued == 0) queue_->complete(task);
}

void Lane::stats(inf_path_stats *stats) const {
    *stats = stats_;
    stats->in_flight = requests_;
    if (transfers_) stats->busy_ns += now_ns() - busy_since_ns_;
}

void Lane::describe(inf_path_info *info) const {
    *info = inf_path_info{};
    info->backend = backend_kind_;
    info->depth = depth_;
    backend_->describe(info);
}

std::mutex &Lane::mutex() { return queue_->mutex_; }

inf_files *Lane::files() const { return queue_->files_; }

bool Lane::stopping() const { return queue_->stopping_; }

void Lane::unlock_and_ring(std::unique_lock<std::mutex> &lock) { queue_->unlock_and_ring(lock); }

}  // namespace inf
