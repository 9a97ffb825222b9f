// A group: 32 values in the registers of one lane, the unit of rotation and of the packed 4-bit layout.
#pragma once

#include "numerics.cuh"

namespace zpp {

typedef long long i64;

ZPP_FN constexpr bool quantized(int code) { return code == INT8 || code == INT4; }

// Bytes of a group in memory, as values of a type or as the payload of a code: a multiple of 16.
ZPP_FN constexpr int group_nbytes(int code) {
    return code == FLOAT32 ? 4 * GROUP : code == BFLOAT16 || code == FLOAT16 ? 2 * GROUP : code == INT4 ? GROUP / 2 : GROUP;
}

template <int NBYTES> struct Words { zpp_u32 w[NBYTES / 4]; };  // a group as it lies in memory

struct Group { float x[GROUP]; };

// ---- Value types. PLAIN: no value is near the limits of float32, see SMALLEST_PLAIN.

template <int TYPE> ZPP_FN float widen(zpp_u32 low_bits) {
    if (TYPE == FLOAT32) return float_of(low_bits);
    return TYPE == BFLOAT16 ? widen_bfloat16(low_bits) : widen_float16(low_bits);
}

template <int TYPE, bool PLAIN> ZPP_FN zpp_u32 narrow(float x) {
    if (TYPE == FLOAT32) return PLAIN ? bits_of(x) : bits_of(quiet(x));
    if (TYPE == FLOAT16) return narrow_float16(x);
    return PLAIN ? round_bfloat16(x) >> 16 : narrow_bfloat16(x);
}

template <int TYPE> ZPP_FN Group values_of(const Words<group_nbytes(TYPE)>& in) {
    Group g;
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
        g.x[i] = widen<TYPE>(TYPE == FLOAT32 ? in.w[i] : i % 2 ? in.w[i / 2] >> 16 : in.w[i / 2]);
    return g;
}

template <int TYPE, bool PLAIN> ZPP_FN Words<group_nbytes(TYPE)> words_of(const Group& g) {
    Words<group_nbytes(TYPE)> out;
#pragma unroll
    for (int i = 0; i < group_nbytes(TYPE) / 4; ++i) {
        if (TYPE == FLOAT32) out.w[i] = narrow<TYPE, PLAIN>(g.x[i]);
        else out.w[i] = narrow<TYPE, PLAIN>(g.x[2 * i % GROUP]) | narrow<TYPE, PLAIN>(g.x[(2 * i + 1) % GROUP]) << 16;
    }
    return out;
}

// ---- Levels

constexpr zpp_u32 LOW_NIBBLES = 0x0F0F0F0Fu;

// Byte `j` of a word, which holds a level plus `bias`. As the last bits of 2^23 it is a float already.
ZPP_FN float level_of(zpp_u32 biased, int j, int bias) {
    return float_of(__byte_perm(biased, 0x4B000000u, 0x7440u + j)) - (8388608.0f + (float)bias);
}

template <int CODE> ZPP_FN Group levels_of(const Words<group_nbytes(CODE)>& in) {
    Group g;
#pragma unroll
    for (int i = 0; i < group_nbytes(CODE) / 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (CODE == INT8) {
                g.x[4 * i + j] = level_of(in.w[i] ^ 0x80808080u, j, 128);
            } else {
                g.x[4 * i + j] = level_of((in.w[i] & LOW_NIBBLES) ^ 0x08080808u, j, 8);
                g.x[(4 * i + j + GROUP / 2) % GROUP] = level_of((in.w[i] >> 4 & LOW_NIBBLES) ^ 0x08080808u, j, 8);
            }
        }
    }
    return g;
}

// The low bytes of four numbers.
ZPP_FN zpp_u32 low_bytes(zpp_u32 a, zpp_u32 b, zpp_u32 c, zpp_u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040u), __byte_perm(c, d, 0x0040u), 0x5410u);
}

// `bytes(i)`: levels i to i + 3 of the group in two's complement, a byte each.
template <int CODE, class Bytes> ZPP_FN Words<group_nbytes(CODE)> packed(Bytes bytes) {
    Words<group_nbytes(CODE)> out;
#pragma unroll
    for (int i = 0; i < group_nbytes(CODE) / 4; ++i) {
        out.w[i] = bytes(4 * i);
        if (CODE == INT4) out.w[i] = (out.w[i] & LOW_NIBBLES) | (bytes(4 * i + GROUP / 2) << 4 & ~LOW_NIBBLES);
    }
    return out;
}

// ---- Rotation

ZPP_FN void hadamard(Group& g) {
#pragma unroll
    for (int half = 1; half < GROUP; half *= 2)
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (!(i & half)) {
                float a = g.x[i], b = g.x[i + half];
                g.x[i] = a + b;
                g.x[i + half] = a - b;
            }
}

template <class Function> ZPP_FN void for_each(Group& g, Function f) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) g.x[i] = f(g.x[i]);
}

ZPP_FN void rotate(Group& g) {
    for_each(g, [](float x) { return x * (1.0f / GROUP); });
    hadamard(g);
}

// A power of two moves freely through plain values: 32 H (y / 32) = H y.
template <bool PLAIN> ZPP_FN void unrotate(Group& g) {
    if (!PLAIN) for_each(g, [](float x) { return x * (1.0f / GROUP); });
    hadamard(g);
    if (!PLAIN) for_each(g, [](float x) { return unrotated(x); });
}

}  // namespace zpp
