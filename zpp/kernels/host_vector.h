// Groups of 32 values as two 16-lane vectors: loads, stores, packing and the rotation.
//
// GCC's and Clang's vector extensions; the compiler lowers 16 lanes to what the instruction set has.
#pragma once

#include <cstdint>

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

template <int TYPE> struct Values;

template <> struct Values<FLOAT32> {
    static constexpr int SIZE = 4;
    static ZPP_FN vf read(const uint8_t* p) { return load<vf>(p); }
    static ZPP_FN void write(uint8_t* p, vf x) { store(p, quiet(x)); }
};
template <> struct Values<BFLOAT16> {
    static constexpr int SIZE = 2;
    static ZPP_FN vf read(const uint8_t* p) { return widen_bfloat16(__builtin_convertvector(load<vu16>(p), vu)); }
    static ZPP_FN void write(uint8_t* p, vf x) { store(p, __builtin_convertvector(narrow_bfloat16(x), vu16)); }
};
template <> struct Values<FLOAT16> {
    static constexpr int SIZE = 2;
    static ZPP_FN vf read(const uint8_t* p) { return widen_float16(__builtin_convertvector(load<vu16>(p), vu)); }
    static ZPP_FN void write(uint8_t* p, vf x) { store(p, __builtin_convertvector(narrow_float16(x), vu16)); }
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

template <int TYPE> ZPP_FN void write_group(uint8_t* base, int64_t i, int64_t left, Group g) {
    constexpr int SIZE = Values<TYPE>::SIZE;
    uint8_t* p = base + i * SIZE;
    uint8_t padded[GROUP * SIZE];
    uint8_t* to = left < GROUP ? padded : p;
    Values<TYPE>::write(to, g.low);
    Values<TYPE>::write(to + 16 * SIZE, g.high);
    if (__builtin_expect(left < GROUP, 0)) std::memcpy(p, padded, left * SIZE);
}

// ---- The Walsh-Hadamard transform of 32 values, unnormalised, in the reference's order of stages.

template <int HALF> ZPP_FN vf stage(vf x) {
    const vi partner = {0 ^ HALF, 1 ^ HALF, 2 ^ HALF,  3 ^ HALF,  4 ^ HALF,  5 ^ HALF,  6 ^ HALF,  7 ^ HALF,
                        8 ^ HALF, 9 ^ HALF, 10 ^ HALF, 11 ^ HALF, 12 ^ HALF, 13 ^ HALF, 14 ^ HALF, 15 ^ HALF};
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vu upper = (lane & (uint32_t)HALF) * (SIGN / HALF);
    return butterfly(x, __builtin_shuffle(x, partner), upper);
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
        vi low = __builtin_convertvector(load<vi8>(payload + i), vi);
        vi high = __builtin_convertvector(load<vi8>(payload + i + 16), vi);
        return {__builtin_convertvector(low, vf), __builtin_convertvector(high, vf)};
    } else {
        vi pairs = __builtin_convertvector(load<vu8>(payload + i / 2), vi);
        vi low = ((pairs & 15) ^ 8) - 8, high = ((pairs >> 4) ^ 8) - 8;
        return {__builtin_convertvector(low, vf), __builtin_convertvector(high, vf)};
    }
}

template <int CODE> ZPP_FN void write_levels(uint8_t* payload, int64_t i, vu low, vu high) {
    if constexpr (CODE == INT8) {
        store(payload + i, __builtin_convertvector(low, vu8));
        store(payload + i + 16, __builtin_convertvector(high, vu8));
    } else {
        store(payload + i / 2, __builtin_convertvector((low & 15u) | (high << 4), vu8));
    }
}

ZPP_FN uint32_t highest(vu v) {
    uint32_t lanes[16], most = 0;
    store(lanes, v);
    for (uint32_t lane : lanes) most = lane > most ? lane : most;
    return most;
}

}  // namespace ZPP_ISA
}  // namespace zpp
