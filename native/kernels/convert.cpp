/* fp32 <-> the 16 + 16 split (simd.hpp has it for one element). */

#include "kernels.hpp"
#include "simd.hpp"

namespace inf {
namespace {

void split_scalar(const float *master, uint16_t *hi, uint16_t *lo, uint64_t numel) {
    for (uint64_t i = 0; i < numel; ++i) split(master[i], hi + i, lo + i);
}

void join_scalar(float *master, const uint16_t *hi, const uint16_t *lo, uint64_t numel) {
    for (uint64_t i = 0; i < numel; ++i) master[i] = join(hi[i], lo[i]);
}

#if defined(INF_X86)

INF_AVX2 void split_avx2(const float *master, uint16_t *hi, uint16_t *lo, uint64_t numel) {
    uint64_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        avx2_cut(avx2_split_kept(avx2_load(master + i)), avx2_split_kept(avx2_load(master + i + 8)), hi + i, lo + i);
    }
    split_scalar(master + i, hi + i, lo + i, numel - i);
}

INF_AVX2 void join_avx2(float *master, const uint16_t *hi, const uint16_t *lo, uint64_t numel) {
    uint64_t i = 0;
    for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(master + i, avx2_join(hi + i, lo + i));
    join_scalar(master + i, hi + i, lo + i, numel - i);
}

#endif

}  // namespace

int run_split(const void *args, uint32_t args_nbytes, uint64_t *) {
    const auto *a = args_of<inf_split_args>(args, args_nbytes);
    if (a == nullptr) return -EINVAL;
    auto run = split_scalar;
#if defined(INF_X86)
    if (simd_best() == INF_SIMD_AVX2) run = split_avx2;
#endif
    run(pointer<const float>(a->master), pointer<uint16_t>(a->param), pointer<uint16_t>(a->residual), a->numel);
    return 0;
}

int run_join(const void *args, uint32_t args_nbytes, uint64_t *) {
    const auto *a = args_of<inf_split_args>(args, args_nbytes);
    if (a == nullptr) return -EINVAL;
    auto run = join_scalar;
#if defined(INF_X86)
    if (simd_best() == INF_SIMD_AVX2) run = join_avx2;
#endif
    run(pointer<float>(a->master), pointer<const uint16_t>(a->param), pointer<const uint16_t>(a->residual), a->numel);
    return 0;
}

}  // namespace inf
