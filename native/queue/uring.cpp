// The `uring` backend: one dispatcher thread that alone touches an io_uring, through the kernel's own header and raw system calls.
//
// A request in flight has a slot; the slot's number is the user data of its entry. The dispatcher sleeps in io_uring_enter; an
// eventfd, polled by the ring itself, wakes it for requests that others made ready. Slots are as many as `depth`, and the ring has an
// entry for each and one for the poll, so it can neither overflow nor run out of entries.

#include "dispatcher.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IO_URING_OP_SUPPORTED   // headers of kernel 5.6 or later

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include <linux/time_types.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

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
        do {
            try_enter(1);
        } while (load_acquire(cq_tail_) == *cq_head_);
    }

    // Submits what is new, all of it, unless there is a completion to be taken first.
    bool submit() {
        while (tail_ != load_acquire(sq_head_)) {
            try_enter(0);
            if (load_acquire(cq_tail_) != *cq_head_) break;
        }
        return tail_ == load_acquire(sq_head_);
    }

    int fd() const { return fd_.get(); }

    bool next(io_uring_cqe *cqe) {
        const uint32_t head = *cq_head_;
        if (head == load_acquire(cq_tail_)) return false;
        *cqe = cqes_[head & cq_mask_];
        store_release(cq_head_, head + 1);
        return true;
    }

 private:
    void try_enter(uint32_t least) {
        store_release(sq_tail_, tail_);
        const int result = sys_enter(fd_.get(), tail_ - load_acquire(sq_head_), least);
        if (result < 0 && result != -EINTR && load_acquire(cq_tail_) == *cq_head_) {
            const timespec delay = {0, 1000000};
            nanosleep(&delay, nullptr);
        }
    }

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

// What the dispatcher is asked to do about files and memory; lies in the frame of the caller, who waits for `done`.
struct Errand {
    enum Kind { kAddFile, kDropFile, kAddMemory, kDropMemory } kind;
    int fd;
    uint64_t base, nbytes;
    bool done;
};

// Files and memory that the kernel need not look up, or pin, for each request. Kept by the ring's thread.
//
// A file's place in the kernel's table is its descriptor's number. Memory is registered in pieces of at most 1 GiB, each with a place.
// The kernel says when it has let go of something with a completion that bears its tag.
class Registered {
 public:
    static constexpr uint32_t kFiles = 1024, kPieces = 1024, kAreas = 64;
    static constexpr uint64_t kPieceNbytes = uint64_t{1} << 30;
    static constexpr uint64_t kTags = uint64_t{1} << 63;   // user data of those completions; kWake is none of them

    struct Figures {
        uint32_t files = 0;
        uint64_t memory_nbytes = 0;
        int files_error = 0, memory_error = 0;   // why not, or not more
    };

    void open(int ring) {
        ring_ = ring;
        // The table of files may not be longer than the process may have files open.
        rlimit limit = {};
        getrlimit(RLIMIT_NOFILE, &limit);
        n_files_ = limit.rlim_cur < kFiles ? static_cast<uint32_t>(limit.rlim_cur) : kFiles;
        figures.files_error = table(kRegisterFiles2, n_files_);
        if (figures.files_error) n_files_ = 0;
        figures.memory_error = table(kRegisterBuffers2, kPieces);
        n_pieces_ = figures.memory_error ? 0 : kPieces;
    }

