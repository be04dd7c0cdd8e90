"""Bugs in the optimizer kernels, in the ways to keep a weight, and in the cutting of a list into units, runs and launches."""

from . import Mutant

TEST = "test_adamw"
STEP = "update/step.cuh"
ARGS = "update/arguments.cuh"
WEIGHTS = "update/update.cuh"
PLAN = "base/tensor_list.h"
SHARES = "device/tensor_list.cuh"

MUTANTS = [
    # ---- decisions of the step
    Mutant(STEP, "if (i >= args.tensors || skipped(decisions)) return;", "if (i >= args.tensors) return;", "a skipped step counts"),
    Mutant(STEP, "if (i >= args.tensors || skipped(decisions)) return;", "if (skipped(decisions)) return;", "threads beyond the list go on"),
    Mutant(STEP, "if (skipped(decisions)) return; ListWalk", "ListWalk", "a skipped step changes the weights"),
    Mutant(STEP, "load(args.step[i]) + 1.0f;", "load(args.step[i]);", "the step is not counted"),
    Mutant(STEP, "store(args.step[i], step);", "", "the count is not stored"),
    Mutant(STEP, "if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);", "", "the learning rate on the device is ignored"),
    Mutant(STEP, "if (args.weight_decay[i] != nullptr) options.weight_decay = load(args.weight_decay[i]);", "", "the weight decay on the device is ignored"),
    Mutant(STEP, "if (args.maximize[i]) row.clip = -row.clip;", "", "maximize is ignored"),
    Mutant(STEP, "inverse_scale(load(decisions.grad_scale))", "load(decisions.grad_scale)", "multiplies by the scale"),
    Mutant(STEP, "clip_factor(load(decisions.sum_sq), decisions.max_norm)", "1.0f", "does not clip"),
    Mutant(STEP, "effective_grad(grad[j], row.inv_scale, row.clip)", "effective_grad(grad[j], row.clip, 1.0f)", "does not unscale"),
    # ---- which row, which tensor
    Mutant(ARGS, "row[place] = static_cast<uint32_t>(position);", "row[place] = static_cast<uint32_t>(place);", "scalars of another parameter"),
    Mutant(STEP, "decisions, rows + begin);", "decisions, rows);", "a later launch overwrites the first rows"),
    Mutant(STEP, "groups[p.group]", "groups[0]", "every parameter is taken for group 0"),
    Mutant(STEP, "params[begin + i]", "params[i]", "every launch prepares the first parameters"),
    Mutant(STEP, "walk(block_index(), grid_blocks())", "walk(0, 1)", "every block updates the whole list"),
    Mutant(STEP, "tensor = span.tensor;", "tensor = 0;", "every span is taken for the first tensor's"),
    # ---- elements
    Mutant(STEP, "aligned ? span.count / 8 * 8 : 0", "span.count / 8 * 8", "unaligned tensors take the vector path"),
    Mutant(STEP, "aligned ? span.count / 8 * 8 : 0", "aligned ? (span.count + 7) / 8 * 8 : 0", "the tail is rounded up"),
    Mutant(STEP, "thread_index(); i < span.count;", "thread_index(); i < span.count - 1;", "the last element is left out"),
    Mutant(STEP, "i < by_eight; i += kThreads * 8", "i < by_eight; i += kThreads", "elements are updated several times"),
    Mutant(STEP, "int i = thread_index() * 8;", "int i = thread_index();", "vectors overlap"),
    Mutant(STEP, "m < kThere; m++) store_moment", "m < 1; m++) store_moment", "the second moment is not stored"),
    Mutant(STEP, "store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m])", "store_moment(t.moments[m], t.moment_dtypes[0], i, moments[m])",
           "the second moment is stored in the first one's dtype"),
    Mutant(STEP, "fetch<V>(t.moments[m], t.moment_dtypes[m], i)", "fetch<V>(t.moments[0], t.moment_dtypes[m], i)", "the first moment is read twice"),
    Mutant(ARGS, "aligned[place] && vector_aligned(p.moments[m])", "aligned[place]", "a moment's alignment is not looked at"),
    # ---- which way a weight is kept
    Mutant(WEIGHTS, "WeightKind::kSplitBf16, p.param, p.master};", "WeightKind::kSplitBf16, p.param, p.shadow};", "the remainder is looked for in the shadow"),
    Mutant(WEIGHTS, "half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16", "WeightKind::kSplitBf16", "an fp16 split master is taken for bf16"),
    Mutant(WEIGHTS, "of_copy(p.shadow_dtype == DType::kFloat16)", "of_copy(half)", "an fp16 shadow is written as bf16"),
    Mutant(WEIGHTS, "if (p.stochastic) return", "if (false) return", "stochastic rounding is ignored"),
    Mutant(WEIGHTS, "if (p.param_dtype == DType::kFloat32) return", "if (p.param_dtype == DType::kFloat32 && !p.stochastic) return",
           "an fp32 weight is rounded stochastically"),
    Mutant(WEIGHTS, "half ? WeightKind::kStochasticFp16 : WeightKind::kStochasticBf16", "WeightKind::kStochasticBf16", "an fp16 weight is rounded as bf16"),
    Mutant(WEIGHTS, "f(StochasticWeight<fp16>{});", "f(PlainWeight<fp16>{});", "fp16 weights are rounded to nearest even"),
    # ---- stochastic rounding
    Mutant(WEIGHTS, "static_cast<uint64_t>(i) / 8", "static_cast<uint64_t>(i)", "every element calls the generator anew"),
    Mutant(WEIGHTS, "round_stochastic<T>(x[j], random[j])", "round_stochastic<T>(x[j], random[0])", "eight elements share one number"),
    Mutant(WEIGHTS, "i % 8 == j ? random16<kScale>(bits, j, value) : random[0]", "random16(bits, 0)", "element by element all take the first number of a call"),
    Mutant(WEIGHTS, "key.seed, key.step, key.place.index", "key.seed, key.place.index, key.step", "step and index are mixed up"),
    Mutant("base/philox.h", "static_cast<uint32_t>(key >> 32) + round", "round", "half of the seed is dropped"),
    Mutant(STEP, "row.step = static_cast<uint32_t>(step);", "", "all steps have the same random bits"),
    Mutant(STEP, "row.step = static_cast<uint32_t>(step);", "row.step = static_cast<uint32_t>(step) - 1;", "the random bits of the step before"),
    Mutant(STEP, "args.random[i] = p.random;", "args.random[i] = p.random; args.random[i].index = begin + i;", "the index depends on the list"),
    # ---- average of the weights
    Mutant(WEIGHTS, "ak::ema(average[j], weight[j], take)", "ak::ema(weight[j], average[j], take)", "the average jumps"),
    Mutant(STEP, "ema_take(group.ema_decay)", "static_cast<float>(group.ema_decay)", "takes what it should keep"),
    Mutant(STEP, "ema_take(group.ema_decay)", "ema_take(groups[0].ema_decay)", "all have the decay of group 0"),
    Mutant(STEP, "if (kExtras && t.ema != nullptr) store_ema", "for (float& w : weight) w = to_float(round_to<bf16>(w)); if (kExtras && t.ema != nullptr) store_ema",
           "the average is of the rounded weight"),
    Mutant(STEP, "(t.ema + i)", "(t.ema)", "the first elements of the average are read again and again"),
    Mutant(ARGS, "t.ema = extras.ema[tensor]", "t.ema = extras.ema[0]", "the average of another parameter"),
    Mutant(STEP, "if (kExtras && t.ema != nullptr) average", "if (kExtras) average", "an average that is not there is read"),
    Mutant(ARGS, "aligned[place] = aligned[place] && vector_aligned(p.ema);", "", "unaligned averages take the vector path"),
    # ---- AMSGrad
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "false, g, row.scalars", "the largest second moment is ignored"),
    Mutant(STEP, "for (int m = 0; m < kMoments; m++) of_element[m] = moments[m][j];",
           "for (int m = 0; m < kMoments; m++) of_element[m] = moments[m == 0 ? 0 : kMoments - m][j];", "the second moment and the largest one are mixed up"),
    Mutant(STEP, "kOptionalMoments ? kMoments : Rule::kRequiredMoments", "kMoments", "a moment that is not there is read"),
    Mutant(STEP, "m < kThere; m++) store_moment", "m < Rule::kRequiredMoments; m++) store_moment", "the third moment is not stored"),
    Mutant(STEP, "t.moments[Rule::kRequiredMoments] != nullptr", "t.moments[Rule::kRequiredMoments] != t.ema", "the third moment counts only where there is an average"),
    # ---- which kernel
    Mutant(STEP, "return moments || p.ema != nullptr ||", "return p.ema != nullptr ||", "AMSGrad alone is not noticed"),
    Mutant(STEP, "moments || p.ema != nullptr ||", "moments ||", "an average alone is not noticed"),
    Mutant(STEP, "|| weight_place(p).stochastic();", ";", "stochastic rounding alone is not noticed"),
    Mutant(STEP, "std::any_of(params", "std::all_of(params", "one parameter without extras hides those of the others"),
    # ---- ways to keep a weight
    Mutant(WEIGHTS, "store_rounded<T>(second, i, x);", "", "the 16-bit copy is not written"),
    Mutant(WEIGHTS, "raw.remainder[j] = static_cast<Remainder>(k24 ? split.remainder >> 8 : split.remainder);", "raw.remainder[j] = 0;", "the remainder is dropped"),
    Mutant(WEIGHTS, "x[j] = join_master(raw.weight[j], raw.remainder[j]);", "x[j] = to_float(raw.weight[j]);", "the remainder is not read"),
    Mutant(WEIGHTS, "static_cast<uint16_t>(raw.low[j] >> 16)", "static_cast<uint16_t>(raw.low[j])", "every other 16-bit element is the one before"),
    Mutant(WEIGHTS, "x[j + 4] = float_of(raw.high[j]);", "x[j + 4] = float_of(raw.low[j]);", "the upper four elements repeat the lower"),
    Mutant(WEIGHTS, "load_vec<4, Cache::kStreaming>(words + 4)", "load_vec<4, Cache::kStreaming>(words + 2)", "the upper half is read from the wrong place"),
    # ---- units, runs and launches
    Mutant(PLAN, "(entry.numel + unit_ - 1) / unit_", "entry.numel / unit_", "the last unit of a tensor has no number"),
    Mutant(PLAN, "divide_up(map.units, static_cast", "(map.units / static_cast", "more blocks than may be resident", missed="blocks of a second wave do the same work"),
    Mutant(PLAN, "map.longer = map.units - map.runs * map.per_run", "map.longer = 0", "the last units belong to no run"),
    Mutant(SHARES, "if (index < end[low]) high = low;", "high = low;", "the search never leaves the last tensor"),
    Mutant(SHARES, "index < end[middle]", "index <= end[middle]", "the first unit of a tensor is looked for in the one before"),
    Mutant(SHARES, "index - begin_of(low)", "index", "units are counted from the first tensor"),
    Mutant(SHARES, "left < wanted ? left : wanted", "wanted", "the last unit runs past the end"),
    Mutant(SHARES, "(run < longer ? run : longer)", "0", "runs overlap"),
    Mutant(SHARES, "at_ = end < stop_ ? end : stop_;", "at_ = stop_;", "a run ends with its first tensor"),
    # ---- the kernel in front
    Mutant(STEP, "wait_for_previous_kernel();", "", "the decisions are read before they are made"),
    Mutant(STEP, "wait_for_previous_kernel();", "", "scalars are read before they are written", 2),
]  # fmt: skip
