"""The times of every tile of gemm_sm90 on an H200, which the planner's cost model (csrc/gemm/cost.h) is held against."""
