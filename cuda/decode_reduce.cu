// Contract: zpp.reference.decode_reduce, records [peers, count, record_nbytes] -> values [count, numel].
// Layout:   a lane sums 32 neighbouring values of all peers in registers; a warp holds 1024, a thread block 4096.
// Launch:   grid count * ceil(numel / 4096), block 128 (zpp.kernels.launch); nothing is launched without values.
// Needs:    records on 16-byte boundaries; values anywhere, in 16-byte pieces where a tile of them is aligned.
#include "values.cuh"

namespace zpp {

struct DecodeReduce {
    Record record;
    float factor;
    zpp_u32 tiles_per_chunk;
    Rows out;
    Peers peers;
};

// Thread blocks that a multiprocessor shall hold, which leaves 80 (96 for peers in float32) registers to a thread.
ZPP_FN constexpr int reduce_resident(int code) { return code == FLOAT32 ? 5 : 6; }

template <int CODE, int TYPE, bool ROTATE> ZPP_FN void decode_reduce(const DecodeReduce& d) {
    __shared__ Stage<larger(group_nbytes(TYPE), group_nbytes(CODE))> stages[WARPS];
    auto& stage = stages[warp_index()];
    Place place = place_of(blockIdx.x, d.tiles_per_chunk);
    Group g;
    bool plain = sum_records<CODE>(d.record, d.peers, place.chunk * d.record.nbytes, place.start, g, stage);
    write_values<TYPE, ROTATE>(g, plain, d.factor, d.out, place, d.record.numel, stage);
}

}  // namespace zpp

#ifdef ZPP_TYPE
extern "C" __global__ void __launch_bounds__(zpp::THREADS, zpp::resident(zpp::reduce_resident(ZPP_CODE)))
    zpp_decode_reduce(const __grid_constant__ zpp::DecodeReduce d) {
    zpp::decode_reduce<ZPP_CODE, ZPP_TYPE, ZPP_ROTATE>(d);
}
#endif
