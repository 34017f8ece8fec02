/* Running sums of gradients, and sums of squares for the norm. */

#include "kernels.hpp"
#include "simd.hpp"

namespace inf {
namespace {

constexpr uint64_t kRun = 1024;

/* ---- accumulate ---- */

template <typename From> void accumulate_scalar(float *to, const From *from, uint64_t numel) {
    for (uint64_t i = 0; i < numel; ++i) to[i] = canonical(to[i] + as_float(from[i]));
}

/* Bits are kept as they are, NaNs too. */
template <typename From> void widen_scalar(float *to, const From *from, uint64_t numel) {
    for (uint64_t i = 0; i < numel; ++i) to[i] = as_float(from[i]);
}

#if defined(INF_X86)

template <typename From> INF_AVX2 void accumulate_avx2(float *to, const From *from, uint64_t numel) {
    uint64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        _mm256_storeu_ps(to + i, avx2_canonical(_mm256_add_ps(_mm256_loadu_ps(to + i), avx2_load(from + i))));
    }
    accumulate_scalar(to + i, from + i, numel - i);
}

template <typename From> INF_AVX2 void widen_avx2(float *to, const From *from, uint64_t numel) {
    uint64_t i = 0;
    for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(to + i, avx2_load(from + i));
    widen_scalar(to + i, from + i, numel - i);
}

#endif

template <typename From> void accumulate(int simd, const inf_accumulate_segment &segment, uint64_t begin, uint64_t numel) {
    float *to = pointer<float>(segment.to) + begin;
    const From *from = pointer<const From>(segment.from) + begin;
    auto run = segment.add ? accumulate_scalar<From> : widen_scalar<From>;
#if defined(INF_X86)
    if (simd == INF_SIMD_AVX2) run = segment.add ? accumulate_avx2<From> : widen_avx2<From>;
#else
    (void)simd;
#endif
    run(to, from, numel);
}

/* ---- sums of squares: a square of an fp32 number is exact in fp64, so fused or not makes no difference ---- */

template <typename From> double sumsq_run_scalar(const From *from, uint64_t numel) {
    double lane[8] = {};
    for (uint64_t i = 0; i < numel; ++i) {
        const double x = as_float(from[i]);
        lane[i % 8] += x * x;
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <typename From> void sumsq_scalar(const From *from, double *sums, uint64_t numel) {
    for (; numel >= kRun; numel -= kRun, from += kRun) *sums++ = sumsq_run_scalar(from, kRun);
    if (numel != 0) *sums = sumsq_run_scalar(from, numel);
}

#if defined(INF_X86)

INF_AVX2 inline void add_squares(__m256 x, __m256d *low, __m256d *high) {
    const __m256d x_low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), x_high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    *low = _mm256_fmadd_pd(x_low, x_low, *low);
    *high = _mm256_fmadd_pd(x_high, x_high, *high);
}

INF_AVX2 inline double sum_of_lanes(__m256d low, __m256d high) {
    const __m256d four = _mm256_add_pd(low, high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

/* `n` whole runs side by side: the additions of one run wait for each other, those of two do not. */
template <int n, typename From> INF_AVX2 void sumsq_runs_avx2(const From *from, double *sums) {
    __m256d low[n], high[n];
    for (int r = 0; r < n; ++r) low[r] = high[r] = _mm256_setzero_pd();
    for (uint64_t i = 0; i < kRun; i += 8) {
        for (int r = 0; r < n; ++r) add_squares(avx2_load(from + uint64_t(r) * kRun + i), &low[r], &high[r]);
    }
    for (int r = 0; r < n; ++r) sums[r] = sum_of_lanes(low[r], high[r]);
}

template <typename From> INF_AVX2 void sumsq_avx2(const From *from, double *sums, uint64_t numel) {
    for (; numel >= 4 * kRun; numel -= 4 * kRun, from += 4 * kRun, sums += 4) sumsq_runs_avx2<4>(from, sums);
    for (; numel >= kRun; numel -= kRun, from += kRun, sums += 1) sumsq_runs_avx2<1>(from, sums);
    if (numel != 0) *sums = sumsq_run_scalar(from, numel);
}

#endif

/* Elements [begin, begin + numel) of the segment; `begin` starts a run. */
template <typename From> void sumsq(int simd, const inf_sumsq_segment &segment, uint64_t begin, uint64_t numel) {
    auto run = sumsq_scalar<From>;
#if defined(INF_X86)
    if (simd == INF_SIMD_AVX2) run = sumsq_avx2<From>;
#else
    (void)simd;
#endif
    double *sums = pointer<double>(segment.sums) + begin / kRun;
    run(pointer<const From>(segment.from) + begin, sums, numel);
    const uint64_t runs = (numel + kRun - 1) / kRun;
    for (uint64_t r = 0; r < runs; ++r) {
        if (sums[r] != sums[r]) sums[r] = double(float_of(kNan));
    }
}

uint64_t nbytes_of(int32_t format) { return format == INF_F32 ? 4 : 2; }

/* Elements in a piece when there are checks. */
constexpr uint64_t kBlock = Checks::kPieceNbytes / 4;
static_assert(kBlock % kRun == 0, "pieces are whole runs");

/* Work over each piece of each segment, between its checks; `work` takes a segment and the piece's [begin, begin + numel) in it, and
 * `ranges` gives the memory of that. */
template <typename Segment, typename Ranges, typename Work>
int in_pieces(Checks *checks, const Segment *segments, uint32_t n_segments, uint64_t *value, Ranges ranges, Work work) {
    for (uint32_t s = 0; s < n_segments; ++s) {
        const Segment &segment = segments[s];
        for (uint64_t begin = 0; begin < segment.numel;) {
            const uint64_t left = segment.numel - begin, numel = checks->empty() || left < kBlock ? left : kBlock;
            const auto memory = ranges(segment, begin, numel);
            const int status = checks->before(memory.ranges, value);
            if (status != 0) return status;
            work(segment, begin, numel);
            checks->after(memory.ranges);
            begin += numel;
        }
    }
    return checks->close(value);
}

template <int n> struct Ranges {
    Range ranges[n];
};

}  // namespace

int run_accumulate(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const inf_accumulate_segment *segments = nullptr;
    Checks checks;
    const auto *a = args_with_segments<inf_accumulate_args>(args, args_nbytes, &segments, &checks);
    if (a == nullptr) return -EINVAL;
    const int simd = simd_resolve(a->variant);
    if (simd < 0) return simd;
    for (uint32_t s = 0; s < a->n_segments; ++s) {
        if (!is_float_format(segments[s].from_format) || segments[s].add > 1) return -EINVAL;
    }
    const auto ranges = [](const inf_accumulate_segment &segment, uint64_t begin, uint64_t numel) {
        const uint64_t width = nbytes_of(segment.from_format);
        return Ranges<2>{{{segment.to + begin * 4, numel * 4}, {segment.from + begin * width, numel * width}}};
    };
    return in_pieces(&checks, segments, a->n_segments, value, ranges,
                     [simd](const inf_accumulate_segment &segment, uint64_t begin, uint64_t numel) {
                         segment.from_format == INF_F32 ? accumulate<float>(simd, segment, begin, numel)
                                                        : accumulate<uint16_t>(simd, segment, begin, numel);
                     });
}

int run_sumsq(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const inf_sumsq_segment *segments = nullptr;
    Checks checks;
    const auto *a = args_with_segments<inf_sumsq_args>(args, args_nbytes, &segments, &checks);
    if (a == nullptr) return -EINVAL;
    const int simd = simd_resolve(a->variant);
    if (simd < 0) return simd;
    for (uint32_t s = 0; s < a->n_segments; ++s) {
        if (!is_float_format(segments[s].from_format)) return -EINVAL;
    }
    const auto ranges = [](const inf_sumsq_segment &segment, uint64_t begin, uint64_t numel) {
        const uint64_t width = nbytes_of(segment.from_format);
        return Ranges<1>{{{segment.from + begin * width, numel * width}}};
    };
    return in_pieces(&checks, segments, a->n_segments, value, ranges,
                     [simd](const inf_sumsq_segment &segment, uint64_t begin, uint64_t numel) {
                         segment.from_format == INF_F32 ? sumsq<float>(simd, segment, begin, numel)
                                                        : sumsq<uint16_t>(simd, segment, begin, numel);
                     });
}

}  // namespace inf
