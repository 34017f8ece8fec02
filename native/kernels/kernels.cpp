/* The table of kernels, and those without arithmetic. */

#include "kernels.hpp"

#include <cfenv>
#include <cstring>
#include <ctime>

#include "simd.hpp"

namespace inf {
namespace {

using Run = int (*)(const void *args, uint32_t args_nbytes, uint64_t *value);

/* In the order of the enum of abi.h. */
constexpr Run kKernels[] = {
    run_copy,       /* INF_KERNEL_COPY */
    run_checksum,   /* INF_KERNEL_CHECKSUM */
    run_verify,     /* INF_KERNEL_VERIFY */
    run_adamw,      /* INF_KERNEL_ADAMW */
    run_accumulate, /* INF_KERNEL_ACCUMULATE */
    run_sumsq,      /* INF_KERNEL_SUMSQ */
    run_split,      /* INF_KERNEL_SPLIT */
    run_join,       /* INF_KERNEL_JOIN */
    run_sleep,      /* INF_KERNEL_SLEEP */
};
static_assert(sizeof kKernels / sizeof kKernels[0] == INF_KERNELS, "one row per kernel");

/* Round to nearest, denormals kept, while it lives: a thread inherits its creator's environment, and torch.set_flush_denormal or
 * another library may have changed that. */
class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&saved_); }
    DefaultFloats(const DefaultFloats &) = delete;
    DefaultFloats &operator=(const DefaultFloats &) = delete;

  private:
    std::fenv_t saved_;
};

}  // namespace

int run_kernel(int kernel, const void *args, uint32_t args_nbytes, uint64_t *value) {
    *value = 0;
    if (kernel < 0 || kernel >= INF_KERNELS) return -EINVAL;
    if (args == nullptr || reinterpret_cast<uintptr_t>(args) % 8 != 0) return -EINVAL;
    const DefaultFloats floats;
    return kKernels[kernel](args, args_nbytes, value);
}

int run_copy(const void *args, uint32_t args_nbytes, uint64_t *value) {
    Checks checks;
    const auto *a = args_of<inf_copy_args>(args, args_nbytes, &checks);
    if (a == nullptr) return -EINVAL;
    if (checks.empty()) {
        if (a->nbytes != 0) std::memmove(pointer<void>(a->to), pointer<void>(a->from), a->nbytes);
        return 0;
    }
    if (a->to < a->from + a->nbytes && a->from < a->to + a->nbytes) return -EINVAL;
    for (uint64_t begin = 0; begin < a->nbytes;) {
        const uint64_t left = a->nbytes - begin, nbytes = left < Checks::kPieceNbytes ? left : Checks::kPieceNbytes;
        const Range ranges[] = {{a->from + begin, nbytes}, {a->to + begin, nbytes}};
        const int status = checks.before(ranges, value);
        if (status != 0) return status;
        std::memcpy(pointer<void>(ranges[1].address), pointer<void>(ranges[0].address), nbytes);
        checks.after(ranges);
        begin += nbytes;
    }
    return checks.close(value);
}

int run_checksum(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const auto *a = args_of<inf_checksum_args>(args, args_nbytes);
    if (a == nullptr) return -EINVAL;
    *value = inf_crc32c(pointer<void>(a->address), a->nbytes, 0);
    return 0;
}

int run_verify(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const int status = run_checksum(args, args_nbytes, value);
    if (status != 0) return status;
    return *value == static_cast<const inf_checksum_args *>(args)->expected ? 0 : -EBADMSG;
}

int run_sleep(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const auto *a = args_of<inf_sleep_args>(args, args_nbytes);
    if (a == nullptr) return -EINVAL;
    timespec left;
    left.tv_sec = static_cast<time_t>(a->microseconds / 1000000);
    left.tv_nsec = static_cast<long>(a->microseconds % 1000000) * 1000;
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    *value = a->value;
    return a->status;
}

}  // namespace inf

extern "C" {

int inf_kernel_run(int kernel, const void *args, uint32_t args_nbytes, uint64_t *value) {
    return inf::run_kernel(kernel, args, args_nbytes, value);
}

int inf_simd_best(void) { return inf::simd_best(); }

}
