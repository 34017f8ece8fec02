// Every file operation of store and checkpoint, behind one table (files.hpp).

#include "files.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr uint64_t kBlock = 4096;              // what O_DIRECT asks of every file system we know, at most
constexpr uint64_t kWaitUsMax = 60'000'000;

// The same for the same call and seed (splitmix64).
uint64_t drawn(uint64_t call, uint64_t seed) {
    uint64_t x = (seed << 40 ^ call) + 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

bool is_one_of(int op, std::initializer_list<int> ops) {
    for (int other : ops) {
        if (op == other) return true;
    }
    return false;
}

bool makes_sense(int op, const inf_fault &fault) {
    if (fault.us > kWaitUsMax || fault.bit > 7) return false;
    if ((fault.us != 0) != (fault.kind == INF_FAULT_DELAY || fault.kind == INF_FAULT_HOLD)) return false;
    switch (fault.kind) {
        case INF_FAULT_ERROR: return fault.value > 0 && fault.value <= 4095;
        case INF_FAULT_DELAY: return true;
        case INF_FAULT_HOLD: return fault.value > 0 && fault.value <= UINT32_MAX && is_one_of(op, {INF_FILE_READ, INF_FILE_WRITE, INF_FILE_DATASYNC});
        case INF_FAULT_SHORT: return fault.value <= INT64_MAX && is_one_of(op, {INF_FILE_READ, INF_FILE_WRITE});
        case INF_FAULT_FLIP: return is_one_of(op, {INF_FILE_READ, INF_FILE_WRITE});
        case INF_FAULT_TEAR: return op == INF_FILE_WRITE;
        case INF_FAULT_LOSE: return is_one_of(op, {INF_FILE_WRITE, INF_FILE_DATASYNC, INF_FILE_SYNC});
        default: return false;
    }
}

}  // namespace

bool inf_files::ask(int op, inf_fault *fault) {
    const uint64_t call = calls[op].fetch_add(1, std::memory_order_relaxed) + 1;
    if (!armed[op].load(std::memory_order_acquire)) return false;
    std::lock_guard<std::mutex> lock(mutex);
    for (const Fault &one : faults[op]) {
        if (call < one.first || call > one.last) continue;
        if (one.what.one_in > 1 && drawn(call, one.what.seed) % one.what.one_in != 0) continue;
        *fault = one.what;
        return true;
    }
    return false;
}

void inf_files::wait(const inf_fault &fault) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(fault.us);
    std::unique_lock<std::mutex> lock(mutex);
    if (fault.kind == INF_FAULT_HOLD) holding.fetch_add(1, std::memory_order_relaxed);
    const uint64_t enough = fault.kind == INF_FAULT_HOLD ? n_ended + fault.value : UINT64_MAX;
    others_ended.wait_until(lock, until, [&] { return n_ended >= enough; });
    if (fault.kind == INF_FAULT_HOLD) holding.fetch_sub(1, std::memory_order_relaxed);
}

void inf_files::note_ended() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        ++n_ended;
    }
    others_ended.notify_all();
}

namespace inf {

namespace {

int code(int result) { return result < 0 ? -errno : result; }

// Counts one call of `op`, which is carried out here and now, and waits where a fault says so. True: `result` is what it gave.
bool answers(inf_files *files, int op, int *result) {
    inf_fault fault = {};
    if (!files->ask(op, &fault)) return false;
    if (fault.us) files->wait(fault);
    *result = fault.kind == INF_FAULT_ERROR ? -static_cast<int>(fault.value) : 0;
    return fault.kind == INF_FAULT_ERROR || fault.kind == INF_FAULT_LOSE;
}

}  // namespace

void Call::begin(inf_files *files, int op, int fd, void *address, size_t nbytes, uint64_t offset) {
    forget();
    files_ = files;
    op_ = op;
    address_ = address;
    nbytes_ = nbytes;
    answered_ = false;
    fault_ = {};
    if (!files->ask(op, &fault_)) return;
    switch (fault_.kind) {
        case INF_FAULT_ERROR:
            answer(-static_cast<int64_t>(fault_.value));
            break;
        case INF_FAULT_LOSE:
            answer(static_cast<int64_t>(nbytes));
            break;
        case INF_FAULT_SHORT:
            if (fault_.value == 0) answer(0);
            else if (fault_.value < nbytes) nbytes_ = std::min(nbytes, (fault_.value + kBlock - 1) / kBlock * kBlock);   // O_DIRECT takes whole blocks
            break;
        case INF_FAULT_FLIP:
        case INF_FAULT_TEAR:
            if (op == INF_FILE_WRITE) falsify(fd, nbytes, offset);
            break;
        default:
            break;
    }
}

// Another content for the file, while the caller's memory stays as it is.
void Call::falsify(int fd, size_t nbytes, uint64_t offset) {
    copy_ = aligned_alloc(kBlock, (nbytes + kBlock - 1) / kBlock * kBlock);
    if (!copy_) {
        answer(-ENOMEM);
        return;
    }
    unsigned char *const bytes = static_cast<unsigned char *>(copy_);
    size_t ours = nbytes;
    if (fault_.kind == INF_FAULT_TEAR) {
        if (fault_.value < nbytes) ours = fault_.value;
        memset(bytes, 0, nbytes);
        const ssize_t before = pread(fd, bytes, nbytes, static_cast<off_t>(offset));   // behind the end of the file there is nothing
        static_cast<void>(before);
    }
    memcpy(bytes, address_, ours);
    if (fault_.kind == INF_FAULT_FLIP && nbytes) bytes[fault_.value % nbytes] ^= static_cast<unsigned char>(1u << fault_.bit);
    address_ = copy_;
}

int64_t Call::end(int64_t result) {
    if (result > 0 && fault_.kind == INF_FAULT_SHORT) result = std::min(result, static_cast<int64_t>(fault_.value));
    if (result > 0 && fault_.kind == INF_FAULT_FLIP && op_ == INF_FILE_READ) {
        static_cast<unsigned char *>(address_)[fault_.value % static_cast<uint64_t>(result)] ^= static_cast<unsigned char>(1u << fault_.bit);
    }
    forget();
    files_->ended();
    return result;
}

void Call::forget() {
    std::free(copy_);
    copy_ = nullptr;
}

int64_t read_at(inf_files *files, int fd, void *address, size_t nbytes, uint64_t offset) {
    Call call;
    call.begin(files, INF_FILE_READ, fd, address, nbytes, offset);
    if (call.answered()) return call.answer();
    call.wait();
    const ssize_t moved = pread(fd, call.address(), call.nbytes(), static_cast<off_t>(offset));
    return call.end(moved < 0 ? -errno : moved);
}

int64_t write_at(inf_files *files, int fd, const void *address, size_t nbytes, uint64_t offset) {
    Call call;
    call.begin(files, INF_FILE_WRITE, fd, const_cast<void *>(address), nbytes, offset);
    if (call.answered()) return call.answer();
    call.wait();
    const ssize_t moved = pwrite(fd, call.address(), call.nbytes(), static_cast<off_t>(offset));
    return call.end(moved < 0 ? -errno : moved);
}

}  // namespace inf

