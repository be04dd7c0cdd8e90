"""Tensors whose pieces lie on several ranks: DTensors, shard groups, and what all ranks must agree on."""
