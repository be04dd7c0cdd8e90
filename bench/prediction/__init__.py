"""Predicts what GPUs that are not here take: the cost model of csrc/gemm for products, bytes and measured rates for the rest."""
