// One transfer (or flush) at the backend, and what its result means: the same rules for every backend.
#pragma once

#include <cerrno>
#include <cstdint>

extern "C" {
#include "abi.h"
}

namespace inf {

struct Task;

// What to do with a request after a result.
enum class Next {
    kFinish,   // over: `status` is final
    kAgain,    // issue what is left, now
    kLater,    // issue what is left, after delay_ms()
};

struct Request {
    Task *task = nullptr;
    int op = 0;
    int fd = -1;
    uint64_t offset = 0, nbytes = 0, address = 0;
    uint64_t issued_ns = 0;     // when it was taken
    uint64_t done = 0;          // bytes moved
    uint64_t misaligned = 0;    // the largest `done` from which continuing was refused
    uint32_t tries = 0;         // results in a row that moved nothing
    uint32_t shorts = 0, retries = 0;
    int status = 0;

    static constexpr uint32_t kTriesAtOnce = 8, kTriesMax = 32, kDelayMsMax = 64;
    static constexpr uint64_t kBlock = 4096;

    uint32_t delay_ms() const {
        const uint32_t doublings = tries - kTriesAtOnce;
        return doublings < 6 ? 1u << doublings : kDelayMsMax;
    }

    // `result`: bytes moved (0 for a flush), or -errno. A request that is neither whole nor failed goes on behind what it moved.
    Next advance(int64_t result) {
        if (op == INF_FLUSH) return result == 0 ? Next::kFinish : failed(static_cast<int>(result));
        if (result > 0) {
            done += static_cast<uint64_t>(result);
            tries = 0;
            if (done >= nbytes) return Next::kFinish;
            ++shorts;
            return Next::kAgain;
        }
        if (result == 0) return op == INF_READ ? finish(-ENODATA) : retry(-EIO);   // the end of the file; a write that wrote nothing
        return failed(static_cast<int>(result));
    }

 private:
    Next finish(int code) {
        status = code;
        return Next::kFinish;
    }

    Next retry(int code) {
        if (++tries >= kTriesMax) return finish(code);
        ++retries;
        return tries < kTriesAtOnce ? Next::kAgain : Next::kLater;
    }

    Next failed(int code) {
        if (code == -EINTR || code == -EAGAIN) return retry(code);
        if (code == -EINVAL && done % kBlock != 0) {
            // O_DIRECT came short inside a block and does not go on from there: move that block again. Refused twice at one place,
            // a read has met the end of the file.
            if (done <= misaligned) return finish(op == INF_READ ? -ENODATA : code);
            misaligned = done;
            done -= done % kBlock;
            ++retries;
            return Next::kAgain;
        }
        return finish(code);
    }
};

}  // namespace inf
