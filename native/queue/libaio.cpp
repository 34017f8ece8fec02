// The `libaio` backend: one dispatcher thread on the kernel's older asynchronous I/O, for where io_uring is forbidden.
//
// The calls are those of the system's libaio, found at run time; where it is not installed they are made directly, which is all that
// the library does. One eventfd tells of completions and of requests that others made ready, so the thread sleeps in one poll. What
// the kernel cannot do asynchronously (files without O_DIRECT) it does inside io_submit.

#include "dispatcher.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <dlfcn.h>
#include <poll.h>
#include <sys/syscall.h>

namespace inf {

namespace {

// The kernel's own structures (linux/aio_abi.h), which libaio's are by another name.
struct Iocb {
    uint64_t data;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint32_t key, rw_flags;
#else
    uint32_t rw_flags, key;
#endif
    uint16_t opcode;
    int16_t priority;
    uint32_t fd;
    uint64_t address, nbytes;
    int64_t offset;
    uint64_t reserved;
    uint32_t flags, result_fd;
};
static_assert(sizeof(Iocb) == 64, "struct iocb");

struct Event {
    uint64_t data, iocb;
    int64_t result, result2;
};
static_assert(sizeof(Event) == 32, "struct io_event");

constexpr uint16_t kRead = 0, kWrite = 1, kDatasync = 3;   // IOCB_CMD_PREAD, _PWRITE, _FDSYNC
constexpr uint32_t kResultFd = 1;                          // IOCB_FLAG_RESFD
constexpr uint32_t kEventsMax = 128;

using Context = unsigned long;   // aio_context_t; a pointer by another name in libaio

// libaio answers -errno; so do these.
int raw_setup(int n, Context *context) { return syscall(__NR_io_setup, n, context) < 0 ? -errno : 0; }
int raw_destroy(Context context) { return syscall(__NR_io_destroy, context) < 0 ? -errno : 0; }
int raw_submit(Context context, long n, Iocb **iocbs) {
    const long done = syscall(__NR_io_submit, context, n, iocbs);
    return done < 0 ? -errno : static_cast<int>(done);
}
int raw_getevents(Context context, long least, long n, Event *events, timespec *timeout) {
    const long done = syscall(__NR_io_getevents, context, least, n, events, timeout);
    return done < 0 ? -errno : static_cast<int>(done);
}

// Four functions, all from the library or all our own.
class Calls {
 public:
    Calls() = default;
    Calls(const Calls &) = delete;
    Calls &operator=(const Calls &) = delete;
    ~Calls() {
        if (library_) dlclose(library_);
    }

    void find() {
        for (const char *name : {"libaio.so.1t64", "libaio.so.1"}) {
            library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (!library_) continue;
            if (find(&setup, "io_setup") && find(&destroy, "io_destroy") && find(&submit, "io_submit") && find(&getevents, "io_getevents")) return;
            dlclose(library_);
            library_ = nullptr;
        }
        setup = raw_setup;
        destroy = raw_destroy;
        submit = raw_submit;
        getevents = raw_getevents;
    }

    bool from_library() const { return library_ != nullptr; }

    int (*setup)(int, Context *) = nullptr;
    int (*destroy)(Context) = nullptr;
    int (*submit)(Context, long, Iocb **) = nullptr;
    int (*getevents)(Context, long, long, Event *, timespec *) = nullptr;

 private:
    template <typename F>
    bool find(F *function, const char *name) {
        *function = reinterpret_cast<F>(dlsym(library_, name));
        return *function != nullptr;
    }

    void *library_ = nullptr;
};

class Libaio : public Dispatcher {
 public:
    explicit Libaio(Lane *lane) : Dispatcher(lane) {}

    void describe(inf_path_info *info) const override {
        const char *const calls = calls_.from_library() ? "calls are made through the system's libaio" : "libaio is not installed: its calls are made directly";
        const int at = snprintf(info->notes, sizeof info->notes, "%s\n", calls);
        if (limited_) snprintf(info->notes + at, sizeof info->notes - static_cast<size_t>(at), "fs.aio-max-nr allows no more requests in flight\n");
    }

 protected:
    int start() override {
        calls_.find();
        uint32_t depth = lane_->depth();
        int error;
        while ((error = calls_.setup(static_cast<int>(depth), &context_)) == -EAGAIN && depth > 1) depth /= 2;   // fs.aio-max-nr
        if (error) return error;
        limited_ = depth < lane_->depth();
        lane_->limit_depth(depth);
        iocbs_.reset(new (std::nothrow) Iocb[depth]);
        ready_.reset(new (std::nothrow) Iocb *[depth]);
        refused_.reset(new (std::nothrow) Event[depth]);
        waits_.reset(new (std::nothrow) Wait[depth]);
        if (iocbs_ && ready_ && refused_ && waits_) return 0;
        end();
        return -ENOMEM;
    }

    void end() override { calls_.destroy(context_); }

