"""fully_shard with one process per GPU (on the CPU: gloo, two processes): sharded weights, state and gradients, and a checkpoint.
python examples/fsdp.py       or       torchrun --standalone --nproc-per-node 2 examples/fsdp.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import amp_kernels as ak


def build(device):
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).to(device)
    fully_shard(ak.convert(model))
    return model, ak.optim.AdamW(model.parameters(), lr=3e-3), ak.GradScaler(device.type)


def train(model, optimizer, scaler, teacher):
    torch.manual_seed(1 + dist.get_rank())  # different batches on each rank
    for _ in range(50):
        x = torch.randn(128, 32, device=(device := teacher.weight.device))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = ak.cross_entropy(model(x), teacher(x).argmax(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)  # all ranks skip and clip alike
        scaler.update()
        yield loss.detach()


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()
    torch.manual_seed(0)  # the same task and initial weights on every rank
    teacher = nn.Linear(32, 10).to(device)
    losses = list(train(*(parts := build(device)), teacher))
    with tempfile.TemporaryDirectory() as folder:
        dist.broadcast_object_list(path := [f"{folder}/50"])
        dcp.save({"state": get_state_dict(*parts[:2]), "scaler": parts[2]}, checkpoint_id=path[0])
        state = get_state_dict(*(parts := build(device))[:2])  # as in a new run; the number of ranks may differ
        dcp.load({"state": state, "scaler": parts[2]}, checkpoint_id=path[0])
        set_state_dict(*parts[:2], model_state_dict=state[0], optim_state_dict=state[1])
    losses = torch.stack([*losses, *train(*parts, teacher)])
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.barrier()  # no rank exits while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    launch = ["--standalone", "--nproc-per-node", str(torch.cuda.device_count() or 2), __file__]
    main() if "LOCAL_RANK" in os.environ else torchrun(launch)
