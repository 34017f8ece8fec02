// Random chains over every backend that works here, with faults, cancellation and several threads at one queue, against a model that
// runs the tasks one after the other. Built with a sanitizer, it shows it all of the native code; see tests/support/sanitize.py.
//
//   stress SECONDS SEED

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

extern "C" {
#include "abi.h"
}

namespace {

constexpr uint64_t kPlace = 6000;   // bytes of a cell of memory, and of a slot of a file
constexpr uint32_t kCells = 6, kSlots = 6, kFiles = 2;

[[noreturn]] void fail(const std::string &what) {
    fprintf(stderr, "stress: %s\n", what.c_str());
    exit(1);
}

void check(int code, const char *what) {
    if (code < 0) fail(std::string(what) + ": " + strerror(-code));
}

using Bytes = std::vector<unsigned char>;

// A place that tasks read and write: cells first, then the slots of all files.
struct Places {
    std::vector<Bytes> content;
    std::vector<bool> known;   // not after a task failed halfway
};

enum class What { kRead, kWrite, kCopy, kChecksum, kFlush, kSleep };

struct Step {
    What what;
    uint32_t from, to;   // places; one of them only where there is no other
    std::vector<uint32_t> after;
    int32_t priority;
};

class Round {
 public:
    Round(uint64_t seed, int backend) : draw_(seed), backend_(backend) {}

    // False: the backend does not work here.
    bool run() {
        if (!open()) return false;
        make_program();
        arm();
        std::thread poller(&Round::poll, this), spy(&Round::spy, this);
        submit();
        poller.join();
        over_ = true;
        spy.join();
        close();
        compare();
        return true;
    }

    uint64_t n_tasks() const { return program_.size(); }
    uint64_t n_failed() const { return n_failed_; }

 private:
    uint32_t below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(draw_); }
    bool one_in(uint32_t n) { return below(n) == 0; }

    bool open() {
        check(inf_files_new(&files_), "files");
        inf_queue_options options = {};
        options.backend = backend_;
        options.depth = std::vector<uint32_t>{1, 2, 3, 32}[below(4)];
        options.in_flight_nbytes = one_in(2) ? 4000 : 1u << 20;
        options.block_nbytes = std::vector<uint64_t>{700, 4096, 1u << 20}[below(3)];
        options.workers = 1 + below(3);
        options.io_threads = 1 + below(4);
        options.n_paths = 1 + below(kFiles);
        const int code = inf_queue_open(files_, &options, &queue_);
        if (code < 0) {
            inf_files_free(files_);
            return false;
        }
        memory_.reset(static_cast<unsigned char *>(std::aligned_alloc(4096, kCells * 8192)));
        if (one_in(2)) check(inf_queue_add_memory(queue_, memory_.get(), kCells * 8192), "add_memory");
        for (uint32_t i = 0; i < kCells + kFiles * kSlots; ++i) {
            Bytes bytes(kPlace);
            for (unsigned char &byte : bytes) byte = static_cast<unsigned char>(draw_());
            places_.content.push_back(bytes);
            places_.known.push_back(true);
        }
        for (uint32_t i = 0; i < kCells; ++i) memcpy(cell(i), places_.content[i].data(), kPlace);
        for (uint32_t i = 0; i < kFiles; ++i) {
            const char *base = getenv("TMPDIR");
            std::string name = std::string(base ? base : "/tmp") + "/infinity-stress-XXXXXX";
            fds_[i] = mkstemp(&name[0]);
            if (fds_[i] < 0) fail("mkstemp");
            unlink(name.c_str());
            for (uint32_t slot = 0; slot < kSlots; ++slot) {
                const Bytes &bytes = places_.content[kCells + i * kSlots + slot];
                if (pwrite(fds_[i], bytes.data(), kPlace, static_cast<off_t>(slot * kPlace)) != static_cast<ssize_t>(kPlace)) fail("pwrite");
            }
            if (one_in(2)) check(inf_queue_add_file(queue_, fds_[i], below(options.n_paths)), "add_file");
        }
        return true;
    }

