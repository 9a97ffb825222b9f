"""Wrong input and disagreeing ranks: a clear error, before anything is sent, and nobody hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zpp
from zpp.format import BlockFormat, Code, Formats
from zpp.transport.inprocess import InProcessTransport, run


def test_wrong_arguments_name_the_numbers_and_leave_the_communicator_usable() -> None:
    def body(transport: InProcessTransport) -> torch.Tensor:
        zp = zpp.Communicator(transport=transport, threads=1, formats=Formats.exact())
        shard, full = torch.zeros(10), torch.ones(40)
        with pytest.raises(ValueError, match=r"output has 41 values and input 10: .* 4 \(ranks\) \* 10 = 40"):
            zp.all_gather(torch.ones(41), shard)
        with pytest.raises(ValueError, match=r"input has 44 values and output 10"):
            zp.reduce_scatter(shard, torch.ones(44))
        with pytest.raises(ValueError, match="not contiguous"):
            zp.reduce_scatter(shard, torch.ones(40, 2)[:, 0])
        with pytest.raises(ValueError, match="not contiguous"):
            zp.all_gather(torch.ones(40, 2)[:, 0], shard)
        with pytest.raises(TypeError, match=r"float32 and input is torch.float64"):
            zp.reduce_scatter(shard, full.double())
        with pytest.raises(ValueError, match="is on meta"):
            zp.all_gather(full.to("meta"), shard)
        for parts, match in [
            ([(0, full[:9]), (8, full[:9])], "part of input at 8 has 9 values: .* between 9, .* and 40, the"),
            (
                [(32, full[:9])],
                "part of input at 32 has 9 values: .* between 0, .* and 40, the length of input",
            ),
            ([(3, torch.ones(4, 2)[:, 0])], "part of input at 3 .* is not contiguous"),
        ]:
            with pytest.raises(ValueError, match=match):
                zp.reduce_scatter(shard, zpp.PartedTensor(40, torch.float32, parts))
        with pytest.raises(TypeError, match="part of input at 3 is torch.float64, not torch.float32"):
            zp.reduce_scatter(shard, zpp.PartedTensor(40, torch.float32, [(3, torch.ones(4).double())]))
        with pytest.raises(ValueError, match="input has 41 values and output 10"):
            zp.reduce_scatter(shard, zpp.PartedTensor(41, torch.float32, []))
        with pytest.raises(TypeError, match="only dense"):
            zp.all_reduce(torch.ones(4).to_sparse())
        with pytest.raises(TypeError, match="must be a torch.Tensor, not list"):
            zp.all_reduce([1.0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="SUM or ReduceOp.AVG"):
            zp.reduce_scatter(shard, full, op=dist.ReduceOp.MAX)
        with pytest.raises(TypeError, match="int64 can be summed, not multiplied by 0.25"):
            zp.reduce_scatter(shard.long(), full.long())
        zp.reduce_scatter(shard, full)
        return shard

    for got in run(4, 2, body):
        assert torch.equal(got, torch.ones(10))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"formats": Formats.zeropp()}, "rank 2: zpp .*INT4"),
        ({"span": 4096}, "rank 2: zpp .*span 4096"),
        ({"seed": 5}, "rank 2: zpp .*seed 5"),
    ],
)
def test_communicators_of_other_settings_are_refused_on_every_rank(
    change: dict[str, Any], match: str
) -> None:
    def body(transport: InProcessTransport) -> None:
        mine = change if transport.topology.rank == 2 else {}
        with pytest.raises(zpp.MismatchError, match=match):
            zpp.Communicator(transport=transport, threads=1, **mine)

    run(4, 2, body)


@pytest.mark.parametrize("what", ["size", "dtype", "format", "operation", "op"])
def test_calls_that_differ_are_refused_on_every_rank(what: str) -> None:
    def body(transport: InProcessTransport) -> None:
        zp = zpp.Communicator(transport=transport, threads=1)
        odd = transport.topology.rank == 1
        n = 11 if odd and what == "size" else 10
        dtype = torch.bfloat16 if odd and what == "dtype" else torch.float32
        fmt = BlockFormat(Code.INT4, block=64) if odd and what == "format" else None
        op = dist.ReduceOp.SUM if odd and what == "op" else dist.ReduceOp.AVG

        def call() -> None:
            if what == "op" or (what == "operation" and odd):
                zp.reduce_scatter(torch.ones(n), torch.ones(4 * n), op=op)
            else:
                zp.all_gather(torch.ones(4 * n, dtype=dtype), torch.ones(n, dtype=dtype), fmt=fmt)

        with pytest.raises(zpp.MismatchError, match="ranks disagree. 3 of 4 ranks: .*rank 1: "):
            call()

    run(4, 2, body)


def test_debug_compares_every_call() -> None:
    def body(transport: InProcessTransport) -> None:
        zp = zpp.Communicator(transport=transport, threads=1, debug=True)
        for n in (10, 20):
            zp.all_gather(torch.ones(4 * n), torch.ones(n))
        n = 20 if transport.topology.rank == 0 else 10
        with pytest.raises(zpp.MismatchError, match="rank 0: all_gather numel=20"):
            zp.all_gather(torch.ones(4 * n), torch.ones(n))

    run(4, 2, body)


def test_a_peer_that_stays_away_is_named_within_the_timeout() -> None:
    """Rank 2 waits for rank 3 inside the node, and so do, between nodes, 1 for 3 and 0 for 2."""
    awaited = {0: 2, 1: 3, 2: 3}

    def body(transport: InProcessTransport) -> None:
        zp = zpp.Communicator(transport=transport, threads=1)
        shard, full = torch.ones(64), torch.ones(256)
        zp.reduce_scatter(shard, full)
        if transport.topology.rank == 3:
            return
        missing = awaited[transport.topology.rank]
        with pytest.raises(zpp.PeerError, match=rf"waiting for ranks \[{missing}\]: nothing came within 1 s"):
            zp.reduce_scatter(shard, full)
        with pytest.raises(zpp.PeerError, match="an earlier reduction failed"):
            zp.reduce_scatter(shard, full)

    run(4, 2, body, timeout=1.0)


def test_a_rank_that_fails_ends_the_others() -> None:
    def body(transport: InProcessTransport) -> None:
        zp = zpp.Communicator(transport=transport, threads=1)
        if transport.topology.rank == 1:
            raise KeyError("lost")
        zp.all_gather(torch.ones(40), torch.ones(10))

    with pytest.raises(KeyError, match="lost"):
        run(4, 2, body)


def test_no_group_and_no_transport_is_said() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        zpp.Communicator(ranks_per_node=1)


def test_device_without_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(zpp.UnavailableError, match="meta"):
        zpp.Communicator(device="meta")
    with pytest.raises(zpp.UnavailableError, match="cuda:1: torch finds no CUDA device"):
        zpp.Communicator(device="cuda:1")
