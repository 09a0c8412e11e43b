"""Two processes train one network: replicas stay equal and constants exact."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from asymmetry_reference import assert_truthful, asymmetric, batch, constants_of
from torch.nn.parallel import DistributedDataParallel

KINDS = ("mlp", "images")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = {}
    for kind in KINDS:
        torch.manual_seed(rank)  # other global random states must not matter
        net = asymmetric(kind, seed=4)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
        x, target = batch(kind)
        x, target = x[rank::2], target[rank::2]
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
        optimizer.zero_grad()  # two forward passes, in each of which buffers are synchronised, before one backward
        (F.cross_entropy(model(x), target) + F.cross_entropy(model(x.flip(0)), target.flip(0))).backward()
        optimizer.step()
        result[kind] = {name: value.clone() for name, value in net.state_dict().items()}
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ddp(tmp_path):
    other = mp.get_context("spawn").Process(target=work, args=(1, str(tmp_path)))
    other.start()
    threads = torch.get_num_threads()
    work(0, str(tmp_path))
    torch.set_num_threads(threads)
    other.join(60)
    assert other.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for kind in KINDS:
        assert first[kind].keys() == second[kind].keys()
        for name, value in first[kind].items():
            assert torch.equal(value, second[kind][name])

        # One process with the whole batch does the same: means of gradients over two halves of equal size.
        net, (x, target) = asymmetric(kind, seed=4), batch(kind)
        constants = constants_of(net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
        for factor in (1, 1, 1, 1, 2):
            optimizer.zero_grad()
            (factor * F.cross_entropy(net(x), target)).backward()
            optimizer.step()
        for name, value in net.state_dict().items():
            torch.testing.assert_close(first[kind][name], value, rtol=1e-3, atol=1e-4)
        net.load_state_dict(first[kind])
        assert_truthful(kind, net, constants, x)
