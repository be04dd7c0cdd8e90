"""Bugs in the CPU kernels over lists of tensors: gradients, casts, optimizer steps."""

from . import in_cpu_kernel

MUTANTS = [
    *in_cpu_kernel(
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
    *in_cpu_kernel(
        "gradients/cpu_check_and_norm.cpp",
        "check_and_norm",
        ("peak_is_finite(totals[i].peak) ? 0.0f : 1.0f", "0.0f", "no overflow is reported"),
        ("per_tensor ? static_cast<size_t>(chunks[i].tensor) : 0", "0", "all tensors count as the first"),
        ("peak = std::max(peak, other.peak);", "peak = other.peak;", "the last chunk decides about the overflow"),
        ("add_to_lanes<kSum>(x, lanes, n, inv_scale);", ";", "the last elements of a chunk are not read"),
    ),
    *in_cpu_kernel(
        "gradients/cpu_exponent_histogram.cpp",
        "exponent_histogram",
        (
            "largest[tensor] = std::max(largest[tensor], partials[i].largest)",
            "largest[tensor] = partials[i].largest",
            "the largest of the last chunk",
        ),
        ("set < kSets", "set < kSets - 1", "a set of counters is not added"),
    ),
    *in_cpu_kernel(
        "gradients/cpu_unscale.cpp",
        "unscale",
        (
            "if (here) found.store(true, std::memory_order_relaxed);",
            "found.store(here, std::memory_order_relaxed);",
            "the last chunk decides",
        ),
        ("found |= any_non_finite(data + at, n);", "found = any_non_finite(data + at, n);", "the last tile decides"),
    ),
    *in_cpu_kernel(
        "gradients/cpu_update_scale.cpp",
        "update_scale",
        ("*at.growth_tracker = updated.growth_tracker;", "", "the scale never grows"),
        (
            "count_consecutive_skips(*at.consecutive_skips, overflow)",
            "count_skips(*at.consecutive_skips, overflow)",
            "skips in a row are never reset",
        ),
    ),
    *in_cpu_kernel(
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
    *in_cpu_kernel(
        "update/cpu.h",
        "updates",
        (
            "last->group == p.group && *last->step == *p.step",
            "last->group == p.group",
            "parameters of different ages share scalars",
        ),
        ("call.flags[group] & kMaximize ? -clip : clip", "clip", "maximizing minimizes"),
    ),
    *in_cpu_kernel(
        "update/rules/cpu_lamb.cpp",
        "lamb",
        (
            "totals[i].weight += part.weight;",
            "totals[i].weight = part.weight;",
            "the weight's norm is that of the last chunk",
        ),
        (
            "sum.direction += sum_squares(direction, n);",
            "sum.direction = sum_squares(direction, n);",
            "the direction's norm is that of the last tile",
        ),
    ),
    *in_cpu_kernel(
        "update/cpu_moments.cpp",
        "moments8",
        ("p.exponents[k] + at / kBlock8", "p.exponents[k]", "all tiles are decoded with the first exponents"),
        ("numbers.of(1 + k, first, n)", "numbers.of(1, first, n)", "both moments are rounded by the same numbers"),
    ),
]
