"""Ranks on hosts of their own, where this machine allows network namespaces, else processes: the same weights, and an error,
not a hang, when a host falls silent without closing anything."""

import datetime
import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import amp_kernels as ak

from ..helpers.ranks import Failure, Ranks, hosts_allowed
from .test_optimizers import BAD
from .worlds import LAYOUTS, compare, give, make_model

HOSTS = hosts_allowed()


@pytest.fixture(scope="module")
def hosts():
    pool = Ranks(hosts=HOSTS)
    yield pool
    pool.close()


def over_the_network(networks):
    addresses = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, os.readlink("/proc/self/ns/net"))
    assert len(set(addresses)) == networks
    weights, _ = compare("fsdp", "AdamW", torch.float32, {}, None, BAD)
    assert weights == 0.0


def test_hosts_agree_as_one_process(hosts):
    hosts.run(over_the_network, 2 if HOSTS else 1, world=2)


def falls_silent(separate, ended):
    """In the third step rank 1 says nothing any more: its cable is out, or the process sleeps until the other one has given up."""
    model, reference = LAYOUTS["fsdp"](make_model()), make_model()
    optimizer = ak.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    for step in range(3):
        give(model, reference, step, 1.0, None)
        if step == 2:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), dist.group.WORLD)
            if dist.get_rank() == 1 and separate:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            elif dist.get_rank() == 1:
                while not os.path.exists(ended):
                    time.sleep(0.1)
        try:
            optimizer.step()
        except RuntimeError:
            open(ended, "w").close()
            raise


def test_a_host_that_falls_silent_ends_the_others(hosts, tmp_path):
    first, _ = hosts.outcomes(falls_silent, HOSTS, str(tmp_path / "ended"), world=2)
    assert isinstance(first, Failure)
    assert "no answer in time" not in first.text
    assert "agreement.py" in first.text  # in the sum that every step waits for
