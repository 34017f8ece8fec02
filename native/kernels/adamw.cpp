/* AdamW over the planes of a tile, one pass over memory.
 *
 * The arithmetic is torch's AdamW(fused=True) in fp32, each operation rounded on its own except where fma is written:
 *     g = g * grad_factor
 *     m = |w| < 0.5 ? fma(w, g - m, m) : fma(w - 1, g - m, g)              w = 1 - beta1
 *     v = fma((1 - beta2) * g, g, beta2 * v)
 *     p = p * decay + (step_scale * m) / (sqrt(v) / bias_scale + eps)
 * A bf16 parameter is updated as fp32: its bits and those of its residual are one number (the 16 + 16 split of simd.hpp). */

#include "kernels.hpp"
#include "simd.hpp"

namespace inf {
namespace {

/* One run of elements of every plane; the gradient's type is the caller's. `residual` is null for an fp32 parameter. */
struct Run {
    void *param;
    uint16_t *residual;
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    uint64_t numel;
};

/* The scalars as the loops use them. */
struct Coefficients {
    explicit Coefficients(const inf_adamw_scalars &s)
        : scalars(s), small(std::fabs(s.weight) < 0.5f), weight(small ? s.weight : s.weight - 1.0f) {}
    inf_adamw_scalars scalars;
    bool small;   /* |1 - beta1| < 0.5: m is the base of the interpolation, else g */
    float weight;
};

inline float update(const Coefficients &c, float p, float g, float *exp_avg, float *exp_avg_sq) {
    const inf_adamw_scalars &s = c.scalars;
    g = g * s.grad_factor;
    const float m = canonical(std::fma(c.weight, g - *exp_avg, c.small ? *exp_avg : g));
    const float v = canonical(std::fma(s.one_minus_beta2 * g, g, s.beta2 * *exp_avg_sq));
    *exp_avg = m;
    *exp_avg_sq = v;
    const float denominator = std::sqrt(v) / s.bias_scale + s.eps;
    return canonical(p * s.decay + (s.step_scale * m) / denominator);
}

template <typename Grad> void adamw_f32_scalar(const Coefficients &c, const Run &run) {
    float *param = static_cast<float *>(run.param);
    const Grad *grad = static_cast<const Grad *>(run.grad);
    for (uint64_t i = 0; i < run.numel; ++i) {
        param[i] = update(c, param[i], as_float(grad[i]), run.exp_avg + i, run.exp_avg_sq + i);
    }
}

template <typename Grad> void adamw_bf16_scalar(const Coefficients &c, const Run &run) {
    uint16_t *param = static_cast<uint16_t *>(run.param);
    const Grad *grad = static_cast<const Grad *>(run.grad);
    for (uint64_t i = 0; i < run.numel; ++i) {
        const float master = join(param[i], run.residual[i]);
        split(update(c, master, as_float(grad[i]), run.exp_avg + i, run.exp_avg_sq + i), param + i, run.residual + i);
    }
}

#if defined(INF_X86)

struct Avx2Coefficients {
    INF_AVX2 explicit Avx2Coefficients(const Coefficients &c)
        : grad_factor(_mm256_set1_ps(c.scalars.grad_factor)), decay(_mm256_set1_ps(c.scalars.decay)), weight(_mm256_set1_ps(c.weight)),
          beta2(_mm256_set1_ps(c.scalars.beta2)), one_minus_beta2(_mm256_set1_ps(c.scalars.one_minus_beta2)),
          step_scale(_mm256_set1_ps(c.scalars.step_scale)), bias_scale(_mm256_set1_ps(c.scalars.bias_scale)),
          eps(_mm256_set1_ps(c.scalars.eps)) {}
    __m256 grad_factor, decay, weight, beta2, one_minus_beta2, step_scale, bias_scale, eps;
};

/* Eight elements after their update. A NaN in m or v is one in p too, so p alone says whether any is to be made canonical. */
struct Avx2Updated {
    __m256 m, v, p;

