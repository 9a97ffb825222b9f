"""Sums in a dtype's own arithmetic, for what no format encodes: integers, booleans, complex, float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp.format import BlockFormat, Noise, ValueType
from zpp.kernels import Kernels
from zpp.kernels.operands import Parts


class ExactKernels:
    """Records are plain copies (``Code.BYTE``), made by `copies`; sums run in rank order in `dtype`."""

    def __init__(self, copies: Kernels, dtype: torch.dtype) -> None:
        self._copies, self._dtype = copies, dtype

    def encode(
        self, src: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1, noise: Noise | None = None
    ) -> None:
        self._copies.encode(src, fmt, out, rows=rows, noise=noise)

    def encode_parts(
        self,
        parts: Parts,
        kind: ValueType,
        fmt: BlockFormat,
        out: Tensor,
        numel: int,
        *,
        rows: int = 1,
        noise: Noise | None = None,
    ) -> None:
        self._copies.encode_parts(parts, kind, fmt, out, numel, rows=rows, noise=noise)

    def decode(self, records: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1) -> None:
        self._copies.decode(records, fmt, out, rows=rows)

    def _sum(self, records: Sequence[Tensor], nbytes: int) -> Tensor:
        parts = [part[:, :nbytes].flatten().view(self._dtype).view(part.shape[0], -1) for part in records]
        total: Tensor = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        if not out.numel():
            return
        total = self._sum(records, out.shape[1] * out.element_size())
        out.copy_(total if factor == 1.0 else total * factor)

    def decode_reduce_encode(
        self,
        records: Sequence[Tensor],
        fmt: BlockFormat,
        out_fmt: BlockFormat,
        out: Tensor,
        numel: int,
        *,
        noise: Noise | None = None,
    ) -> None:
        out.zero_()
        if numel:
            out[:, :numel] = self._sum(records, numel).view(torch.uint8)
