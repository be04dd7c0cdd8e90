"""Bugs in the kernel that casts lists."""

from . import Mutant

TEST = "test_cast"
KERNEL = "cast/cast.cu"

MUTANTS = [
    # ---- which elements
    Mutant(KERNEL, "walk(block_index(), grid_blocks())", "walk(0, 1)", "every block casts the whole list"),
    Mutant(KERNEL, "tensor = span.tensor;", "tensor = 0;", "every span is taken for the first pair's"),
    Mutant(KERNEL, "span.begin + span.count;", "span.begin + kUnit;", "every span is a unit"),
    Mutant(KERNEL, "end - span.count % 8", "end", "the vectors of eight run past the end"),
    Mutant(KERNEL, "const bool aligned = (reinterpret_cast<uintptr_t>(source) |", "const bool aligned = (", "only the destination's alignment is looked at"),
    Mutant(KERNEL, "| reinterpret_cast<uintptr_t>(destination)) % 16", ") % 16", "only the source's alignment is looked at"),
    Mutant(KERNEL, "source, destination, middle, end, key", "source, destination, end, end, key", "no element alone"),
    Mutant(KERNEL, "thread_index() * V", "thread_index()", "threads overlap"),
    Mutant(KERNEL, "i + (kLoads - 1) * kStride < end", "i < end", "the unrolled loop goes past the end"),
    Mutant(KERNEL, "nullptr, at, x, key", "nullptr, i, x, key", "all groups are stored at one place"),
    Mutant(KERNEL, "if (i < end) convert(std::false_type{}, i);", "", "the last groups are left out"),
    Mutant(KERNEL, "kWhole || at < end ? at : end - V", "at", "the last groups are fetched past the end"),
    Mutant(KERNEL, "if (!kWhole && at >= end) break;", "", "the last groups are stored past the end"),
    # ---- values
    Mutant(KERNEL, "return f(bf16{});", "return f(fp16{});", "bf16 is taken for fp16"),
    Mutant(KERNEL, "with_narrow_dtype(args.to[tensor],", "with_narrow_dtype(args.from[tensor],", "dtypes are mixed up"),
    Mutant(KERNEL, "key{seed, count, {0, args.index[tensor], 0, 0, 0}}", "key{seed, count, {}}", "all pairs have the same random bits"),
    Mutant(KERNEL, "key{seed, count,", "key{seed, 0,", "the step is forgotten"),
    Mutant(KERNEL, "key{seed, count,", "key{uint32_t(seed), count,", "half of the seed is dropped"),
    Mutant(KERNEL, "struct Destination : StochasticWeight<T>", "struct Destination : PlainWeight<T>", "nothing is rounded stochastically"),
    Mutant(KERNEL, "cast_on<kCastThreads, true, Args>", "cast_on<kCastThreads, false, Args>", "the seed is dropped"),
    # ---- the list
    Mutant(KERNEL, "index[place] = static_cast<uint32_t>(position)", "index[place] = place", "places count, not positions"),
    Mutant(KERNEL, "to[place] = cast.to;", "to[0] = cast.to;", "dtypes go to the wrong place"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "sources are read before they are written"),
]  # fmt: skip