    INF_AVX2 void make_canonical() {
        m = avx2_canonical(m);
        v = avx2_canonical(v);
        p = avx2_canonical(p);
    }
};

template <bool small> INF_AVX2 inline Avx2Updated avx2_update(const Avx2Coefficients &c, __m256 p, __m256 g, __m256 m, __m256 v) {
    g = _mm256_mul_ps(g, c.grad_factor);
    m = _mm256_fmadd_ps(c.weight, _mm256_sub_ps(g, m), small ? m : g);
    v = _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, _mm256_mul_ps(c.beta2, v));
    const __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), c.bias_scale), c.eps);
    const __m256 move = _mm256_div_ps(_mm256_mul_ps(c.step_scale, m), denominator);
    return Avx2Updated{m, v, _mm256_add_ps(_mm256_mul_ps(p, c.decay), move)};
}

/* What a vector loop leaves over goes to the scalar form. */
template <typename Param, typename Grad> Run rest_of(const Run &run, uint64_t done) {
    return Run{static_cast<Param *>(run.param) + done,
               run.residual == nullptr ? nullptr : run.residual + done,
               run.exp_avg + done,
               run.exp_avg_sq + done,
               static_cast<const Grad *>(run.grad) + done,
               run.numel - done};
}

template <bool small, typename Grad> INF_AVX2 void adamw_f32_avx2(const Coefficients &coefficients, const Run &run) {
    const Avx2Coefficients c(coefficients);
    float *param = static_cast<float *>(run.param), *exp_avg = run.exp_avg, *exp_avg_sq = run.exp_avg_sq;
    const Grad *grad = static_cast<const Grad *>(run.grad);
    const uint64_t numel = run.numel;
    uint64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        Avx2Updated x = avx2_update<small>(c, avx2_load(param + i), avx2_load(grad + i), avx2_load(exp_avg + i), avx2_load(exp_avg_sq + i));
        if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x.p, x.p, _CMP_UNORD_Q)) != 0, 0)) x.make_canonical();
        _mm256_storeu_ps(exp_avg + i, x.m);
        _mm256_storeu_ps(exp_avg_sq + i, x.v);
        _mm256_storeu_ps(param + i, x.p);
    }
    adamw_f32_scalar<Grad>(coefficients, rest_of<float, Grad>(run, i));
}

template <bool small, typename Grad> INF_AVX2 void adamw_bf16_avx2(const Coefficients &coefficients, const Run &run) {
    const Avx2Coefficients c(coefficients);
    uint16_t *param = static_cast<uint16_t *>(run.param), *residual = run.residual;
    float *exp_avg = run.exp_avg, *exp_avg_sq = run.exp_avg_sq;
    const Grad *grad = static_cast<const Grad *>(run.grad);
    const uint64_t numel = run.numel;
    uint64_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        const uint64_t j = i + 8;
        Avx2Updated x = avx2_update<small>(c, avx2_join(param + i, residual + i), avx2_load(grad + i), avx2_load(exp_avg + i),
                                           avx2_load(exp_avg_sq + i));
        Avx2Updated y = avx2_update<small>(c, avx2_join(param + j, residual + j), avx2_load(grad + j), avx2_load(exp_avg + j),
                                           avx2_load(exp_avg_sq + j));
        __m256i x_kept = _mm256_castps_si256(x.p), y_kept = _mm256_castps_si256(y.p);
        if (__builtin_expect(_mm256_movemask_ps(_mm256_or_ps(avx2_is_unusual(x.p), avx2_is_unusual(y.p))) != 0, 0)) {
            x.make_canonical();
            y.make_canonical();
            x_kept = avx2_split_kept(x.p);
            y_kept = avx2_split_kept(y.p);
        }
        _mm256_storeu_ps(exp_avg + i, x.m);
        _mm256_storeu_ps(exp_avg + j, y.m);
        _mm256_storeu_ps(exp_avg_sq + i, x.v);
        _mm256_storeu_ps(exp_avg_sq + j, y.v);
        avx2_cut(x_kept, y_kept, param + i, residual + i);
    }
    adamw_bf16_scalar<Grad>(coefficients, rest_of<uint16_t, Grad>(run, i));
}

#endif

using Kernel = void (*)(const Coefficients &, const Run &);

template <typename Grad> Kernel choose(int simd, bool is_bf16, bool small) {
#if defined(INF_X86)
    if (simd == INF_SIMD_AVX2) {
        if (is_bf16) return small ? adamw_bf16_avx2<true, Grad> : adamw_bf16_avx2<false, Grad>;
        return small ? adamw_f32_avx2<true, Grad> : adamw_f32_avx2<false, Grad>;
    }
#else
    (void)simd, (void)small;
#endif
    return is_bf16 ? adamw_bf16_scalar<Grad> : adamw_f32_scalar<Grad>;
}

