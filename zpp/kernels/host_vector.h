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

}  // namespace zpp

#include "numerics.cuh"

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

// ---- Value types. PLAIN: the values are finite and small, see PLAIN_SCALE.

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

template <int TYPE, bool PLAIN = false> ZPP_FN void write_group(uint8_t* base, int64_t i, int64_t left, Group g) {
    constexpr int SIZE = Values<TYPE>::SIZE;
    if (__builtin_expect(left >= GROUP, 1)) return Values<TYPE>::template write<PLAIN>(base + i * SIZE, g);
    uint8_t padded[GROUP * SIZE];
    Values<TYPE>::template write<PLAIN>(padded, g);
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
    const vi partner = {0 ^ HALF, 1 ^ HALF, 2 ^ HALF,  3 ^ HALF,  4 ^ HALF,  5 ^ HALF,  6 ^ HALF,  7 ^ HALF,
                        8 ^ HALF, 9 ^ HALF, 10 ^ HALF, 11 ^ HALF, 12 ^ HALF, 13 ^ HALF, 14 ^ HALF, 15 ^ HALF};
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vu upper = (lane & (uint32_t)HALF) * (SIGN / HALF);
    return butterfly(x, __builtin_shuffle(x, partner), upper);
#endif
}

ZPP_FN Group hadamard(Group g) {
    vf a = stage<8>(stage<4>(stage<2>(stage<1>(g.low))));
    vf b = stage<8>(stage<4>(stage<2>(stage<1>(g.high))));
    return {a + b, a - b};
}

ZPP_FN Group rotate(Group g) { return hadamard({g.low * 0.03125f, g.high * 0.03125f}); }

template <bool PLAIN> ZPP_FN Group unrotate(Group g) {
    Group t = rotate(g);
    if constexpr (PLAIN) return {t.low * 32.0f, t.high * 32.0f};
    return {unrotated(t.low), unrotated(t.high)};
}

// ---- Payloads

template <int CODE> ZPP_FN Group read_levels(const uint8_t* payload, int64_t i) {
    if constexpr (CODE == INT8) {
        return {to_float(widen(load<vi8>(payload + i))), to_float(widen(load<vi8>(payload + i + 16)))};
    } else {
        vi pairs = (vi)widen(load<vu8>(payload + i / 2));
        return {to_float(((pairs & 15) ^ 8) - 8), to_float(((pairs >> 4) ^ 8) - 8)};
    }
}

template <int CODE> ZPP_FN void write_levels(uint8_t* payload, int64_t i, vu low, vu high) {
    if constexpr (CODE == INT8) {
        store(payload + i, narrow8(low));
        store(payload + i + 16, narrow8(high));
    } else {
        store(payload + i / 2, narrow8((low & 15u) | (high << 4)));
    }
}

ZPP_FN uint32_t highest(vu v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)v);
#else
    uint32_t most = 0;
    for (int i = 0; i < 16; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

}  // namespace ZPP_ISA
}  // namespace zpp