    void *cell(uint32_t place) { return memory_.get() + place * 8192; }
    uint32_t any_cell() { return below(kCells); }
    uint32_t any_slot() { return kCells + below(kFiles * kSlots); }

    void make_program() {
        const uint32_t n = 20 + below(200);
        for (uint32_t i = 0; i < n; ++i) {
            Step step = {static_cast<What>(below(6)), any_cell(), any_cell(), {}, static_cast<int32_t>(below(INF_PRIORITIES))};
            if (step.what == What::kRead) step.from = any_slot();
            if (step.what == What::kWrite || step.what == What::kFlush) step.to = any_slot();
            for (uint32_t j = 0; j < i; ++j) {
                if (depends(step, program_[j]) || one_in(100)) step.after.push_back(j);
            }
            program_.push_back(step);
        }
    }

    static bool reads(const Step &step, uint32_t place) { return step.what != What::kFlush && step.what != What::kSleep && step.from == place; }
    static bool writes(const Step &step, uint32_t place) {
        return (step.what == What::kRead || step.what == What::kWrite || step.what == What::kCopy) && step.to == place;
    }

    static bool depends(const Step &step, const Step &earlier) {
        for (uint32_t place : {step.from, step.to}) {
            if (writes(earlier, place) && (reads(step, place) || writes(step, place))) return true;
            if (reads(earlier, place) && writes(step, place)) return true;
        }
        return false;
    }

    void arm() {
        const auto fault = [&](int op, int kind, uint64_t value, uint64_t us, uint32_t share, uint64_t times) {
            const inf_fault what = {kind, 0, value, us, share, static_cast<uint32_t>(draw_())};
            check(inf_files_fault(files_, op, 1, times, &what), "fault");
        };
        for (int op : {INF_FILE_READ, INF_FILE_WRITE, INF_FILE_DATASYNC}) {
            if (one_in(3)) fault(op, INF_FAULT_ERROR, EINTR, 0, 5, 1u << 20);
            if (one_in(3)) fault(op, INF_FAULT_ERROR, EAGAIN, 0, 7, 1u << 20);
            if (one_in(3)) fault(op, INF_FAULT_DELAY, 0, 200, 9, 1u << 20);
            if (one_in(3)) fault(op, INF_FAULT_HOLD, 2, 500, 6, 1u << 20);
            if (op != INF_FILE_DATASYNC && one_in(3)) fault(op, INF_FAULT_SHORT, 333, 0, 4, 1u << 20);
            if (one_in(4)) fault(op, INF_FAULT_ERROR, EIO, 0, 11, 40), may_fail_ = true;
        }
        may_cancel_ = one_in(4);
    }

