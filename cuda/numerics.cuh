// The numerics of one value and of one block, for every device. zpp/reference.py is the specification.
//
// Functions are templates over F (float, or a vector of floats) and U (the unsigned integers of the same
// width), so that a CUDA thread and a SIMD lane run the same text. Nothing here contracts a multiply and an
// add into one operation: compile with -ffp-contract=off (host) or --fmad=false (NVRTC).
#pragma once

#ifdef __CUDACC__
#define ZPP_FN __device__ __forceinline__
typedef unsigned int zpp_u32;
typedef unsigned long long zpp_u64;
#else
#include <cstdint>
#include <cstring>
#define ZPP_FN inline __attribute__((always_inline))
typedef uint32_t zpp_u32;
typedef uint64_t zpp_u64;
#endif

namespace zpp {

// The numbers of zpp.format.Code, ValueType, ScaleType.
enum : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BYTE = 3, INT8 = 4, INT4 = 5 };
enum : int { SCALE_BFLOAT16 = 0, SCALE_FLOAT32 = 1 };

constexpr int GROUP = 32;
constexpr zpp_u32 INF_BITS = 0x7F800000u, MAGNITUDE = 0x7FFFFFFFu, SIGN = 0x80000000u;
constexpr float FLOAT_MAX = 3.40282346638528859812e+38f;
constexpr zpp_u32 SMALLEST_SCALE_BITS = 0x00800000u;  // 2^-126
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

#ifdef __CUDACC__
ZPP_FN zpp_u32 bits_of(float x) { return __float_as_uint(x); }
ZPP_FN float float_of(zpp_u32 b) { return __uint_as_float(b); }
#else
ZPP_FN zpp_u32 bits_of(float x) { zpp_u32 b; std::memcpy(&b, &x, 4); return b; }
ZPP_FN float float_of(zpp_u32 b) { float x; std::memcpy(&x, &b, 4); return x; }
#endif

// The same number in every lane; a scalar is a single lane.
template <class T, class S> ZPP_FN T splat(S x) { return T{} + x; }

// ---- Value types, in the low bits of a 32-bit lane. Finite values stay finite; NaN becomes the quiet one.

template <class U> ZPP_FN auto widen_bfloat16(U half) { return float_of(half << 16); }

// The result in the upper half, what was rounded off below. Right where x is finite and below 2^127.
template <class F> ZPP_FN auto round_bfloat16(F x) {
    auto b = bits_of(x);
    return b + 0x7FFFu + ((b >> 16) & 1u);
}

template <class F> ZPP_FN auto narrow_bfloat16(F x) {
    auto magnitude = bits_of(x) & MAGNITUDE;
    auto rounded = round_bfloat16(x) >> 16;
    auto overflowed = (rounded & 0x7FFFu) == 0x7F80u;
    rounded = (magnitude < INF_BITS) & overflowed ? rounded - 1u : rounded;  // a finite value saturates
    return magnitude > INF_BITS ? splat<decltype(rounded)>(0x7FC0u) : rounded;
}

template <class U> ZPP_FN auto widen_float16(U half) {
    U magnitude = half & 0x7FFFu;
    // Shifted into place, the exponent is too small by 112; the product repairs it, for subnormals too.
    U finite = bits_of(float_of(magnitude << 13) * splat<decltype(float_of(half))>(5192296858534827628530496329220096.0f));  // * 2^112
    U b = magnitude >= 0x7C00u ? (magnitude << 13) | INF_BITS : finite;
    return float_of(b | ((half & 0x8000u) << 16));
}

template <class F> ZPP_FN auto narrow_float16(F x) {
    auto b = bits_of(x);
    auto sign = (b >> 16) & 0x8000u;
    auto magnitude = b & MAGNITUDE;
    typedef decltype(b) U;
    auto largest = splat<U>(0x477FE000u);  // 65504
    auto m = magnitude > largest ? largest : magnitude;
    auto normal = (m + 0xFFFu + ((m >> 13) & 1u) - 0x38000000u) >> 13;
    normal = normal > 0x7BFFu ? splat<U>(0x7BFFu) : normal;
    // Below 2^-14 the spacing is 2^-24, which is that of float32 near 0.5.
    auto subnormal = bits_of(float_of(m) + splat<F>(0.5f)) - 0x3F000000u;
    auto finite = m < 0x38800000u ? subnormal : normal;
    auto special = magnitude > INF_BITS ? splat<U>(0x7E00u) : sign | 0x7C00u;
    return magnitude < INF_BITS ? sign | finite : special;
}

template <class F> ZPP_FN auto quiet(F x) {
    auto b = bits_of(x);
    return float_of((b & MAGNITUDE) > INF_BITS ? splat<decltype(b)>(0x7FC00000u) : b);
}

// ---- Scales

// A key whose maximum over a block finds the element of largest magnitude: |x| above, "positive" as the last
// bit (positive wins a tie). As integers NaN > Inf > finite, so what is not finite always wins.
template <class U> ZPP_FN U magnitude_key(U b) { return ((b << 1) | (b >> 31)) ^ 1u; }

