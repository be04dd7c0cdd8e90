"""What tests and benchmarks share: input generators, error bounds, NaN poison, the comparison of backends. Shipped, so
that the installed package can check itself."""
