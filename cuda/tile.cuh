// Memory to registers and back. A warp's tile is 1024 values of one chunk: lane l holds group l of it.
//
// Global memory is read and written in 16-byte pieces, neighbouring lanes at neighbouring pieces; shared
// memory deals them out to the lanes whose groups they belong to. A piece's slot there is its number with the
// low bits turned by the next ones, so that eight lanes meet all 32 banks both ways.
#pragma once

#include "group.cuh"

namespace zpp {

constexpr int WARP = 32, WARPS = 4, THREADS = WARP * WARPS;
constexpr int TILE = WARP * GROUP;             // values of a warp
constexpr int BLOCK_TILE = WARPS * TILE;       // values of a thread block: the largest block of a format
constexpr int PIECE = 16;                      // bytes of the widest load and store

// Thread blocks to keep on a multiprocessor, for launch bounds: before Ampere it has place for half the warps.
ZPP_FN constexpr int resident(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return blocks < 4 ? blocks : 4;
#else
    return blocks;
#endif
}

// Where the warp's pieces change hands.
template <int NBYTES> struct Stage { uint4 piece[WARP * NBYTES / PIECE]; };

ZPP_FN constexpr int larger(int a, int b) { return a > b ? a : b; }
ZPP_FN i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
ZPP_FN int lane_index() { return threadIdx.x % WARP; }
ZPP_FN int warp_index() { return threadIdx.x / WARP; }
ZPP_FN bool is_aligned(const void* p) { return (zpp_u64)p % PIECE == 0; }
ZPP_FN int slot(int piece) { return piece ^ (piece >> 3 & 7); }

// ---- A warp's tile as pieces

template <int NBYTES> struct Pieces { uint4 row[NBYTES / PIECE]; };  // the lane's: number lane + 32 r of the tile

// Pieces that do not exist are zero.
template <int NBYTES> ZPP_FN Pieces<NBYTES> fetch(const uint4* from, i64 existing) {
    Pieces<NBYTES> out;
#pragma unroll
    for (int r = 0; r < NBYTES / PIECE; ++r) {
        int p = r * WARP + lane_index();
        out.row[r] = p < existing ? from[p] : make_uint4(0, 0, 0, 0);
    }
    return out;
}

template <int NBYTES, int SPACE> ZPP_FN Words<NBYTES> take_own(const Stage<SPACE>& stage) {
    Words<NBYTES> out;
#pragma unroll
    for (int r = 0; r < NBYTES / PIECE; ++r) {
        uint4 piece = stage.piece[slot(lane_index() * (NBYTES / PIECE) + r)];
        out.w[4 * r] = piece.x, out.w[4 * r + 1] = piece.y, out.w[4 * r + 2] = piece.z, out.w[4 * r + 3] = piece.w;
    }
    return out;
}

template <int NBYTES, int SPACE> ZPP_FN Words<NBYTES> deal(const Pieces<NBYTES>& pieces, Stage<SPACE>& stage) {
    if constexpr (NBYTES == PIECE) {  // every lane has read its own
        uint4 own = pieces.row[0];
        return {{own.x, own.y, own.z, own.w}};
    }
    __syncwarp();  // the stage may still be read
#pragma unroll
    for (int r = 0; r < NBYTES / PIECE; ++r) stage.piece[slot(r * WARP + lane_index())] = pieces.row[r];
    __syncwarp();
    return take_own<NBYTES>(stage);
}

template <int NBYTES, int SPACE> ZPP_FN void put_own(const Words<NBYTES>& own, Stage<SPACE>& stage) {
    __syncwarp();  // the stage may still be read
#pragma unroll
    for (int r = 0; r < NBYTES / PIECE; ++r)
        stage.piece[slot(lane_index() * (NBYTES / PIECE) + r)] =
            make_uint4(own.w[4 * r], own.w[4 * r + 1], own.w[4 * r + 2], own.w[4 * r + 3]);
    __syncwarp();
}

template <int NBYTES, int SPACE> ZPP_FN void store_pieces(
    const Words<NBYTES>& own, uint4* to, i64 existing, Stage<SPACE>& stage) {
    if constexpr (NBYTES == PIECE) {
        if (lane_index() < existing) to[lane_index()] = make_uint4(own.w[0], own.w[1], own.w[2], own.w[3]);
    } else {
        put_own(own, stage);
#pragma unroll
        for (int r = 0; r < NBYTES / PIECE; ++r) {
            int p = r * WARP + lane_index();
            if (p < existing) to[p] = stage.piece[slot(p)];
        }
    }
}

// ---- Values, which may lie anywhere

template <int TYPE> struct Element { typedef unsigned short T; };
template <> struct Element<FLOAT32> { typedef zpp_u32 T; };
template <> struct Element<BYTE> { typedef unsigned char T; };

// Chunk k is a row of a tensor. Strides are in values.
struct Rows {
    void* data;
    i64 stride;