    void hand_over(Slot *slot) override {
        const Request &request = slot->request;
        const size_t index = static_cast<size_t>(slot - slots_.get());
        Iocb *iocb = &iocbs_[index];
        memset(iocb, 0, sizeof *iocb);
        iocb->data = index;
        iocb->fd = static_cast<uint32_t>(request.fd);
        iocb->flags = kResultFd;
        iocb->result_fd = static_cast<uint32_t>(bell_.get());
        if (request.op == INF_FLUSH) {
            iocb->opcode = kDatasync;
        } else {
            iocb->opcode = request.op == INF_READ ? kRead : kWrite;
            iocb->address = reinterpret_cast<uint64_t>(slot->call.address());
            iocb->nbytes = slot->call.nbytes();
            iocb->offset = static_cast<int64_t>(request.offset + request.done);
        }
        ready_[n_ready_++] = iocb;
    }

    void wait(Slot *slot, uint64_t us, uint32_t calls) override {
        waits_[n_waits_++] = {slot, now_ns() + us * 1000, calls ? n_ended_ + calls : UINT64_MAX};
    }

    void sleep() override {
        const bool starved = !submit();
        if (n_refused_) return;
        uint64_t until_ns = UINT64_MAX;
        if (starved && n_submitted_ == 0) until_ns = now_ns() + 1000000;   // nothing of ours will end and give the kernel room
        for (uint32_t i = 0; i < n_waits_; ++i) until_ns = std::min(until_ns, waits_[i].due_ns);
        pollfd bell = {bell_.get(), POLLIN, 0};
        timespec left;
        if (until_ns != UINT64_MAX) {
            const uint64_t now = now_ns(), left_ns = until_ns > now ? until_ns - now : 0;
            left = {static_cast<time_t>(left_ns / 1000000000), static_cast<long>(left_ns % 1000000000)};
        }
        ppoll(&bell, 1, until_ns == UINT64_MAX ? nullptr : &left, nullptr);
        silence();   // before the events are taken, so that none of them goes unnoticed
    }

    void collect() override {
        for (uint32_t i = 0; i < n_refused_; ++i) ended(refused_[i]);
        n_refused_ = 0;
        Event events[kEventsMax];
        while (n_submitted_ > 0) {
            timespec at_once = {};
            const int n = calls_.getevents(context_, 0, kEventsMax, events, &at_once);
            if (n <= 0) break;
            n_submitted_ -= static_cast<uint32_t>(n);
            for (int i = 0; i < n; ++i) ended(events[i]);
        }
        if (n_waits_ == 0) return;
        const uint64_t now = now_ns();
        for (uint32_t i = 0; i < n_waits_;) {
            const Wait wait = waits_[i];
            if (now < wait.due_ns && n_ended_ < wait.enough) {
                ++i;
                continue;
            }
            waits_[i] = waits_[--n_waits_];
            proceed(wait.slot, 0);
        }
    }

 private:
    // False: the kernel has no room for more now.
    bool submit() {
        uint32_t begin = 0;
        bool starved = false;
        while (begin < n_ready_ && !starved) {
            const int n = calls_.submit(context_, n_ready_ - begin, &ready_[begin]);
            if (n > 0) {
                begin += static_cast<uint32_t>(n);
                n_submitted_ += static_cast<uint32_t>(n);
            } else if (n == 0 || n == -EAGAIN) {
                starved = true;
            } else if (n != -EINTR) {   // the first of them is not taken, and that is its result
                const Iocb &iocb = *ready_[begin++];
                int64_t result = n;
                if (n == -EINVAL && iocb.opcode == kDatasync) {   // kernels before 4.18
                    result = fdatasync(static_cast<int>(iocb.fd)) < 0 ? -errno : 0;
                }
                refused_[n_refused_++] = {iocb.data, 0, result, 0};
            }
        }
        n_ready_ -= begin;
        memmove(&ready_[0], &ready_[begin], n_ready_ * sizeof ready_[0]);
        return !starved;
    }

    void ended(const Event &event) {
        ++n_ended_;
        proceed(&slots_[event.data], event.result);
    }

    struct Wait {
        Slot *slot;
        uint64_t due_ns, enough;   // calls ended
    };

    Calls calls_;
    bool limited_ = false;
    Context context_ = 0;
    std::unique_ptr<Iocb[]> iocbs_;   // one for each slot
    std::unique_ptr<Iocb *[]> ready_;
    std::unique_ptr<Event[]> refused_;   // calls that io_submit itself ended
    std::unique_ptr<Wait[]> waits_;
    uint32_t n_ready_ = 0, n_submitted_ = 0, n_refused_ = 0, n_waits_ = 0;
    uint64_t n_ended_ = 0;
};

}  // namespace

std::unique_ptr<Backend> new_libaio_backend(Lane *lane) { return std::unique_ptr<Backend>(new (std::nothrow) Libaio(lane)); }

}  // namespace inf
