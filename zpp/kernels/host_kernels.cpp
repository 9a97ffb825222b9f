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
constexpr int SPAN = 2048;  // values that are worked on at a time: 8 KiB of float32

ZPP_FN int64_t transposed(int64_t k, int64_t rows, int64_t columns) { return (k % columns) * rows + k / columns; }

ZPP_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Reading records

ZPP_FN float read_scale(const Record& r, const uint8_t* record, int64_t i) {
    const uint8_t* scales = record + r.payload_nbytes;
    int64_t block = i >> r.block_shift;
    if (r.format.scale_type == SCALE_FLOAT32) return load<float>(scales + 4 * block);
    return float_of((zpp_u32)load<uint16_t>(scales + 2 * block) << 16);
}

// The values of group i in the format's own domain.
template <int CODE, bool PLAIN> ZPP_FN Group read_record(const Record& r, const uint8_t* record, int64_t i, float scale) {
    if constexpr (CODE == INT8 || CODE == INT4) {
        Group q = read_levels<CODE>(record, i);
        if constexpr (PLAIN) return {q.low * scale, q.high * scale};
        return {dequantized(q.low, scale), dequantized(q.high, scale)};
    } else {
        return read_group<CODE>(record, i, r.numel - i);
    }
}

// Set (FIRST) or raise sums by one or two records' values [start, stop), in order.
template <int CODE, bool PLAIN, bool FIRST, int RECORDS> ZPP_FN void add_groups(
    const Record& r, const uint8_t* record, int64_t step, int64_t start, int64_t stop, const float* scales, Group* sums) {
    for (int64_t i = start; i < stop; i += GROUP, ++sums) {
        Group g = read_record<CODE, PLAIN>(r, record, i, scales[0]);
        if (!FIRST) g = {sums->low + g.low, sums->high + g.high};
        if (RECORDS == 2) {
            Group next = read_record<CODE, PLAIN>(r, record + step, i, scales[1]);
            g = {g.low + next.low, g.high + next.high};
        }
        *sums = g;
    }
}

template <int CODE, bool FIRST, int RECORDS> ZPP_FN bool add_records(
    const Record& r, const uint8_t* record, int64_t step, int64_t start, int64_t stop, Group* sums) {
    constexpr bool QUANTIZED = CODE == INT8 || CODE == INT4;
    bool all_plain = QUANTIZED;
    for (int64_t i = start; i < stop;) {
        int64_t end = QUANTIZED ? smaller(stop, ((i >> r.block_shift) + 1) << r.block_shift) : stop;
        float scales[RECORDS] = {};
        bool plain = QUANTIZED;
        for (int p = 0; QUANTIZED && p < RECORDS; ++p) {
            scales[p] = read_scale(r, record + p * step, i);
            plain &= scales[p] < PLAIN_SCALE && scales[p] > -PLAIN_SCALE;
        }
        Group* to = sums + (i - start) / GROUP;
        if (plain) add_groups<CODE, true, FIRST, RECORDS>(r, record, step, i, end, scales, to);
        else add_groups<CODE, false, FIRST, RECORDS>(r, record, step, i, end, scales, to);
        all_plain &= plain;
        i = end;
    }
    return all_plain;
}

// Sums over `peers` records, `step` bytes apart, in order; at most MAX_BLOCK values. True if all scales are
// plain: then so are the sums.
template <int CODE> bool sum_groups(
    const Record& r, const uint8_t* record, int64_t peers, int64_t step, int64_t start, int64_t stop, Group* sums) {
    bool plain = peers > 1 ? add_records<CODE, true, 2>(r, record, step, start, stop, sums)
                           : add_records<CODE, true, 1>(r, record, step, start, stop, sums);
    for (int64_t p = 2; p < peers; ++p) plain &= add_records<CODE, false, 1>(r, record + p * step, step, start, stop, sums);
    return plain;
}

// ---- Values

template <int TYPE> ZPP_FN void read_values(const uint8_t* src, int64_t first, int64_t last, int64_t numel, Group* to) {
    constexpr int SIZE = Values<TYPE>::SIZE;
    int64_t whole = first + (smaller(last, numel) - first) / GROUP * GROUP;
    for (int64_t i = first; i < whole; i += GROUP)
        *to++ = {Values<TYPE>::read(src + i * SIZE), Values<TYPE>::read(src + (i + 16) * SIZE)};
    if (whole < last) *to = read_group<TYPE>(src, whole, numel - whole);
}

