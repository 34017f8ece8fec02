/* Which instructions a kernel may use, decided at run time, and what every kernel shares element by element.
 *
 * The scalar form of a kernel is the reference; the others give the same bits. So every operation is rounded on its own, fused ones
 * are written as such, and a NaN that a kernel computes is stored as 7FC00000, because the sign and payload that an instruction gives
 * it differ between instruction sets. */

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define INF_X86 1
#define INF_AVX2 __attribute__((target("avx2,fma")))
#endif

namespace inf {

inline int simd_best() {
#if defined(INF_X86)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return INF_SIMD_AVX2;
#endif
    return INF_SIMD_SCALAR;
}

/* The instructions that `variant` (INF_SIMD_...) stands for here: -EINVAL if unknown, -EOPNOTSUPP if this machine lacks them. */
inline int simd_resolve(uint32_t variant) {
    if (variant == INF_SIMD_AUTO) return simd_best();
    if (variant == INF_SIMD_SCALAR) return INF_SIMD_SCALAR;
    if (variant != INF_SIMD_AVX2) return -EINVAL;
    return simd_best() == INF_SIMD_AVX2 ? INF_SIMD_AVX2 : -EOPNOTSUPP;
}

template <typename T> T *pointer(uint64_t address) { return reinterpret_cast<T *>(static_cast<uintptr_t>(address)); }

inline bool is_float_format(int32_t format) { return format == INF_F32 || format == INF_BF16; }

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kNan = 0x7FC00000u;
/* The largest magnitude that 16 + 16 bits hold: hi 7F7F, lo 7FFF. Larger finite values saturate to it. */
constexpr uint32_t kSplitMax = 0x7F7F7FFFu;

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float canonical(float x) { return x != x ? float_of(kNan) : x; }

/* Elements as fp32, by the type they are stored in: float, or uint16_t for bf16. */
inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) { return float_of(uint32_t(x) << 16); }

/* The 16 + 16 split: hi is the fp32 bits rounded half away from zero to 16, lo the signed rest, which is the low half itself. */
inline void split(float x, uint16_t *hi, uint16_t *lo) {
    const uint32_t bits = bits_of(x), sign = bits & kSign;
    uint32_t magnitude = bits & ~kSign;
    if (magnitude > kInfinity) magnitude = kNan;
    if (magnitude > kSplitMax && magnitude < kInfinity) magnitude = kSplitMax;
    const uint32_t kept = sign | magnitude;
    *hi = uint16_t((kept + 0x8000u) >> 16);
    *lo = uint16_t(kept);
}

inline float join(uint16_t hi, uint16_t lo) { return float_of((uint32_t(hi) << 16) + uint32_t(int32_t(int16_t(lo)))); }

#if defined(INF_X86)

INF_AVX2 inline __m256 avx2_canonical(__m256 x) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(kNan)));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INF_AVX2 inline __m256i avx2_load_u16(const uint16_t *from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

/* Eight elements as fp32. */
INF_AVX2 inline __m256 avx2_load(const float *from) { return _mm256_loadu_ps(from); }
INF_AVX2 inline __m256 avx2_load(const uint16_t *from) { return _mm256_castsi256_ps(_mm256_slli_epi32(avx2_load_u16(from), 16)); }

INF_AVX2 inline __m256 avx2_join(const uint16_t *hi, const uint16_t *lo) {
    const __m256i high = _mm256_slli_epi32(avx2_load_u16(hi), 16);
    const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(lo)));
    return _mm256_castsi256_ps(_mm256_add_epi32(high, low));
}

/* What `split` keeps of eight fp32 values, before it cuts them in two. */
INF_AVX2 inline __m256i avx2_split_kept(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(int32_t(~kSign)));
    const __m256i finite = _mm256_min_epi32(magnitude, _mm256_set1_epi32(int32_t(kSplitMax)));
    const __m256i special = _mm256_blendv_epi8(magnitude, _mm256_set1_epi32(int32_t(kNan)),
                                               _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(int32_t(kInfinity))));
    const __m256i is_special = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(int32_t(kInfinity - 1)));
    const __m256i kept = _mm256_blendv_epi8(finite, special, is_special);
    return _mm256_or_si256(kept, _mm256_and_si256(bits, _mm256_set1_epi32(int32_t(kSign))));
}

/* Cuts sixteen values in two, as they are: none is NaN or larger than kSplitMax in magnitude, or avx2_split_kept was there before. */
INF_AVX2 inline void avx2_cut(__m256i kept0, __m256i kept1, uint16_t *hi, uint16_t *lo) {
    const __m256i half = _mm256_set1_epi32(0x8000), zero = _mm256_setzero_si256();
    const __m256i highs = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(kept0, half), 16),
                                              _mm256_srli_epi32(_mm256_add_epi32(kept1, half), 16));
    const __m256i lows = _mm256_packus_epi32(_mm256_blend_epi16(kept0, zero, 0xAA), _mm256_blend_epi16(kept1, zero, 0xAA));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(hi), _mm256_permute4x64_epi64(highs, 0xD8));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(lo), _mm256_permute4x64_epi64(lows, 0xD8));
}

/* All ones in each lane that avx2_split_kept would change, or that is an infinity. */
INF_AVX2 inline __m256 avx2_is_unusual(__m256 x) {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_cmp_ps(magnitude, _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(kSplitMax))), _CMP_NLE_UQ);
}

#endif

}  // namespace inf