    // Value i of a chunk of `numel`, or null if there is none.
    template <class T> ZPP_FN T* at(i64 chunk, i64 i, i64 numel) const {
        return i < numel ? (T*)data + chunk * stride + i : nullptr;
    }
    // Value i if a whole tile lies from there on, on a 16-byte boundary; else null.
    template <class T> ZPP_FN T* tile_at(i64 chunk, i64 i, i64 numel) const {
        T* first = (T*)data + chunk * stride + i;
        return i + TILE <= numel && is_aligned(first) ? first : nullptr;
    }
};

// The chunks, one after another, are a row of tensors with gaps: value `start` to `stop` lies at `data`.
struct Segment {
    i64 start, stop;
    void* data;
};

constexpr int MAX_SEGMENTS = 160;  // with what else a kernel takes they stay below 4096 bytes of arguments

struct Segments {
    i64 count;
    Segment segments[MAX_SEGMENTS];  // ordered, without overlap

    // The last segment that starts at or before a value; the first one if none does.
    ZPP_FN int find(i64 value) const {
        int low = 0, high = (int)count;
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (segments[middle].start <= value) low = middle;
            else high = middle;
        }
        return low;
    }
    template <class T> ZPP_FN T* range_at(i64 first, i64 last) const {
        int s = find(first);
        bool inside = count > 0 && segments[s].start <= first && last <= segments[s].stop;
        return inside ? (T*)segments[s].data + (first - segments[s].start) : nullptr;
    }
    template <class T> ZPP_FN T* at(i64 chunk, i64 i, i64 numel) const {
        i64 first = chunk * numel + i;
        return i < numel ? range_at<T>(first, first + 1) : nullptr;
    }
    template <class T> ZPP_FN T* tile_at(i64 chunk, i64 i, i64 numel) const {
        i64 first = chunk * numel + i;
        T* found = i + TILE <= numel ? range_at<T>(first, first + TILE) : nullptr;
        return is_aligned(found) ? found : nullptr;
    }
};

// The warp's tile from value `start` of a chunk; values that do not exist are zero. The stage's first use.
template <int TYPE, class View, int SPACE> ZPP_FN Words<group_nbytes(TYPE)> load_values(
    const View& view, i64 chunk, i64 start, i64 numel, Stage<SPACE>& stage) {
    typedef typename Element<TYPE>::T T;
    constexpr int NBYTES = group_nbytes(TYPE), PER_PIECE = PIECE / sizeof(T);
    if (const T* from = view.template tile_at<T>(chunk, start, numel))
        return deal(fetch<NBYTES>((const uint4*)from, TILE), stage);
#pragma unroll 4
    for (int i = lane_index(); i < TILE; i += WARP) {
        const T* from = view.template at<T>(chunk, start + i, numel);
        ((T*)stage.piece)[slot(i / PER_PIECE) * PER_PIECE + i % PER_PIECE] = from ? *from : T(0);
    }
    __syncwarp();
    return take_own<NBYTES>(stage);
}

template <int TYPE, class View, int SPACE> ZPP_FN void store_values(
    const Words<group_nbytes(TYPE)>& own, const View& view, i64 chunk, i64 start, i64 numel, Stage<SPACE>& stage) {
    typedef typename Element<TYPE>::T T;
    constexpr int PER_PIECE = PIECE / sizeof(T);
    if (T* to = view.template tile_at<T>(chunk, start, numel)) return store_pieces(own, (uint4*)to, TILE, stage);
    put_own(own, stage);
#pragma unroll 4
    for (int i = lane_index(); i < TILE; i += WARP)
        if (T* to = view.template at<T>(chunk, start + i, numel))
            *to = ((const T*)stage.piece)[slot(i / PER_PIECE) * PER_PIECE + i % PER_PIECE];
}

// ---- Which tile

// Tiles of thread blocks are counted through all chunks; `start` is the first value of the warp's part.
struct Place {
    i64 chunk, start;
    bool last;  // of the chunk's thread blocks
};

ZPP_FN Place place_of(zpp_u32 tile, zpp_u32 tiles_per_chunk) {
    zpp_u32 chunk = tile / tiles_per_chunk, in_chunk = tile - chunk * tiles_per_chunk;
    return {(i64)chunk, (i64)in_chunk * BLOCK_TILE + warp_index() * TILE, in_chunk + 1 == tiles_per_chunk};
}

// Where chunk k of a (rows, columns) table stands in its transpose.
ZPP_FN i64 transposed(i64 k, zpp_u32 rows, zpp_u32 columns) {
    if (rows == 1) return k;
    zpp_u32 row = (zpp_u32)k / columns, column = (zpp_u32)k - row * columns;
    return (i64)column * rows + row;
}

}  // namespace zpp
