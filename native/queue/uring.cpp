// The `uring` backend: one dispatcher thread that alone touches an io_uring, through the kernel's own header and raw system calls.
//
// A request in flight has a slot; the slot's number is the user data of its entry. The dispatcher sleeps in io_uring_enter; an
// eventfd, polled by the ring itself, wakes it for requests that others made ready. Slots are as many as `depth`, and the ring has an
// entry for each and one for the poll, so it can neither overflow nor run out of entries.

#include "queue.hpp"

#include <new>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IO_URING_OP_SUPPORTED   // headers of kernel 5.6 or later

#include <cerrno>
#include <cstring>
#include <ctime>

#include <linux/time_types.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.hpp"

namespace inf {

namespace {

// Younger than the headers of some systems; values are the kernel's.
constexpr uint32_t kSingleIssuer = 1u << 12;   // IORING_SETUP_SINGLE_ISSUER, kernel 6.0
constexpr uint32_t kDeferTaskrun = 1u << 13;   // IORING_SETUP_DEFER_TASKRUN, kernel 6.1
constexpr uint64_t kWake = UINT64_MAX;         // user data of the poll of the eventfd

int sys_setup(uint32_t entries, io_uring_params *params) {
    const long result = syscall(__NR_io_uring_setup, entries, params);
    return result < 0 ? -errno : static_cast<int>(result);
}

int sys_enter(int fd, uint32_t to_submit, uint32_t min_complete) {
    const long result = syscall(__NR_io_uring_enter, fd, to_submit, min_complete, IORING_ENTER_GETEVENTS, nullptr, 0);
    return result < 0 ? -errno : static_cast<int>(result);
}

uint32_t load_acquire(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store_release(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

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

class Mapping {
 public:
    Mapping() = default;
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    ~Mapping() {
        if (base_) munmap(base_, nbytes_);
    }

    int open(int fd, size_t nbytes, uint64_t offset) {
        void *base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
        if (base == MAP_FAILED) return -errno;
        base_ = base;
        nbytes_ = nbytes;
        return 0;
    }

    template <typename T>
    T *at(uint32_t offset) const {
        return reinterpret_cast<T *>(static_cast<char *>(base_) + offset);
    }

 private:
    void *base_ = nullptr;
    size_t nbytes_ = 0;
};

// The two rings shared with the kernel. Used by one thread.
class KernelRing {
 public:
    int open(uint32_t entries) {
        io_uring_params params;
        int fd = -EINVAL;
        for (uint32_t flags : {kSingleIssuer | kDeferTaskrun, 0u}) {
            memset(&params, 0, sizeof params);
            params.flags = flags;
            fd = sys_setup(entries, &params);
            if (fd != -EINVAL) break;
        }
        if (fd < 0) return fd;
        fd_.take(fd);
        if (const int error = probe()) return error;

        const size_t sq_nbytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        const size_t cq_nbytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        if (const int error = sq_.open(fd, sq_nbytes, IORING_OFF_SQ_RING)) return error;
        if (const int error = cq_.open(fd, cq_nbytes, IORING_OFF_CQ_RING)) return error;
        if (const int error = sqes_.open(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return error;
        sq_head_ = sq_.at<uint32_t>(params.sq_off.head);
        sq_tail_ = sq_.at<uint32_t>(params.sq_off.tail);
        sq_mask_ = *sq_.at<uint32_t>(params.sq_off.ring_mask);
        cq_head_ = cq_.at<uint32_t>(params.cq_off.head);
        cq_tail_ = cq_.at<uint32_t>(params.cq_off.tail);
        cq_mask_ = *cq_.at<uint32_t>(params.cq_off.ring_mask);
        cqes_ = cq_.at<io_uring_cqe>(params.cq_off.cqes);
        entries_ = sqes_.at<io_uring_sqe>(0);
        uint32_t *array = sq_.at<uint32_t>(params.sq_off.array);
        for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
        tail_ = *sq_tail_;
        return round_trip();
    }

    // A cleared entry; submitted by the next enter.
    io_uring_sqe *entry(uint64_t user_data) {
        io_uring_sqe *sqe = &entries_[tail_++ & sq_mask_];
        memset(sqe, 0, sizeof *sqe);
        sqe->user_data = user_data;
        return sqe;
    }

    // Submits what is new and sleeps until there is a completion. A kernel short of memory, or a signal, is met by trying again.
    void enter() {
        store_release(sq_tail_, tail_);
        for (;;) {
            const uint32_t fresh = tail_ - load_acquire(sq_head_);
            const int result = sys_enter(fd_.get(), fresh, 1);
            if (load_acquire(cq_tail_) != *cq_head_) return;
            if (result < 0 && result != -EINTR) {
                const timespec delay = {0, 1000000};
                nanosleep(&delay, nullptr);
            }
        }
    }

    bool next(io_uring_cqe *cqe) {
        const uint32_t head = *cq_head_;
        if (head == load_acquire(cq_tail_)) return false;
        *cqe = cqes_[head & cq_mask_];
        store_release(cq_head_, head + 1);
        return true;
    }

 private:
    // READ and WRITE without vectors came after the ring itself, with kernel 5.6, and so did the probe.
    int probe() const {
        constexpr uint32_t kOps = 64;
        alignas(io_uring_probe) unsigned char memory[sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op)] = {};
        io_uring_probe *answer = reinterpret_cast<io_uring_probe *>(memory);
        if (syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_PROBE, answer, kOps) < 0) return errno == EINVAL ? -ENOSYS : -errno;
        for (int op : {IORING_OP_NOP, IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC, IORING_OP_POLL_ADD, IORING_OP_TIMEOUT}) {
            if (op > answer->last_op || !(answer->ops[op].flags & IO_URING_OP_SUPPORTED)) return -ENOSYS;
        }
        return 0;
    }

    // A sandbox may allow the set-up and forbid the rest.
    int round_trip() {
        entry(0)->opcode = IORING_OP_NOP;
        store_release(sq_tail_, tail_);
        int result;
        do {
            result = sys_enter(fd_.get(), tail_ - load_acquire(sq_head_), 1);
        } while (result == -EINTR);
        if (result < 0) return result;
        io_uring_cqe cqe;
        return next(&cqe) ? cqe.res : -ENOSYS;
    }

    Descriptor fd_;
    Mapping sq_, cq_, sqes_;
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
    io_uring_sqe *entries_ = nullptr;
    io_uring_cqe *cqes_ = nullptr;
};

// What the slot's entry in the ring is.
enum class Entry {
    kCall,
    kRetry,   // a wait, before the call is begun again
    kHeld,    // a wait that a fault put before the call
};

struct Slot {
    Request request;
    Call call;
    Entry entry = Entry::kCall;
    __kernel_timespec delay = {};
    Slot *next_free = nullptr;
};

class Uring : public Backend {
 public:
    explicit Uring(Lane *lane) : lane_(lane) {}

    int open() override {
        slots_.reset(new (std::nothrow) Slot[lane_->depth()]);
        if (!slots_) return -ENOMEM;
        for (uint32_t i = lane_->depth(); i > 0; --i) give_back(&slots_[i - 1]);
        const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake < 0) return -errno;
        wake_.take(wake);
        if (const int error = thread_.start<Uring, &Uring::run>(this, "infinity-io")) return error;
        std::unique_lock<std::mutex> lock(lane_->mutex());
        while (!opened_) opening_.wait(lock);
        if (open_error_) {
            lock.unlock();
            thread_.join();
        }
        return open_error_;
    }

    uint32_t claim(uint64_t) override {
        const bool wake = asleep_;
        asleep_ = false;
        return wake;
    }

    void ring(uint32_t n) override {
        if (n == 0) return;
        const uint64_t one = 1;
        // Fails only when the counter is full, and then the poll is about to fire anyway.
        const ssize_t written = write(wake_.get(), &one, sizeof one);
        static_cast<void>(written);
    }

    void join() override { thread_.join(); }

 private:
    void run() {
        KernelRing ring;   // of this thread alone, from set-up on
        const int error = ring.open(lane_->depth() + 1);
        ring_ = &ring;
        std::unique_lock<std::mutex> lock(lane_->mutex());
        opened_ = true;
        open_error_ = error;
        opening_.notify_one();
        if (error) return;
        watch();
        for (;;) {
            while (free_) {
                Slot *slot = free_;
                if (!lane_->take(&slot->request)) break;
                free_ = slot->next_free;
                issue(slot);
            }
            if (lane_->stopping()) return;
            asleep_ = free_ != nullptr;   // without a free slot there is nothing to wake for
            lane_->unlock_and_ring(lock);
            ring.enter();
            lock.lock();
            asleep_ = false;
            io_uring_cqe cqe;
            while (ring.next(&cqe)) {
                if (cqe.user_data == kWake) watch();
                else complete(&slots_[cqe.user_data], cqe.res);
            }
        }
    }

    void watch() {
        uint64_t count;
        while (read(wake_.get(), &count, sizeof count) > 0) {
        }
        io_uring_sqe *sqe = ring_->entry(kWake);
        sqe->opcode = IORING_OP_POLL_ADD;
        sqe->fd = wake_.get();
        sqe->poll_events = POLLIN;
    }

    void give_back(Slot *slot) {
        slot->next_free = free_;
        free_ = slot;
    }

    // Hands what is left of the slot's request to the kernel, or, where a fault is set, its result to the rules.
    void issue(Slot *slot) {
        Request &request = slot->request;
        for (;;) {
            const int file_op = request.op == INF_READ ? INF_FILE_READ : request.op == INF_WRITE ? INF_FILE_WRITE : INF_FILE_DATASYNC;
            const uint64_t done = request.done;
            slot->call.begin(lane_->files(), file_op, request.fd, reinterpret_cast<void *>(request.address + done), request.nbytes - done,
                             request.offset + done);
            if (!slot->call.answered()) {
                if (slot->call.wait_us()) wait(slot, Entry::kHeld, slot->call.wait_us(), slot->call.wait_calls());
                else transfer(slot);
                return;
            }
            switch (request.advance(slot->call.answer())) {
                case Next::kFinish: finish(slot); return;
                case Next::kLater: wait(slot, Entry::kRetry, request.delay_ms() * 1000); return;
                case Next::kAgain: break;
            }
        }
    }

    void transfer(Slot *slot) {
        const Request &request = slot->request;
        slot->entry = Entry::kCall;
        io_uring_sqe *sqe = ring_->entry(static_cast<uint64_t>(slot - slots_.get()));
        sqe->fd = request.fd;
        if (request.op == INF_FLUSH) {
            sqe->opcode = IORING_OP_FSYNC;
            sqe->fsync_flags = IORING_FSYNC_DATASYNC;
            return;
        }
        sqe->opcode = request.op == INF_READ ? IORING_OP_READ : IORING_OP_WRITE;
        sqe->off = request.offset + request.done;
        sqe->addr = reinterpret_cast<uint64_t>(slot->call.address());
        sqe->len = static_cast<uint32_t>(slot->call.nbytes());
    }

    // Completes after `us` microseconds, or, where that is not 0, when `completions` others have come.
    void wait(Slot *slot, Entry why, uint64_t us, uint32_t completions = 0) {
        slot->entry = why;
        slot->delay.tv_sec = static_cast<long long>(us / 1000000);
        slot->delay.tv_nsec = static_cast<long long>(us % 1000000) * 1000;
        io_uring_sqe *sqe = ring_->entry(static_cast<uint64_t>(slot - slots_.get()));
        sqe->opcode = IORING_OP_TIMEOUT;
        sqe->fd = -1;
        sqe->addr = reinterpret_cast<uint64_t>(&slot->delay);
        sqe->len = 1;
        sqe->off = completions;
    }

    void complete(Slot *slot, int32_t result) {
        switch (slot->entry) {
            case Entry::kRetry: issue(slot); return;
            case Entry::kHeld: transfer(slot); return;
            case Entry::kCall: break;
        }
        switch (slot->request.advance(slot->call.end(result))) {
            case Next::kFinish: finish(slot); return;
            case Next::kAgain: issue(slot); return;
            case Next::kLater: wait(slot, Entry::kRetry, slot->request.delay_ms() * 1000); return;
        }
    }

    void finish(Slot *slot) {
        lane_->finish(slot->request);
        give_back(slot);
    }

    Lane *const lane_;
    std::unique_ptr<Slot[]> slots_;
    Slot *free_ = nullptr;
    Descriptor wake_;
    Thread thread_;
    std::condition_variable opening_;
    bool opened_ = false;
    int open_error_ = 0;
    bool asleep_ = false;   // in enter, or on the way there, with slots to spare
    KernelRing *ring_ = nullptr;
};

}  // namespace

std::unique_ptr<Backend> new_uring_backend(Lane *lane) { return std::unique_ptr<Backend>(new (std::nothrow) Uring(lane)); }

}  // namespace inf

#else

namespace inf {

namespace {

class Absent : public Backend {
 public:
    int open() override { return -ENOSYS; }
    uint32_t claim(uint64_t) override { return 0; }
    void ring(uint32_t) override {}
    void join() override {}
};

}  // namespace

std::unique_ptr<Backend> new_uring_backend(Lane *) { return std::unique_ptr<Backend>(new (std::nothrow) Absent); }

}  // namespace inf

#endif
