/* What a KERNEL task runs. Each kernel checks its arguments (-EINVAL for a size, range or format that cannot be right), owns nothing
 * and keeps no pointer; the memory that addresses name belongs to the task until it is complete. */

#pragma once

#include <cerrno>
#include <cstdint>

#include "checks.hpp"

namespace inf {

/* Runs kernel `kernel` (INF_KERNEL_...) on the calling thread: 0 or -errno. `args` is aligned to 8 bytes. `*value` is what the kernel
 * answers, 0 if nothing. Computes in the default floating-point environment whatever the thread's own, which it leaves as it was. */
int run_kernel(int kernel, const void *args, uint32_t args_nbytes, uint64_t *value);

/* One per row of the table in kernels.cpp; all have this form. */
int run_copy(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_checksum(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_verify(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_adamw(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_accumulate(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_sumsq(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_split(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_join(const void *args, uint32_t args_nbytes, uint64_t *value);
int run_sleep(const void *args, uint32_t args_nbytes, uint64_t *value);

/* `args` as one Args, or null if its size is another. */
template <typename Args> const Args *args_of(const void *args, uint32_t args_nbytes) {
    return args_nbytes == sizeof(Args) ? static_cast<const Args *>(args) : nullptr;
}

/* `args` as one Args and checks, or null if the size does not match or the checks cannot be right. */
template <typename Args> const Args *args_of(const void *args, uint32_t args_nbytes, Checks *checks) {
    static_assert(sizeof(Args) % alignof(inf_check) == 0, "checks follow their header without padding");
    if (args_nbytes < sizeof(Args)) return nullptr;
    const Args *head = static_cast<const Args *>(args);
    return checks->open(head + 1, args_nbytes - sizeof(Args)) ? head : nullptr;
}

/* `args` as one Args, its n_segments Segments, and checks; null as above. */
template <typename Args, typename Segment>
const Args *args_with_segments(const void *args, uint32_t args_nbytes, const Segment **segments, Checks *checks) {
    static_assert(sizeof(Args) % alignof(Segment) == 0, "segments follow their header without padding");
    static_assert((sizeof(Args) + sizeof(Segment)) % alignof(inf_check) == 0, "checks follow the segments without padding");
    if (args_nbytes < sizeof(Args)) return nullptr;
    const Args *head = static_cast<const Args *>(args);
    const uint64_t segments_nbytes = uint64_t(head->n_segments) * sizeof(Segment), rest_nbytes = args_nbytes - sizeof(Args);
    if (rest_nbytes < segments_nbytes) return nullptr;
    *segments = reinterpret_cast<const Segment *>(head + 1);
    return checks->open(*segments + head->n_segments, rest_nbytes - segments_nbytes) ? head : nullptr;
}

}  // namespace inf