    void submit() {
        for (uint32_t begin = 0; begin < program_.size();) {
            const uint32_t n = std::min<uint32_t>(1 + below(60), static_cast<uint32_t>(program_.size()) - begin);
            std::vector<inf_task> tasks;
            std::vector<int64_t> after;
            std::vector<uint8_t> args;
            for (uint32_t i = begin; i < begin + n; ++i) {
                const Step &step = program_[i];
                inf_task task = {};
                task.after_begin = static_cast<uint32_t>(after.size());
                task.after_count = static_cast<uint32_t>(step.after.size());
                for (uint32_t j : step.after) after.push_back(j >= begin ? -1 - static_cast<int64_t>(j - begin) : static_cast<int64_t>(j + 1));
                task.priority = step.priority;
                const uint32_t slot = (step.what == What::kRead ? step.from : step.to) - kCells;
                if (step.what == What::kRead || step.what == What::kWrite) {
                    task.op = step.what == What::kRead ? INF_READ : INF_WRITE;
                    task.fd = fds_[slot / kSlots];
                    task.offset = slot % kSlots * kPlace;
                    task.nbytes = kPlace;
                    task.address = reinterpret_cast<uint64_t>(cell(step.what == What::kRead ? step.to : step.from));
                } else if (step.what == What::kFlush) {
                    task.op = INF_FLUSH;
                    task.fd = fds_[slot / kSlots];
                } else {
                    task.op = INF_KERNEL;
                    task.args_offset = args.size();
                    inf_copy_args copy = {};
                    inf_checksum_args checksum = {};
                    inf_sleep_args sleep = {};
                    copy.to = reinterpret_cast<uint64_t>(cell(step.to));
                    copy.from = checksum.address = reinterpret_cast<uint64_t>(cell(step.from));
                    copy.nbytes = checksum.nbytes = kPlace;
                    if (step.from == step.to) copy.nbytes = 0;
                    sleep.microseconds = below(200);
                    const auto add = [&](int kernel, const void *bytes, size_t nbytes) {
                        task.kernel = kernel;
                        task.args_nbytes = static_cast<uint32_t>(nbytes);
                        args.insert(args.end(), static_cast<const uint8_t *>(bytes), static_cast<const uint8_t *>(bytes) + nbytes);
                    };
                    if (step.what == What::kCopy) add(INF_KERNEL_COPY, &copy, sizeof copy);
                    else if (step.what == What::kChecksum) add(INF_KERNEL_CHECKSUM, &checksum, sizeof checksum);
                    else add(INF_KERNEL_SLEEP, &sleep, sizeof sleep);
                    args.resize((args.size() + 7) / 8 * 8);
                }
                tasks.push_back(task);
            }
            uint64_t first_id = 0;
            check(inf_queue_submit(queue_, tasks.data(), n, after.data(), static_cast<uint32_t>(after.size()), args.data(), args.size(), &first_id),
                  "submit");
            if (first_id != begin + 1) fail("ids do not grow by one");
            begin += n;
            n_submitted_ = begin;
            if (may_cancel_ && one_in(3)) {
                std::vector<uint64_t> ids;
                for (uint32_t i = below(4); i < 4; ++i) ids.push_back(1 + below(begin));
                const bool all = one_in(8);
                check(inf_queue_cancel(queue_, all ? nullptr : ids.data(), all ? 0 : static_cast<uint32_t>(ids.size())), "cancel");
            }
        }
        std::vector<uint64_t> ids;
        for (uint32_t i = below(3); i < program_.size(); i += 1 + below(20)) ids.push_back(i + 1);
        const int code = one_in(3) ? inf_queue_drain(queue_, 60000) : inf_queue_wait(queue_, ids.data(), static_cast<uint32_t>(ids.size()), 60000);
        check(code, "wait");
    }