// The scale that the decoder will multiply by; in a block that holds NaN or Inf it is NaN.
template <class U> ZPP_FN auto block_scale(U key, int code, int scale_type) {
    U magnitude = key >> 1;
    U negative = ((key & 1u) ^ 1u) << 31;
    auto scale = code == INT8 ? float_of(magnitude) / 127.0f : float_of(magnitude | negative) * -0.125f;
    if (scale_type == SCALE_BFLOAT16) scale = float_of(narrow_bfloat16(scale) << 16);
    U bits = bits_of(scale);
    bits = (bits & MAGNITUDE) < SMALLEST_SCALE_BITS ? (bits & SIGN) | SMALLEST_SCALE_BITS : bits;
    bits = magnitude == 0u ? splat<U>(0u) : bits;
    return float_of(magnitude >= INF_BITS ? splat<U>(0x7FC00000u) : bits);
}

// What the encoder multiplies by: 0 where the payload is to be 0.
template <class F> ZPP_FN F inverse_of(F scale) {
    auto magnitude = bits_of(scale) & MAGNITUDE;
    auto usable = (magnitude != 0u) & (magnitude < INF_BITS);
    return usable ? 1.0f / scale : splat<F>(0.0f);
}

// ---- Levels. The low bits of the result are the level in two's complement.

// NaN passes both: its comparisons are false.
template <class F> ZPP_FN F at_least(F x, float low) { return x < splat<F>(low) ? splat<F>(low) : x; }
template <class F> ZPP_FN F at_most(F x, float high) { return x > splat<F>(high) ? splat<F>(high) : x; }

template <class F> ZPP_FN auto round_nearest(F t) { return bits_of(t + ROUNDER); }

template <class F> ZPP_FN F clamp_level(F t, int code) {
    return at_most(at_least(t, code == INT8 ? -127.0f : -8.0f), code == INT8 ? 127.0f : 7.0f);
}

// Up with the probability of the fraction: u is uniform in [0, 1). Adding u to t instead would round.
template <class F> ZPP_FN auto round_stochastic(F t, F u, int code) {
    F nearest = (t + ROUNDER) - ROUNDER;
    F whole = nearest > t ? nearest - 1.0f : nearest;
    return bits_of(clamp_level(u < t - whole ? whole + 1.0f : whole, code) + ROUNDER);
}

// ---- Sums and products, which saturate where both operands are finite

template <class F> ZPP_FN F saturated(F x) { return at_most(at_least(x, -FLOAT_MAX), FLOAT_MAX); }

template <class F> ZPP_FN F finite_sum(F a, F b) {
    auto finite = ((bits_of(a) & MAGNITUDE) < INF_BITS) & ((bits_of(b) & MAGNITUDE) < INF_BITS);
    return finite ? saturated(a + b) : a + b;
}

template <class F> ZPP_FN F finite_product(F x, float factor) {
    return (bits_of(x) & MAGNITUDE) < INF_BITS ? saturated(x * factor) : x * factor;
}

// A level times a scale; only the product of the largest values can exceed float32, and then saturates.
template <class F> ZPP_FN F dequantized(F level, float scale) {
    return saturated(level * scale);
}

// A scale of at most 8 significant bits (any bfloat16) that is 0 or of a magnitude between these. Where all are
// such, every product with a level is exact, and no level, sum of a few thousand levels or rotation of them
// comes near the limits of float32 or bfloat16 on either side: saturation and NaN need no looking after, and a
// power of two may be multiplied in at any place.
constexpr float SMALLEST_PLAIN = 7.88860905221011805411e-31f, LARGEST_PLAIN = 1.26765060022822940150e+30f;  // 2^+-100

ZPP_FN bool is_plain(float scale) {
    float magnitude = float_of(bits_of(scale) & MAGNITUDE);
    bool in_range = scale == 0.0f || (magnitude >= SMALLEST_PLAIN && magnitude <= LARGEST_PLAIN);
    return in_range && (bits_of(scale) & 0xFFFFu) == 0u;
}

// ---- Philox4x32-10 (Salmon et al., 2011): four words for a 64-bit counter, stream and seed.

ZPP_FN void philox(zpp_u64 counter, zpp_u64 stream, zpp_u64 seed, zpp_u32 out[4]) {
    zpp_u32 c0 = (zpp_u32)counter, c1 = (zpp_u32)(counter >> 32);
    zpp_u32 c2 = (zpp_u32)stream, c3 = (zpp_u32)(stream >> 32);
    zpp_u32 k0 = (zpp_u32)seed, k1 = (zpp_u32)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        zpp_u64 p0 = (zpp_u64)c0 * 0xD2511F53u, p1 = (zpp_u64)c2 * 0xCD9E8D57u;
        c0 = (zpp_u32)(p1 >> 32) ^ c1 ^ k0;
        c1 = (zpp_u32)p1;
        c2 = (zpp_u32)(p0 >> 32) ^ c3 ^ k1;
        c3 = (zpp_u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

ZPP_FN float uniform_of(zpp_u32 word) { return (float)(word >> 8) * 5.9604644775390625e-8f; }  // * 2^-24

// ---- Rotation

// One lane of one butterfly: the lower of the pair becomes a + b, the upper a - b.
template <class F, class U> ZPP_FN F butterfly(F mine, F partner, U sign_if_upper) {
    return partner + float_of(bits_of(mine) ^ sign_if_upper);
}

// The end of an inverse rotation: times 32. A finite value saturates, an infinite one stays.
template <class F> ZPP_FN F unrotated(F t) {
    F x = t * 32.0f;
    auto finite = (bits_of(t) & MAGNITUDE) < INF_BITS;
    auto infinite = (bits_of(x) & MAGNITUDE) == INF_BITS;
    auto saturated = float_of((bits_of(t) & SIGN) | 0x7F7FFFFFu);
    return finite & infinite ? saturated : x;
}

}  // namespace zpp
