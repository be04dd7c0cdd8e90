"""DistributedDataParallel with one process per GPU (on the CPU: gloo, two processes): all ranks skip the same steps.

python examples/ddp.py       or       torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later by DDP, its default arguments would keep the process group alive
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

import amp_kernels as ak


def train(device):
    torch.manual_seed(0)  # the same task and initial weights on every rank
    teacher = nn.Linear(32, 10).to(device)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    model = DistributedDataParallel(ak.convert(model.to(device)))
    optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = ak.GradScaler(device.type)  # checks the gradients after their all-reduce, so all ranks agree
    torch.manual_seed(1 + dist.get_rank())  # different batches on each rank
    losses = []
    for _ in range(100):
        x = torch.randn(128, 32, device=device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = ak.cross_entropy(model(x), teacher(x).argmax(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        losses.append(loss.detach())
    dist.all_reduce(losses := torch.stack(losses) / dist.get_world_size())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, weights)
    if dist.get_rank() == 0:
        print(f"{len(copies)} ranks; the same weights on all of them: {all(c.equal(weights) for c in copies)}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(device)
    dist.barrier()  # no rank exits while another still communicates with it
    gc.collect()  # frees DDP's references to the process group, whose threads must end before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    launch = ["--standalone", "--nproc-per-node", str(torch.cuda.device_count() or 2), __file__]
    main() if "LOCAL_RANK" in os.environ else torchrun(launch)
