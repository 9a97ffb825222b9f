// Groups of 32 values as two 16-lane vectors: loads, stores, packing and the rotation.
//
// GCC's and Clang's vector extensions; the compiler lowers 16 lanes to what the instruction set has.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// The lanes, declared before the numerics that are to be used with them.
namespace zpp {

typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vu16 __attribute__((vector_size(32)));
typedef uint8_t vu8 __attribute__((vector_size(16)));
typedef int8_t vi8 __attribute__((vector_size(16)));

inline __attribute__((always_inline)) vu bits_of(vf x) { return (vu)x; }
inline __attribute__((always_inline)) vf float_of(vu b) { return (vf)b; }
#if defined(__AVX512F__)
// One instruction each; they return their second operand where a comparison with NaN is false.
inline __attribute__((always_inline)) vf at_least(vf x, float low) {
    return (vf)_mm512_max_ps(_mm512_set1_ps(low), (__m512)x);
}
inline __attribute__((always_inline)) vf at_most(vf x, float high) {
    return (vf)_mm512_min_ps(_mm512_set1_ps(high), (__m512)x);
}
#endif

}  // namespace zpp

#include "numerics.cuh"

// Lanes of two vectors by constant numbers; GCC has had Clang's form since version 12.
#if defined(__clang__) || __GNUC__ >= 12
#define ZPP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZPP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

namespace zpp {
namespace ZPP_ISA {

struct Group {
    vf low, high;  // values 0 to 15 and 16 to 31
};

template <class V> ZPP_FN V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> ZPP_FN void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }

// ---- Conversions between lanes of 8, 16 and 32 bits. Compilers take the general form apart lane by lane.

#if defined(__AVX512F__) && defined(__AVX512VL__)
ZPP_FN vu widen(vu16 x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
ZPP_FN vu widen(vu8 x) { return (vu)_mm512_cvtepu8_epi32((__m128i)x); }
ZPP_FN vi widen(vi8 x) { return (vi)_mm512_cvtepi8_epi32((__m128i)x); }
ZPP_FN vu16 narrow16(vu x) { return (vu16)_mm512_cvtepi32_epi16((__m512i)x); }
ZPP_FN vu8 narrow8(vu x) { return (vu8)_mm512_cvtepi32_epi8((__m512i)x); }
ZPP_FN vf to_float(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
ZPP_FN void store_upper_halves(uint8_t* p, vu low, vu high) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high));
}
#else
template <class To, class From> ZPP_FN To each_lane(From x) {
    To y;
    for (int i = 0; i < 16; ++i) y[i] = x[i];
    return y;
}
ZPP_FN vu widen(vu16 x) { return each_lane<vu>(x); }
ZPP_FN vu widen(vu8 x) { return each_lane<vu>(x); }
ZPP_FN vi widen(vi8 x) { return each_lane<vi>(x); }
ZPP_FN vu16 narrow16(vu x) { return each_lane<vu16>(x); }
ZPP_FN vu8 narrow8(vu x) { return each_lane<vu8>(x); }
ZPP_FN vf to_float(vi x) { return __builtin_convertvector(x, vf); }
ZPP_FN void store_upper_halves(uint8_t* p, vu low, vu high) {
    store(p, narrow16(low >> 16));
    store(p + 32, narrow16(high >> 16));
}
#endif

