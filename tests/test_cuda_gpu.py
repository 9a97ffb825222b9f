"""The CUDA kernels on a GPU: bit for bit the reference, on any stream, in a captured graph."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path

import expected
import pytest
import torch
import torch.distributed as dist
from test_cuda_kernels import DTYPES, FORMATS, REFERENCE
from test_kernels import NOISE, empty_records, peer_records, sources
from test_operators import calls, round_trip
from test_streams import collectives
from test_zero3 import train
from torch.utils import _pytree as pytree

import zpp
from zpp.errors import UnavailableError
from zpp.format import BlockFormat, Code
from zpp.kernels import Kernels, for_device
from zpp.kernels.cuda import CudaKernels
from zpp.kernels.operands import VALUE_TYPES
from zpp.transport.inprocess import InProcessTransport, run

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = [0, 1, 33, 4097, 5120, 3 * 65536]
INT8, ROTATED = BlockFormat(Code.INT8, block=512), BlockFormat(Code.INT4, block=128, rotate=True)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    try:
        return for_device(DEVICE)
    except UnavailableError as error:
        pytest.skip(str(error))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(expected.bits(got.cpu()), expected.bits(want))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_and_decode(kernels: Kernels, fmt: BlockFormat, dtype: torch.dtype) -> None:
    for numel in SIZES:
        for src in sources(numel, dtype):
            want, record = empty_records(fmt, numel, 4), empty_records(fmt, numel, 4).to(DEVICE)
            REFERENCE.encode(src, fmt, want, rows=2, noise=NOISE)
            kernels.encode(src.to(DEVICE), fmt, record, rows=2, noise=NOISE)
            assert same(record, want), numel
            for out_dtype in DTYPES:
                out = torch.empty(4, numel, dtype=out_dtype)
                REFERENCE.decode(want, fmt, out, rows=2)
                got = torch.empty_like(out, device=DEVICE)
                kernels.decode(record, fmt, got, rows=2)
                assert same(got, out), (numel, out_dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("peers", "numel"), [(3, 1), (9, 33), (5, 4097), (2, 65536)])
def test_sums(kernels: Kernels, fmt: BlockFormat, peers: int, numel: int) -> None:
    for records in peer_records(fmt, numel, peers):
        there = [peer.to(DEVICE) for peer in records]
        for dtype in DTYPES:
            want = torch.empty(4, numel, dtype=dtype)
            REFERENCE.decode_reduce(records, fmt, want, factor=1 / 3)
            got = torch.empty_like(want, device=DEVICE)
            kernels.decode_reduce(there, fmt, got, factor=1 / 3)
            assert same(got, want), dtype
        for out_fmt in (INT8, ROTATED):
            made = empty_records(out_fmt, numel, 4)
            REFERENCE.decode_reduce_encode(records, fmt, out_fmt, made, numel)
            out = torch.empty_like(made, device=DEVICE)
            kernels.decode_reduce_encode(there, fmt, out_fmt, out, numel)
            assert same(out, made), out_fmt


def test_values_in_several_tensors(kernels: Kernels) -> None:
    assert isinstance(kernels, CudaKernels)
    flat = torch.randn(2 * 5000).bfloat16()
    want = empty_records(ROTATED, 5000, 2)
    REFERENCE.encode(flat.view(2, 5000), ROTATED, want)
    cuts = [0, 7, 4096, 6000, 10000]
    parts = [(a, flat[a:b].to(DEVICE)) for a, b in itertools.pairwise(cuts)]
    got = torch.empty_like(want, device=DEVICE)
    kernels.encode_parts(parts, VALUE_TYPES[torch.bfloat16], ROTATED, got, 5000)
    assert same(got, want)


def test_a_captured_graph_runs_again_on_new_values(kernels: Kernels) -> None:
    src, record = torch.randn(2, 65536, device=DEVICE), empty_records(INT8, 65536, 2).to(DEVICE)
    out = torch.empty_like(src)
    kernels.encode(src, INT8, record)
    kernels.decode(record, INT8, out)
    graph = torch.cuda.CUDAGraph()
    allocated = torch.cuda.memory_allocated(DEVICE)
    with torch.cuda.graph(graph):
        kernels.encode(src, INT8, record)
        kernels.decode(record, INT8, out)
    assert torch.cuda.memory_allocated(DEVICE) == allocated
    for seed in range(3):
        values = torch.randn(2, 65536, generator=torch.Generator().manual_seed(seed))
        want_record, want = empty_records(INT8, 65536, 2), torch.empty(2, 65536)
        REFERENCE.encode(values, INT8, want_record)
        REFERENCE.decode(want_record, INT8, want)
        src.copy_(values)
        graph.replay()
        assert same(out, want)


def test_kernels_run_on_the_current_stream(kernels: Kernels) -> None:
    """What is in front of them on that stream is done first; other streams are not waited for."""
    src, record = torch.zeros(1, 1 << 20, device=DEVICE), empty_records(INT8, 1 << 20, 1).to(DEVICE)
    kernels.encode(src, INT8, record)
    torch.cuda.synchronize(DEVICE)
    side, values = torch.cuda.Stream(DEVICE), torch.randn(1, 1 << 20)
    there = values.to(DEVICE)
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        src.copy_(there)
        kernels.encode(src, INT8, record)
        done = side.record_event()
    assert not done.query(), "encode waited for the stream"
    done.synchronize()
    want = empty_records(INT8, 1 << 20, 1)
    REFERENCE.encode(values, INT8, want)
    assert same(record, want)


def test_every_device_has_its_own_kernels(kernels: Kernels) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here, two are needed")
    src, want = torch.randn(1, 5000), empty_records(INT8, 5000, 1)
    REFERENCE.encode(src, INT8, want)
    for index in range(2):
        record = torch.empty_like(want, device=torch.device("cuda", index))
        kernels.encode(src.to(record.device), INT8, record)
        assert same(record, want)


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)])
def test_collectives_give_the_bits_of_the_cpu(kernels: Kernels, world: int, per_node: int) -> None:
    want = run(world, per_node, collectives)
    got = run(world, per_node, lambda transport: collectives(transport, "cuda"), device=DEVICE)
    for mine, theirs in zip(got, want, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("world", [1, 4])
def test_training_follows_the_cpu(kernels: Kernels, world: int) -> None:
    """A module that stays on the CPU is sharded onto the GPU."""

    def body(transport: InProcessTransport, device: str) -> list[float]:
        torch.autograd.set_multithreading_enabled(False)
        return train(transport, 10, device=device)[0]

    want = run(world, min(world, 2), lambda transport: body(transport, "cpu"))
    got = run(world, min(world, 2), lambda transport: body(transport, "cuda"), device=DEVICE)
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)
        assert mine[-1] < mine[0]


def test_a_collective_does_not_hold_up_the_host(kernels: Kernels) -> None:
    """Neither to start it nor to wait for it, however much is in front of it."""

    def body(transport: InProcessTransport) -> bool:
        zp = zpp.Communicator(transport=transport, device=DEVICE)
        shard, whole = torch.ones(1 << 20, device=DEVICE), torch.empty(2 << 20, device=DEVICE)
        zp.all_gather(whole, shard)  # compiles the kernels
        torch.cuda.synchronize(DEVICE)
        torch.cuda._sleep(500_000_000)
        work = zp.all_gather(whole, shard, async_op=True)
        assert work is not None
        work.wait()
        early = not torch.cuda.current_stream(DEVICE).query()
        with pytest.raises(zpp.PeerError, match="did not finish within 0.01 s"):
            work.wait(timedelta(seconds=0.01))
        zp.close()
        return early

    assert run(2, 1, body, device=DEVICE) == [True, True]


def test_one_rank_over_nccl(kernels: Kernels, tmp_path: Path) -> None:
    """The whole way through torch.distributed, as far as one device goes."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        zp = zpp.Communicator(device="cuda", ranks_per_node=1)
        assert zp.device == DEVICE
        values = torch.randn(5000, device=DEVICE)
        whole, part = torch.empty_like(values), torch.empty_like(values)
        zp.all_gather(whole, values)
        zp.reduce_scatter(part, values)
        assert torch.equal(whole, values)
        assert torch.equal(part, values)
        zp.close()
    finally:
        dist.destroy_process_group()


def test_operators(kernels: Kernels) -> None:
    x, compiled = torch.randn(2, 700), torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert same(compiled(x.to(DEVICE)), round_trip(x))
    for operator, arguments in calls(ROTATED, 333):
        there = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)
        assert set(torch.library.opcheck(operator, there).values()) == {"SUCCESS"}
