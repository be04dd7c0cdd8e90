"""Bugs in the optimizer kernels, in the ways to keep a weight, and in the cutting of a list into chunks and launches."""

from . import Mutant

TEST = "test_adamw"
STEP = "kernels/update_step.cuh"
WEIGHTS = "kernels/update.cuh"
PLAN = "kernels/tensor_list.h"
CHUNKS = "device/tensor_list.cuh"

MUTANTS = [
    # ---- decisions of the step
    Mutant(
        STEP,
        "if (i >= args.tensors || skipped(decisions)) return;",
        "if (i >= args.tensors) return;",
        "a skipped step counts",
    ),
    Mutant(
        STEP,
        "if (i >= args.tensors || skipped(decisions)) return;",
        "if (skipped(decisions)) return;",
        "threads beyond the list go on",
    ),
    Mutant(STEP, "if (skipped(decisions)) return; int tensor", "int tensor", "a skipped step changes the weights"),
    Mutant(STEP, "load(args.step[i]) + 1.0f;", "load(args.step[i]);", "the step is not counted"),
    Mutant(STEP, "store(args.step[i], step);", "", "the count is not stored"),
    Mutant(
        STEP,
        "if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);",
        "",
        "the learning rate on the device is ignored",
    ),
    Mutant(STEP, "if (args.maximize[i]) row.clip = -row.clip;", "", "maximize is ignored"),
    Mutant(STEP, "inverse_scale(load(decisions.grad_scale))", "load(decisions.grad_scale)", "multiplies by the scale"),
    Mutant(STEP, "clip_factor(load(decisions.sum_sq), decisions.max_norm)", "1.0f", "does not clip"),
    Mutant(
        STEP,
        "effective_grad(grad[j], row.inv_scale, row.clip)",
        "effective_grad(grad[j], row.clip, 1.0f)",
        "does not unscale",
    ),
    # ---- which row, which tensor
    Mutant(
        STEP,
        "row[place] = static_cast<uint32_t>(position);",
        "row[place] = static_cast<uint32_t>(place);",
        "scalars of another parameter",
    ),
    Mutant(STEP, "decisions, rows + begin);", "decisions, rows);", "a later launch overwrites the first rows"),
    Mutant(STEP, "groups[p.group]", "groups[0]", "every parameter is taken for group 0"),
    Mutant(STEP, "params[begin + i]", "params[i]", "every launch prepares the first parameters"),
    Mutant(STEP, "index += grid_blocks()", "index += 1", "several blocks update one chunk"),
    Mutant(STEP, "tensor = chunk.tensor;", "tensor = 0;", "every chunk is taken for the first tensor's"),
    # ---- elements
    Mutant(
        STEP,
        "args.aligned[tensor] ? chunk.count / 8 * 8 : 0",
        "chunk.count / 8 * 8",
        "unaligned tensors take the vector path",
    ),
    Mutant(
        STEP,
        "args.aligned[tensor] ? chunk.count / 8 * 8 : 0",
        "args.aligned[tensor] ? (chunk.count + 7) / 8 * 8 : 0",
        "the tail is rounded up",
    ),
    Mutant(
        STEP, "thread_index(); i < chunk.count;", "thread_index(); i < chunk.count - 1;", "the last element is left out"
    ),
    Mutant(
        STEP, "i < by_eight; i += kThreads * 8", "i < by_eight; i += kThreads", "elements are updated several times"
    ),
    Mutant(STEP, "int i = thread_index() * 8;", "int i = thread_index();", "vectors overlap"),
    Mutant(
        STEP,
        "if (kHasMoments) store_moment",
        "if (kHasMoments && m == 0) store_moment",
        "the second moment is not stored",
    ),
    Mutant(
        STEP,
        "store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m])",
        "store_moment(t.moments[m], t.moment_dtypes[0], i, moments[m])",
        "the second moment is stored in the first one's dtype",
    ),
    Mutant(
        STEP,
        "fetch<V>(t.moments[m], t.moment_dtypes[m], i)",
        "fetch<V>(t.moments[0], t.moment_dtypes[m], i)",
        "the first moment is read twice",
    ),
    Mutant(STEP, "second[place] = p.master;", "second[place] = p.shadow;", "the remainder is looked for in the shadow"),
    Mutant(
        STEP,
        "half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16",
        "WeightKind::kSplitBf16",
        "an fp16 split master is taken for bf16",
    ),
    Mutant(
        STEP,
        "p.shadow_dtype == DType::kFloat16 ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16",
        "WeightKind::kFp32CopyBf16",
        "an fp16 shadow is written as bf16",
    ),
    Mutant(
        STEP, "aligned[place] && is_aligned(p.moments[m])", "aligned[place]", "a moment's alignment is not looked at"
    ),
    # ---- ways to keep a weight
    Mutant(WEIGHTS, "store_rounded<T>(second, i, x);", "", "the 16-bit copy is not written"),
    Mutant(WEIGHTS, "raw.remainder[j] = split.remainder;", "raw.remainder[j] = 0;", "the remainder is dropped"),
    Mutant(
        WEIGHTS,
        "x[j] = join_master(raw.weight[j], raw.remainder[j]);",
        "x[j] = to_float(raw.weight[j]);",
        "the remainder is not read",
    ),
    Mutant(
        WEIGHTS,
        "static_cast<uint16_t>(raw.low[j] >> 16)",
        "static_cast<uint16_t>(raw.low[j])",
        "every other 16-bit element is the one before",
    ),
    Mutant(
        WEIGHTS,
        "x[j + 4] = float_of(raw.high[j]);",
        "x[j + 4] = float_of(raw.low[j]);",
        "the upper four elements repeat the lower",
    ),
    Mutant(
        WEIGHTS,
        "load_vec<4, Cache::kStreaming>(words + 4)",
        "load_vec<4, Cache::kStreaming>(words + 2)",
        "the upper half is read from the wrong place",
    ),
    # ---- chunks and launches
    Mutant(
        PLAN, "(entry.numel + kChunk - 1) / kChunk", "entry.numel / kChunk", "the last chunk of a tensor has no number"
    ),
    Mutant(CHUNKS, "if (index < end[low]) high = low;", "high = low;", "the search never leaves the last tensor"),
    Mutant(
        CHUNKS,
        "index < end[middle]",
        "index <= end[middle]",
        "the first chunk of a tensor is looked for in the one before",
    ),
    Mutant(CHUNKS, "index - (low == 0 ? 0 : end[low - 1])", "index", "chunks are counted from the first tensor"),
    Mutant(CHUNKS, "left < kChunk ? static_cast<int>(left) : kChunk", "kChunk", "the last chunk runs past the end"),
]
