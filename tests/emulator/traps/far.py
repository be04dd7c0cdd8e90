"""Places counted in 32 bits."""

TRAPS = [
    ("activation/backward.cu test_far_elements", "at = row * columns + i * kVec;", "at = static_cast<uint32_t>(row * columns + i * kVec);", "gates are counted in 32 bits"),
    ("activation/forward.cu test_far_elements", "at = row * columns + i * kVec;", "at = static_cast<int>(row * columns + i * kVec);", "gates are counted in ints"),
    ("base/elementwise.cuh test_far_elements", "return static_cast<int64_t>(block_index()) * kElementThreads", "return block_index() * kElementThreads", "elements are counted in ints"),
    ("base/row_ring.cuh test_far_elements", "const int64_t at_row = (row", "const int at_row = (row", "rows are brought from elsewhere"),
    ("device/tensor_list.cuh test_far_elements", "static_cast<int64_t>(index - begin_of(low)) * unit", "(index - begin_of(low)) * unit", "units are counted in 32 bits"),
    ("embedding/accumulate.cu test_far_elements", "static_cast<Out*>(p.out) + row * p.columns", "static_cast<Out*>(p.out) + static_cast<unsigned>(row * p.columns)", "rows of the table lie elsewhere"),
    ("embedding/accumulate.cu test_far_elements", "grad + at[k] * p.columns", "grad + static_cast<int>(at[k] * p.columns)", "rows of the gradient lie elsewhere"),
    ("loss/cross_entropy.cu test_far_elements", "static_cast<T*>(p.grad) + row * p.grad_stride", "static_cast<T*>(p.grad) + static_cast<int>(row * p.grad_stride)", "gradients in pieces are stored elsewhere", 2),
    ("loss/cross_entropy.cu test_far_elements", "v, p.grad, p.grad_type, row * p.grad_stride", "v, p.grad, p.grad_type, static_cast<unsigned>(row * p.grad_stride)", "gradients are stored elsewhere"),
    ("norm/backward.cu test_far_elements", "row * p.columns + ring.begin();", "static_cast<unsigned>(row) * p.columns + ring.begin();", "gradients are stored elsewhere"),
    ("norm/backward.cu test_far_elements", "const int64_t at = row * p.columns;", "const int at = static_cast<int>(row * p.columns);", "rows in pieces lie elsewhere"),
    ("norm/backward.cu test_far_elements", "const int64_t at = (row", "const int at = (row", "sums over rows read other rows"),
    ("norm/backward.cu test_far_elements", "static_cast<int64_t>(share) * p.parameters", "share * p.parameters", "slots of sums lie elsewhere"),
    ("norm/forward.cu test_far_elements", "const int64_t at = row * p.columns;", "const int at = static_cast<int>(row * p.columns);", "rows in registers are stored elsewhere"),
    ("norm/forward.cu test_far_elements", "const int64_t at = row * p.columns;", "const int at = static_cast<int>(row * p.columns);", "rows in pieces lie elsewhere", 2),
    ("norm/forward.cu test_far_elements", "static_cast<Y*>(p.y) + row * p.columns", "static_cast<Y*>(p.y) + static_cast<int>(row) * p.columns", "rows in shared memory are stored elsewhere"),
    ("norm/forward.cu test_far_elements", "add_residual(p, ring, row * p.columns)", "add_residual(p, ring, static_cast<unsigned>(row) * p.columns)", "sums of rows in shared memory are stored elsewhere"),
]  # fmt: skip