template <int TYPE, bool PLAIN> ZPP_FN void write_values(
    uint8_t* out, int64_t first, int64_t last, int64_t numel, const Group* groups) {
    for (int64_t i = first; i < last; i += GROUP) write_group<TYPE, PLAIN>(out, i, numel - i, *groups++);
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

template <int CODE> __attribute__((noinline)) void quantize_stochastic(
    const Group* groups, int64_t n, float inverse, const zpp_noise& noise, int64_t k, int64_t i, uint8_t* payload) {
    for (int64_t g = 0; g < n; ++g, i += GROUP) {
        float u[GROUP];
        draw(noise, k, i, u);
        vf low = clamp_level(groups[g].low * inverse + load<vf>(u), CODE);
        vf high = clamp_level(groups[g].high * inverse + load<vf>(u + 16), CODE);
        write_levels<CODE>(payload, i, round_down(low), round_down(high));
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

// The key of a block, whose values are rotated on the way if they have to be.
template <int CODE, bool ROTATE> ZPP_FN uint32_t highest_key(Group* groups, int64_t n) {
    vu low = {}, high = {};
    for (int64_t g = 0; g < n; ++g) {
        if (ROTATE) groups[g] = rotate(groups[g]);
        vu a = bits_of(groups[g].low), b = bits_of(groups[g].high);
        a = CODE == INT8 ? a << 1 : magnitude_key(a);  // for int8 the sign does not matter
        b = CODE == INT8 ? b << 1 : magnitude_key(b);
        low = low > a ? low : a;
        high = high > b ? high : b;
    }
    return highest(low > high ? low : high);
}

// Encode the values [first, last) of a record, at most SPAN or one block. The scales of all their blocks are
// computed together: one at a time, each would wait for its own division.
template <int CODE, bool ROTATE> void write_span(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t first, int64_t last, Group* groups, uint8_t* record) {
    constexpr int MOST = SPAN / GROUP;
    alignas(64) uint32_t keys[MOST] = {};
    alignas(64) float scales[MOST], inverses[MOST];
    int64_t block = r.format.block, n = (last - first + block - 1) >> r.block_shift;
    for (int64_t b = 0; b < n; ++b) {
        int64_t start = b * block, stop = smaller(start + block, last - first);
        keys[b] = highest_key<CODE, ROTATE>(groups + start / GROUP, (stop - start + GROUP - 1) / GROUP);
    }
    for (int64_t b = 0; b < n; b += 16) {
        vf scale = block_scale(load<vu>(keys + b), CODE, r.format.scale_type);
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

// Write values [start, stop) of a record. `fill(first, last, groups)` gives those of a span, which are still to
// be rotated if `rotated` says so.
template <class Fill> ZPP_FN void write_record(
    const Record& r, const zpp_noise& noise, int64_t k, int64_t start, int64_t stop, uint8_t* record, bool rotated, Fill fill) {
    Group groups[MAX_BLOCK / GROUP];
    int code = r.format.code;
    int64_t span = r.format.block > SPAN ? r.format.block : SPAN;
    for (int64_t first = start; first < stop; first += span) {
        int64_t last = smaller(first + span, stop);
        fill(first, last, groups);
        if (code == INT8 && rotated) write_span<INT8, true>(r, noise, k, first, last, groups, record);
        else if (code == INT8) write_span<INT8, false>(r, noise, k, first, last, groups, record);
        else if (code == INT4 && rotated) write_span<INT4, true>(r, noise, k, first, last, groups, record);
        else if (code == INT4) write_span<INT4, false>(r, noise, k, first, last, groups, record);
        else if (code == FLOAT32) write_values<FLOAT32, false>(record, first, last, r.numel, groups);
        else if (code == BFLOAT16) write_values<BFLOAT16, false>(record, first, last, r.numel, groups);
        else write_values<FLOAT16, false>(record, first, last, r.numel, groups);
    }
}

// ---- The four functions

template <int TYPE> void encode_type(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    const uint8_t* src = e.src + k * e.stride * Values<TYPE>::SIZE;
    uint8_t* record = e.out + transposed(k, e.rows, e.count / e.rows) * e.record.nbytes;
    int64_t numel = e.record.numel;
    write_record(e.record, e.noise, k, start, stop, record, e.record.format.rotate,
                 [=](int64_t first, int64_t last, Group* to) { read_values<TYPE>(src, first, last, numel, to); });
}

void encode(const Encode& e, int64_t k, int64_t start, int64_t stop) {
    switch (e.type) {
        case FLOAT32: return encode_type<FLOAT32>(e, k, start, stop);
        case BFLOAT16: return encode_type<BFLOAT16>(e, k, start, stop);
        case FLOAT16: return encode_type<FLOAT16>(e, k, start, stop);
    }
}

template <int CODE, int TYPE, bool PLAIN> ZPP_FN void decode_block(
    const Record& r, const uint8_t* record, int64_t first, int64_t last, float scale, uint8_t* out) {
    if (r.format.rotate)
        for (int64_t i = first; i < last; i += GROUP)
            write_group<TYPE, PLAIN>(out, i, r.numel - i, unrotate<PLAIN>(read_record<CODE, PLAIN>(r, record, i, scale)));
    else
        for (int64_t i = first; i < last; i += GROUP)
            write_group<TYPE, PLAIN>(out, i, r.numel - i, read_record<CODE, PLAIN>(r, record, i, scale));
}

template <int CODE, int TYPE> void decode_values(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    const Record& r = d.record;
    const uint8_t* record = d.records + transposed(k, d.rows, d.count / d.rows) * r.nbytes;
    uint8_t* out = d.out + k * d.stride * Values<TYPE>::SIZE;
    constexpr bool QUANTIZED = CODE == INT8 || CODE == INT4;
    int64_t block = QUANTIZED ? r.format.block : MAX_BLOCK;
    for (int64_t first = start; first < stop; first += block) {
        int64_t last = smaller(first + block, stop);
        float scale = QUANTIZED ? read_scale(r, record, first) : 0.0f;
        if (QUANTIZED && scale < PLAIN_SCALE && scale > -PLAIN_SCALE)
            decode_block<CODE, TYPE, true>(r, record, first, last, scale, out);
        else
            decode_block<CODE, TYPE, false>(r, record, first, last, scale, out);
    }
}

template <int TYPE, bool PLAIN> ZPP_FN void finish_sums(
    bool rotated, float factor, uint8_t* out, int64_t first, int64_t last, int64_t numel, const Group* sums) {
    for (int64_t i = first; i < last; i += GROUP) {
        Group g = *sums++;
        if (rotated) g = unrotate<PLAIN>(g);
        write_group<TYPE, PLAIN>(out, i, numel - i, {g.low * factor, g.high * factor});
    }
}

template <int CODE, int TYPE> void reduce_values(const Decode& d, int64_t k, int64_t start, int64_t stop) {
    const Record& r = d.record;
    const uint8_t* record = d.records + k * r.nbytes;
    uint8_t* out = d.out + k * d.stride * Values<TYPE>::SIZE;
    bool small = d.factor <= 1.0f && d.factor >= -1.0f;
    Group sums[SPAN / GROUP];
    for (int64_t first = start; first < stop; first += SPAN) {
        int64_t last = smaller(first + SPAN, stop);
        if (sum_groups<CODE>(r, record, d.peers, d.count * r.nbytes, first, last, sums) && small)
            finish_sums<TYPE, true>(r.format.rotate, d.factor, out, first, last, r.numel, sums);
        else
            finish_sums<TYPE, false>(r.format.rotate, d.factor, out, first, last, r.numel, sums);
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

// What an inverse rotation put behind the record's last value is no value.
ZPP_FN void cut(Group* groups, int64_t first, int64_t last) {
    float* values = reinterpret_cast<float*>(groups);
    for (int64_t i = last - first; i % GROUP; ++i) values[i] = 0.0f;
}

template <int CODE> void convert(const DecodeEncode& c, int64_t k, int64_t start, int64_t stop) {
    const Record& r = c.in;
    const uint8_t* record = c.records + k * r.nbytes;
    uint8_t* out = c.out + k * c.out_record.nbytes;
    bool undo = r.format.rotate && !c.out_record.format.rotate, redo = c.out_record.format.rotate && !r.format.rotate;
    write_record(c.out_record, c.noise, k, start, stop, out, redo, [=, &r, &c](int64_t first, int64_t last, Group* sums) {
        sum_groups<CODE>(r, record, c.peers, c.count * r.nbytes, first, last, sums);
        int64_t n = (last - first + GROUP - 1) / GROUP;
        if (undo)
            for (int64_t g = 0; g < n; ++g) sums[g] = unrotate<false>(sums[g]);
        if (undo || redo) cut(sums, first, last);
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
