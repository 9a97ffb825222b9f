// Where values that are written come from: rows of a tensor, or sums of the peers' records.
#pragma once

#include <vector>

#include "host.h"
#include "host_vector.h"

namespace zpp {
namespace ZPP_ISA {
namespace {

ZPP_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr bool quantized(int code) { return code == INT8 || code == INT4; }

// A source is read a stretch at a time: move_to(i), then the stretch's whole groups one by one. The values
// behind the last one of a short group are zero.

// A row of values in memory, rotated where the format says so.
template <int TYPE, bool ROTATE> class Row {
   public:
    Row(const uint8_t* values, int64_t numel) : values_(values), numel_(numel) {}

    // The end of the stretch that starts at value i; plain() tells whether all of it is, see is_plain.
    ZPP_FN int64_t move_to(int64_t, int64_t limit) { return limit; }
    ZPP_FN bool plain() const { return false; }
    ZPP_FN int64_t peers() const { return 0; }
    ZPP_FN int64_t numel() const { return numel_; }
    template <bool PLAIN, int PEERS> ZPP_FN Group group(int64_t i) const {
        return finish({Values<TYPE>::read(values_ + i * SIZE), Values<TYPE>::read(values_ + (i + GROUP / 2) * SIZE)});
    }
    ZPP_FN Group short_group(int64_t i) const { return finish(read_group<TYPE>(values_, i, numel_ - i)); }

   private:
    static constexpr int SIZE = Values<TYPE>::SIZE;
    ZPP_FN Group finish(Group g) const { return ROTATE ? rotate(g) : g; }
    const uint8_t* values_;
    int64_t numel_;
};

// A row of values in several parts of memory, rotated where the format says so. `base` counts the values of
// the chunks before. A stretch lies in one part, or is one group put together here.
template <int TYPE, bool ROTATE> class PartedRow {
   public:
    PartedRow(const zpp_part* parts, int64_t part_count, int64_t base, int64_t numel)
        : part_(parts), end_(parts + part_count), base_(base), numel_(numel), row_(nullptr, numel) {}

    ZPP_FN int64_t move_to(int64_t i, int64_t limit) {
        while (part_ < end_ && part_->stop <= base_ + i) ++part_;
        if (part_ < end_ && part_->start <= base_ + i) {
            int64_t whole = (smaller(part_->stop - base_, limit) - i) / GROUP * GROUP;
            row_ = Row<TYPE, ROTATE>(part_->data + (base_ - part_->start) * SIZE, numel_);
            if (whole) return i + whole;
        }
        int64_t stop = smaller(i + GROUP, limit);
        copy_parts(part_, end_ - part_, base_ + i, base_ + stop, SIZE, group_);
        row_ = Row<TYPE, ROTATE>(group_ - i * SIZE, numel_);
        return stop;
    }
    ZPP_FN bool plain() const { return false; }
    ZPP_FN int64_t peers() const { return 0; }
    ZPP_FN int64_t numel() const { return numel_; }
    template <bool PLAIN, int PEERS> ZPP_FN Group group(int64_t i) const {
        return row_.template group<PLAIN, PEERS>(i);
    }
    ZPP_FN Group short_group(int64_t i) const { return row_.short_group(i); }

   private:
    static constexpr int SIZE = Values<TYPE>::SIZE;
    const zpp_part *part_, *end_;
    int64_t base_, numel_;
    uint8_t group_[GROUP * SIZE];
    Row<TYPE, ROTATE> row_;
};

// The sum of the records that stand `offset` bytes into each peer's, in order, in the format's own domain. A stretch is what
// shares a scale. In plain stretches the values come out times `unit`, a power of two.
template <int CODE> class Sum {
   public:
    Sum(const Record& record, const uint8_t* const* records, int64_t peers, int64_t offset, float unit = 1.0f)
        : record_(record), records_(records, records + peers), peers_(peers), unit_(unit), scales_(2 * peers) {
        for (auto& start : records_) start += offset;
    }

    ZPP_FN int64_t move_to(int64_t i, int64_t limit) {
        if (!quantized(CODE)) return limit;
        int64_t block = i >> record_.block_shift;
        if (block != block_) read_scales(block_ = block);
        return smaller(limit, (block + 1) << record_.block_shift);
    }
    ZPP_FN bool plain() const { return plain_; }
    ZPP_FN int64_t peers() const { return peers_; }

    // PEERS: how many there are, where that is known when the loop over groups is compiled.
    template <bool PLAIN, int PEERS = 0> ZPP_FN Group group(int64_t i) const {
        const float* scales = scales_.data() + (PLAIN ? 0 : peers_);
        Group sum = value<PLAIN>(records_[0], i, scales[0]);
        for (int64_t p = 1; p < (PEERS ? PEERS : peers_); ++p) {
            const uint8_t* record = records_[p];
            if constexpr (PLAIN && quantized(CODE)) {
                Group q = read_levels<CODE>(record, i);
                sum = {plus_exact_product(sum.low, q.low, scales[p]), plus_exact_product(sum.high, q.high, scales[p])};
            } else {
                Group next = value<false>(record, i, scales[p]);
                sum = {finite_sum(sum.low, next.low), finite_sum(sum.high, next.high)};
            }
        }
        return sum;
    }

   private:
    template <bool PLAIN> ZPP_FN Group value(const uint8_t* record, int64_t i, float scale) const {
        if constexpr (quantized(CODE)) {
            Group q = read_levels<CODE>(record, i);
            if constexpr (PLAIN) return {q.low * scale, q.high * scale};
            return {dequantized(q.low, scale), dequantized(q.high, scale)};
        } else {
            return read_group<CODE>(record, i, record_.numel - i);
        }
    }

    void read_scales(int64_t block) {
        plain_ = true;
        for (int64_t p = 0; p < peers_; ++p) {
            const uint8_t* stored = records_[p] + record_.payload_nbytes;
            float scale = record_.format.scale_type == SCALE_FLOAT32
                              ? load<float>(stored + 4 * block)
                              : float_of((zpp_u32)load<uint16_t>(stored + 2 * block) << 16);
            plain_ &= is_plain(scale);
            scales_[p] = scale * unit_;
            scales_[peers_ + p] = scale;
        }
    }

    const Record& record_;
    std::vector<const uint8_t*> records_;  // of each peer
    int64_t peers_, block_ = -1;
    float unit_;
    std::vector<float> scales_;  // of each peer: times the unit, then as they are
    bool plain_ = false;
};

enum class Turn { NONE, ROTATE, UNROTATE };

// The sum, turned into another domain than the records have.
template <int CODE, Turn TURN> class TurnedSum {
   public:
    TurnedSum(const Record& record, const uint8_t* const* records, int64_t peers, int64_t offset)
        : sum_(record, records, peers, offset, TURN == Turn::ROTATE ? 1.0f / GROUP : 1.0f),
          // Every value of a rotated group counts, also where the group is short.
          numel_(TURN == Turn::NONE && record.format.rotate ? INT64_MAX : record.numel) {}

    ZPP_FN int64_t move_to(int64_t i, int64_t limit) { return sum_.move_to(i, limit); }
    ZPP_FN bool plain() const { return sum_.plain(); }
    ZPP_FN int64_t peers() const { return sum_.peers(); }
    ZPP_FN int64_t numel() const { return numel_; }

    // Powers of two move freely through a plain stretch: 32 H(y / 32) = H y, and H(x / 32) has its unit already.
    template <bool PLAIN, int PEERS> ZPP_FN Group group(int64_t i) const {
        Group g = sum_.template group<PLAIN, PEERS>(i);
        if (TURN == Turn::NONE) return g;
        if (PLAIN) return hadamard(g);
        return TURN == Turn::ROTATE ? rotate(g) : unrotate(g);
    }
    __attribute__((noinline)) Group short_group(int64_t i) const {
        Group g = sum_.template group<false, 0>(i);
        if (TURN == Turn::UNROTATE) g = unrotate(g);
        g = first_of(g, numel_ - i);
        return TURN == Turn::ROTATE ? rotate(g) : g;
    }

   private:
    Sum<CODE> sum_;
    int64_t numel_;
};

}  // namespace
}  // namespace ZPP_ISA
}  // namespace zpp