// Arithmetic that has an instruction of its own where the general form takes several.
#if defined(__AVX512F__)
// sum + x * y where the product is exact, so that rounding once or twice is the same.
ZPP_FN vf plus_exact_product(vf sum, vf x, float y) { return (vf)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(y), (__m512)sum); }
// Each lane's lowest four bits, as a number from -8 to 7.
ZPP_FN vf level_of_nibble(vu x) {
    return (vf)_mm512_permutexvar_ps((__m512i)x, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
}
ZPP_FN vu nibbles(vu low, vu high) {
    return (vu)_mm512_ternarylogic_epi32((__m512i)low, _mm512_set1_epi32(15), (__m512i)(high << 4), 0xEA);  // (a & b) | c
}
#else
ZPP_FN vf plus_exact_product(vf sum, vf x, float y) { return sum + x * y; }
ZPP_FN vf level_of_nibble(vu x) { return to_float((((vi)x & 15) ^ 8) - 8); }
ZPP_FN vu nibbles(vu low, vu high) { return (low & 15u) | (high << 4); }
#endif

// ---- Sums and products. PLAIN: no result is near the limits of float32, see SMALLEST_PLAIN.

template <bool PLAIN> ZPP_FN Group times(Group g, float factor) {
    if (PLAIN) return {g.low * factor, g.high * factor};
    return {finite_product(g.low, factor), finite_product(g.high, factor)};
}

// ---- Value types. PLAIN: the values are finite and small, see SMALLEST_PLAIN.

template <int TYPE> struct Values;

template <> struct Values<FLOAT32> {
    static constexpr int SIZE = 4;
    static ZPP_FN vf read(const uint8_t* p) { return load<vf>(p); }
    template <bool PLAIN> static ZPP_FN void write(uint8_t* p, Group g) {
        store(p, PLAIN ? g.low : quiet(g.low));
        store(p + 64, PLAIN ? g.high : quiet(g.high));
    }
};
template <> struct Values<BFLOAT16> {
    static constexpr int SIZE = 2;
    static ZPP_FN vf read(const uint8_t* p) { return widen_bfloat16(widen(load<vu16>(p))); }
    template <bool PLAIN> static ZPP_FN void write(uint8_t* p, Group g) {
        if constexpr (PLAIN) return store_upper_halves(p, round_bfloat16(g.low), round_bfloat16(g.high));
        store(p, narrow16(narrow_bfloat16(g.low)));
        store(p + 32, narrow16(narrow_bfloat16(g.high)));
    }
};
template <> struct Values<FLOAT16> {
    static constexpr int SIZE = 2;
    static ZPP_FN vf read(const uint8_t* p) { return widen_float16(widen(load<vu16>(p))); }
    template <bool PLAIN> static ZPP_FN void write(uint8_t* p, Group g) {
        store(p, narrow16(narrow_float16(g.low)));
        store(p + 32, narrow16(narrow_float16(g.high)));
    }
};

// Value `i` onward of an array of which `left` values are there: a short group is filled up with zeros.
template <int TYPE> ZPP_FN Group read_group(const uint8_t* base, int64_t i, int64_t left) {
    constexpr int SIZE = Values<TYPE>::SIZE;
    const uint8_t* p = base + i * SIZE;
    uint8_t padded[GROUP * SIZE];
    if (__builtin_expect(left < GROUP, 0)) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, p, left * SIZE);
        p = padded;
    }
    return {Values<TYPE>::read(p), Values<TYPE>::read(p + 16 * SIZE)};
}

template <int TYPE, bool PLAIN> ZPP_FN void write_group(uint8_t* base, int64_t i, Group g) {
    Values<TYPE>::template write<PLAIN>(base + i * Values<TYPE>::SIZE, g);
}

// The first `left` values of a group.
template <int TYPE> inline void write_short_group(uint8_t* base, int64_t i, int64_t left, Group g) {
    constexpr int SIZE = Values<TYPE>::SIZE;
    uint8_t padded[GROUP * SIZE];
    Values<TYPE>::template write<false>(padded, g);
    std::memcpy(base + i * SIZE, padded, left * SIZE);
}

// ---- The Walsh-Hadamard transform of 32 values, unnormalised, in the reference's order of stages.

