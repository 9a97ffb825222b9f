// The plain C interface of the host kernels, and the table of functions that each instruction set fills.
#pragma once

#include <cstdint>

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

struct Kernels {
    void (*encode)(const Encode&, int64_t k, int64_t start, int64_t stop);
    void (*decode)(const Decode&, int64_t k, int64_t start, int64_t stop);
    void (*decode_reduce_encode)(const DecodeEncode&, int64_t k, int64_t start, int64_t stop);
};

}  // namespace zpp
