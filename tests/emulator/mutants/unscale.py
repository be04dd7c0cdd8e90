"""Bugs in the unscale kernel, and in the walk over a span where only a kernel that stores would notice."""

from . import Mutant

TEST = "test_unscale"
KERNEL = "gradients/unscale.cu"
WALK = "base/vector_walk.cuh"
LIST = "gradients/list.h"

MUTANTS = [
    # ---- values
    Mutant(KERNEL, "const float factor = load(inv_scale);", "const float factor = 1.0f / load(inv_scale);", "the factor is inverted"),
    Mutant(KERNEL, "v[j] = unscaled(v[j], factor);", "", "nothing is multiplied"),
    Mutant(KERNEL, "v[j] = unscaled(v[j], factor);", "v[0] = unscaled(v[0], factor);", "only the first element of a vector is multiplied"),
    Mutant(KERNEL, "AK_DEVICE double unscaled(double grad, float inv_scale) { return unscale(grad, inv_scale); }",
           "AK_DEVICE double unscaled(double grad, float inv_scale) { return unscale(static_cast<float>(grad), inv_scale); }", "fp64 gradients go through fp32"),
    Mutant(KERNEL, "store_vec<Cache::kStreaming>(at, v);", "", "the products are not stored"),
    # ---- the flag
    Mutant(KERNEL, "finite = finite && is_finite(v[j]);", "finite = is_finite(v[j]);", "only the last element is checked"),
    Mutant(KERNEL, "v[j] = unscaled(v[j], factor); finite = finite && is_finite(v[j]);", "finite = finite && is_finite(v[j]); v[j] = unscaled(v[j], factor);",
           "the scaled value is checked"),
    Mutant(KERNEL, "finite = finite && is_finite(v[j]);",
           "finite = finite && is_finite(static_cast<float>(unscaled(double(sizeof(T) == 8 ? 1 : 0), factor))) && (sizeof(T) == 2 || is_finite(v[j]));", "16-bit results are not checked"),
    Mutant(KERNEL, "if (!finite && found_inf != nullptr) store_relaxed(found_inf, 1.0f);", "", "nothing is reported"),
    Mutant(KERNEL, "if (!finite && found_inf != nullptr) store_relaxed(found_inf, 1.0f);", "store_relaxed(found_inf, finite ? 0.0f : 1.0f);",
           "an earlier find is cleared"),
    Mutant(KERNEL, "if (!finite && found_inf != nullptr) store_relaxed", "if (!finite && found_inf != nullptr && thread_index() == 0) store_relaxed",
           "only thread 0 reports"),
    Mutant(KERNEL, "if (found_inf == nullptr && factor == 1.0f) return;", "", "a factor of 1 is multiplied by"),
    Mutant(KERNEL, "found_inf == nullptr && factor == 1.0f", "factor == 1.0f", "for a factor of 1 nothing is checked"),
    Mutant(KERNEL, "found_inf == nullptr && factor == 1.0f", "found_inf == nullptr", "without a flag nothing is done"),
    Mutant(KERNEL, "!finite && found_inf != nullptr", "!finite", "what nobody asks for is reported"),
    Mutant(KERNEL, "store_relaxed(found_inf, 1.0f)", "store(found_inf, 1.0f)", "threads race for the flag"),
    Mutant(KERNEL, "store_relaxed(found_inf, 1.0f)", "atomic_add(found_inf, 1.0f)", "finds are counted"),
    # ---- which elements
    Mutant(KERNEL, "walk(block_index(), grid_blocks())", "walk(0, 1)", "every block multiplies the whole list"),
    Mutant(KERNEL, "args.data[span.tensor]", "args.data[0]", "every span is taken for the first tensor's"),
    Mutant(KERNEL, "static_cast<T*>(args.data[span.tensor]) + span.begin;", "static_cast<T*>(args.data[span.tensor]);", "every span is the first"),
    Mutant(KERNEL, "(grads, span.count,", "(grads, kUnit,", "every span is a unit"),
    Mutant(LIST, "dtype[place] = grad.dtype;", "dtype[0] = grad.dtype;", "dtypes go to the wrong place"),
    Mutant(WALK, "if (thread < head)", "if (thread <= head)", "the element after the first boundary is multiplied twice"),
    Mutant(WALK, "f(data + tail + thread,", "f(data + thread,", "the tail is stored at the front"),
    Mutant(WALK, "f(at + k * kStride, v[k])", "f(at, v[k])", "four vectors are stored at one place"),
    Mutant(WALK, "int left = vectors - thread;", "int left = vectors;", "threads past the last vector go on"),
    Mutant(WALK, "left > (kInFlight - 1) * kThreads", "left > 0", "the unrolled loop goes past the end"),
    Mutant(WALK, "return f(bf16{});", "return f(fp16{});", "bf16 is taken for fp16"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "gradients are read before they are written"),
]  # fmt: skip
