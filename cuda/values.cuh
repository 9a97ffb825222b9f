// The end of a decoding: a group leaves the format's domain and is written as values of a tensor.
#pragma once

#include "record.cuh"

namespace zpp {

template <int TYPE, bool ROTATE, bool PLAIN> ZPP_FN Words<group_nbytes(TYPE)> finished(Group g, float factor) {
    if (ROTATE) unrotate<PLAIN>(g);
    for_each(g, [=](float x) { return PLAIN ? x * factor : finite_product(x, factor); });
    return words_of<TYPE, PLAIN>(g);
}

// Each value times `factor`; at most 1, it leaves plain values far from the limits.
template <int TYPE, bool ROTATE, class View, int SPACE> ZPP_FN void write_values(
    const Group& g, bool plain, float factor, const View& out, const Place& place, i64 numel, Stage<SPACE>& stage) {
    bool small = factor <= 1.0f && factor >= -1.0f;
    auto words = plain && small ? finished<TYPE, ROTATE, true>(g, factor) : finished<TYPE, ROTATE, false>(g, factor);
    store_values<TYPE>(words, out, place.chunk, place.start, numel, stage);
}

}  // namespace zpp
