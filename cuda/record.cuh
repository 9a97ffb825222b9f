// Records: what a warp writes into one, and the sum of several.
#pragma once

#include "tile.cuh"

namespace zpp {

// The sizes of a record, and what only its blocks know of its format. Records start on 16-byte boundaries.
struct Record {
    i64 numel, payload_nbytes, nbytes;
    int block_shift, scale_type;  // log2 of the block
};

// zpp.format.Noise.
struct Noise { zpp_u64 seed, stream, offset, pitch; };

ZPP_FN int scale_nbytes(const Record& r) { return r.scale_type == SCALE_FLOAT32 ? 4 : 2; }

// Pieces of the payload from the warp's tile on.
template <int CODE> ZPP_FN i64 pieces_from(const Record& r, i64 start) {
    return r.payload_nbytes / PIECE - start / GROUP * (group_nbytes(CODE) / PIECE);
}

template <int CODE, class Byte> ZPP_FN auto payload_at(Byte* record, i64 start) {
    return record + start / GROUP * group_nbytes(CODE);
}

// ---- Writing

// The largest key of the block that the lane's group belongs to. Called at most once by a kernel.
ZPP_FN zpp_u32 highest_of_block(zpp_u32 key, int block_shift, zpp_u32 (&of_warps)[WARPS]) {
    for (int lanes = 1; lanes < WARP && lanes * GROUP < 1 << block_shift; lanes *= 2) {
        zpp_u32 other = __shfl_xor_sync(0xFFFFFFFFu, key, lanes);
        key = other > key ? other : key;
    }
    if (TILE < 1 << block_shift) {
        int warps = (1 << block_shift) / TILE, first = warp_index() & ~(warps - 1);
        if (lane_index() == 0) of_warps[warp_index()] = key;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            if ((w & ~(warps - 1)) == first && of_warps[w] > key) key = of_warps[w];
    }
    return key;
}

// The largest key of a group. As signed numbers the bits of the largest positive value win, as unsigned ones
// those of the most negative one: two comparisons a value, where a key for each would have to be made.
ZPP_FN zpp_u32 highest_of_group(const Group& g) {
    int positive = 0;
    zpp_u32 negative = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        zpp_u32 b = bits_of(g.x[j]);
        positive = (int)b > positive ? (int)b : positive;
        negative = b > negative ? b : negative;
    }
    zpp_u32 a = magnitude_key((zpp_u32)positive), b = magnitude_key(negative);
    return a > b ? a : b;
}

// Levels j to j + 3 of a group of which value i of chunk k is the first.
template <int CODE, bool STOCHASTIC> ZPP_FN zpp_u32 four_levels(
    const Group& g, int j, float inverse, const Noise& noise, i64 k, i64 i) {
    zpp_u32 random[4], level[4];
    if (STOCHASTIC) {
        zpp_u64 element = (zpp_u64)k * noise.pitch + noise.offset + (zpp_u64)i;
        philox(element / 4 + j / 4, noise.stream, noise.seed, random);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        float t = g.x[j + n] * inverse;
        if (STOCHASTIC) level[n] = round_stochastic(t, uniform_of(random[n]), CODE);
        else level[n] = round_nearest(CODE == INT4 ? at_most(t, 7.0f) : t);  // the scale keeps the other bounds
    }
    return low_bytes(level[0], level[1], level[2], level[3]);
}

template <int CODE, bool STOCHASTIC> ZPP_FN Words<group_nbytes(CODE)> quantized_words(
    const Group& g, float inverse, const Noise& noise, i64 k, i64 i) {
    auto out = packed<CODE>([&](int j) { return four_levels<CODE, STOCHASTIC>(g, j, inverse, noise, k, i); });
#pragma unroll
    for (int w = 0; w < group_nbytes(CODE) / 4; ++w) out.w[w] = inverse == 0.0f ? 0u : out.w[w];  // Inf * 0 is NaN
    return out;
}

