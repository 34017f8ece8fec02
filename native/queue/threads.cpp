// The `threads` backend: a pool of threads that call pread, pwrite and fdatasync. Works everywhere, and is the reference.

#include <algorithm>
#include <ctime>
#include <new>

#include "files.hpp"
#include "queue.hpp"

namespace inf {

namespace {

class Threads : public Backend {
 public:
    explicit Threads(inf_queue *queue) : queue_(queue) {}

    int open() override {
        const uint32_t n = std::min(queue_->io_threads(), queue_->depth());
        threads_.reset(new (std::nothrow) Thread[n]);
        if (!threads_) return -ENOMEM;
        for (; n_threads_ < n; ++n_threads_) {
            if (const int error = threads_[n_threads_].start<Threads, &Threads::run>(this, "infinity-io")) return n_threads_ ? 0 : error;
        }
        return 0;
    }

    uint32_t claim(uint64_t ready) override { return idle_.claim(ready); }
    void ring(uint32_t n) override { idle_.ring(n); }

    void join() override {
        for (uint32_t i = 0; i < n_threads_; ++i) threads_[i].join();
    }

 private:
    int64_t transfer(const Request &request) {
        const uint64_t offset = request.offset + request.done, nbytes = request.nbytes - request.done;
        void *address = reinterpret_cast<void *>(request.address + request.done);
        switch (request.op) {
            case INF_READ: return read_at(queue_->files(), request.fd, address, nbytes, offset);
            case INF_WRITE: return write_at(queue_->files(), request.fd, address, nbytes, offset);
            default: return inf_file_datasync(queue_->files(), request.fd);
        }
    }

    void carry_out(Request *request) {
        for (;;) {
            switch (request->advance(transfer(*request))) {
                case Next::kFinish: return;
                case Next::kAgain: break;
                case Next::kLater: {
                    const timespec delay = {0, static_cast<long>(request->delay_ms()) * 1000000};
                    nanosleep(&delay, nullptr);
                    break;
                }
            }
        }
    }

    void run() {
        std::unique_lock<std::mutex> lock(queue_->mutex());
        Request request;
        for (;;) {
            const bool taken = queue_->take(&request);
            if (!taken && queue_->stopping()) return;
            queue_->unlock_and_ring(lock);
            if (taken) carry_out(&request);
            lock.lock();
            if (taken) queue_->finish(request);
            else if (!queue_->has_requests() && !queue_->stopping()) idle_.sleep(lock);
        }
    }

    inf_queue *const queue_;
    std::unique_ptr<Thread[]> threads_;
    uint32_t n_threads_ = 0;
    Sleepers idle_;
};

}  // namespace

std::unique_ptr<Backend> new_threads_backend(inf_queue *queue) { return std::unique_ptr<Backend>(new (std::nothrow) Threads(queue)); }

}  // namespace inf
