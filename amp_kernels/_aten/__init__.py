"""Ops as compositions of torch's own products and the package's other ops: a file for each family, a function for each op."""
