// The four functions of zpp/reference.py for one instruction set. Compiled once per set, with ZPP_ISA its name.
//
// Each works on whole blocks: the values of a block are held as float32 in a buffer that stays in the first
// cache, between the search for the maximum and the rounding, so that memory is read and written once.
#include <utility>

#include "host_sources.h"

namespace zpp {
namespace ZPP_ISA {
namespace {

constexpr int LARGEST_BLOCK = 4096;
constexpr int SPAN = 2048;  // values worked on at a time, or one block if it has more: 8 KiB of float32, so
                            // that what is read and written fits beside them in a first cache of 32 KiB

ZPP_FN int64_t transposed(int64_t k, int64_t rows, int64_t columns) { return (k % columns) * rows + k / columns; }

// ---- Writing records

void draw(const zpp_noise& noise, int64_t k, int64_t i, float u[GROUP]) {
    uint64_t first = k * noise.pitch + noise.offset + i;
    for (int j = 0; j < GROUP / 4; ++j) {
        zpp_u32 words[4];
        philox(first / 4 + j, noise.stream, noise.seed, words);
        for (int w = 0; w < 4; ++w) u[4 * j + w] = uniform_of(words[w]);
    }
}

template <int CODE> __attribute__((noinline)) void quantize_stochastic(
    const Group* groups, int64_t n, float inverse, const zpp_noise& noise, int64_t k, int64_t i, uint8_t* payload) {
    for (int64_t g = 0; g < n; ++g, i += GROUP) {
        float u[GROUP];
        draw(noise, k, i, u);
        write_levels<CODE>(payload, i, round_stochastic(groups[g].low * inverse, load<vf>(u), CODE),
                           round_stochastic(groups[g].high * inverse, load<vf>(u + GROUP / 2), CODE));
    }
}

template <int CODE> ZPP_FN void quantize_block(
    const Group* groups, int64_t n, float inverse, const zpp_format& f, const zpp_noise& noise, int64_t k, int64_t i,
    uint8_t* payload) {
    if (__builtin_expect(inverse == 0.0f, 0)) {
        std::memset(payload + (CODE == INT8 ? i : i / 2), 0, n * (CODE == INT8 ? GROUP : GROUP / 2));
    } else if (f.stochastic) {
        quantize_stochastic<CODE>(groups, n, inverse, noise, k, i, payload);
    } else {
        for (int64_t g = 0; g < n; ++g, i += GROUP) {
            vf low = groups[g].low * inverse, high = groups[g].high * inverse;
            if constexpr (CODE == INT4) {  // the other bounds hold already, since the scale is the largest value's
                low = at_most(low, 7.0f);
                high = at_most(high, 7.0f);
            }
            write_levels<CODE>(payload, i, round_nearest(low), round_nearest(high));
        }
    }
}

// Copy whole groups out of a source, and raise the extremes by them.
template <bool PLAIN, int PEERS, class Source> ZPP_FN void take(
    const Source& source, int64_t first, int64_t last, Group* to, Extremes& seen) {
    for (int64_t i = first; i < last; i += GROUP) {
        Group g = source.template group<PLAIN, PEERS>(i);
        seen.add(g);
        *to++ = g;
    }
}

// Copy a block, values [first, last), out of a source; returns the largest of what is there in each lane.
template <class Source> ZPP_FN vu take_block(Source& source, int64_t first, int64_t last, Group* to) {
    Extremes seen;
    int64_t whole = smaller(last, first + (source.numel() - first) / GROUP * GROUP);
    for (int64_t i = first; i < last;) {
        int64_t end = source.move_to(i, last), stop = smaller(end, whole);
        if (source.plain() && source.peers() == 2) take<true, 2>(source, i, stop, to, seen);
        else if (source.plain()) take<true, 0>(source, i, stop, to, seen);
        else take<false, 0>(source, i, stop, to, seen);
        to += (end - i) / GROUP;
        i = end;
    }
    if (__builtin_expect(whole < last, 0)) {
        *to = source.short_group(whole);
        seen.add(*to);
    }
    return seen.keys();
}

// Encode the values [first, last) of a record: at most SPAN, or one block. The scales of all their blocks are
// computed together: one at a time, each would wait for its own division.
template <int CODE, class Source> ZPP_FN void write_span(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t first, int64_t last, Source& source, uint8_t* record) {
    constexpr int MOST = SPAN / GROUP;  // blocks: none has fewer values than a group
    Group groups[LARGEST_BLOCK / GROUP];
    vu keys[MOST];
    alignas(64) float scales[MOST], inverses[MOST];
    int64_t block = r.format.block, n = (last - first + block - 1) >> r.block_shift;
    for (int64_t b = 0; b < n; ++b) {
        int64_t start = first + b * block;
        keys[b] = take_block(source, start, smaller(start + block, last), groups + b * block / GROUP);
    }
    for (int64_t b = 0; b < n; b += 16) {
        vf scale = block_scale(highest_of_each(keys + b, smaller(16, n - b)), CODE, r.format.scale_type);
        store(scales + b, scale);
        store(inverses + b, inverse_of(scale));
    }
    uint8_t* stored = record + r.payload_nbytes;
    for (int64_t b = 0; b < n; ++b) {
        int64_t start = b * block, stop = smaller(start + block, last - first), at = (first >> r.block_shift) + b;
        quantize_block<CODE>(groups + start / GROUP, (stop - start + GROUP - 1) / GROUP, inverses[b], r.format, noise, k,
                             first + start, record);
        if (r.format.scale_type == SCALE_FLOAT32) store(stored + 4 * at, scales[b]);
        else store(stored + 2 * at, (uint16_t)(bits_of(scales[b]) >> 16));
    }
}

template <int CODE, class Source> void write_quantized(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t start, int64_t stop, Source& source, uint8_t* record) {
    int64_t span = r.format.block > SPAN ? r.format.block : SPAN;
    for (int64_t first = start; first < stop; first += span)
        write_span<CODE>(r, noise, k, first, smaller(first + span, stop), source, record);
}

// Write values [start, stop) of a record, or of a tensor: each times `factor`, at most 1 where it is PLAIN.
template <int TYPE, class Source> void write_values(
    uint8_t* out, int64_t start, int64_t stop, Source& source, float factor = 1.0f) {
    bool small = factor <= 1.0f && factor >= -1.0f;
    int64_t whole = start + (smaller(stop, source.numel()) - start) / GROUP * GROUP;
    for (int64_t i = start; i < whole;) {
        int64_t end = smaller(source.move_to(i, stop), whole);
        if (source.plain() && small)
            for (; i < end; i += GROUP)
                write_group<TYPE, true>(out, i, times<true>(source.template group<true, 0>(i), factor));
        else
            for (; i < end; i += GROUP)
                write_group<TYPE, false>(out, i, times<false>(source.template group<false, 0>(i), factor));
    }
    if (whole < stop) {
        source.move_to(whole, stop);
        write_short_group<TYPE>(out, whole, stop - whole, times<false>(source.short_group(whole), factor));
    }
}

// Write values [start, stop) of a record.
template <class Source> ZPP_FN void write_record(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t start, int64_t stop, Source source, uint8_t* record) {
    switch (r.format.code) {
        case FLOAT32: return write_values<FLOAT32>(record, start, stop, source);
        case BFLOAT16: return write_values<BFLOAT16>(record, start, stop, source);
        case FLOAT16: return write_values<FLOAT16>(record, start, stop, source);
        case INT8: return write_quantized<INT8>(r, noise, k, start, stop, source, record);
        case INT4: return write_quantized<INT4>(r, noise, k, start, stop, source, record);
    }
}

// ---- The four functions

template <int TYPE> void encode_type(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    const uint8_t* src = e.src + k * e.stride * Values<TYPE>::SIZE;
    uint8_t* record = e.out + transposed(k, e.rows, e.count / e.rows) * e.record.nbytes;
    if (e.record.format.rotate)
        write_record(e.record, e.noise, k, start, stop, Row<TYPE, true>(src, e.record.numel), record);
    else
        write_record(e.record, e.noise, k, start, stop, Row<TYPE, false>(src, e.record.numel), record);
}

void encode(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    switch (e.type) {
        case FLOAT32: return encode_type<FLOAT32>(e, k, start, stop);
        case BFLOAT16: return encode_type<BFLOAT16>(e, k, start, stop);
        case FLOAT16: return encode_type<FLOAT16>(e, k, start, stop);
    }
}

template <int TYPE> void encode_parts_type(const EncodeParts& e, int64_t k, int64_t start, int64_t stop) {
    uint8_t* record = e.out + transposed(k, e.rows, e.count / e.rows) * e.record.nbytes;
    int64_t base = k * e.record.numel;
    if (e.record.format.rotate) {
        PartedRow<TYPE, true> row(e.parts, e.part_count, base, e.record.numel);
        write_record(e.record, e.noise, k, start, stop, row, record);
    } else {
        PartedRow<TYPE, false> row(e.parts, e.part_count, base, e.record.numel);
        write_record(e.record, e.noise, k, start, stop, row, record);
    }
}

void encode_parts(const EncodeParts& e, int64_t k, int64_t start, int64_t stop) {
    switch (e.type) {
        case FLOAT32: return encode_parts_type<FLOAT32>(e, k, start, stop);
        case BFLOAT16: return encode_parts_type<BFLOAT16>(e, k, start, stop);
        case FLOAT16: return encode_parts_type<FLOAT16>(e, k, start, stop);
    }
}

template <int CODE, int TYPE, Turn TURN> void decode_values(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    int64_t offset = transposed(k, d.rows, d.count / d.rows) * d.record.nbytes;
    TurnedSum<CODE, TURN> source(d.record, d.records, d.peers, offset);
    write_values<TYPE>(d.out + k * d.stride * Values<TYPE>::SIZE, start, stop, source, d.factor);
}

template <int CODE, int TYPE> void decode_type(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    if (d.record.format.rotate) decode_values<CODE, TYPE, Turn::UNROTATE>(d, k, start, stop);
    else decode_values<CODE, TYPE, Turn::NONE>(d, k, start, stop);
}

template <int CODE> void decode_code(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    switch (d.type) {
        case FLOAT32: return decode_type<CODE, FLOAT32>(d, k, start, stop);
        case BFLOAT16: return decode_type<CODE, BFLOAT16>(d, k, start, stop);
        case FLOAT16: return decode_type<CODE, FLOAT16>(d, k, start, stop);
    }
}

void decode(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    switch (d.record.format.code) {
        case FLOAT32: return decode_code<FLOAT32>(d, k, start, stop);
        case BFLOAT16: return decode_code<BFLOAT16>(d, k, start, stop);
        case FLOAT16: return decode_code<FLOAT16>(d, k, start, stop);
        case INT8: return decode_code<INT8>(d, k, start, stop);
        case INT4: return decode_code<INT4>(d, k, start, stop);
    }
}

template <int CODE, Turn TURN> void convert_turned(const DecodeEncode& c, int64_t k, int64_t start, int64_t stop) {
    TurnedSum<CODE, TURN> source(c.in, c.records, c.peers, k * c.in.nbytes);
    write_record(c.out_record, c.noise, k, start, stop, std::move(source), c.out + k * c.out_record.nbytes);
}

template <int CODE> void convert(const DecodeEncode& c, int64_t k, int64_t start, int64_t stop) {
    if (c.in.format.rotate == c.out_record.format.rotate) convert_turned<CODE, Turn::NONE>(c, k, start, stop);
    else if (c.in.format.rotate) convert_turned<CODE, Turn::UNROTATE>(c, k, start, stop);
    else convert_turned<CODE, Turn::ROTATE>(c, k, start, stop);
}

void decode_reduce_encode(const DecodeEncode& c, int64_t k, int64_t start, int64_t stop) {
    switch (c.in.format.code) {
        case FLOAT32: return convert<FLOAT32>(c, k, start, stop);
        case BFLOAT16: return convert<BFLOAT16>(c, k, start, stop);
        case FLOAT16: return convert<FLOAT16>(c, k, start, stop);
        case INT8: return convert<INT8>(c, k, start, stop);
        case INT4: return convert<INT4>(c, k, start, stop);
    }
}

}  // namespace

extern const Kernels table;
const Kernels table = {encode, encode_parts, decode, decode_reduce_encode};

}  // namespace ZPP_ISA
}  // namespace zpp
