"""Bugs in the AdamW kernels, in the ways to keep a weight, and in the cutting of a list into chunks and launches."""

from . import Mutant

TEST = "test_adamw"
KERNEL = "kernels/adamw.cu"
UPDATE = "kernels/update.cuh"
PLAN = "kernels/tensor_list.h"
CHUNKS = "device/tensor_list.cuh"

MUTANTS = [
    # ---- decisions of the step
    Mutant(
        KERNEL,
        "if (i >= args.tensors || skipped(decisions)) return;",
        "if (i >= args.tensors) return;",
        "a skipped step counts",
    ),
    Mutant(
        KERNEL,
        "if (i >= args.tensors || skipped(decisions)) return;",
        "if (skipped(decisions)) return;",
        "threads beyond the list go on",
    ),
    Mutant(KERNEL, "if (skipped(decisions)) return; int tensor", "int tensor", "a skipped step changes the weights"),
    Mutant(
        KERNEL,
        "const float step = load(args.step[i]) + 1.0f;",
        "const float step = load(args.step[i]);",
        "the step is not counted",
    ),
    Mutant(KERNEL, "store(args.step[i], step);", "", "the count is not stored"),
    Mutant(
        KERNEL,
        "if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);",
        "",
        "the learning rate on the device is ignored",
    ),
    Mutant(KERNEL, "if (args.maximize[i]) row.clip = -row.clip;", "", "maximize is ignored"),
    Mutant(
        KERNEL, "inverse_scale(load(decisions.grad_scale))", "load(decisions.grad_scale)", "multiplies by the scale"
    ),
    Mutant(KERNEL, "clip_factor(load(decisions.sum_sq), decisions.max_norm)", "1.0f", "does not clip"),
    Mutant(
        KERNEL,
        "effective_grad(grad[j], row.inv_scale, row.clip)",
        "effective_grad(grad[j], row.clip, 1.0f)",
        "does not unscale",
    ),
    # ---- which row, which tensor
    Mutant(
        KERNEL,
        "row[place] = static_cast<uint32_t>(position);",
        "row[place] = static_cast<uint32_t>(place);",
        "scalars of another parameter",
    ),
    Mutant(KERNEL, "decisions, rows + begin);", "decisions, rows);", "a later launch overwrites the first rows"),
    Mutant(KERNEL, "groups[t.group]", "groups[0]", "every parameter is taken for group 0"),
    Mutant(KERNEL, "tensors[begin + i]", "tensors[i]", "every launch prepares the first parameters"),
    Mutant(KERNEL, "index += grid_blocks()", "index += 1", "several blocks update one chunk"),
    Mutant(KERNEL, "tensor = chunk.tensor;", "tensor = 0;", "every chunk is taken for the first tensor's"),
    # ---- elements
    Mutant(
        KERNEL,
        "args.aligned[tensor] ? chunk.count / 8 * 8 : 0",
        "chunk.count / 8 * 8",
        "unaligned tensors take the vector path",
    ),
    Mutant(
        KERNEL,
        "args.aligned[tensor] ? chunk.count / 8 * 8 : 0",
        "args.aligned[tensor] ? (chunk.count + 7) / 8 * 8 : 0",
        "the tail is rounded up",
    ),
    Mutant(
        KERNEL,
        "int i = by_eight + thread_index(); i < chunk.count",
        "int i = by_eight + thread_index(); i < chunk.count - 1",
        "the last element is left out",
    ),
    Mutant(
        KERNEL,
        "i += kThreads * 8) update_elements",
        "i += kThreads) update_elements",
        "elements are updated several times",
    ),
    Mutant(KERNEL, "int i = thread_index() * 8;", "int i = thread_index();", "vectors overlap"),
    Mutant(
        KERNEL, "store_moment(c.exp_avg_sq, c.exp_avg_sq_dtype, i, exp_avg_sq);", "", "the second moment is not stored"
    ),
    Mutant(
        KERNEL,
        "store_moment(c.exp_avg, c.exp_avg_dtype, i, exp_avg);",
        "store_moment(c.exp_avg, c.exp_avg_sq_dtype, i, exp_avg);",
        "the first moment is stored in the second one's dtype",
    ),
    Mutant(
        KERNEL,
        "fetch<V>(c.exp_avg_sq, c.exp_avg_sq_dtype, i)",
        "fetch<V>(c.exp_avg, c.exp_avg_sq_dtype, i)",
        "the first moment is read twice",
    ),
    Mutant(
        KERNEL, "second[place] = t.master;", "second[place] = t.shadow;", "the remainder is looked for in the shadow"
    ),
    Mutant(
        KERNEL,
        "half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16",
        "WeightKind::kSplitBf16",
        "an fp16 split master is taken for bf16",
    ),
    Mutant(
        KERNEL,
        "t.shadow_dtype == DType::kFloat16 ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16",
        "WeightKind::kFp32CopyBf16",
        "an fp16 shadow is written as bf16",
    ),
    # ---- ways to keep a weight
    Mutant(UPDATE, "store_rounded<T>(second, i, x);", "", "the 16-bit copy is not written"),
    Mutant(UPDATE, "raw.remainder[j] = split.remainder;", "raw.remainder[j] = 0;", "the remainder is dropped"),
    Mutant(
        UPDATE,
        "x[j] = join_master(raw.weight[j], raw.remainder[j]);",
        "x[j] = to_float(raw.weight[j]);",
        "the remainder is not read",
    ),
    Mutant(
        UPDATE,
        "static_cast<uint16_t>(raw.low[j] >> 16)",
        "static_cast<uint16_t>(raw.low[j])",
        "every other 16-bit element is the one before",
    ),
    Mutant(
        UPDATE,
        "x[j + 4] = float_of(raw.high[j]);",
        "x[j + 4] = float_of(raw.low[j]);",
        "the upper four elements repeat the lower",
    ),
    Mutant(
        UPDATE,
        "load_vec<4, Cache::kStreaming>(words + 4)",
        "load_vec<4, Cache::kStreaming>(words + 2)",
        "the upper half is read from the wrong place",
    ),
    # ---- chunks and launches
    Mutant(
        PLAN, "(entry.numel + kChunk - 1) / kChunk", "entry.numel / kChunk", "the last chunk of a tensor has no number"
    ),
    Mutant(
        PLAN,
        "if (entry.numel == 0) continue;",
        "",
        "an empty tensor takes a place",
        missed="such a place has no chunks, so only room in the launch is lost: the result is right",
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
