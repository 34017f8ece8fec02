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
    explicit Threads(Lane *lane) : lane_(lane) {}

    int open() override {
        const uint32_t n = std::min(lane_->io_threads(), lane_->depth());
        threads_.reset(new (std::nothrow) Thread[n]);
        if (!threads_) return -ENOMEM;
        int error = 0;
        for (; n_threads_ < n && !error; ++n_threads_) error = threads_[n_threads_].start<Threads, &Threads::run>(this, "infinity-io");
        if (error && --n_threads_ == 0) return error;
        std::lock_guard<std::mutex> lock(lane_->mutex());
        lane_->limit_depth(n_threads_);
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
            case INF_READ: return read_at(lane_->files(), request.fd, address, nbytes, offset);
            case INF_WRITE: return write_at(lane_->files(), request.fd, address, nbytes, offset);
            default: return inf_file_datasync(lane_->files(), request.fd);
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
        std::unique_lock<std::mutex> lock(lane_->mutex());
        Request request;
        for (;;) {
            const bool taken = lane_->take(&request);
            if (!taken && lane_->stopping()) return;
            lane_->unlock_and_ring(lock);
            if (taken) carry_out(&request);
            lock.lock();
            if (taken) lane_->finish(request);
            else if (!lane_->has_requests() && !lane_->stopping()) idle_.sleep(lock);
        }
    }

    Lane *const lane_;
    std::unique_ptr<Thread[]> threads_;
    uint32_t n_threads_ = 0;
    Sleepers idle_;
};

}  // namespace

std::unique_ptr<Backend> new_threads_backend(Lane *lane) { return std::unique_ptr<Backend>(new (std::nothrow) Threads(lane)); }

}  // namespace inf
