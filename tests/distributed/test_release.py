"""Gradient release over ranks: the bits of the plain step under ``fully_shard``, and layouts whose gradients are summed too late."""

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

import amp_kernels as ak
from amp_kernels.optim import _host

from ..helpers.ranks import on_ranks
from ..optim.released import assert_close
from .worlds import everyone, make_model, make_optimizer, make_wide, states

BF16 = torch.bfloat16
CASES = {
    "AdamW split24 8bit": (make_wide, BF16, {"master_weights": "split24", "state_dtype": "8bit"}),
    "AdamW fp32": (make_model, torch.float32, {}),
    "SGD none": (make_wide, BF16, {"master_weights": "none", "momentum": 0.9}),
    "LAMB split": (make_model, BF16, {"master_weights": "split"}),
    "Muon": (make_wide, BF16, {"master_weights": "split"}),
}


def sharded(make, dtype):
    model = make(dtype)
    for layer in model[::2]:
        fully_shard(layer, mesh=everyone(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return fully_shard(model, mesh=everyone())


def trained(case, released, **more):
    """Weights and states after some steps of two micro-batches, and how many gradients were left by a backward."""
    make, dtype, options = CASES[case]
    model, left = sharded(make, dtype), 0
    optimizer = make_optimizer(case.split()[0], model, lr=1e-2, **options, **more)
    width = model[0].in_features
    if released:
        ak.optim.release_gradients(optimizer)
    for step in range(4):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            seed = 100 * step + 10 * micro + dist.get_rank()
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
            model(x).float().square().sum().backward()
        left += sum(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [[param.detach().full_tensor(), states(optimizer, param)] for param in model.parameters()], left


@pytest.mark.parametrize("kinds", [{}, {"state_device": "cpu"}], ids=["device", "host"])
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_bits_under_fully_shard(case, kinds):
    plain, all_left = trained(case, False)
    released, left = trained(case, True, **kinds)
    torch.testing.assert_close(released, plain, rtol=0, atol=0)
    if kinds:
        torch.testing.assert_close(trained(case, False, **kinds)[0], plain, rtol=0, atol=0)
        expected, held, clipped = (
            trained(case, of, max_grad_norm=0.1, **more)[0] for of, more in ((False, {}), (False, kinds), (True, kinds))
        )
        torch.testing.assert_close(held, expected, rtol=0, atol=0)
        # The norm is the sum of the gradients' own: other 8-bit codes and low bits may follow, and Muon rounds in BF16.
        leaves = (list(filter(torch.is_floating_point, pytree.tree_leaves(of))) for of in (clipped, expected))
        assert_close(*leaves, close=2**-8 if case == "Muon" else 2e-5)
    assert all_left > 0
    assert left == 0


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_state_stays_in_host_memory_whatever_the_mesh_says(case):
    """Weights and states after plain steps, and after steps with state in host memory of parameters whose mesh says that it is CUDA's."""
    (make, dtype, options), found = CASES[case], []
    for kinds in ({}, {"state_device": "cpu"}):
        model = sharded(make, dtype)
        optimizer, mesh = (
            make_optimizer(case.split()[0], model, lr=1e-2, **options, **kinds),
            model[0].weight.device_mesh,
        )
        for step in range(3):
            x = torch.randn(3, model[0].in_features, generator=torch.Generator().manual_seed(step))
            model(x.to(dtype)).float().square().sum().backward()
            device_type, mesh._device_type = mesh._device_type, "cuda" if kinds else "cpu"
            try:
                optimizer.step()
                optimizer.state_dict()
            finally:
                mesh._device_type = device_type
            optimizer.zero_grad()
        found.append([[param.detach().full_tensor(), states(optimizer, param)] for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["LAMB split", "Muon"])
@on_ranks(2)
def test_ranks_exchange_the_same_buckets_in_the_order_of_their_backwards(case):
    """Pieces of 9 biases are 5 and 4: counted by its own bytes, a bucket of 265 takes them on one rank alone."""
    algorithm, threads = getattr(ak.optim, case.split()[0])._algorithm, set()

    def noting(*arguments, prepared=algorithm.prepared):
        threads.add(threading.get_ident())
        return prepared(*arguments)

    plain = trained(case, False)[0]
    with mock.patch.object(_host, "BUCKET_BYTES", 265), mock.patch.object(algorithm, "prepared", noting):
        torch.testing.assert_close(trained(case, True, state_device="cpu")[0], plain, rtol=0, atol=0)
    assert threads == {threading.get_ident()}


@on_ranks(2)
def test_distributed_data_parallel_is_refused():
    """Of gradients that DistributedDataParallel would sum: at once, and in the backward after such a parameter came."""
    expected = (
        "SGD: params[0] is no DTensor in a process group of 2 ranks, whose gradients DistributedDataParallel sums after the update; "
        "accepted: parameters of fully_shard"
    )
    said, plain, model = [], DistributedDataParallel(nn.Linear(4, 4)), sharded(make_model, torch.float32)
    optimizer = ak.optim.SGD(plain.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="accepted") as error:
        ak.optim.release_gradients(optimizer)
    said.append(str(error.value))
    optimizer = ak.optim.SGD(model.parameters(), lr=1.0)
    ak.optim.release_gradients(optimizer)
    optimizer.add_param_group({"params": list(plain.parameters())})
    before = [param.detach().full_tensor() for param in model.parameters()]
    with pytest.raises(ValueError, match="accepted") as error:
        model(torch.ones(2, 7)).sum().backward()
    assert all(map(torch.equal, before, [param.detach().full_tensor() for param in model.parameters()]))
    assert [*said, str(error.value)] == [expected] * 2


@on_ranks(2)
def test_offloaded_parameters_are_refused_where_their_hooks_come_too_early():
    """A mesh that says it is CUDA's, with parameters in CPU memory."""
    model = sharded(make_model, torch.float32)
    mesh = model[0].weight.device_mesh
    device_type, mesh._device_type = mesh._device_type, "cuda"
    refused = pytest.raises(ValueError, match=r"params\[0\] is offloaded by fully_shard")
    try:
        with refused if TorchVersion(torch.__version__) < (2, 13) else nullcontext():
            ak.optim.release_gradients(ak.optim.SGD(model.parameters(), lr=1.0))
    finally:
        mesh._device_type = device_type
