// A native thread that takes no signals: they belong to Python's thread. Faults of its own still reach faulthandler.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>

#include <pthread.h>

namespace inf {

class Thread {
 public:
    Thread() = default;
    Thread(const Thread &) = delete;
    Thread &operator=(const Thread &) = delete;

    // 0 or -errno. `argument` outlives the thread.
    template <typename T, void (T::*kRun)()>
    int start(T *argument, const char *name) {
        sigset_t all, before;
        sigfillset(&all);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        const int error = pthread_create(&thread_, nullptr, &entry<T, kRun>, argument);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error) return -error;
        pthread_setname_np(thread_, name);
        started_ = true;
        return 0;
    }

    void join() {
        if (started_) pthread_join(thread_, nullptr);
        started_ = false;
    }

 private:
    template <typename T, void (T::*kRun)()>
    static void *entry(void *argument) {
        (static_cast<T *>(argument)->*kRun)();
        return nullptr;
    }

    pthread_t thread_ = {};
    bool started_ = false;
};

// Threads that sleep until there is work for them. A wake is claimed under the mutex and rung after it, so that the thread woken
// does not run into the mutex at once.
class Sleepers {
 public:
    void sleep(std::unique_lock<std::mutex> &lock) {
        ++asleep_;
        while (tokens_ == 0) wake_.wait(lock);
        --tokens_;
    }

    // With the mutex: how many to ring for `work` pieces; threads already rung and not yet here count.
    uint32_t claim(uint64_t work) {
        if (work <= tokens_) return 0;
        const uint64_t wanted = work - tokens_;
        const uint32_t n = wanted < asleep_ ? static_cast<uint32_t>(wanted) : asleep_;
        asleep_ -= n;
        tokens_ += n;
        return n;
    }

    // Without it.
    void ring(uint32_t n) {
        for (; n > 0; --n) wake_.notify_one();
    }

 private:
    std::condition_variable wake_;
    uint32_t asleep_ = 0;   // not rung
    uint32_t tokens_ = 0;   // rung and not yet awake
};

}  // namespace inf