    void poll() {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        inf_completion some[16];
        while (completions_.size() < program_.size()) {
            const int n = inf_queue_poll(queue_, some, 16);
            completions_.insert(completions_.end(), some, some + n);
            if (n == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
            if (std::chrono::steady_clock::now() > deadline) fail("tasks do not end");
        }
    }

    // What other threads may ask at any time.
    void spy() {
        std::mt19937_64 draw(1);
        uint64_t ids[8];
        while (!over_) {
            inf_queue_stats stats;
            check(inf_queue_get_stats(queue_, &stats), "stats");
            inf_path_stats path_stats;
            check(inf_queue_get_path_stats(queue_, 0, &path_stats), "path stats");
            inf_path_info info;
            check(inf_queue_get_path_info(queue_, 0, &info), "path info");
            const uint32_t n = inf_queue_list(queue_, ids, 8);
            for (uint32_t i = 0; i < std::min(n, 8u); ++i) {
                inf_task task;
                int phase;
                inf_queue_pending(queue_, ids[i], &task, &phase);
            }
            if (const uint64_t submitted = n_submitted_) {
                const uint64_t id = 1 + draw() % submitted;
                inf_queue_wait(queue_, &id, 1, static_cast<uint32_t>(draw() % 2));
            }
        }
    }

    void close() {
        for (int fd : fds_) check(inf_queue_drop_file(queue_, fd), "drop_file");
        check(inf_queue_drop_memory(queue_, memory_.get()), "drop_memory");
        inf_queue_close(queue_);
        inf_files_free(files_);
    }

    void compare() {
        std::vector<int> statuses(program_.size(), 1);
        std::vector<uint64_t> values(program_.size());
        for (const inf_completion &completion : completions_) {
            const uint64_t i = completion.id - 1;
            if (i >= program_.size() || statuses[i] != 1) fail("a completion of nothing, or given twice");
            for (uint32_t j : program_[i].after) {
                if (statuses[j] == 1) fail("a task completed before one that it depends on");
            }
            statuses[i] = completion.status;
            values[i] = completion.value;
        }
        for (uint32_t i = 0; i < program_.size(); ++i) carry_out(program_[i], statuses, i, values[i]);
        for (uint32_t place = 0; place < places_.content.size(); ++place) {
            Bytes found(kPlace);
            if (place < kCells) {
                memcpy(found.data(), cell(place), kPlace);
            } else {
                const uint32_t slot = place - kCells;
                if (pread(fds_[slot / kSlots], found.data(), kPlace, static_cast<off_t>(slot % kSlots * kPlace)) < 0) fail("pread");
            }
            if (places_.known[place] && found != places_.content[place]) fail("place " + std::to_string(place) + " has other bytes than it must");
        }
        for (int fd : fds_) ::close(fd);
    }

    void carry_out(const Step &step, const std::vector<int> &statuses, uint32_t i, uint64_t value) {
        const int status = statuses[i];
        const bool doomed = std::any_of(step.after.begin(), step.after.end(), [&](uint32_t j) { return statuses[j] < 0; });
        if (doomed && status != -ECANCELED) fail("a task that depends on a failed one ended with " + std::to_string(status));
        if (doomed) return;
        const bool moves = step.what == What::kRead || step.what == What::kWrite || step.what == What::kCopy;
        if (status < 0) {
            ++n_failed_;
            if (!(may_cancel_ && status == -ECANCELED) && !(may_fail_ && status == -EIO)) fail("a task ended with " + std::to_string(status));
            if (moves) places_.known[step.to] = false;
            return;
        }
        if (moves) {
            places_.content[step.to] = places_.content[step.from];
            places_.known[step.to] = places_.known[step.from];
        } else if (step.what == What::kChecksum && places_.known[step.from]) {
            if (value != inf_crc32c_table(places_.content[step.from].data(), kPlace, 0)) fail("a checksum of other bytes");
        }
    }

    struct Free {
        void operator()(unsigned char *memory) const { std::free(memory); }
    };

    std::mt19937_64 draw_;
    const int backend_;
    inf_files *files_ = nullptr;
    inf_queue *queue_ = nullptr;
    std::unique_ptr<unsigned char, Free> memory_;
    int fds_[kFiles] = {};
    Places places_;
    std::vector<Step> program_;
    bool may_fail_ = false, may_cancel_ = false;
    std::vector<inf_completion> completions_;
    std::atomic<uint64_t> n_submitted_ = {0};
    std::atomic<bool> over_ = {false};
    uint64_t n_failed_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) fail("usage: stress SECONDS SEED");
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<long>(atof(argv[1]) * 1000));
    uint64_t seed = strtoull(argv[2], nullptr, 10);
    uint64_t rounds[4] = {}, tasks = 0, failed = 0;
    do {
        for (int backend : {INF_BACKEND_THREADS, INF_BACKEND_URING, INF_BACKEND_LIBAIO}) {
            Round round(++seed, backend);
            if (!round.run()) continue;
            ++rounds[backend];
            tasks += round.n_tasks();
            failed += round.n_failed();
        }
    } while (std::chrono::steady_clock::now() < end);
    printf("threads %llu, uring %llu, libaio %llu rounds; %llu tasks, %llu of them failed or cancelled; last seed %llu\n",
           static_cast<unsigned long long>(rounds[INF_BACKEND_THREADS]), static_cast<unsigned long long>(rounds[INF_BACKEND_URING]),
           static_cast<unsigned long long>(rounds[INF_BACKEND_LIBAIO]), static_cast<unsigned long long>(tasks),
           static_cast<unsigned long long>(failed), static_cast<unsigned long long>(seed));
    return rounds[INF_BACKEND_THREADS] ? 0 : 1;
}