/* Elements in a piece when there are checks: 56 KiB of a bf16 parameter, its moments and its gradient. */
constexpr uint64_t kPiece = 4096;
/* While that many elements are updated, as many of the next piece are fetched: the checksums would wait for them otherwise. */
constexpr uint64_t kStrip = 128;

uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Updates a piece whose param, residual (or nothing), moments and gradient are `ranges`. With a next piece behind it, that is fetched
 * on the way. */
void update_piece(Kernel kernel, const Coefficients &coefficients, const Range (&ranges)[5], uint64_t numel, bool has_next) {
    uint64_t widths[5];
    for (int i = 0; i < 5; ++i) widths[i] = ranges[i].nbytes / numel;
    const auto at = [&](int i, uint64_t elem) { return ranges[i].address + elem * widths[i]; };
    for (uint64_t begin = 0; begin < numel;) {
        const uint64_t strip = has_next ? least(numel - begin, kStrip) : numel;
        if (has_next) {
            for (int i = 0; i < 5; ++i) fetch_ahead(at(i, numel + begin), strip * widths[i]);
        }
        kernel(coefficients, Run{pointer<void>(at(0, begin)), widths[1] != 0 ? pointer<uint16_t>(at(1, begin)) : nullptr,
                                 pointer<float>(at(2, begin)), pointer<float>(at(3, begin)), pointer<const void>(at(4, begin)), strip});
        begin += strip;
    }
}

bool is_valid(const inf_adamw_args &a, const inf_adamw_segment &s) {
    if (s.begin > s.end || !is_float_format(s.grad_format)) return false;
    const uint64_t pieces = a.exp_avg[1] != 0 && a.exp_avg_sq[1] != 0 ? 2 : 1;
    return s.begin == s.end || (s.end - 1) / a.exp_piece_numel < pieces;
}

}  // namespace

int run_adamw(const void *args, uint32_t args_nbytes, uint64_t *value) {
    const inf_adamw_segment *segments = nullptr;
    Checks checks;
    const auto *a = args_with_segments<inf_adamw_args>(args, args_nbytes, &segments, &checks);
    if (a == nullptr || a->exp_piece_numel == 0) return -EINVAL;
    const int simd = simd_resolve(a->variant);
    if (simd < 0) return simd;
    for (uint32_t i = 0; i < a->n_segments; ++i) {
        if (!is_valid(*a, segments[i])) return -EINVAL;
    }
    const bool is_bf16 = a->residual != 0;
    const uint64_t param_nbytes = is_bf16 ? 2 : 4, most_numel = checks.empty() ? UINT64_MAX : kPiece;
    for (uint32_t i = 0; i < a->n_segments; ++i) {
        const inf_adamw_segment &s = segments[i];
        const Coefficients coefficients(s.scalars);
        const uint64_t grad_nbytes = s.grad_format == INF_F32 ? 4 : 2;
        const Kernel kernel = s.grad_format == INF_F32 ? choose<float>(simd, is_bf16, coefficients.small)
                                                       : choose<uint16_t>(simd, is_bf16, coefficients.small);
        for (uint64_t begin = s.begin; begin < s.end;) {
            const uint64_t piece = begin / a->exp_piece_numel, piece_begin = piece * a->exp_piece_numel;
            const uint64_t numel = least(least(s.end - begin, piece_begin + a->exp_piece_numel - begin), most_numel);
            const Range ranges[] = {
                {a->param + begin * param_nbytes, numel * param_nbytes},
                {is_bf16 ? a->residual + begin * 2 : 0, is_bf16 ? numel * 2 : 0},
                {a->exp_avg[piece] + (begin - piece_begin) * 4, numel * 4},
                {a->exp_avg_sq[piece] + (begin - piece_begin) * 4, numel * 4},
                {s.grad + (begin - s.begin) * grad_nbytes, numel * grad_nbytes},
            };
            const int status = checks.before(ranges, value);
            if (status != 0) return status;
            update_piece(kernel, coefficients, ranges, numel, !checks.empty() && begin + numel < s.end);
            checks.after(ranges);
            begin += numel;
        }
    }
    return checks.close(value);
}

}  // namespace inf