template <int HALF> ZPP_FN vf stage(vf x) {
#if defined(__AVX512F__)
    // partner + (+-1 * x) is exact in one operation, and saves flipping the sign.
    constexpr float U = -1.0f;
    const vf sign = {1, HALF & 1 ? U : 1, HALF & 2 ? U : 1, HALF & 3 ? U : 1, HALF & 4 ? U : 1, HALF & 5 ? U : 1,
                     HALF & 6 ? U : 1, HALF & 7 ? U : 1, HALF & 8 ? U : 1, HALF & 9 ? U : 1, HALF & 10 ? U : 1,
                     HALF & 11 ? U : 1, HALF & 12 ? U : 1, HALF & 13 ? U : 1, HALF & 14 ? U : 1, HALF & 15 ? U : 1};
    __m512 partner = HALF == 1   ? _mm512_permute_ps((__m512)x, 0xB1)
                     : HALF == 2 ? _mm512_permute_ps((__m512)x, 0x4E)
                     : HALF == 4 ? _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xB1)
                                 : _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E);
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)sign, partner);
#else
    vf partner = ZPP_SHUFFLE(x, x, 0 ^ HALF, 1 ^ HALF, 2 ^ HALF, 3 ^ HALF, 4 ^ HALF, 5 ^ HALF, 6 ^ HALF, 7 ^ HALF, 8 ^ HALF,
                             9 ^ HALF, 10 ^ HALF, 11 ^ HALF, 12 ^ HALF, 13 ^ HALF, 14 ^ HALF, 15 ^ HALF);
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vu upper = (lane & (uint32_t)HALF) * (SIGN / HALF);
    return butterfly(x, partner, upper);
#endif
}

ZPP_FN Group hadamard(Group g) {
    vf a = stage<8>(stage<4>(stage<2>(stage<1>(g.low))));
    vf b = stage<8>(stage<4>(stage<2>(stage<1>(g.high))));
    return {a + b, a - b};
}

ZPP_FN Group rotate(Group g) { return hadamard({g.low * 0.03125f, g.high * 0.03125f}); }

ZPP_FN Group unrotate(Group g) {
    Group t = rotate(g);
    return {unrotated(t.low), unrotated(t.high)};
}

// ---- Payloads

template <int CODE> ZPP_FN Group read_levels(const uint8_t* payload, int64_t i) {
    if constexpr (CODE == INT8) {
        return {to_float(widen(load<vi8>(payload + i))), to_float(widen(load<vi8>(payload + i + 16)))};
    } else {
        vu pairs = widen(load<vu8>(payload + i / 2));
        return {level_of_nibble(pairs), level_of_nibble(pairs >> 4)};
    }
}

// `low` and `high` hold levels in two's complement in their lowest bits.
template <int CODE> ZPP_FN void write_levels(uint8_t* payload, int64_t i, vu low, vu high) {
    if constexpr (CODE == INT8) {
        store(payload + i, narrow8(low));
        store(payload + i + 16, narrow8(high));
    } else {
        store(payload + i / 2, narrow8(nibbles(low, high)));
    }
}

// ---- The largest value of a block

ZPP_FN vu higher(vu a, vu b) { return a > b ? a : b; }

// The highest values seen in each lane, as signed and as unsigned integers: among bits of floats the first are
// the largest positive ones and the second the largest negative ones, with NaN > Inf > finite in both. Where all
// have one sign both are the same.
class Extremes {
   public:
    ZPP_FN void add(Group g) {
        add(bits_of(g.low));
        add(bits_of(g.high));
    }
    ZPP_FN vu keys() const {
        return higher(magnitude_key((vu)signed_), magnitude_key(unsigned_));
    }

   private:
    ZPP_FN void add(vu bits) {
        signed_ = signed_ > (vi)bits ? signed_ : (vi)bits;
        unsigned_ = higher(unsigned_, bits);
    }
    vi signed_ = vi{} + INT32_MIN;
    vu unsigned_ = {};
};

// The maxima of neighbouring lanes: those of `a`, then those of `b`.
ZPP_FN vu pairwise_higher(vu a, vu b) {
    return higher(ZPP_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  ZPP_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
}

// Lane j becomes the highest lane of v[j]: four rounds, each of which halves the number of vectors.
ZPP_FN vu highest_of_each(const vu* v, int64_t count) {
    vu level[16] = {};
    for (int64_t j = 0; j < count; ++j) level[j] = v[j];
    for (int n = 8; n >= 1; n /= 2)
        for (int j = 0; j < n; ++j) level[j] = pairwise_higher(level[2 * j], level[2 * j + 1]);
    return level[0];
}

// The first `count` values of a group; the rest become zero.
inline Group first_of(Group g, int64_t count) {
    float values[GROUP] = {};
    Group kept;
    std::memcpy(values, &g, count * sizeof(float));
    std::memcpy(&kept, values, sizeof kept);
    return kept;
}

}  // namespace ZPP_ISA
}  // namespace zpp
