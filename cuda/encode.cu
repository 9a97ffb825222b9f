// Contract: zpp.reference.encode, values [count, numel] -> records [count, record_nbytes], each value read once.
// Layout:   a lane holds 32 neighbouring values, a warp 1024, a thread block 4096: the largest block of a format.
// Launch:   grid count * ceil(numel / 4096), block 128 (zpp.kernels.launch); nothing is launched without values.
// Needs:    records on 16-byte boundaries; values anywhere, in 16-byte pieces where a tile of them is aligned.
#include "record.cuh"

namespace zpp {

// View: Rows or Segments. A chunk's record stands where a table of `rows` times `columns` chunks has it
// when it is transposed.
template <class View> struct Encode {
    Record record;
    Noise noise;
    unsigned char* out;
    zpp_u32 rows, columns, tiles_per_chunk, first_tile;
    View src;
};

// Thread blocks that a multiprocessor shall hold, which leaves 64 registers to a thread; 80 to
// widen 16-bit values, 96 for the rounds of Philox.
ZPP_FN constexpr int encode_resident(int code, bool stochastic) {
    return stochastic ? 5 : code == FLOAT32 ? 6 : 8;
}

template <class View, int TYPE, int CODE, bool ROTATE, bool STOCHASTIC> ZPP_FN void encode(const Encode<View>& e) {
    __shared__ Stage<larger(group_nbytes(TYPE), group_nbytes(CODE))> stages[WARPS];
    __shared__ zpp_u32 of_warps[WARPS];
    auto& stage = stages[warp_index()];
    Place place = place_of(e.first_tile + blockIdx.x, e.tiles_per_chunk);
    unsigned char* record = e.out + transposed(place.chunk, e.rows, e.columns) * e.record.nbytes;
    auto words = load_values<TYPE>(e.src, place.chunk, place.start, e.record.numel, stage);
    if constexpr (TYPE == CODE) {  // verbatim, NaNs with all their bits
        uint4* payload = (uint4*)payload_at<CODE>(record, place.start);
        store_pieces(words, payload, pieces_from<CODE>(e.record, place.start), stage);
    } else {
        Group g = values_of<TYPE>(words);
        if (ROTATE) rotate(g);
        write_record<CODE, STOCHASTIC>(g, e.record, e.noise, place.chunk, place, record, stage, of_warps);
    }
}

}  // namespace zpp

#ifdef ZPP_VIEW
extern "C" __global__ void __launch_bounds__(zpp::THREADS, zpp::resident(zpp::encode_resident(ZPP_CODE, ZPP_STOCHASTIC)))
    zpp_encode(const __grid_constant__ zpp::Encode<zpp::ZPP_VIEW> e) {
    zpp::encode<zpp::ZPP_VIEW, ZPP_TYPE, ZPP_CODE, ZPP_ROTATE, ZPP_STOCHASTIC>(e);
}
#endif
