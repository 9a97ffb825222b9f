// The C interface of the host kernels: picks the instruction set, cuts the work over threads, copies what is
// verbatim. The numerics stand in host_kernels.cpp and cuda/numerics.cuh.
#include <thread>
#include <vector>

#include "host.h"
#include "numerics.cuh"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zpp {

namespace baseline { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

namespace {

constexpr int64_t PIECE = 1 << 16;  // values of one piece of work: a multiple of every block
constexpr int64_t LEAST_PER_THREAD = 2;  // pieces; below that starting a thread costs more than it saves

const Kernels& kernels_of(int level) {
#if defined(__x86_64__)
    if (level == 2) return avx512::table;
    if (level == 1) return avx2::table;
#endif
    (void)level;
    return baseline::table;
}

// Results must not depend on the caller's floating-point mode (flush to zero, rounding direction).
class DefaultFloatingPoint {
   public:
#if defined(__x86_64__)
    DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

   private:
    unsigned saved_;
#endif
};

// Run piece(k, start, stop) for every piece of `count` chunks of `numel` values. Pieces are independent, so
// the result does not depend on the number of threads.
template <class Piece> void for_pieces(int64_t count, int64_t numel, int threads, Piece piece) {
    int64_t per_chunk = std::max<int64_t>(1, (numel + PIECE - 1) / PIECE), total = count * per_chunk;
    auto work = [=](int64_t first, int64_t last) {
        DefaultFloatingPoint mode;
        for (int64_t i = first; i < last; ++i) {
            int64_t start = (i % per_chunk) * PIECE;
            piece(i / per_chunk, start, std::min(start + PIECE, numel));
        }
    };
    int64_t useful = std::max<int64_t>(1, std::min<int64_t>(threads, total / LEAST_PER_THREAD));
    std::vector<std::thread> others;
    for (int64_t t = 1; t < useful; ++t) others.emplace_back(work, total * t / useful, total * (t + 1) / useful);
    work(0, total / useful);
    for (auto& other : others) other.join();
}

int size_of(int type) { return type == FLOAT32 ? 4 : type == BYTE ? 1 : 2; }

bool quantized(const zpp_format& f) { return f.code == INT8 || f.code == INT4; }

Record record_of(const zpp_format& f, int64_t numel) {
    auto up = [](int64_t x) { return (x + 15) / 16 * 16; };
    int64_t groups = (numel + GROUP - 1) / GROUP;
    int shift = __builtin_ctzll(f.block);
    if (!quantized(f)) return {f, numel, up(numel * size_of(f.code)), up(numel * size_of(f.code)), shift};
    int64_t payload = groups * (f.code == INT8 ? GROUP : GROUP / 2);
    int64_t blocks = (numel + f.block - 1) / f.block;
    return {f, numel, payload, payload + up(blocks * (f.scale_type == SCALE_FLOAT32 ? 4 : 2)), shift};
}

// The bytes of a record that hold nothing are zero.
void clear_padding(const Record& r, uint8_t* record) {
    int64_t used = r.numel * size_of(r.format.code);
    if (quantized(r.format)) {
        int64_t blocks = (r.numel + r.format.block - 1) / r.format.block;
        used = r.payload_nbytes + blocks * (r.format.scale_type == SCALE_FLOAT32 ? 4 : 2);
    }
    std::memset(record + used, 0, r.nbytes - used);
}

int64_t transposed(int64_t k, int64_t rows, int64_t columns) { return (k % columns) * rows + k / columns; }

}  // namespace
}  // namespace zpp

using namespace zpp;

extern "C" {

// The best instruction set here: 0 baseline, 1 AVX2, 2 AVX-512.
int zpp_best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512) return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

int64_t zpp_record_nbytes(const zpp_format* f, int64_t numel) { return record_of(*f, numel).nbytes; }

