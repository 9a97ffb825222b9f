// Contract: zpp.reference.decode_reduce_encode, records [peers, count, ...] -> sums -> records [count, ...].
// Layout:   a lane sums 32 neighbouring values of all peers in registers; a warp holds 1024, a thread block 4096.
// Launch:   grid count * ceil(numel / 4096), block 128 (zpp.kernels.launch); nothing is launched without values.
// Needs:    records, read and written, on 16-byte boundaries.
#include "record.cuh"

namespace zpp {

struct DecodeReduceEncode {
    Record record, out_record;
    Noise noise;
    unsigned char* out;
    zpp_u32 tiles_per_chunk;
    Peers peers;
};

// Thread blocks that a multiprocessor shall hold, which leaves 80 registers to a thread; 96 for
// Philox, for peers in float32, and for int8 in and out.
ZPP_FN constexpr int recode_resident(int code, int out_code, bool stochastic) {
    return code == FLOAT32 || stochastic || (code == INT8 && out_code == INT8) ? 5 : 6;
}

// A sum of rotated values that is to be rotated stays in that domain, where every value of a group counts.
template <int CODE, bool ROTATED, int OUT_CODE, bool ROTATE, bool STOCHASTIC>
ZPP_FN void decode_reduce_encode(const DecodeReduceEncode& d) {
    __shared__ Stage<larger(group_nbytes(CODE), group_nbytes(OUT_CODE))> stages[WARPS];
    __shared__ zpp_u32 of_warps[WARPS];
    auto& stage = stages[warp_index()];
    Place place = place_of(blockIdx.x, d.tiles_per_chunk);
    Group g;
    bool plain = sum_records<CODE>(d.record, d.peers, place.chunk * d.record.nbytes, place.start, g, stage);
    if (ROTATED && !ROTATE) {
        if (plain) unrotate<true>(g);
        else unrotate<false>(g);
    }
    if (!(ROTATED && ROTATE)) cut(g, place.start + lane_index() * GROUP, d.record.numel);
    if (ROTATE && !ROTATED) rotate(g);
    unsigned char* record = d.out + place.chunk * d.out_record.nbytes;
    write_record<OUT_CODE, STOCHASTIC>(g, d.out_record, d.noise, place.chunk, place, record, stage, of_warps);
}

}  // namespace zpp

#ifdef ZPP_CODE
extern "C" __global__ void __launch_bounds__(zpp::THREADS, zpp::resident(zpp::recode_resident(ZPP_CODE, ZPP_OUT_CODE, ZPP_STOCHASTIC)))
    zpp_decode_reduce_encode(const __grid_constant__ zpp::DecodeReduceEncode d) {
    zpp::decode_reduce_encode<ZPP_CODE, ZPP_ROTATED, ZPP_OUT_CODE, ZPP_ROTATE, ZPP_STOCHASTIC>(d);
}
#endif
