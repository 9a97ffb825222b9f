// Enough of CUDA to run the kernels in cuda/ on the CPU: one thread block at a time, its threads as fibers that
// change only where they wait for one another. Which of them goes first is the caller's choice, so that a
// kernel with a race gives different results.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

constexpr int WARP = 32, THREADS = 128;
struct Index { unsigned x; };
extern Index thread_index, block_index;

enum Wait { NOTHING, SYNCTHREADS, SYNCWARP, SHUFFLE, VOTE };

// Wait until all threads that take part have come to the same place.
void wait_for_others(Wait why);

// What the lanes show one another: two sets, so that the next exchange cannot overtake this one.
unsigned* shown();

// What every lane of the warp showed.
inline const unsigned* exchange(unsigned mine, Wait why) {
    unsigned* lanes = shown();
    lanes[thread_index.x % WARP] = mine;
    wait_for_others(why);
    return lanes;
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index

inline void __syncthreads() { emulation::wait_for_others(emulation::SYNCTHREADS); }
inline void __syncwarp() { emulation::wait_for_others(emulation::SYNCWARP); }
inline unsigned __shfl_xor_sync(unsigned, unsigned mine, int mask) {
    return emulation::exchange(mine, emulation::SHUFFLE)[(threadIdx.x % emulation::WARP) ^ mask];
}
inline bool __all_sync(unsigned, bool mine) {
    const unsigned* lanes = emulation::exchange(mine, emulation::VOTE);
    bool all = true;
    for (int lane = 0; lane < emulation::WARP; ++lane) all = all && lanes[lane];
    return all;
}

inline unsigned __float_as_uint(float x) { unsigned b; std::memcpy(&b, &x, 4); return b; }
inline float __uint_as_float(unsigned b) { float x; std::memcpy(&x, &b, 4); return x; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(bytes >> 8 * (selectors >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}