// Strides are in values. `noise` is read only where the format rounds stochastically.
void zpp_encode(
    int level, int threads, const uint8_t* src, int type, int64_t stride, int64_t count, int64_t numel, int64_t rows,
    const zpp_format* format, const zpp_noise* noise, uint8_t* out) {
    Encode e{src, type, stride, count, rows, record_of(*format, numel), *noise, out};
    const Kernels& kernels = kernels_of(level);
    int64_t size = size_of(type);
    for (int64_t k = 0; k < count; ++k) clear_padding(e.record, out + k * e.record.nbytes);
    bool verbatim = format->code == type;
    for_pieces(count, numel, threads, [&](int64_t k, int64_t start, int64_t stop) {
        if (!verbatim) return kernels.encode(e, k, start, stop);
        uint8_t* record = out + transposed(k, rows, count / rows) * e.record.nbytes;
        std::memcpy(record + start * size, src + (k * stride + start) * size, (stop - start) * size);
    });
}

// Values in several parts of memory, in order, in place of the tensor.
void zpp_encode_parts(
    int level, int threads, const zpp_part* parts, int64_t part_count, int type, int64_t count, int64_t numel,
    int64_t rows, const zpp_format* format, const zpp_noise* noise, uint8_t* out) {
    EncodeParts e{parts, part_count, type, count, rows, record_of(*format, numel), *noise, out};
    const Kernels& kernels = kernels_of(level);
    int64_t size = size_of(type);
    bool verbatim = format->code == type;
    for (int64_t k = 0; k < count; ++k) clear_padding(e.record, out + k * e.record.nbytes);
    for_pieces(count, numel, threads, [&](int64_t k, int64_t start, int64_t stop) {
        if (!verbatim) return kernels.encode_parts(e, k, start, stop);
        uint8_t* record = out + transposed(k, rows, count / rows) * e.record.nbytes;
        copy_parts(parts, part_count, k * numel + start, k * numel + stop, size, record + start * size);
    });
}

void zpp_decode(
    int level, int threads, const uint8_t* records, const zpp_format* format, int64_t count, int64_t numel, int64_t rows,
    uint8_t* out, int type, int64_t stride) {
    Decode d{&records, 1, count, rows, record_of(*format, numel), 1.0f, out, type, stride};
    const Kernels& kernels = kernels_of(level);
    int64_t size = size_of(type);
    bool verbatim = format->code == type;
    for_pieces(count, numel, threads, [&](int64_t k, int64_t start, int64_t stop) {
        if (!verbatim) return kernels.decode(d, k, start, stop);
        const uint8_t* record = records + transposed(k, rows, count / rows) * d.record.nbytes;
        std::memcpy(out + (k * stride + start) * size, record + start * size, (stop - start) * size);
    });
}

void zpp_decode_reduce(
    int level, int threads, const uint8_t* const* records, const zpp_format* format, int64_t peers, int64_t count,
    int64_t numel, float factor, uint8_t* out, int type, int64_t stride) {
    Decode d{records, peers, count, 1, record_of(*format, numel), factor, out, type, stride};
    const Kernels& kernels = kernels_of(level);
    for_pieces(count, numel, threads,
               [&](int64_t k, int64_t start, int64_t stop) { kernels.decode(d, k, start, stop); });
}

void zpp_decode_reduce_encode(
    int level, int threads, const uint8_t* const* records, const zpp_format* in, int64_t peers, int64_t count,
    int64_t numel, const zpp_format* out_format, const zpp_noise* noise, uint8_t* out) {
    DecodeEncode c{records, peers, count, record_of(*in, numel), record_of(*out_format, numel), *noise, out};
    const Kernels& kernels = kernels_of(level);
    for (int64_t k = 0; k < count; ++k) clear_padding(c.out_record, out + k * c.out_record.nbytes);
    for_pieces(count, numel, threads,
               [&](int64_t k, int64_t start, int64_t stop) { kernels.decode_reduce_encode(c, k, start, stop); });
}

}  // extern "C"