// Write the lane's group, values from i on, as values or as levels and scales.
template <int CODE, bool STOCHASTIC, int SPACE> ZPP_FN void write_record(
    const Group& g, const Record& r, const Noise& noise, i64 k, const Place& place, unsigned char* record,
    Stage<SPACE>& stage, zpp_u32 (&of_warps)[WARPS]) {
    uint4* payload = (uint4*)payload_at<CODE>(record, place.start);
    i64 existing = pieces_from<CODE>(r, place.start), i = place.start + lane_index() * GROUP;
    if constexpr (!quantized(CODE)) {
        store_pieces(words_of<CODE, false>(g), payload, existing, stage);
    } else {
        zpp_u32 key = highest_of_block(highest_of_group(g), r.block_shift, of_warps);
        float scale = block_scale(key, CODE, r.scale_type);
        unsigned char* stored = record + r.payload_nbytes + (i >> r.block_shift) * scale_nbytes(r);
        if (i < r.numel && (i & ((1 << r.block_shift) - 1)) == 0) {
            if (r.scale_type == SCALE_FLOAT32) *(zpp_u32*)stored = bits_of(scale);
            else *(unsigned short*)stored = (unsigned short)(bits_of(scale) >> 16);
        }
        auto words = quantized_words<CODE, STOCHASTIC>(g, inverse_of(scale), noise, k, i);
        store_pieces(words, payload, existing, stage);
        i64 used = r.payload_nbytes + ((r.numel - 1 >> r.block_shift) + 1) * scale_nbytes(r);
        if (place.last && used + (int)threadIdx.x < r.nbytes) record[used + threadIdx.x] = 0;
    }
}

// Zero what stands behind the last value: it is no value.
ZPP_FN void cut(Group& g, i64 i, i64 numel) {
    int values = (int)smaller(numel - i, GROUP);
    if (values == GROUP) return;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) g.x[j] = j < values ? g.x[j] : 0.0f;
}

// ---- Reading

ZPP_FN float load_scale(const Record& r, const unsigned char* record, i64 i) {
    if (i >= r.numel) return 0.0f;
    const unsigned char* stored = record + r.payload_nbytes + (i >> r.block_shift) * scale_nbytes(r);
    if (r.scale_type == SCALE_FLOAT32) return float_of(*(const zpp_u32*)stored);
    return widen_bfloat16((zpp_u32)*(const unsigned short*)stored);
}

// One peer's levels times their scale, onto the total. A plain product is exact: one rounding either way.
template <int CODE, bool PLAIN> ZPP_FN void add_levels(Group& total, const Group& levels, float scale) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j)
        total.x[j] = PLAIN ? __fmaf_rn(levels.x[j], scale, total.x[j])
                           : finite_sum(total.x[j], dequantized(levels.x[j], scale));
}

constexpr int MAX_PEERS = 256;

// The records of every peer whose values are summed, in order.
struct Peers {
    i64 count;
    const unsigned char* records[MAX_PEERS];
};

// One record alone.
struct Alone {
    static constexpr i64 count = 1;
    const unsigned char* records[1];
};

// The sum of the records that stand `offset` bytes into each peer's, in order, in the format's own domain.
// Returns whether the sums of the whole warp are plain. Several peers' pieces are on their way at a time.
template <int CODE, class Records, int SPACE> ZPP_FN bool sum_records(
    const Record& r, const Records& peers, i64 offset, i64 start, Group& total, Stage<SPACE>& stage) {
    constexpr int NBYTES = group_nbytes(CODE), AT_ONCE = larger(1, 64 / NBYTES);
    i64 existing = pieces_from<CODE>(r, start), i = start + lane_index() * GROUP;
    bool plain = quantized(CODE);
    for_each(total, [](float) { return -0.0f; });  // plus x it is x, whatever the sign of a zero
    for (int first = 0; first < (int)peers.count; first += AT_ONCE) {
        Pieces<NBYTES> pieces[AT_ONCE];
        float scales[AT_ONCE];
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p) {
            bool there = first + p < (int)peers.count;
            const unsigned char* record = peers.records[there ? first + p : 0] + offset;
            pieces[p] = fetch<NBYTES>((const uint4*)payload_at<CODE>(record, start), there ? existing : 0);
            scales[p] = quantized(CODE) && there ? load_scale(r, record, i) : 0.0f;
            if (quantized(CODE)) plain = plain && is_plain(scales[p]);
        }
        if (quantized(CODE)) plain = __all_sync(0xFFFFFFFFu, plain);
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p) {
            if (first + p >= (int)peers.count) break;
            auto words = deal(pieces[p], stage);
            if constexpr (!quantized(CODE)) {
                Group next = values_of<CODE>(words);
#pragma unroll
                for (int j = 0; j < GROUP; ++j) total.x[j] = finite_sum(total.x[j], next.x[j]);
            } else if (plain) {
                add_levels<CODE, true>(total, levels_of<CODE>(words), scales[p]);
            } else {
                asm volatile("");  // else both branches' levels are unpacked before them, into 32 registers more
                add_levels<CODE, false>(total, levels_of<CODE>(words), scales[p]);
            }
        }
    }
    return plain;
}

}  // namespace zpp