    // Closing a ring lets go of its things some time later; this, now.
    void close() {
        if (n_files_) syscall(__NR_io_uring_register, ring_, IORING_UNREGISTER_FILES, nullptr, 0);
        if (n_pieces_) syscall(__NR_io_uring_register, ring_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
    }

    bool has_file(int fd) const { return fd >= 0 && static_cast<uint32_t>(fd) < n_files_ && tags_[fd] != 0; }

    // The place of the piece that [address, address + nbytes) lies in whole, or -1.
    int piece(uint64_t address, uint64_t nbytes) const {
        for (uint32_t i = 0; i < n_areas_; ++i) {
            const uint64_t at = address - areas_[i].base;   // huge where it is lower
            if (at >= areas_[i].nbytes || nbytes > areas_[i].nbytes - at || nbytes == 0) continue;
            const uint64_t piece = at / kPieceNbytes;
            return (at + nbytes - 1) / kPieceNbytes == piece ? static_cast<int>(areas_[i].first + piece) : -1;
        }
        return -1;
    }

    void add_file(int fd) {
        if (fd < 0 || static_cast<uint32_t>(fd) >= n_files_) return;
        const uint64_t tag = kTags | next_tag_++;
        int32_t value = fd;
        const int error = update(kUpdateFiles2, static_cast<uint32_t>(fd), 1, &value, &tag);
        if (error) {
            figures.files_error = error;
            return;
        }
        tags_[fd] = tag;
        ++figures.files;
    }

    // The tag to wait for, or 0.
    uint64_t drop_file(int fd) {
        if (!has_file(fd)) return 0;
        const uint64_t tag = tags_[fd];
        tags_[fd] = 0;
        --figures.files;
        const uint64_t none = 0;
        int32_t value = -1;
        return update(kUpdateFiles2, static_cast<uint32_t>(fd), 1, &value, &none) ? 0 : tag;
    }

    void add_memory(uint64_t base, uint64_t nbytes) {
        if (n_pieces_ == 0 || nbytes == 0 || n_areas_ == kAreas) return;
        const uint64_t wanted = (nbytes - 1) / kPieceNbytes + 1;
        uint32_t first = 0;
        for (uint32_t i = 0; i < n_areas_;) {   // the lowest places in a row that no area has
            const Area &area = areas_[i++];
            if (first + wanted <= area.first || first >= area.first + area.n_pieces) continue;
            first = area.first + area.n_pieces;
            i = 0;
        }
        if (first + wanted > n_pieces_) return;
        Area area = {base, 0, kTags | next_tag_++, first, 0};
        while (area.nbytes < nbytes) {
            const uint64_t left = nbytes - area.nbytes;
            iovec piece = {reinterpret_cast<void *>(base + area.nbytes), static_cast<size_t>(left < kPieceNbytes ? left : kPieceNbytes)};
            if (const int error = update(kUpdateBuffers, first + area.n_pieces, 1, &piece, &area.tag)) {
                figures.memory_error = error;   // what is registered by now serves all the same
                break;
            }
            area.nbytes += piece.iov_len;
            ++area.n_pieces;
        }
        if (area.n_pieces == 0) return;
        figures.memory_nbytes += area.nbytes;
        areas_[n_areas_++] = area;
    }

    // The tag to wait for, and how often it comes.
    uint64_t drop_memory(uint64_t base, uint32_t *n) {
        for (uint32_t i = 0; i < n_areas_; ++i) {
            if (areas_[i].base != base) continue;
            const Area area = areas_[i];
            areas_[i] = areas_[--n_areas_];
            figures.memory_nbytes -= area.nbytes;
            *n = 0;
            for (uint32_t j = 0; j < area.n_pieces; ++j) {
                const uint64_t none = 0;
                iovec piece = {};
                if (update(kUpdateBuffers, area.first + j, 1, &piece, &none) == 0) ++*n;
            }
            return *n ? area.tag : 0;
        }
        return 0;
    }

    Figures figures;

 private:
    // Younger than the headers of some systems; names, values and sizes are the kernel's (5.13, the flag 5.19).
    static constexpr unsigned kRegisterFiles2 = 13, kUpdateFiles2 = 14, kRegisterBuffers2 = 15, kUpdateBuffers = 16;
    static constexpr uint32_t kSparse = 1;
    struct Table {   // struct io_uring_rsrc_register
        uint32_t n, flags;
        uint64_t reserved, data, tags;
    };
    static_assert(sizeof(Table) == 32, "struct io_uring_rsrc_register");
    struct Update {   // struct io_uring_rsrc_update2
        uint32_t offset, reserved;
        uint64_t data, tags;
        uint32_t n, reserved2;
    };
    static_assert(sizeof(Update) == 32, "struct io_uring_rsrc_update2");

    struct Area {
        uint64_t base, nbytes, tag;
        uint32_t first, n_pieces;
    };

    int table(unsigned opcode, uint32_t n) const {
        Table table = {n, kSparse, 0, 0, 0};
        return syscall(__NR_io_uring_register, ring_, opcode, &table, sizeof table) < 0 ? -errno : 0;
    }

    int update(unsigned opcode, uint32_t place, uint32_t n, const void *data, const uint64_t *tags) const {
        Update update = {place, 0, reinterpret_cast<uint64_t>(data), reinterpret_cast<uint64_t>(tags), n, 0};
        return syscall(__NR_io_uring_register, ring_, opcode, &update, sizeof update) < 0 ? -errno : 0;
    }

    int ring_ = -1;
    uint32_t n_files_ = 0, n_pieces_ = 0, n_areas_ = 0;
    uint64_t next_tag_ = 0;
    uint64_t tags_[kFiles] = {};   // of each file here, by descriptor
    Area areas_[kAreas] = {};
};

class Uring : public Dispatcher {
 public:
    explicit Uring(Lane *lane) : Dispatcher(lane) {}

    void add_file(int fd) override { run_errand({Errand::kAddFile, fd, 0, 0, false}); }
    void drop_file(int fd) override { run_errand({Errand::kDropFile, fd, 0, 0, false}); }
    void add_memory(void *base, uint64_t nbytes) override { run_errand({Errand::kAddMemory, -1, reinterpret_cast<uint64_t>(base), nbytes, false}); }
    void drop_memory(void *base) override { run_errand({Errand::kDropMemory, -1, reinterpret_cast<uint64_t>(base), 0, false}); }

    void describe(inf_path_info *info) const override {
        info->files_registered = shown_.files;
        info->memory_registered_nbytes = shown_.memory_nbytes;
        size_t at = 0;
        for (const auto &[what, error] : {std::pair<const char *, int>{"files", shown_.files_error}, {"memory", shown_.memory_error}}) {
            if (!error) continue;
            const char *const why = -error == ENOMEM ? " (RLIMIT_MEMLOCK)" : -error == EINVAL ? " (kernel before 5.19)" : "";
            at += snprintf(info->notes + at, sizeof info->notes - at, "%s not registered, or not all: %s%s\n", what, strerror(-error), why);
        }
    }

