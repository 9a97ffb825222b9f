// Contract: zpp.reference.decode, records [count, record_nbytes] -> values [count, numel], each record read once.
// Layout:   a lane holds 32 neighbouring values, a warp 1024, a thread block 4096: the largest block of a format.
// Launch:   grid count * ceil(numel / 4096), block 128 (zpp.kernels.launch); nothing is launched without values.
// Needs:    records on 16-byte boundaries; values anywhere, in 16-byte pieces where a tile of them is aligned.
#include "values.cuh"

namespace zpp {

// View: Rows or Segments. A chunk's record stands where a table of `rows` times `columns` chunks has it
// when it is transposed.
template <class View> struct Decode {
    Record record;
    const unsigned char* records;
    zpp_u32 rows, columns, tiles_per_chunk, first_tile;
    View out;
};

// Thread blocks that a multiprocessor shall hold, which leaves 64 registers to a thread.
constexpr int DECODE_RESIDENT = 8;

template <class View, int CODE, int TYPE, bool ROTATE> ZPP_FN void decode(const Decode<View>& d) {
    __shared__ Stage<larger(group_nbytes(TYPE), group_nbytes(CODE))> stages[WARPS];
    auto& stage = stages[warp_index()];
    Place place = place_of(d.first_tile + blockIdx.x, d.tiles_per_chunk);
    const unsigned char* record = d.records + transposed(place.chunk, d.rows, d.columns) * d.record.nbytes;
    if constexpr (CODE == TYPE) {  // verbatim, NaNs with all their bits
        const uint4* payload = (const uint4*)payload_at<CODE>(record, place.start);
        auto pieces = fetch<group_nbytes(CODE)>(payload, pieces_from<CODE>(d.record, place.start));
        store_values<TYPE>(deal(pieces, stage), d.out, place.chunk, place.start, d.record.numel, stage);
    } else {
        Group g;
        bool plain = sum_records<CODE>(d.record, Alone{{record}}, 0, place.start, g, stage);
        write_values<TYPE, ROTATE>(g, plain, 1.0f, d.out, place, d.record.numel, stage);
    }
}

}  // namespace zpp

#ifdef ZPP_VIEW
extern "C" __global__ void __launch_bounds__(zpp::THREADS, zpp::resident(zpp::DECODE_RESIDENT))
    zpp_decode(const __grid_constant__ zpp::Decode<zpp::ZPP_VIEW> d) {
    zpp::decode<zpp::ZPP_VIEW, ZPP_CODE, ZPP_TYPE, ZPP_ROTATE>(d);
}
#endif
