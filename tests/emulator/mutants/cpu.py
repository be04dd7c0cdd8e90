"""Bugs in the CPU kernels. Those in a form for AVX-512 are planted where the machine has it, since no test runs it elsewhere."""

import torch

from . import Mutant

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def kernel(file: str, test: str, *bugs: tuple) -> list[Mutant]:
    """A mutant for each (old, new, why, and perhaps nth), which tests/ops/test_{test}.py must catch."""
    return [Mutant(file, *bug, test=f"ops/test_{test}.py") for bug in bugs]


MUTANTS = [
    *kernel(
        "norm/cpu_forward.cpp",
        "norm",
        ("means[r] /= count;", "means[r] *= 1.0f;", "the mean of short rows is a sum"),
        ("infinite |= is_finite(square) ? 0u : 1u;", "infinite |= 0u;", "squares that overflow go unseen"),
        (
            "joined(all, {count, mean,",
            "joined(all, {count, 0.0f,",
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
    *kernel(
        "norm/cpu_forward.cpp",
        "dropout",
        ("drop_span(x, at, n,", "drop_span(x, 0, n,", "every tile draws the numbers of the first"),
    ),
    *kernel(
        "norm/cpu_backward.cpp",
        "norm",
        ("p.mean ? row.g / count : 0.0f", "row.g / count", "rms_norm subtracts a mean"),
        ("row.gn / count;", "row.gn;", "a sum for a mean"),
        ("gradient(v, dy, w) + added", "gradient(v, dy, w)", "the gradient of the sum is left out"),
        (
            "std::fill_n(slot, width, 0.0f);",
            "if (first == 0) std::fill_n(slot, width, 0.0f);",
            "a slot keeps the sums of the strip before",
        ),
        ("store_rest(parts.of_bias, of_bias + i, columns - i);", ";", "the last columns have no bias gradient"),
    ),
    *kernel(
        "norm/cpu_backward.cpp",
        "rows_cpu",
        (
            "sums.get() + s * width + begin, p.sums + begin",
            "sums.get() + s * width, p.sums + begin",
            "a thread adds the columns of another one",
        ),
    ),
    *kernel(
        "norm/cpu_backward.cpp",
        "dropout",
        ("drop_span(values, at, n,", "drop_span(values, 0, n,", "the branch's mask is that of the first row"),
    ),
    *kernel(
        "softmax/cpu.cpp",
        "softmax",
        (
            "std::max(largest, largest_of_span(load(c, count), count))",
            "largest_of_span(load(c, count), count)",
            "the maximum of the last tile",
        ),
        (
            "exp_span<true>(x, base, exponentials + c, count)",
            "exp_span<true>(x, base, exponentials, count)",
            "exponentials of all tiles in one place",
        ),
        (
            "if (call.mask.data) mask_span(call.mask.row(r) + c, 0.0f, to, to, count);",
            "",
            "masked elements of long rows get gradients",
        ),
        (
            "call.mask.row(first + r), kMasked",
            "call.mask.row(first), kMasked",
            "all rows of a batch take the mask of the first",
        ),
        ("sums[r] * kExpUnscale, safe", "sums[r], safe", "the sum keeps its scale"),
        (
            "call.statistics[call.rows + r] = of.inverse;",
            "call.statistics[r] = of.inverse;",
            "the inverse overwrites the base",
        ),
    ),
    *kernel(
        "softmax/cpu_exp_sums.h",
        "softmax",
        (
            "part_of_lanes(x, i, n, kLeast, part)",
            "part_of_lanes(x, i, n, 0.0f, part)",
            "lanes out of bounds count as zeros in the maximum",
        ),
        ("store_rest(kept, e + i, n - i);", ";", "the last exponentials of a row are not kept"),
    ),
    *kernel(
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
            "weight_span(p.weight + at, c, n)",
            "weight_span(p.weight, c, n)",
            "every tile takes the weights of the first classes",
        ),
        (
            "sums.total[k] += sum_of_span(c, n);",
            "sums.total[k] = sum_of_span(c, n);",
            "the total is that of the last tile",
        ),
    ),
    *kernel(
        "activation/cpu.cpp",
        "activation",
        (
            "swiglu(to_float(z[i]), to_float(z[columns + i]))",
            "swiglu(to_float(z[i]), to_float(z[i]))",
            "the gate is its own value",
        ),
    ),
    *kernel(
        "activation/cpu.cpp",
        "activation_backward",
        (
            "add_rows(made, call.type, last - row, width, strip);",
            "add_rows(made, call.type, last - row - 1, width, strip);",
            "one row of each batch is not summed",
        ),
        ("row * columns + c, n, buffer);", "c, n, buffer);", "every gated row takes the first gradient"),
    ),
    *kernel(
        "activation/cpu_gradient.h",
        "activation_backward",
        ("store(d_up, columns + c);", "store(d_up, c);", "the values' gradients go where the gates' belong"),
        ("d_up[i] = d.up;", "d_up[i] = d.gate;", "the values get the gates' gradients"),
    ),
    *kernel(
        "dropout/cpu_span.h",
        "dropout",
        ("drop_tile(x + done, words + lead,", "drop_tile(x + done, words,", "an offset within a group is lost"),
        (
            "dropout_bits(seed, group + static_cast<uint64_t>(q))",
            "dropout_bits(seed, group)",
            "all groups of a tile draw the same",
        ),
        (
            "drop_and_add_tile(x + done, words + lead, rate, added + done,",
            "drop_and_add_tile(x + done, words + lead, rate, added,",
            "the residual of the first tile",
        ),
    ),
    *kernel(
        "embedding/cpu.cpp",
        "embedding",
        ("if (rows[begin] != call.padding_idx)", "", "padding gets a gradient"),
        ("run_end < call.entries &&", "run_end < end &&", "a run ends with a thread's share"),
        ("static_cast<float>(run_end - first) : 1.0f", "1.0f : 1.0f", "gradients are not divided by the frequency"),
    ),
    *kernel(
        "base/cpu/column_sums.cpp",
        "column_sums",
        ("for (; r < rows; ++r) {", "for (; r + 1 < rows; ++r) {", "the last row is not summed"),
        ("sums[c + i] += tile[i];", "sums[i] += tile[i];", "all tiles of an fp16 row go to the first columns"),
    ),
    *kernel(
        "base/cpu/column_sums.h",
        "column_sums",
        ("std::min(rows, (i + 1) * strip)", "(i + 1) * strip - 1", "a strip leaves out its last row"),
    ),
    *kernel(
        "unit_sums/cpu.cpp",
        "batch_invariant_splits",
        ("if (p.fresh)", "if (true)", "micro-batches after the first start anew"),
        ("p.mean ? p.mean[r] : 0.0f", "0.0f", "the mean is not subtracted"),
    ),
    *kernel(
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
    *kernel(
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
    *kernel(
        "cast/cpu.cpp",
        "cast",
        ("{0, static_cast<uint32_t>(c.tensor), 0, 0, 0}", "{0, 0, 0, 0, 0}", "all tensors draw the same numbers"),
        (
            "if (cast.to == DType::kFloat32) return cast_span",
            "if (false) return cast_span",
            "a seed keeps fp32 results from being written",
        ),
        (
            "store_tile(load_tile(cast.source, cast.from, at, count, buffer), cast.destination, cast.to, at, count)",
            "store_tile(load_tile(cast.source, cast.from, begin, count, buffer), cast.destination, cast.to, at, count)",
            "fp16 to bf16 repeats the first tile",
        ),
    ),
    *kernel(
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
    *kernel(
        "gradients/cpu_check_and_norm.cpp",
        "check_and_norm",
        ("peak_is_finite(totals[i].peak) ? 0.0f : 1.0f", "0.0f", "no overflow is reported"),
        ("per_tensor ? static_cast<size_t>(chunks[i].tensor) : 0", "0", "all tensors count as the first"),
        ("peak = std::max(peak, other.peak);", "peak = other.peak;", "the last chunk decides about the overflow"),
        ("add_to_lanes<kSum>(x, lanes, n, inv_scale);", ";", "the last elements of a chunk are not read"),
    ),
    *kernel(
        "gradients/cpu_exponent_histogram.cpp",
        "exponent_histogram",
        (
            "largest[tensor] = std::max(largest[tensor], partials[i].largest)",
            "largest[tensor] = partials[i].largest",
            "the largest of the last chunk",
        ),
        ("set < kSets", "set < kSets - 1", "a set of counters is not added"),
    ),
    *kernel(
        "gradients/cpu_unscale.cpp",
        "unscale",
        (
            "if (here) found.store(true, std::memory_order_relaxed);",
            "found.store(here, std::memory_order_relaxed);",
            "the last chunk decides",
        ),
        ("found |= any_non_finite(data + at, n);", "found = any_non_finite(data + at, n);", "the last tile decides"),
    ),
    *kernel(
        "gradients/cpu_update_scale.cpp",
        "update_scale",
        ("*at.growth_tracker = updated.growth_tracker;", "", "the scale never grows"),
        (
            "count_consecutive_skips(*at.consecutive_skips, overflow)",
            "count_skips(*at.consecutive_skips, overflow)",
            "skips in a row are never reset",
        ),
    ),
    *kernel(
        "gemm/cpu/gemm.cpp",
        "gemm_epilogue",
        ("bias[r % m]", "bias[0]", "all rows take the first bias"),
        ("finish_z(up, r, columns + c, width)", "finish_z(up, r, c, width)", "gates and values share a bias"),
        ("fma(beta, residual[i], out[i])", "residual[i] + out[i]", "the residual is not scaled"),
        (
            "preact[j] = round_to<T>(z);",
            "preact[j] = round_to<T>(activate(kActivation, z));",
            "the result is kept in place of the pre-activation",
        ),
    ),
    *kernel(
        "gemm/cpu/gemm.cpp",
        "gemm_dact",
        (
            "sums + unit * gradient.width + column",
            "sums + unit * gradient.width",
            "all tiles go to the first columns' sums",
        ),
        ("block.unit + i / kRowUnit", "block.unit", "rows of all units go to the first one's sums"),
    ),
    *kernel(
        "gemm/cpu/blocked.cpp",
        "gemm_cpu",
        ("step + p > 0", "step > 0", "each depth of a panel starts from zero"),
        (
            "std::min(kernel_.columns, piece.columns - column)",
            "kernel_.columns",
            "a full panel is multiplied at the right edge",
        ),
        ("half * columns_ + first_column(block)", "first_column(block)", "both halves are the gates"),
        (
            "if (block != packed_block || steps < steps_)",
            "if (block != packed_block)",
            "later steps of K multiply the columns of the first",
        ),
        ("(by_rows ? 0 : first)", "0", "all lanes of a thin product go to the first rows"),
    ),
    *kernel(
        "gemm/cpu/portable.cpp",
        "gemm_cpu",
        ("(row + i) * start->row_stride", "i * start->row_stride", "chains start from the first rows of C"),
        ("(column + j) * b.column_stride", "j * b.column_stride", "every panel is the first"),
    ),
    *kernel(
        "gemm/cpu/grouped.cpp",
        "grouped_mm",
        (
            "std::clamp<int64_t>(p.offs[index * p.offs_stride], begin, total)",
            "p.offs[index * p.offs_stride]",
            "offsets that decrease or lie out of bounds are taken at their word",
        ),
        ("zero_rows(p.product.c, end, total);", "", "rows after the last group are not zeroed"),
        ("element(e.bias, group.index * e.bias.batch_stride)", "element(e.bias, 0)", "all groups take the first bias"),
    ),
    *kernel(
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
    *kernel(
        "update/cpu.cpp",
        "updates",
        ("if (p.shadow) store_tile(weights, p.shadow, p.shadow_dtype, at, n);", "", "shadows are never written"),
        (
            "static_cast<int16_t*>(p.master) + at, n);",
            "static_cast<int16_t*>(p.master), n);",
            "every tile overwrites the first remainders",
        ),
        (
            "ema_span(p.ema + at, weights, n, take);",
            "ema_span(p.ema, weights, n, take);",
            "averages of all tiles move the first elements",
        ),
        (
            "p.stochastic && p.master_kind == Master::kNone",
            "p.master_kind == Master::kNone",
            "every step rounds stochastically",
        ),
    ),
    *kernel(
        "update/cpu.h",
        "updates",
        (
            "last->group == p.group && *last->step == *p.step",
            "last->group == p.group",
            "parameters of different ages share scalars",
        ),
        ("call.flags[group] & kMaximize ? -clip : clip", "clip", "maximizing minimizes"),
    ),
    *kernel(
        "update/rules/cpu_lamb.cpp",
        "lamb",
        ("squares[i][static_cast<size_t>(at / kChunk)]", "squares[i][0]", "chunks on several threads add to one sum"),
        (
            "sum.direction += sum_squares(direction, n);",
            "sum.direction = sum_squares(direction, n);",
            "the direction's norm is that of the last tile",
        ),
    ),
    *kernel(
        "update/cpu_moments.cpp",
        "moments8",
        ("p.exponents[k] + at / kBlock8", "p.exponents[k]", "all tiles are decoded with the first exponents"),
        ("numbers.of(1 + k, first, n)", "numbers.of(1, first, n)", "both moments are rounded by the same numbers"),
    ),
]

if HAS_AVX512:
    MUTANTS += [
        *kernel(
            "update/cpu_moments.cpp",
            "moments8",
            ("left >= kBlock8 ? ~0u", "left > kBlock8 ? ~0u", "a last block that is whole loses an element"),
            ("_mm512_set1_epi32(kBlock8LeastCode)", "_mm512_set1_epi32(0)", "a small square may become zero"),
        ),
        *kernel(
            "update/cpu_plain8.h",
            "moments8",
            ("_mm512_set1_epi8(8)) == 0;", "_mm512_set1_epi8(0)) == 0;", "subnormal codes are decoded as normal ones"),
            ("if (wrong != 0)", "if (false)", "codes below 16 are encoded as normal ones"),
            ("(i / kGroup + 1) % 2", "i / kGroup % 2", "a group is stored before it is updated"),
            ("group.nan |= _mm512_cmpge_epu32_mask(exponent, c.nan);", "", "a NaN is encoded as a number"),
        ),
        *kernel(
            "base/cpu/stochastic.cpp",
            "cast",
            (
                "_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7)",
                "_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)",
                "calls are unpacked in another order",
            ),
            (
                "first + static_cast<uint64_t>(q + 8 * v)",
                "first + static_cast<uint64_t>(q)",
                "four vectors draw the same",
            ),
        ),
        *kernel(
            "gemm/cpu/avx512.h",
            "gemm_cpu",
            ("elements > 1 ? mask : 0", "mask", "an odd K reads the element after its end"),
            ("(__mmask16)((1u << n) - 1)", "(__mmask16)((1u << n) - 1) >> 1", "the last of a few lanes is not stored"),
        ),
    ]