 protected:
    int start() override {
        uint32_t depth = lane_->depth();
        delays_.reset(new (std::nothrow) __kernel_timespec[depth]);
        if (!delays_) return -ENOMEM;
        for (;;) {
            ring_.reset(new (std::nothrow) KernelRing);
            const int error = ring_ ? ring_->open(depth + 1) : -ENOMEM;
            if (!error) break;
            if (error != -ENOMEM || depth == 1) return error;
            depth /= 2;   // rings count as locked memory, before kernel 5.12 and again in those of today
        }
        lane_->limit_depth(depth);
        registered_.open(ring_->fd());
        shown_ = registered_.figures;
        watch();
        return 0;
    }

    void end() override {
        registered_.close();
        ring_.reset();
    }

    void hand_over(Slot *slot) override {
        const Request &request = slot->request;
        io_uring_sqe *sqe = ring_->entry(static_cast<uint64_t>(slot - slots_.get()));
        sqe->fd = request.fd;
        if (registered_.has_file(request.fd)) sqe->flags = IOSQE_FIXED_FILE;   // under the same number
        if (request.op == INF_FLUSH) {
            sqe->opcode = IORING_OP_FSYNC;
            sqe->fsync_flags = IORING_FSYNC_DATASYNC;
            return;
        }
        const bool read = request.op == INF_READ;
        sqe->off = request.offset + request.done;
        sqe->addr = reinterpret_cast<uint64_t>(slot->call.address());
        sqe->len = static_cast<uint32_t>(slot->call.nbytes());
        const int piece = registered_.piece(sqe->addr, sqe->len);
        if (piece < 0) {
            sqe->opcode = read ? IORING_OP_READ : IORING_OP_WRITE;
        } else {
            sqe->opcode = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
            sqe->buf_index = static_cast<uint16_t>(piece);
        }
    }

    void wait(Slot *slot, uint64_t us, uint32_t calls) override {
        const size_t index = static_cast<size_t>(slot - slots_.get());
        delays_[index].tv_sec = static_cast<long long>(us / 1000000);
        delays_[index].tv_nsec = static_cast<long long>(us % 1000000) * 1000;
        io_uring_sqe *sqe = ring_->entry(index);
        sqe->opcode = IORING_OP_TIMEOUT;
        sqe->fd = -1;
        sqe->addr = reinterpret_cast<uint64_t>(&delays_[index]);
        sqe->len = 1;
        sqe->off = calls;
    }

    void sleep() override {
        if (errand_.load()) {
            if (!ring_->submit()) return;   // entries say what is registered, and that is about to change
            carry_out(errand_.exchange(nullptr));
        }
        ring_->enter();
    }

    void collect() override {
        io_uring_cqe cqe;
        while (ring_->next(&cqe)) {
            if (cqe.user_data == kWake) {
                watch();
            } else if (cqe.user_data & Registered::kTags) {
                if (cqe.user_data == leaving_tag_ && --leaving_left_ == 0) report(&leaving_);
            } else {
                proceed(&slots_[cqe.user_data], cqe.res);
            }
        }
    }

 private:
    void watch() {
        silence();
        io_uring_sqe *sqe = ring_->entry(kWake);
        sqe->opcode = IORING_OP_POLL_ADD;
        sqe->fd = bell_.get();
        sqe->poll_events = POLLIN;
    }

    // On the caller's thread.
    void run_errand(Errand errand) {
        errand_.store(&errand);
        ring(1);
        std::unique_lock<std::mutex> lock(lane_->mutex());
        while (!errand.done) errand_done_.wait(lock);
    }

    void carry_out(Errand *errand) {
        uint64_t tag = 0;
        uint32_t n = 1;
        switch (errand->kind) {
            case Errand::kAddFile: registered_.add_file(errand->fd); break;
            case Errand::kDropFile: tag = registered_.drop_file(errand->fd); break;
            case Errand::kAddMemory: registered_.add_memory(errand->base, errand->nbytes); break;
            case Errand::kDropMemory: tag = registered_.drop_memory(errand->base, &n); break;
        }
        std::lock_guard<std::mutex> lock(lane_->mutex());
        shown_ = registered_.figures;
        leaving_ = errand;
        leaving_tag_ = tag;
        leaving_left_ = n;
        if (tag == 0) report(&leaving_);
    }

    // With the mutex.
    void report(Errand **errand) {
        (*errand)->done = true;
        *errand = nullptr;
        leaving_tag_ = 0;
        errand_done_.notify_all();
    }

    std::unique_ptr<KernelRing> ring_;   // of the dispatcher's thread alone, from set-up on
    std::unique_ptr<__kernel_timespec[]> delays_;
    Registered registered_;
    Registered::Figures shown_;   // guarded by the mutex

    std::atomic<Errand *> errand_{nullptr};
    std::condition_variable errand_done_;
    Errand *leaving_ = nullptr;   // what is to go when the kernel has let go of it
    uint64_t leaving_tag_ = 0;
    uint32_t leaving_left_ = 0;
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
