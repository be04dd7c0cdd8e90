"""Bugs in the CPU kernels of rows, elements and tokens."""

from . import in_cpu_kernel

MUTANTS = [
    *in_cpu_kernel(
        "norm/cpu_forward.cpp",
        "norm",
        ("means[r] /= count;", "means[r] *= 1.0f;", "the mean of short rows is a sum"),
        ("infinite |= is_finite(square) ? 0u : 1u;", "infinite |= 0u;", "squares that overflow go unseen"),
        (
            "joined(chain, {count, mean,",
            "joined(chain, {count, 0.0f,",
            "tiles of a long row are joined as if their means were equal",
        ),
        (
            "weight + c, bias + c, y, some",
            "weight, bias, y, some",
            "all tiles of a long row take the weights of the first",
        ),
        ("call.residual ? call.sum : call.x;", "call.x;", "the residual is left out"),
        ("if (call.mean) call.mean[r] = mean;", "", "the mean of a long row is not kept for backward"),
    ),
    *in_cpu_kernel(
        "norm/cpu_backward.cpp",
        "norm",
        (
            "p.mean ? static_cast<float>(sum_g) / count : 0.0f",
            "static_cast<float>(sum_g) / count",
            "rms_norm subtracts a mean",
        ),
        ("static_cast<float>(sum_gn) / count;", "static_cast<float>(sum_gn);", "a sum for a mean"),
        ("sum_gn += chain.gn;", "sum_gn = chain.gn;", "the chains of a long row are not added"),
        ("gradient(v, dy, w) + added", "gradient(v, dy, w)", "the gradient of the sum is left out"),
        ("store_rest(parts.of_bias, of_bias + i, columns - i);", ";", "the last columns have no bias gradient"),
    ),
    *in_cpu_kernel(
        "norm/cpu_backward.cpp",
        "rows_cpu",
        (
            "sums.get() + s * width + begin, p.sums + begin",
            "sums.get() + s * width, p.sums + begin",
            "a thread adds the columns of another one",
        ),
    ),
    *in_cpu_kernel(
        "loss/cpu_exp_sums.h",
        "cross_entropy",
        (
            "part_of_lanes(x, i, n, kLeast, part)",
            "part_of_lanes(x, i, n, 0.0f, part)",
            "lanes out of bounds count as zeros in the maximum",
        ),
        ("store_rest(kept, e + i, n - i);", ";", "the last exponentials of a row are not kept"),
    ),
    *in_cpu_kernel(
        "loss/cpu.cpp",
        "cross_entropy",
        (
            "if (grad) std::fill_n(grad + row * p.grad_stride, classes, T{});",
            "",
            "an ignored row keeps its logits for a gradient",
        ),
        (
            "logits + rows.index[wide] * classes",
            "logits + wide * classes",
            "rows after an ignored one are those before it",
        ),
        ("p.factor[row * p.factor_stride]", "p.factor[0]", "every row takes the first factor"),
        ("-factor * (of_target + others)", "-factor * of_target", "label smoothing leaves out the target's own share"),
        (
            "total.add(sum_of_span(c, n));",
            "total = TileSums(sum_of_span(c, n));",
            "the total is that of the last tile",
        ),
        ("weight_span(p.weight + at,", "weight_span(p.weight,", "all tiles take the weights of the first classes"),
    ),
    *in_cpu_kernel(
        "activation/cpu.cpp",
        "activation",
        (
            "swiglu(to_float(z[i]), to_float(z[columns + i]))",
            "swiglu(to_float(z[i]), to_float(z[i]))",
            "the gate is its own value",
        ),
    ),
    *in_cpu_kernel(
        "activation/cpu.cpp",
        "activation_backward",
        (
            "add_rows(made, call.type, last - row, width, strip);",
            "add_rows(made, call.type, last - row - 1, width, strip);",
            "one row of each batch is not summed",
        ),
        ("row * columns + c, n, buffer);", "c, n, buffer);", "every gated row takes the first gradient"),
    ),
    *in_cpu_kernel(
        "activation/cpu_gradient.h",
        "activation_backward",
        ("store(d_up, columns + c);", "store(d_up, c);", "the values' gradients go where the gates' belong"),
        ("d_up[i] = d.up;", "d_up[i] = d.gate;", "the values get the gates' gradients"),
    ),
    *in_cpu_kernel(
        "embedding/cpu.cpp",
        "embedding",
        ("if (rows[begin] != call.padding_idx)", "", "padding gets a gradient"),
        ("run_end < call.entries &&", "run_end < end &&", "a run ends with a thread's share"),
        ("static_cast<float>(run_end - first) : 1.0f", "1.0f : 1.0f", "gradients are not divided by the frequency"),
    ),
    *in_cpu_kernel(
        "base/cpu/column_sums.cpp",
        "column_sums",
        ("for (; r < rows; ++r) {", "for (; r + 1 < rows; ++r) {", "the last row is not summed"),
        ("sums[c + i] += tile[i];", "sums[i] += tile[i];", "all tiles of an fp16 row go to the first columns"),
    ),
    *in_cpu_kernel(
        "base/cpu/column_sums.h",
        "column_sums",
        ("std::min(rows, (i + 1) * strip)", "(i + 1) * strip - 1", "a strip leaves out its last row"),
    ),
    *in_cpu_kernel(
        "unit_sums/cpu.cpp",
        "batch_invariant_splits",
        ("if (p.fresh)", "if (true)", "micro-batches after the first start anew"),
        ("p.mean ? p.mean[r] : 0.0f", "0.0f", "the mean is not subtracted"),
    ),
    *in_cpu_kernel(
        "routing/cpu.cpp",
        "routing",
        (
            "p.dots[choice] += products_span",
            "p.dots[choice] = products_span",
            "the gradient of a weight is that of the last tile",
        ),
        ("r.weights ? r.weights[choice] : 1.0f", "1.0f", "rows are not weighted"),
        ("place * r.columns + c, n, y_tile", "place * r.columns, n, y_tile", "every tile of a row is its first"),
    ),
    *in_cpu_kernel(
        "rotary/cpu.cpp",
        "rotary",
        ("apart = p.interleaved ? 1 : pairs", "apart = 1", "halves are turned as if they were interleaved"),
        ("for (int i = rotary; i < width; ++i) out[i] = x[i];", "", "elements that do not turn are not copied"),
        (
            "at = batch * p.angle_batch + token * p.rotary",
            "at = token * p.rotary",
            "every batch takes the angles of the first",
        ),
        (
            "of_weight[i] += g[i] * n[i];",
            "of_weight[i] = g[i] * n[i];",
            "the weight's gradient is that of the last head",
        ),
        ("sums + s * p.width", "sums", "keys add to the gradient of the queries' weight"),
        (
            "reciprocal_deviation(dot(small, small, n) / count, eps, kShrink)",
            "reciprocal_deviation(dot(small, small, n) / count, eps, 1.0f)",
            "a shrunk head keeps its scale",
        ),
    ),
    *in_cpu_kernel(
        "newton_schulz/cpu.cpp",
        "unit_matrices",
        ("if (call.column_stride == 1)", "if (true)", "a transposed matrix is read by rows"),
        ("std::fill_n(out, call.out_columns, uint16_t{0});", "", "rows of padding are not zeroed"),
        (
            "for (int lane = 0; i < n; ++i, ++lane)",
            "for (int lane = 0; i + 1 < n; ++i, ++lane)",
            "the last element is not squared",
        ),
    ),
]
