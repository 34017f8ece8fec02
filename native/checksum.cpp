/* crc32c (Castagnoli, polynomial 1EDC6F41 reflected to 82F63B78), inverted before and after, so that the checksum of "123456789" is
 * E3069283 and crc(b, crc(a, 0)) is the checksum of a followed by b.
 *
 * Source: the three streams and their joining by a carry-less product follow V. Gopal et al., "Fast CRC Computation for iSCSI
 * Polynomial Using CRC32 Instruction", Intel, 2011; the folding follows V. Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel, 2009. */

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {
#include "abi.h"
}

namespace inf {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;

/* Row k: the checksum state after one byte and k zero bytes. */
using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
    Table table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
        table[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (uint32_t k = 1; k < 8; ++k) table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xFF];
    }
    return table;
}

constexpr Table kTable = make_table();

uint64_t load_u64(const uint8_t *from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

uint32_t table_byte(uint32_t crc, uint8_t byte) { return (crc >> 8) ^ kTable[0][(crc ^ byte) & 0xFF]; }

/* Eight bytes a round. The state sits in the low end of a little-endian word. */
uint32_t table_update(uint32_t crc, const uint8_t *data, uint64_t nbytes) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        const uint64_t word = load_u64(data) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 0xFF];
    }
#endif
    for (; nbytes > 0; --nbytes) crc = table_byte(crc, *data++);
    return crc;
}

#if defined(__x86_64__)

/* x^n modulo the polynomial, reflected: bit 31 is x^0. */
constexpr uint32_t power(uint64_t n) {
    uint32_t x = 0x80000000u;
    for (; n > 0; --n) x = (x >> 1) ^ ((x & 1) ? kPolynomial : 0);
    return x;
}

/* Three streams of this many bytes, then a shorter kind for what is left. */
constexpr uint64_t kLong = 4096, kShort = 256;

/* A state times x^(8 * nbytes), the effect of nbytes zero bytes, as a 64-bit word to be fed to the crc32 instruction: that multiplies
 * by x^32, and the product of two reflected numbers is one bit short of 64, hence the 33. */
template <uint64_t nbytes> __attribute__((target("sse4.2,pclmul"))) inline uint64_t shifted(uint32_t crc) {
    constexpr uint32_t factor = power(8 * nbytes - 33);
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(int32_t(crc)), _mm_cvtsi32_si128(int32_t(factor)), 0);
    return uint64_t(_mm_cvtsi128_si64(product));
}

template <uint64_t stream_nbytes>
__attribute__((target("sse4.2,pclmul"))) inline uint32_t three_streams(uint32_t crc, const uint8_t **data, uint64_t *nbytes) {
    for (; *nbytes >= 3 * stream_nbytes; *nbytes -= 3 * stream_nbytes, *data += 3 * stream_nbytes) {
        const uint8_t *a = *data, *b = a + stream_nbytes, *c = b + stream_nbytes;
        uint64_t crc_a = crc, crc_b = 0, crc_c = 0;
        for (uint64_t i = 0; i < stream_nbytes - 8; i += 8) {
            crc_a = _mm_crc32_u64(crc_a, load_u64(a + i));
            crc_b = _mm_crc32_u64(crc_b, load_u64(b + i));
            crc_c = _mm_crc32_u64(crc_c, load_u64(c + i));
        }
        crc_a = _mm_crc32_u64(crc_a, load_u64(a + stream_nbytes - 8));
        crc_b = _mm_crc32_u64(crc_b, load_u64(b + stream_nbytes - 8));
        const uint64_t word = load_u64(c + stream_nbytes - 8) ^ shifted<2 * stream_nbytes>(uint32_t(crc_a)) ^
                              shifted<stream_nbytes>(uint32_t(crc_b));
        crc = uint32_t(_mm_crc32_u64(crc_c, word));
    }
    return crc;
}

__attribute__((target("sse4.2,pclmul"))) uint32_t sse42_update(uint32_t crc, const uint8_t *data, uint64_t nbytes) {
    crc = three_streams<kLong>(crc, &data, &nbytes);
    crc = three_streams<kShort>(crc, &data, &nbytes);
    uint64_t state = crc;
    for (; nbytes >= 8; nbytes -= 8, data += 8) state = _mm_crc32_u64(state, load_u64(data));
    for (; nbytes > 0; --nbytes) state = _mm_crc32_u8(uint32_t(state), *data++);
    return uint32_t(state);
}

