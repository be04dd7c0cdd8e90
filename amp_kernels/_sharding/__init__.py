"""Tensors whose pieces are spread over several ranks: DTensors, shard groups, and what all ranks must agree on."""
