// The plain C interface of the host kernels, and the table of functions that each instruction set fills.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {

// A resolved zpp.format.BlockFormat.
struct zpp_format {
    int32_t code, scale_type, rotate, stochastic;
    int64_t block;
};

// zpp.format.Noise.
struct zpp_noise {
    uint64_t seed, stream, offset, pitch;
};

// Values [start, stop) of all chunks, counted through them, lie at `data`.
struct zpp_part {
    int64_t start, stop;
    const uint8_t* data;
};

}  // extern "C"

namespace zpp {

// Records of `numel` values: sizes in bytes, computed once by the caller of the kernels.
struct Record {
    zpp_format format;
    int64_t numel, payload_nbytes, nbytes;
    int block_shift;  // log2 of the block
};

// A piece of work is values [start, stop) of chunk k; start is a multiple of the largest block.
struct Encode {
    const uint8_t* src;
    int32_t type;
    int64_t stride, count, rows;  // stride in values
    Record record;
    zpp_noise noise;
    uint8_t* out;
};

// The chunks' values lie in `part_count` parts, in order; what these leave out is zero.
struct EncodeParts {
    const zpp_part* parts;
    int64_t part_count;
    int32_t type;
    int64_t count, rows;
    Record record;
    zpp_noise noise;
    uint8_t* out;
};

struct Decode {
    const uint8_t* const* records;  // of each peer [count], summed over the peers in order
    int64_t peers, count, rows;
    Record record;
    float factor;
    uint8_t* out;
    int32_t type;
    int64_t stride;
};

struct DecodeEncode {
    const uint8_t* const* records;
    int64_t peers, count;
    Record in, out_record;
    zpp_noise noise;
    uint8_t* out;
};

// Copy values [first, last) of the chunks, of `size` bytes each, out of the parts.
inline void copy_parts(
    const zpp_part* parts, int64_t part_count, int64_t first, int64_t last, int64_t size, uint8_t* to) {
    auto ends_before = [](const zpp_part& part, int64_t i) { return part.stop <= i; };
    std::memset(to, 0, (last - first) * size);
    for (auto p = std::lower_bound(parts, parts + part_count, first, ends_before); p < parts + part_count; ++p) {
        int64_t a = std::max(p->start, first), b = std::min(p->stop, last);
        if (p->start >= last) return;
        if (a < b) std::memcpy(to + (a - first) * size, p->data + (a - p->start) * size, (b - a) * size);
    }
}

struct Kernels {
    void (*encode)(const Encode&, int64_t k, int64_t start, int64_t stop);
    void (*encode_parts)(const EncodeParts&, int64_t k, int64_t start, int64_t stop);
    void (*decode)(const Decode&, int64_t k, int64_t start, int64_t stop);
    void (*decode_reduce_encode)(const DecodeEncode&, int64_t k, int64_t start, int64_t stop);
};

}  // namespace zpp