#define INF_CRC_FOLD __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

/* For folding: each 16 bytes of a vector, taken as a polynomial of degree 127, times x^nbits, modulo the polynomial and of degree 127
 * again. The product of reflected numbers of 64 and 32 bits is 33 bits short of 128; the first 8 bytes are those of the high powers. */
template <uint64_t nbits> INF_CRC_FOLD inline __m512i folded(__m512i x) {
    constexpr int64_t first = power(nbits + 31), second = power(nbits - 33);
    const __m512i k = _mm512_set_epi64(second, first, second, first, second, first, second, first);
    return _mm512_xor_si512(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11));
}

INF_CRC_FOLD inline __m512i load_512(const uint8_t *from) { return _mm512_loadu_si512(from); }

/* Four vectors hold 256 bytes that have, behind the zero bytes still to come, the checksum of all that went into them. */
INF_CRC_FOLD uint32_t avx512_update(uint32_t crc, const uint8_t *data, uint64_t nbytes) {
    constexpr uint64_t kVector = 64, kRound = 4 * kVector;
    if (nbytes < 2 * kRound) return sse42_update(crc, data, nbytes);
    __m512i a = _mm512_xor_si512(load_512(data), _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, int64_t(crc)));
    __m512i b = load_512(data + kVector), c = load_512(data + 2 * kVector), d = load_512(data + 3 * kVector);
    for (data += kRound, nbytes -= kRound; nbytes >= kRound; data += kRound, nbytes -= kRound) {
        a = _mm512_xor_si512(folded<8 * kRound>(a), load_512(data));
        b = _mm512_xor_si512(folded<8 * kRound>(b), load_512(data + kVector));
        c = _mm512_xor_si512(folded<8 * kRound>(c), load_512(data + 2 * kVector));
        d = _mm512_xor_si512(folded<8 * kRound>(d), load_512(data + 3 * kVector));
    }
    b = _mm512_xor_si512(folded<8 * kVector>(a), b);
    c = _mm512_xor_si512(folded<8 * kVector>(b), c);
    d = _mm512_xor_si512(folded<8 * kVector>(c), d);
    uint64_t words[8];
    _mm512_storeu_si512(words, d);
    uint64_t state = 0;
    for (const uint64_t word : words) state = _mm_crc32_u64(state, word);
    return sse42_update(uint32_t(state), data, nbytes);
}

#endif

bool has(int version) {
#if defined(__x86_64__)
    const bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    if (version == INF_CRC_SSE42) return sse42;
    if (version == INF_CRC_AVX512) return sse42 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
#endif
    return version == INF_CRC_TABLE;
}

}  // namespace
}  // namespace inf

extern "C" {

int inf_crc32c_by(int version, const void *data, uint64_t nbytes, uint32_t seed, uint32_t *crc) {
    if (version < 0 || version >= INF_CRC_VERSIONS) return -EINVAL;
    if (!inf::has(version)) return -EOPNOTSUPP;
    auto update = inf::table_update;
#if defined(__x86_64__)
    if (version == INF_CRC_SSE42) update = inf::sse42_update;
    if (version == INF_CRC_AVX512) update = inf::avx512_update;
#endif
    *crc = ~update(~seed, static_cast<const uint8_t *>(data), nbytes);
    return 0;
}

uint32_t inf_crc32c_table(const void *data, uint64_t nbytes, uint32_t seed) {
    return ~inf::table_update(~seed, static_cast<const uint8_t *>(data), nbytes);
}

uint32_t inf_crc32c(const void *data, uint64_t nbytes, uint32_t seed) {
    const auto *bytes = static_cast<const uint8_t *>(data);
#if defined(__x86_64__)
    if (inf::has(INF_CRC_AVX512)) return ~inf::avx512_update(~seed, bytes, nbytes);
    if (inf::has(INF_CRC_SSE42)) return ~inf::sse42_update(~seed, bytes, nbytes);
#endif
    return inf_crc32c_table(bytes, nbytes, seed);
}

}
