"""Places counted in 32 bits, in every kernel of rows and of elements."""

from . import Mutant

TEST = "test_far_elements"
RING = "base/row_ring.cuh"
FORWARD = "norm/forward.cu"
BACKWARD = "norm/backward.cu"
LOSS = "loss/cross_entropy.cu"
ELEMENTS = "base/elementwise.cuh"
EMBEDDING = "embedding/accumulate.cu"
AT = "const int64_t at = row * p.columns;"
SHORT = "const int at = static_cast<int>(row * p.columns);"

MUTANTS = [
    Mutant(RING, "const int64_t at_row = (row", "const int at_row = (row", "rows are brought from elsewhere"),
    Mutant(FORWARD, AT, SHORT, "rows in registers are stored elsewhere"),
    Mutant(FORWARD, AT, SHORT, "rows in pieces lie elsewhere", nth=2),
    Mutant(FORWARD, "static_cast<Y*>(p.y) + row * p.columns", "static_cast<Y*>(p.y) + static_cast<int>(row) * p.columns", "rows in shared memory are stored elsewhere"),
    Mutant(FORWARD, "add_residual(p, ring, row * p.columns)", "add_residual(p, ring, static_cast<unsigned>(row) * p.columns)",
           "sums of rows in shared memory are stored elsewhere"),
    Mutant(BACKWARD, "row * p.columns + ring.begin();", "static_cast<unsigned>(row) * p.columns + ring.begin();", "gradients are stored elsewhere"),
    Mutant(BACKWARD, AT, SHORT, "rows in pieces lie elsewhere"),
    Mutant(BACKWARD, "const int64_t at = (row", "const int at = (row", "sums over rows read other rows"),
    Mutant(BACKWARD, "static_cast<int64_t>(share) * p.parameters", "share * p.parameters", "slots of sums lie elsewhere"),
    Mutant(LOSS, "static_cast<T*>(p.grad) + row * p.grad_stride", "static_cast<T*>(p.grad) + static_cast<int>(row * p.grad_stride)",
           "gradients in pieces are stored elsewhere"),
    Mutant(LOSS, "v, p.grad, p.type, row * p.grad_stride", "v, p.grad, p.type, static_cast<unsigned>(row * p.grad_stride)", "gradients are stored elsewhere"),
    Mutant(ELEMENTS, "return static_cast<int64_t>(block_index()) * kElementThreads", "return block_index() * kElementThreads", "elements are counted in ints"),
    Mutant("activation/forward.cu", "at = row * columns + i * kVec;", "at = static_cast<int>(row * columns + i * kVec);", "gates are counted in ints"),
    Mutant("activation/backward.cu", "at = row * columns + i * kVec;", "at = static_cast<uint32_t>(row * columns + i * kVec);", "gates are counted in 32 bits"),
    Mutant("device/tensor_list.cuh", "static_cast<int64_t>(index - begin_of(low)) * unit", "(index - begin_of(low)) * unit", "units are counted in 32 bits"),
    Mutant(EMBEDDING, "static_cast<Out*>(p.out) + row * p.columns", "static_cast<Out*>(p.out) + static_cast<unsigned>(row * p.columns)",
           "rows of the table lie elsewhere"),
    Mutant(EMBEDDING, "grad + at[k] * p.columns", "grad + static_cast<int>(at[k] * p.columns)", "rows of the gradient lie elsewhere"),
]  # fmt: skip
