// Every file operation of store and checkpoint, behind one table (files.hpp).

#include "files.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

bool inf_files::ask(int op, int64_t *result) {
    const uint64_t call = calls[op].fetch_add(1, std::memory_order_relaxed) + 1;
    if (!armed[op].load(std::memory_order_acquire)) return false;
    std::lock_guard<std::mutex> lock(mutex);
    for (const Fault &fault : faults[op]) {
        if (fault.first <= call && call <= fault.last) {
            *result = fault.result;
            return true;
        }
    }
    return false;
}

namespace inf {

namespace {

bool transfers(int op) { return op == INF_FILE_READ || op == INF_FILE_WRITE; }

int code(int result) { return result < 0 ? -errno : result; }

}  // namespace

int64_t read_at(inf_files *files, int fd, void *address, size_t nbytes, uint64_t offset) {
    int64_t fault = 0;
    const bool faulty = files->ask(INF_FILE_READ, &fault);
    if (faulty && fault <= 0) return fault;
    const ssize_t moved = pread(fd, address, faulty ? short_nbytes(nbytes, fault) : nbytes, static_cast<off_t>(offset));
    if (moved < 0) return -errno;
    return faulty && fault < moved ? fault : moved;
}

int64_t write_at(inf_files *files, int fd, const void *address, size_t nbytes, uint64_t offset) {
    int64_t fault = 0;
    const bool faulty = files->ask(INF_FILE_WRITE, &fault);
    if (faulty && fault <= 0) return fault;
    const ssize_t moved = pwrite(fd, address, faulty ? short_nbytes(nbytes, fault) : nbytes, static_cast<off_t>(offset));
    if (moved < 0) return -errno;
    return faulty && fault < moved ? fault : moved;
}

}  // namespace inf

extern "C" {

int inf_files_new(inf_files **files) {
    *files = new (std::nothrow) inf_files;
    return *files ? 0 : -ENOMEM;
}

void inf_files_free(inf_files *files) { delete files; }

int inf_files_fault(inf_files *files, int op, uint64_t nth, uint64_t times, int64_t result) {
    if (op < 0 || op >= INF_FILE_OPS || nth == 0 || result < -4095) return -EINVAL;
    if (result >= 0 && times != 0 && !inf::transfers(op)) return -EINVAL;
    std::lock_guard<std::mutex> lock(files->mutex);
    if (times == 0) {
        files->faults[op].clear();
        files->armed[op].store(false, std::memory_order_release);
        return 0;
    }
    const uint64_t first = files->calls[op].load(std::memory_order_relaxed) + nth;
    const uint64_t last = times - 1 > UINT64_MAX - first ? UINT64_MAX : first + (times - 1);
    files->faults[op].push_back({first, last, result});
    files->armed[op].store(true, std::memory_order_release);
    return 0;
}

uint64_t inf_files_count(const inf_files *files, int op) {
    return op < 0 || op >= INF_FILE_OPS ? 0 : files->calls[op].load(std::memory_order_relaxed);
}

int inf_file_open(inf_files *files, const char *path, int flags, int mode) {
    int64_t fault = 0;
    if (files->ask(INF_FILE_OPEN, &fault)) return static_cast<int>(fault);
    for (;;) {
        const int fd = inf::code(open(path, flags | O_CLOEXEC, mode));
        if (fd != -EINTR) return fd;
    }
}

int inf_file_close(inf_files *files, int fd) {
    int64_t fault = 0;
    const bool faulty = files->ask(INF_FILE_CLOSE, &fault);
    const int result = inf::code(close(fd));   // the descriptor is gone whatever close answers, EINTR included
    if (faulty) return static_cast<int>(fault);
    return result == -EINTR ? 0 : result;
}

int inf_file_fallocate(inf_files *files, int fd, uint64_t offset, uint64_t nbytes) {
    int64_t fault = 0;
    if (files->ask(INF_FILE_FALLOCATE, &fault)) return static_cast<int>(fault);
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
    int64_t fault = 0;
    if (files->ask(INF_FILE_DATASYNC, &fault)) return static_cast<int>(fault);
    return inf::code(fdatasync(fd));
}

int inf_file_sync(inf_files *files, int fd) {
    int64_t fault = 0;
    if (files->ask(INF_FILE_SYNC, &fault)) return static_cast<int>(fault);
    return inf::code(fsync(fd));
}

int inf_file_rename(inf_files *files, const char *from, const char *to) {
    int64_t fault = 0;
    if (files->ask(INF_FILE_RENAME, &fault)) return static_cast<int>(fault);
    return inf::code(rename(from, to));
}

int inf_file_unlink(inf_files *files, const char *path) {
    int64_t fault = 0;
    if (files->ask(INF_FILE_UNLINK, &fault)) return static_cast<int>(fault);
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
