// The four functions of zpp/reference.py for one instruction set. Compiled once per set, with ZPP_ISA its name.
//
// Each works on whole blocks: the values of a block are held as float32 in a buffer that stays in the first
// cache, between the search for the maximum and the rounding, so that memory is read and written once.
#include "host.h"
#include "host_vector.h"

namespace zpp {
namespace ZPP_ISA {
namespace {

constexpr int MAX_BLOCK = 4096;

ZPP_FN int64_t transposed(int64_t k, int64_t rows, int64_t columns) { return (k % columns) * rows + k / columns; }

ZPP_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Reading records

ZPP_FN float read_scale(const Record& r, const uint8_t* record, int64_t i) {
    const uint8_t* scales = record + r.payload_nbytes;
    int64_t block = i / r.format.block;
    if (r.format.scale_type == SCALE_FLOAT32) return load<float>(scales + 4 * block);
    return float_of((zpp_u32)load<uint16_t>(scales + 2 * block) << 16);
}

// The values of group i in the format's own domain.
template <int CODE> ZPP_FN Group dequantize_group(const Record& r, const uint8_t* record, int64_t i, float scale) {
    if constexpr (CODE == INT8 || CODE == INT4) {
        Group q = read_levels<CODE>(record, i);
        return {dequantized(q.low, scale), dequantized(q.high, scale)};
    } else {
        return read_group<CODE>(record, i, r.numel - i);
    }
}

// Sum of `peers` records, `step` bytes apart, in order.
template <int CODE> ZPP_FN Group sum_group(const Record& r, const uint8_t* record, int64_t peers, int64_t step, int64_t i) {
    constexpr bool QUANTIZED = CODE == INT8 || CODE == INT4;
    Group total = dequantize_group<CODE>(r, record, i, QUANTIZED ? read_scale(r, record, i) : 0.0f);
    for (int64_t p = 1; p < peers; ++p) {
        record += step;
        Group next = dequantize_group<CODE>(r, record, i, QUANTIZED ? read_scale(r, record, i) : 0.0f);
        total = {total.low + next.low, total.high + next.high};
    }
    return total;
}

// ---- Writing records

void draw(const zpp_noise& noise, int64_t k, int64_t i, float u[GROUP]) {
    uint64_t first = k * noise.pitch + noise.offset + i;
    for (int j = 0; j < GROUP / 4; ++j) {
        zpp_u32 words[4];
        philox(first / 4 + j, noise.stream, noise.seed, words);
        for (int w = 0; w < 4; ++w) u[4 * j + w] = uniform_of(words[w]);
    }
}

template <int CODE> void quantize_block(
    const Group* groups, int64_t n, float inverse, const zpp_format& f, const zpp_noise& noise, int64_t k, int64_t i,
    uint8_t* payload) {
    if (inverse == 0.0f) {
        std::memset(payload + (CODE == INT8 ? i : i / 2), 0, n * (CODE == INT8 ? GROUP : GROUP / 2));
    } else if (f.stochastic) {
        for (int64_t g = 0; g < n; ++g) {
            float u[GROUP];
            draw(noise, k, i + g * GROUP, u);
            vf low = groups[g].low * inverse + load<vf>(u), high = groups[g].high * inverse + load<vf>(u + 16);
            write_levels<CODE>(payload, i + g * GROUP, round_down(clamp_level(low, CODE)), round_down(clamp_level(high, CODE)));
        }
    } else {
        for (int64_t g = 0; g < n; ++g) {
            vf low = groups[g].low * inverse, high = groups[g].high * inverse;
            if constexpr (CODE == INT4) {  // |t| < 127.5 and t > -8.5 hold already: the scale is the largest value's
                low = at_most(low, 7.0f);
                high = at_most(high, 7.0f);
            }
            write_levels<CODE>(payload, i + g * GROUP, round_nearest(low), round_nearest(high));
        }
    }
}

// Write values [start, stop) of a record. `source(i)` gives the values of group i in the record's domain.
template <int CODE, class Source> ZPP_FN void write_blocks(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t start, int64_t stop, uint8_t* record, Source source) {
    Group groups[MAX_BLOCK / GROUP];
    for (int64_t i = start; i < stop; i += r.format.block) {
        int64_t n = (smaller(r.format.block, stop - i) + GROUP - 1) / GROUP;
        vu key = {};
        for (int64_t g = 0; g < n; ++g) {
            Group values = source(i + g * GROUP);
            groups[g] = values;
            vu low = bits_of(values.low), high = bits_of(values.high);
            if constexpr (CODE == INT8) {  // the sign does not matter
                low = low << 1;
                high = high << 1;
            } else {
                low = magnitude_key(low);
                high = magnitude_key(high);
            }
            low = low > high ? low : high;
            key = low > key ? low : key;
        }
        Scale scale = block_scale(highest(key), CODE, r.format.scale_type);
        quantize_block<CODE>(groups, n, scale.inverse, r.format, noise, k, i, record);
        uint8_t* scales = record + r.payload_nbytes;
        int64_t block = i / r.format.block;
        if (r.format.scale_type == SCALE_FLOAT32) store(scales + 4 * block, scale.decoded);
        else store(scales + 2 * block, (uint16_t)(bits_of(scale.decoded) >> 16));
    }
}

template <class Source> ZPP_FN void write_record(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t start, int64_t stop, uint8_t* record, Source source) {
    switch (r.format.code) {
        case INT8: return write_blocks<INT8>(r, noise, k, start, stop, record, source);
        case INT4: return write_blocks<INT4>(r, noise, k, start, stop, record, source);
        case FLOAT32:
            for (int64_t i = start; i < stop; i += GROUP) write_group<FLOAT32>(record, i, r.numel - i, source(i));
            return;
        case BFLOAT16:
            for (int64_t i = start; i < stop; i += GROUP) write_group<BFLOAT16>(record, i, r.numel - i, source(i));
            return;
        case FLOAT16:
            for (int64_t i = start; i < stop; i += GROUP) write_group<FLOAT16>(record, i, r.numel - i, source(i));
            return;
    }
}

// ---- The four functions

template <int TYPE> void encode_type(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    const uint8_t* src = e.src + k * e.stride * Values<TYPE>::SIZE;
    uint8_t* record = e.out + transposed(k, e.rows, e.count / e.rows) * e.record.nbytes;
    int64_t numel = e.record.numel;
    if (e.record.format.rotate)
        write_record(e.record, e.noise, k, start, stop, record,
                     [=](int64_t i) __attribute__((always_inline)) { return rotate(read_group<TYPE>(src, i, numel - i)); });
    else
        write_record(e.record, e.noise, k, start, stop, record,
                     [=](int64_t i) __attribute__((always_inline)) { return read_group<TYPE>(src, i, numel - i); });
}

void encode(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    switch (e.type) {
        case FLOAT32: return encode_type<FLOAT32>(e, k, start, stop);
        case BFLOAT16: return encode_type<BFLOAT16>(e, k, start, stop);
        case FLOAT16: return encode_type<FLOAT16>(e, k, start, stop);
    }
}

template <int CODE, int TYPE> void decode_values(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    const Record& r = d.record;
    const uint8_t* record = d.records + transposed(k, d.rows, d.count / d.rows) * r.nbytes;
    uint8_t* out = d.out + k * d.stride * Values<TYPE>::SIZE;
    constexpr bool QUANTIZED = CODE == INT8 || CODE == INT4;
    int64_t block = QUANTIZED ? r.format.block : MAX_BLOCK;
    for (int64_t first = start; first < stop; first += block) {
        float scale = QUANTIZED ? read_scale(r, record, first) : 0.0f;
        int64_t last = smaller(first + block, stop);
        if (r.format.rotate)
            for (int64_t i = first; i < last; i += GROUP)
                write_group<TYPE>(out, i, r.numel - i, unrotate(dequantize_group<CODE>(r, record, i, scale)));
        else
            for (int64_t i = first; i < last; i += GROUP)
                write_group<TYPE>(out, i, r.numel - i, dequantize_group<CODE>(r, record, i, scale));
    }
}

template <int CODE, int TYPE> void reduce_values(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    const Record& r = d.record;
    const uint8_t* record = d.records + k * r.nbytes;
    uint8_t* out = d.out + k * d.stride * Values<TYPE>::SIZE;
    int64_t step = d.count * r.nbytes;
    for (int64_t i = start; i < stop; i += GROUP) {
        Group total = sum_group<CODE>(r, record, d.peers, step, i);
        if (r.format.rotate) total = unrotate(total);
        write_group<TYPE>(out, i, r.numel - i, {total.low * d.factor, total.high * d.factor});
    }
}

template <int CODE> void decode_code(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    switch (d.type) {
        case FLOAT32: return decode_values<CODE, FLOAT32>(d, k, start, stop);
        case BFLOAT16: return decode_values<CODE, BFLOAT16>(d, k, start, stop);
        case FLOAT16: return decode_values<CODE, FLOAT16>(d, k, start, stop);
    }
}

template <int CODE> void reduce_code(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    switch (d.type) {
        case FLOAT32: return reduce_values<CODE, FLOAT32>(d, k, start, stop);
        case BFLOAT16: return reduce_values<CODE, BFLOAT16>(d, k, start, stop);
        case FLOAT16: return reduce_values<CODE, FLOAT16>(d, k, start, stop);
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

void decode_reduce(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    switch (d.record.format.code) {
        case FLOAT32: return reduce_code<FLOAT32>(d, k, start, stop);
        case BFLOAT16: return reduce_code<BFLOAT16>(d, k, start, stop);
        case FLOAT16: return reduce_code<FLOAT16>(d, k, start, stop);
        case INT8: return reduce_code<INT8>(d, k, start, stop);
        case INT4: return reduce_code<INT4>(d, k, start, stop);
    }
}

// A group that ends past the record's values: what an inverse rotation put there is no value.
ZPP_FN Group cut(Group g, int64_t left) {
    if (__builtin_expect(left >= GROUP, 1)) return g;
    float values[GROUP];
    store(values, g);
    for (int64_t i = left; i < GROUP; ++i) values[i] = 0.0f;
    return load<Group>(values);
}

template <int CODE> void convert(const DecodeEncode& c, int64_t k, int64_t start, int64_t stop) {
    const Record& r = c.in;
    const uint8_t* record = c.records + k * r.nbytes;
    uint8_t* out = c.out + k * c.out_record.nbytes;
    int64_t peers = c.peers, step = c.count * r.nbytes;
    bool undo = r.format.rotate && !c.out_record.format.rotate, redo = c.out_record.format.rotate && !r.format.rotate;
    if (undo)
        write_record(c.out_record, c.noise, k, start, stop, out, [&](int64_t i) __attribute__((always_inline)) {
            return cut(unrotate(sum_group<CODE>(r, record, peers, step, i)), r.numel - i);
        });
    else if (redo)
        write_record(c.out_record, c.noise, k, start, stop, out, [&](int64_t i) __attribute__((always_inline)) {
            return rotate(cut(sum_group<CODE>(r, record, peers, step, i), r.numel - i));
        });
    else
        write_record(c.out_record, c.noise, k, start, stop, out, [&](int64_t i) __attribute__((always_inline)) {
            return sum_group<CODE>(r, record, peers, step, i);
        });
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
const Kernels table = {encode, decode, decode_reduce, decode_reduce_encode};

}  // namespace ZPP_ISA
}  // namespace zpp
