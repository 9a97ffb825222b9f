"""The collectives and zero3 over real processes and gloo: four ranks, kept for all tests of the class."""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import expected
import pytest
import torch
import torch.distributed as dist
from small_model import batch, loss_of, net
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests

import zpp
from zpp.format import Formats
from zpp.topology import Axis, Topology
from zpp.transport.torch_device import DeviceTransport, require_nccl


def values(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16()


class GlooTest(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def communicator(self, **settings: Any) -> zpp.Communicator:
        torch.set_num_threads(1)
        return zpp.Communicator(**{"ranks_per_node": 2, **settings})

    def test_collectives_equal_the_reference(self) -> None:
        for per_node in (1, 2, 4):
            zp = self.communicator(ranks_per_node=per_node, span=4 * 4096)
            linux = sys.platform == "linux"
            self.assertEqual(zp._engine.transport.reads_in_place(Axis.INTRA), linux and per_node > 1)
            self.check_collectives(zp, per_node)

    def test_collectives_where_memory_cannot_be_shared(self) -> None:
        with mock.patch("zpp.transport.node_memory.join", return_value=None):
            zp = self.communicator(span=4 * 4096)
        self.assertFalse(zp._engine.transport.reads_in_place(Axis.INTRA))
        self.check_collectives(zp, 2)

    def test_collectives_by_the_messages_of_accelerators(self) -> None:
        """Between tensors on the CPU, which gloo sends as NCCL sends those on GPUs."""
        for per_node in (1, 2, 4):
            topology = Topology(self.rank, 4, per_node)
            assert dist.group.WORLD is not None
            transport = DeviceTransport(dist.group.WORLD, topology, torch.device("cpu"))
            self.assertFalse(transport.reads_in_place(Axis.INTRA))
            self.check_collectives(zpp.Communicator(transport=transport, span=4 * 4096), per_node)

    def test_devices_need_nccl(self) -> None:
        assert dist.group.WORLD is not None
        with pytest.raises(zpp.UnavailableError, match='has gloo for cuda:0.*"cpu:gloo,cuda:nccl"'):
            require_nccl(dist.group.WORLD, torch.device("cuda", 0))

    def check_collectives(self, zp: zpp.Communicator, per_node: int) -> None:
        """Against the reference; closes the communicator."""
        with contextlib.closing(zp):
            formats = zp.formats
            for numel in (0, 7, 4097, 1009 * 64):
                shards = [values(rank, numel) for rank in range(4)]
                whole = torch.empty(4 * numel, dtype=torch.bfloat16)
                zp.all_gather(whole, shards[self.rank])
                want = expected.all_gather(shards, formats.weights, torch.bfloat16)
                self.assertTrue(torch.equal(expected.bits(whole), expected.bits(want)))
                fulls = [values(rank, 4 * numel) for rank in range(4)]
                part = torch.empty(numel)
                zp.reduce_scatter(part, fulls[self.rank])
                pair = (formats.gradients_intra, formats.gradients_inter)
                want = expected.reduce_scatter(fulls, per_node, pair, torch.float32, 0.25)[self.rank]
                self.assertTrue(torch.equal(expected.bits(part), expected.bits(want)))

    def test_works_in_any_order_and_two_communicators(self) -> None:
        a, b = self.communicator(), self.communicator(formats=Formats.zeropp())
        full = values(self.rank, 4 * 5000)
        parts = [torch.empty(5000) for _ in range(6)]
        outs = [torch.empty(4 * 5000, dtype=torch.bfloat16) for _ in range(6)]
        works: list[Any] = []
        for i in range(6):
            zp = (a, b)[i % 2]
            works.append(zp.reduce_scatter(parts[i], full, async_op=True))
            works.append(zp.all_gather(outs[i], full[:5000], async_op=True))
        for work in works[:: -1 if self.rank % 2 else 1]:
            work.wait()
        for i in range(2, 6):
            self.assertTrue(torch.equal(parts[i], parts[i % 2]))
            self.assertTrue(torch.equal(outs[i], outs[i % 2]))
        a.close()
        b.close()

    def test_hosts_give_the_topology(self) -> None:
        zp = zpp.Communicator()
        self.assertEqual((zp.topology.nodes, zp.topology.ranks_per_node), (1, 4))
        zp.close()

    def test_mismatches_are_named_on_every_rank(self) -> None:
        with pytest.raises(zpp.MismatchError, match="rank 1: 4 nodes of 1 ranks"):
            self.communicator(ranks_per_node=1 if self.rank == 1 else 2)
        zp = self.communicator()
        n = 9 if self.rank == 2 else 8
        with pytest.raises(zpp.MismatchError, match="rank 2: all_gather numel=9"):
            zp.all_gather(torch.ones(4 * n), torch.ones(n))
        zp.all_gather(torch.ones(4), torch.ones(1))
        zp.close()

    def test_zero3_hpz_changes_no_bit(self) -> None:
        results = []
        for hpz in (False, True):
            model = net()
            zp = self.communicator()
            handle = zpp.zero3.shard(model, units=list(model.blocks), communicator=zp, hpz=hpz)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
            losses = []
            for step in range(20):
                optimizer.zero_grad()
                loss = loss_of(model, batch(step, self.rank))
                before = zp.stats.wire_bytes(Axis.INTER)
                loss.backward()
                sent = zp.stats.wire_bytes(Axis.INTER) - before
                optimizer.step()
                losses.append(loss.item())
            results.append((losses, handle.full_state_dict(), sent))
            zp.close()
        (losses_a, state_a, sent_a), (losses_b, state_b, sent_b) = results
        self.assertEqual(losses_a, losses_b)
        self.assertLess(losses_b[-1], 0.9 * losses_b[0])
        self.assertTrue(all(torch.equal(state_a[name], state_b[name]) for name in state_a))
        self.assertLess(sent_b, 0.6 * sent_a)

    def test_subgroups_leave_the_other_ranks_alone(self) -> None:
        pair = dist.new_group([1, 3])
        if self.rank in (1, 3):
            zp = self.communicator(group=pair, ranks_per_node=1)
            shards = [values(rank, 100) for rank in (1, 3)]
            whole = torch.empty(200, dtype=torch.bfloat16)
            zp.all_gather(whole, shards[self.rank // 2])
            want = expected.all_gather(shards, zp.formats.weights, torch.bfloat16)
            self.assertTrue(torch.equal(whole, want))
            zp.close()
        dist.barrier()


if __name__ == "__main__":
    run_tests()
