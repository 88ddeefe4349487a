"""What each rank of test_distributed.py does, in a process of its own with a device of its own.

Answers are gathered in a dictionary, one entry a check, and written to a file: processes are
started once for all tests, as most of the time is torch's to be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

STEPS = 3


# ---------------------------------------------------------------- networks, for one device too
class ConvNet(nn.Module):
    """Two convolutions with batch norm, pools, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
            nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 2 * 2, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x).flatten(1))

    def pieces(self) -> list[nn.Module]:
        """What FSDP shards one by one."""
        return [self.features, self.head]


class Transformer(nn.Module):
    """Two layers over a few tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))

    def pieces(self) -> list[nn.Module]:
        """What FSDP shards one by one."""
        return list(self.layers)


def network(kind: str) -> Any:
    """A network with the same numbers in every process."""
    torch.manual_seed(0)
    return ConvNet() if kind == "conv" else Transformer()


def batches(kind: str, ranks: int) -> Iterator[list[tuple[Any, Any]]]:
    """For each step a batch for each rank."""
    made = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield [(torch.randn(4, 1, 8, 8, generator=made) if kind == "conv" else
                torch.randint(0, 11, (4, 6), generator=made),
                torch.randint(0, 5, (4,), generator=made)) for _ in range(ranks)]


def optimizer(parameters: Any) -> Any:
    """With momentum rather than Adam, which makes steps of rounding where gradients are none."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- training
def train(kind: str, wrap: Callable[[Any], Any], rank: int, ranks: int) -> Any:
    """The losses of this rank, and the parameters in the end."""
    model = wrap(network(kind).to(torch.gcu.current_device()))
    opt, losses = optimizer(model.parameters()), []
    for batch in batches(kind, ranks):
        x, y = (t.to("gcu") for t in batch[rank])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    whole = {}
    for name, value in model.named_parameters():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole[name.removeprefix("module.")] = value.detach().cpu()
    return losses, whole


def ddp(model: Any) -> Any:
    """All parameters on each device, gradients in small buckets."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)


def ddp_with_search(model: Any) -> Any:
    """The same looking for parameters without gradient, with gradients sent as float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    made = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    made.register_comm_hook(None, fp16_compress_hook)
    return made


def fsdp(model: Any, **options: Any) -> Any:
    """A share of each parameter on each device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("gcu", (dist.get_world_size(),))
    for piece in model.pieces():
        fully_shard(piece, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_in_bf16(model: Any) -> Any:
    """Shares that are gathered, and gradients that are reduced, as bfloat16 or float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


# ---------------------------------------------------------------- collectives
def values(rank: int, dtype: Any, count: int = 6) -> Any:
    """Numbers that differ from rank to rank and are exact in every type."""
    return (torch.arange(count) % 5 + 3 * rank).to(dtype)


def collectives(rank: int, ranks: int, dtype: Any, to: Callable[[Any], Any]) -> dict[str, Any]:
    """Every collective once, on tensors that `to` makes of those of the host."""
    answers: dict[str, Any] = {}
    mine = to(values(rank, dtype))

    def room(count: int = 6) -> Any:
        return to(torch.zeros(count, dtype=dtype))

    def changed(call: Callable[[Any], Any], at: Any = None) -> Any:
        there = mine.clone() if at is None else at
        call(there)
        return there

    answers["broadcast"] = changed(lambda x: dist.broadcast(x, 1))
    answers["broadcast, turned"] = changed(lambda x: dist.broadcast(x.view(2, 3).t(), 1))
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        answers[f"allreduce {op}"] = changed(
            lambda x, op=op: dist.all_reduce(x, getattr(dist.ReduceOp, op)))
    answers["allreduce, no value"] = changed(dist.all_reduce, room(0))
    answers["allreduce, one value"] = changed(dist.all_reduce, mine[1].clone())
    answers["reduce"] = changed(lambda x: dist.reduce(x, 1)) if rank == 1 else (
        dist.reduce(mine.clone(), 1))
    several = [mine.clone(), mine[:2].clone()]
    with dist._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    answers["allreduce, coalesced"] = several
    lists = [room() for _ in range(ranks)]
    dist.all_gather(lists, mine)
    answers["allgather"] = lists
    into = [room(6 * ranks), room(2 * ranks)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(into[0], mine)
        dist.all_gather_into_tensor(into[1], mine[:2])
    answers["allgather, coalesced"] = into
    answers["allgather, one tensor"] = changed(
        lambda x: dist.all_gather_into_tensor(x, mine), room(6 * ranks))
    lists = [room() for _ in range(ranks)] if rank == 0 else None
    dist.gather(mine, lists, 0)
    answers["gather"] = lists
    turned = [to(values(rank, dtype).roll(i)) for i in range(ranks)]
    parts = turned if rank == 1 else None
    answers["scatter"] = changed(lambda x: dist.scatter(x, parts, 1), room())
    answers["reduce_scatter"] = changed(
        lambda x: dist.reduce_scatter(x, turned), room())
    whole = to(values(rank, dtype, 4 * ranks))
    answers["reduce_scatter, one tensor"] = changed(
        lambda x: dist.reduce_scatter_tensor(x, whole), room(4))
    answers["alltoall"] = changed(lambda x: dist.all_to_all_single(x, whole), room(4 * ranks))
    uneven, back = [room(i + 1) for _ in range(1) for i in [rank] * ranks], [
        mine[:i + 1].contiguous() for i in range(ranks)]
    if mine.device.type != "cpu":  # gloo has no lists of tensors in some versions
        dist.all_to_all(uneven, back)
        answers["alltoall, lists"] = uneven
    answers["send, receive"] = _ring(rank, ranks, mine, room())
    return answers


def _ring(rank: int, ranks: int, mine: Any, room: Any) -> Any:
    """Everybody sends before anybody receives."""
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, room, (rank - 1) % ranks)]):
        work.wait()
    return room