extern "C" {

int inf_files_new(inf_files **files) {
    *files = new (std::nothrow) inf_files;
    return *files ? 0 : -ENOMEM;
}

void inf_files_free(inf_files *files) { delete files; }

int inf_files_fault(inf_files *files, int op, uint64_t nth, uint64_t times, const inf_fault *fault) {
    if (op < 0 || op >= INF_FILE_OPS || nth == 0 || times == 0 || !makes_sense(op, *fault)) return -EINVAL;
    std::lock_guard<std::mutex> lock(files->mutex);
    const uint64_t first = files->calls[op].load(std::memory_order_relaxed) + nth;
    const uint64_t last = times - 1 > UINT64_MAX - first ? UINT64_MAX : first + (times - 1);
    files->faults[op].push_back({first, last, *fault});
    files->armed[op].store(true, std::memory_order_release);
    return 0;
}

int inf_files_mend(inf_files *files, int op) {
    if (op < 0 || op >= INF_FILE_OPS) return -EINVAL;
    std::lock_guard<std::mutex> lock(files->mutex);
    files->faults[op].clear();
    files->armed[op].store(false, std::memory_order_release);
    return 0;
}

uint64_t inf_files_count(const inf_files *files, int op) {
    return op < 0 || op >= INF_FILE_OPS ? 0 : files->calls[op].load(std::memory_order_relaxed);
}

int inf_file_open(inf_files *files, const char *path, int flags, int mode) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_OPEN, &answer)) return answer;
    for (;;) {
        const int fd = inf::code(open(path, flags | O_CLOEXEC, mode));
        if (fd != -EINTR) return fd;
    }
}

int inf_file_close(inf_files *files, int fd) {
    int answer = 0;
    const bool answered = inf::answers(files, INF_FILE_CLOSE, &answer);
    const int result = inf::code(close(fd));   // the descriptor is gone whatever close answers, EINTR included
    if (answered) return answer;
    return result == -EINTR ? 0 : result;
}

int inf_file_fallocate(inf_files *files, int fd, uint64_t offset, uint64_t nbytes) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_FALLOCATE, &answer)) return answer;
    int result;
    do {
        result = inf::code(fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)));
    } while (result == -EINTR);
    if (result != -EOPNOTSUPP) return result;
    // A file system without it: libc touches every block, which takes a buffered descriptor.
    const int emulated = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    return emulated == EINVAL ? -EOPNOTSUPP : -emulated;
}

int inf_file_datasync(inf_files *files, int fd) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_DATASYNC, &answer)) return answer;
    const int result = inf::code(fdatasync(fd));
    files->ended();
    return result;
}

int inf_file_sync(inf_files *files, int fd) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_SYNC, &answer)) return answer;
    return inf::code(fsync(fd));
}

int inf_file_rename(inf_files *files, const char *from, const char *to) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_RENAME, &answer)) return answer;
    return inf::code(rename(from, to));
}

int inf_file_unlink(inf_files *files, const char *path) {
    int answer = 0;
    if (inf::answers(files, INF_FILE_UNLINK, &answer)) return answer;
    return inf::code(unlink(path));
}

// The layout of struct statx is the kernel's and fixed; these two fields are younger than the headers of many systems.
int inf_file_direct_alignment(int fd, uint32_t *memory_align, uint32_t *offset_align) {
    constexpr unsigned kDioAlign = 0x2000;   // STATX_DIOALIGN
    constexpr int kEmptyPath = 0x1000;       // AT_EMPTY_PATH
    constexpr size_t kMemoryAlignAt = 0x98, kOffsetAlignAt = 0x9c;
    alignas(8) unsigned char answer[256] = {};
    *memory_align = 0;
    *offset_align = 0;
    if (syscall(SYS_statx, fd, "", kEmptyPath, kDioAlign, answer) != 0) return errno == ENOSYS || errno == EPERM ? 0 : -errno;
    uint32_t mask;
    memcpy(&mask, answer, sizeof mask);
    if (!(mask & kDioAlign)) return 0;
    memcpy(memory_align, answer + kMemoryAlignAt, sizeof *memory_align);
    memcpy(offset_align, answer + kOffsetAlignAt, sizeof *offset_align);
    return 0;
}

}  // extern "C"
