"""Bugs in the CPU kernels of products."""

from . import in_cpu_kernel

MUTANTS = [
    *in_cpu_kernel(
        "gemm/cpu/gemm.cpp",
        "gemm_epilogue",
        ("bias[r % m]", "bias[0]", "all rows take the first bias"),
        ("finish_z(up, r, columns + c, width)", "finish_z(up, r, c, width)", "gates and values share a bias"),
        ("fma(beta, residual[i], out[i])", "residual[i] + out[i]", "the residual is not scaled"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/gemm.cpp",
        "linear",
        (
            "preact[j] = round_to<T>(z);",
            "preact[j] = round_to<T>(activate(kActivation, z));",
            "the result is kept in place of the pre-activation",
        ),
    ),
    *in_cpu_kernel(
        "gemm/cpu/gemm.cpp",
        "gemm_dact",
        (
            "sums + unit * gradient.width + column",
            "sums + unit * gradient.width",
            "all tiles go to the first columns' sums",
        ),
        ("block.unit + i / kRowUnit", "block.unit", "rows of all units go to the first one's sums"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/blocked.cpp",
        "gemm_cpu",
        ("step + p > 0", "step > 0", "each depth of a panel starts from zero"),
        ("half * columns_ + first_column(block)", "first_column(block)", "both halves are the gates"),
        (
            "if (block != packed_block || steps < steps_)",
            "if (block != packed_block)",
            "later steps of K multiply the columns of the first",
        ),
        ("(by_rows ? 0 : first)", "0", "all lanes of a thin product go to the first rows"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/portable.cpp",
        "gemm_cpu",
        ("(column + j) * b.column_stride", "j * b.column_stride", "every panel is the first"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/portable.cpp",
        "batch_invariant_splits",
        ("(row + i) * start->row_stride", "i * start->row_stride", "the chains of all rows start from C's first ones"),
        (
            "width = std::min(kColumns, n - column);",
            "width = column + kColumns < n ? kColumns : n % kColumns;",
            "a last panel that is full has no columns",
        ),
    ),
    *in_cpu_kernel(
        "gemm/cpu/grouped.cpp",
        "grouped_mm",
        ("zero_rows(p.product.c, end, total);", "", "rows after the last group are not zeroed"),
        ("element(e.bias, group.index * e.bias.batch_stride)", "element(e.bias, 0)", "all groups take the first bias"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/grouped.cpp",
        "grouped_gemm",
        ("p.offs[index * p.offs_stride]", "p.offs[index]", "ends that lie apart are taken from other groups"),
    ),
    *in_cpu_kernel(
        "gemm/cpu/syrk.cpp",
        "syrk",
        ("sums[row - column] += diagonal;", "sums[0] += diagonal;", "the diagonal is added to a panel's first column"),
        (
            "std::max(row0, column + 1)",
            "std::max(row0, column + 2)",
            "the element next to the diagonal is not mirrored",
        ),
        ("i % 2 == 0 ? i / 2 : panels - 1 - i / 2", "i / 2", "half of the panels are computed twice"),
    ),
]