def means(rank: int, ranks: int) -> list[float]:
    """What gloo has not: means, and sums with a factor, of the device's tensors."""
    made = []
    for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.25)):
        x = torch.full((3,), rank + 1.0, device="gcu")
        dist.all_reduce(x, op)
        made.append(x[0].item())
    n = torch.full((), 3 * rank + 2, device="gcu")
    dist.all_reduce(n, dist.ReduceOp.AVG)
    return [*made, n.item()]


def futures(rank: int, ranks: int) -> dict[str, Any]:
    """Works and futures, of calls that the caller does not wait for."""
    x, y = (torch.full((4,), float(rank + n), device="gcu") for n in (1, 2))
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    future = first.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    second.wait()
    answers = {"then": doubled.wait().tolist(), "value": future.value()[0].tolist(),
               "same": future.value()[0].data_ptr() == x.data_ptr(), "done": first.is_completed(),
               "success": first.is_success(), "later": (y + 1).tolist()}
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    group = dist.new_group([0, 1])
    if rank < 2:
        pair = torch.ones(2, device="gcu")
        dist.all_reduce(pair, group=group)
        answers["pair"] = pair.tolist()
    try:
        dist.all_gather_into_tensor(torch.zeros(5, device="gcu"), torch.zeros(4, device="gcu"))
        answers["wrong sizes"] = ""
    except RuntimeError as error:
        answers["wrong sizes"] = str(error)
    return answers | {"objects": objects}


def modelled(rank: int) -> list[float]:
    """Milliseconds that the same calls took three times, on the modelled clock."""
    times = []
    for _ in range(3):
        x = torch.ones(1 << 16, device="gcu")
        torch.gcu.synchronize()
        before, after = (torch.gcu.Event(enable_timing=True) for _ in range(2))
        before.record()
        works = [dist.all_reduce(x[:n], async_op=True) for n in (1 << 12, 1 << 16)]
        for work in works:
            work.wait()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return times


# ---------------------------------------------------------------- processes
def main(rank: int, ranks: int, folder: str, what: str) -> None:
    """All checks of one rank."""
    torch.set_num_threads(1)
    here: dict[str, Any] = {}
    if what == "all":
        here["cpu alone"] = cpu_alone(rank, ranks, folder)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("cpu:gloo,gcu:gcu", store=store, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=100))
    torch.gcu.set_device(rank)
    here |= {"backend": dist.get_backend_config(), "rank": dist.get_rank()}
    if what == "all":
        with torch.no_grad():
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
                for where in ("cpu", "gcu"):
                    found = collectives(rank, ranks, dtype, lambda x, to=where: x.to(to))
                    here[f"{dtype} {where}"] = torch.utils._pytree.tree_map_only(
                        torch.Tensor, torch.Tensor.cpu, found)
        here |= {"means": means(rank, ranks), "futures": futures(rank, ranks),
                 "modelled": modelled(rank)}
        here["ddp_with_search transformer"] = train("transformer", ddp_with_search, rank, ranks)
        here["fsdp_in_bf16 transformer"] = train("transformer", fsdp_in_bf16, rank, ranks)
    for kind in ("conv", "transformer"):
        for wrap in (ddp, fsdp):
            here[f"{wrap.__name__} {kind}"] = train(kind, wrap, rank, ranks)
    dist.barrier()
    torch.save(here, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    if what == "all":
        other_groups(rank, ranks, folder)


def other_groups(rank: int, ranks: int, folder: str) -> None:
    """Groups by the name of the device, by none, and by the device itself."""
    device = torch.device("gcu", rank)
    for number, asked in enumerate(({"backend": "gcu"}, {}, {"device_id": device})):
        again = dist.FileStore(f"{folder}/{number}", ranks)
        dist.init_process_group(store=again, rank=rank, world_size=ranks, **asked)
        check_the_group(ranks, ["gcu"] if "backend" in asked else ["gcu", "cpu"])
        dist.destroy_process_group()


def check_the_group(ranks: int, devices: list[str]) -> None:
    """Tensors of all these devices, in turns."""
    tensors = [torch.full((3,), float(n), device=devices[n % len(devices)]) for n in range(1, 9)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for n, (work, x) in enumerate(zip(works, tensors, strict=True), 1):
        work.wait()
        assert x.tolist() == [n * ranks] * 3, x
    dist.barrier()
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == list(range(ranks))
    assert {device.type for device in dist.group.WORLD._device_types} == set(devices)


def cpu_alone(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """A program that names no backend and has tensors of the CPU alone, as if we were not there."""
    found: dict[str, Any] = {"accelerator": torch.accelerator.current_accelerator().type}
    dist.init_process_group(store=dist.FileStore(f"{folder}/cpu", ranks), rank=rank,
                            world_size=ranks, timeout=timedelta(seconds=100))
    total = torch.full((3,), rank + 1.0)
    dist.all_reduce(total)
    model = ddp(network("transformer"))
    x, y = next(batches("transformer", ranks))[rank]
    F.cross_entropy(model(x), y).backward()
    pair = torch.ones(2)
    dist.all_reduce(pair, group=dist.new_group([0, 1]))
    dist.barrier()
    found |= {"sum": total.tolist(), "pair": pair.tolist(), "gradients": [
        p.grad for p in model.parameters()]}
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
