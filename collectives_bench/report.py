"""From the ranks' measurements to one row per system: JSON lines and a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import fmean, median

from collectives_bench.case import Case, RankResult

LOSS_STEPS = 10  # the last loss is a mean over this many steps: one batch says little
COMPUTE_DTYPE_BYTES = 2


@dataclass(frozen=True)
class Row:
    """One system's figures; the fields are the keys of the JSON lines.

    `cross_node_M` is in units of M, the parameters in the 16-bit compute dtype.
    """

    system: str
    step_ms_median: float
    cross_node_bytes_per_step: float | None
    cross_node_M: float | None  # noqa: N815 - M is the unit
    loss_first: float
    loss_last: float
    params: int
    nodes: int
    ranks_per_node: int
    link: str
    batch: int
    steps: int
    peak_rss_bytes: int
    torch: str

    def json_line(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(asdict(self))


def summarise(case: Case, results: list[RankResult], link: str) -> Row:
    """A step takes as long as its slowest rank, a node sends what its ranks send, the busiest node counts."""
    step_ms = [max(times) for times in zip(*(result.step_ms for result in results), strict=True)]
    losses = [fmean(values) for values in zip(*(result.losses for result in results), strict=True)]
    params = results[0].params
    bytes_per_step = _busiest_node_bytes(case, results)
    return Row(
        system=case.system,
        step_ms_median=median(step_ms),
        cross_node_bytes_per_step=bytes_per_step,
        cross_node_M=None if bytes_per_step is None else bytes_per_step / (params * COMPUTE_DTYPE_BYTES),
        loss_first=losses[0],
        loss_last=fmean(losses[-LOSS_STEPS:]),
        params=params,
        nodes=case.nodes,
        ranks_per_node=case.ranks_per_node,
        link=link,
        batch=case.batch,
        steps=case.steps,
        peak_rss_bytes=max(result.peak_rss_bytes for result in results),
        torch=results[0].torch,
    )


def _busiest_node_bytes(case: Case, results: list[RankResult]) -> float | None:
    sent = [result.cross_node_bytes for result in results]
    known = [value for value in sent if value is not None]
    if len(known) < len(sent):
        return None
    local = case.ranks_per_node
    return max(sum(known[node * local : (node + 1) * local]) for node in range(case.nodes)) / case.steps


_HEADER = (
    "system",
    "step ms",
    "/ zero3",
    "cross-node bytes",
    "in M",
    "/ zero3",
    "first loss",
    "last loss",
    "peak MiB",
)


def table(rows: list[Row]) -> str:
    """The rows in columns: step time and bytes are followed by their ratio to zero3's, where it ran."""
    base = next((row for row in rows if row.system == "zero3"), None)
    base_ms = None if base is None else base.step_ms_median
    base_bytes = None if base is None else base.cross_node_bytes_per_step
    cells = [_HEADER]
    for row in rows:
        sent, sent_m = row.cross_node_bytes_per_step, row.cross_node_M
        cells.append(
            (
                row.system,
                f"{row.step_ms_median:.1f}",
                _ratio(row.step_ms_median, base_ms),
                "-" if sent is None else f"{sent:,.0f}",
                "-" if sent_m is None else f"{sent_m:.3f}",
                _ratio(sent, base_bytes),
                f"{row.loss_first:.3f}",
                f"{row.loss_last:.3f}",
                f"{row.peak_rss_bytes / 2**20:.0f}",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.3f}"
