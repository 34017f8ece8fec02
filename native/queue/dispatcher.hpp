// What backends with one dispatcher thread share. A request at the kernel has a slot; the thread takes requests while it has free slots,
// hands them over together, and sleeps in the kernel until one ends or an eventfd says that others made requests ready.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include <sys/eventfd.h>
#include <unistd.h>

#include "files.hpp"
#include "lane.hpp"
#include "thread.hpp"

namespace inf {

class Descriptor {
 public:
    Descriptor() = default;
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    void take(int fd) { fd_ = fd; }
    int get() const { return fd_; }

 private:
    int fd_ = -1;
};

struct Slot {
    // What is to be done when the kernel comes back to it.
    enum class Then {
        kEnd,     // the call ended
        kAgain,   // a wait is over: the call is begun again
        kCall,    // a wait that a fault put before the call is over
    };

    Request request;
    Call call;
    Then then = Then::kEnd;
    Slot *next = nullptr;   // among the free ones
};

class Dispatcher : public Backend {
 public:
    explicit Dispatcher(Lane *lane) : lane_(lane) {}

    int open() override {
        slots_.reset(new (std::nothrow) Slot[lane_->depth()]);
        if (!slots_) return -ENOMEM;
        const int bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (bell < 0) return -errno;
        bell_.take(bell);
        if (const int error = thread_.start<Dispatcher, &Dispatcher::run>(this, "infinity-io")) return error;
        std::unique_lock<std::mutex> lock(lane_->mutex());
        while (!opened_) opening_.wait(lock);
        if (open_error_) {
            lock.unlock();
            thread_.join();
        }
        return open_error_;
    }

    uint32_t claim(uint64_t) override {
        const bool asleep = asleep_;
        asleep_ = false;
        return asleep;
    }

    void ring(uint32_t n) override {
        if (n == 0) return;
        const uint64_t one = 1;
        // Fails only when the counter is full, and then the thread is about to wake anyway.
        const ssize_t written = write(bell_.get(), &one, sizeof one);
        static_cast<void>(written);
    }

    void join() override { thread_.join(); }

 protected:
    // All of these run on the dispatcher's thread.

    // Opens what is the kernel's: 0, or -errno with nothing left behind. May limit the lane's depth.
    virtual int start() = 0;
    // With the mutex: readies the slot's call for `sleep`, and `proceed` for when it ended.
    virtual void hand_over(Slot *slot) = 0;
    // With the mutex: `proceed` is called after `us` microseconds, or, where that is not 0, when `calls` others have ended.
    virtual void wait(Slot *slot, uint64_t us, uint32_t calls) = 0;
    // Without it: gives the kernel what was handed over, and sleeps until something ended or is due, or the bell rang.
    virtual void sleep() = 0;
    // With it: `proceed` for all of that.
    virtual void collect() = 0;
    // Gives the kernel's things back; nothing is in flight.
    virtual void end() = 0;

    void proceed(Slot *slot, int64_t result) {
        switch (slot->then) {
            case Slot::Then::kCall:
                slot->then = Slot::Then::kEnd;
                hand_over(slot);
                return;
            case Slot::Then::kAgain:
                issue(slot);
                return;
            case Slot::Then::kEnd:
                if (follow(slot, slot->call.end(result))) issue(slot);
                return;
        }
    }

    void silence() {
        uint64_t count;
        while (read(bell_.get(), &count, sizeof count) > 0) {
        }
    }

    Lane *const lane_;
    std::unique_ptr<Slot[]> slots_;
    Descriptor bell_;

 private:
    void run() {
        const int error = start();
        std::unique_lock<std::mutex> lock(lane_->mutex());
        opened_ = true;
        open_error_ = error;
        opening_.notify_one();
        if (error) return;
        for (uint32_t i = lane_->depth(); i > 0; --i) give_back(&slots_[i - 1]);
        for (;;) {
            while (free_) {
                Slot *slot = free_;
                if (!lane_->take(&slot->request)) break;
                free_ = slot->next;
                issue(slot);
            }
            if (lane_->stopping()) break;
            asleep_ = free_ != nullptr;   // without a free slot there is nothing to wake for
            lane_->unlock_and_ring(lock);
            sleep();
            lock.lock();
            asleep_ = false;
            collect();
        }
        lock.unlock();
        end();
    }

    void give_back(Slot *slot) {
        slot->next = free_;
        free_ = slot;
    }

    // Hands what is left of the slot's request over, or, where a fault answers for it, that answer to the rules.
    void issue(Slot *slot) {
        const Request &request = slot->request;
        const int file_op = request.op == INF_READ ? INF_FILE_READ : request.op == INF_WRITE ? INF_FILE_WRITE : INF_FILE_DATASYNC;
        Call &call = slot->call;
        do {
            const uint64_t done = request.done;
            call.begin(lane_->files(), file_op, request.fd, reinterpret_cast<void *>(request.address + done), request.nbytes - done,
                       request.offset + done);
            if (!call.answered()) {
                slot->then = call.wait_us() ? Slot::Then::kCall : Slot::Then::kEnd;
                if (call.wait_us()) wait(slot, call.wait_us(), call.wait_calls());
                else hand_over(slot);
                return;
            }
        } while (follow(slot, call.answer()));
    }

    // What the rules make of a result; whether to go on at once.
    bool follow(Slot *slot, int64_t result) {
        switch (slot->request.advance(result)) {
            case Next::kAgain: return true;
            case Next::kLater:
                slot->then = Slot::Then::kAgain;
                wait(slot, uint64_t{1000} * slot->request.delay_ms(), 0);
                return false;
            case Next::kFinish: break;
        }
        lane_->finish(slot->request);
        give_back(slot);
        return false;
    }

    Thread thread_;
    std::condition_variable opening_;
    bool opened_ = false;
    int open_error_ = 0;
    bool asleep_ = false;   // in `sleep`, or on the way there, with slots to spare
    Slot *free_ = nullptr;
};

}  // namespace inf
