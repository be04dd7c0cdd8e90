"""Which tests must notice a bug in which sources, and the changes that change nothing."""

import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
FOLDERS = (CSRC, HERE.parents[1] / "tools", HERE, HERE.parents[1] / "tools/emulator/tests")

# Sources, patterns under csrc/, and the tests that must notice a bug in them, the quickest first: programs of this folder, or pytest files
# under tests/, with emulate/ in front those cases that run on the emulator. A file that several patterns name belongs to the first family.
FAMILIES = {
    "activation": ("activation/*.cu base/elementwise.cuh", "emulate/ops/test_activation.py emulate/ops/test_activation_backward.py"),
    "activation_formula": ("activation/formula.h", "math/test_activation.py"),
    "cast": ("cast/cast.cu", "emulate/ops/test_cast.py"),
    "column_sums": ("column_sums/*.cu* column_sums/call.h gemm/column_sums.cu", "emulate/ops/test_column_sums.py emulate/ops/test_activation_backward.py"),
    "embedding": ("embedding/accumulate.cu embedding/call.h", "emulate/ops/test_embedding.py"),
    "routing": ("routing/rows.cu", "emulate/ops/test_routing.py"),
    "rotary": ("rotary/*.cu rotary/call.h rotary/glue.cpp", "emulate/ops/test_rotary.py"),
    "unit_sums": ("unit_sums/unit_sums.cu unit_sums/call.h", "emulate/ops/test_unit_sums.py"),
    "unit_matrices": ("newton_schulz/unit_matrices.cu newton_schulz/formula.h", "emulate/ops/test_unit_matrices.py"),
    "norm": ("norm/*.cu norm/formula.h base/row.cuh", "test_norm"),
    "row_ring": ("base/row_ring.cuh", "test_norm test_cross_entropy_rows"),
    "loss": ("loss/*.cu* loss/formula.h loss/exponential.h", "test_cross_entropy_rows"),
    "lists": ("base/tensor_list.h device/tensor_list.cuh base/vector_walk.cuh gradients/list.h", "emulate/ops/test_unscale.py emulate/ops/test_check_and_norm.py emulate/ops/test_exponent_histogram.py"),
    "gradients": ("gradients/unscale.cu gradients/check_and_norm.cu gradients/grad_norm.h", "test_check_and_norm emulate/ops/test_unscale.py emulate/ops/test_check_and_norm.py"),
    "histogram": ("gradients/exponent*", "emulate/ops/test_exponent_histogram.py"),
    "scale": ("gradients/update_scale.cu gradients/loss_scale.h", "emulate/ops/test_update_scale.py math/test_loss_scale.py"),
    "lamb": ("update/rules/lamb.cu", "emulate/ops/test_updates.py emulate/ops/test_lamb.py"),
    "update": ("update/step.cuh update/elements.cuh update/update.cuh update/arguments.cuh update/rule.h update/rules/*.cu", "emulate/ops/test_updates.py emulator/test_glue.py"),
    "units": ("gradients/judge_units.cu gradients/judge.h", "emulate/ops/test_judge_units.py"),
    "rules": ("update/rules/*.h update/ema.h", "math/test_update_rules.py"),
    "moments8": ("update/*8.cuh update/codes.cuh update/normal_numbers.cuh base/philox.h", "emulate/ops/test_moments8.py emulate/ops/test_updates.py"),
    "rounding": ("base/config.h base/half.h base/rounding.h base/split_master.h base/block8.h",
        "math/test_conversions.py math/test_split_master.py math/test_random_rounding.py math/test_block8.py"),
    "device": ("device/block.cuh device/warp.cuh", "test_memory"),
    "gemm_sm80": ("gemm/sm80/*.cuh gemm/epilogue.cuh base/element.cuh", "test_gemm_sm80 test_gemm_chains test_gemm_symmetric"),
    "gemm_sm90": ("gemm/sm90/gemm.* gemm/sm90/main_loop.cuh gemm/sm90/tile.cuh", "test_gemm_segments test_gemm_sm90 test_gemm_chains test_gemm_epilogue test_gemm_epilogue_tma test_grouped"),
    "gemm_producer": ("gemm/sm90/producer.cuh", "test_gemm_sm90 test_grouped test_gemm_segments test_gemm_epilogue_tma"),
    "gemm_store": ("gemm/sm90/direct_store.cuh gemm/sm90/epilogue_elementwise.cuh", "test_gemm_epilogue test_gemm_epilogue_tma test_grouped"),
    "gemm_epilogue": ("gemm/sm90/epilogue_tma.cuh", "test_gemm_epilogue_tma"),
    "gemm_symmetric": ("gemm/sm90/mirrored_store.cuh gemm/sm90/symmetric.cuh", "test_gemm_symmetric"),
    "gemm_grouped": ("gemm/sm80/grouped.cu gemm/sm90/grouped.cuh device/tensor_map.cuh", "test_grouped"),
    "gemm_phases": ("gemm/phases.*", "test_gemm_phases"),
    "gemm_repack": ("gemm/sm90/repack.*", "test_gemm_repack"),
    "glue": ("activation/glue.cpp column_sums/glue.* gradients/glue.cpp update/glue.cpp update/call.h", "emulate/ops/test_update_scale.py emulate/ops/test_activation_backward.py emulate/ops/test_column_sums.py emulator/test_glue.py"),
    "gemm_glue": (
        "gemm/glue*.cpp gemm/glue_operand.h gemm/launch.h gemm/plan.h",
        "emulator/test_glue.py emulator/test_grouped_glue.py emulator/test_segmented_glue.py emulator/test_gemm_tuning.py",
    ),
    "cpu_gradients": (
        "gradients/cpu_*.cpp",
        "ops/test_unscale.py ops/test_update_scale.py ops/test_exponent_histogram.py ops/test_check_and_norm.py ops/test_judge_units.py",
    ),
    "cpu_cast": ("cast/cpu.cpp", "ops/test_cast.py"),
    "cpu_activation": ("activation/cpu*", "ops/test_activation.py ops/test_activation_backward.py"),
    "cpu_column_sums": ("column_sums/cpu.cpp base/cpu/column_sums.*", "ops/test_column_sums.py"),
    "cpu_loss": ("loss/cpu*", "ops/test_cross_entropy.py ops/test_linear_log_probs.py"),
    "cpu_norm": ("norm/cpu*", "ops/test_norm.py ops/test_rows_cpu.py"),
    "cpu_rows": ("rotary/cpu.cpp routing/cpu.cpp embedding/cpu.cpp",
        "ops/test_routing.py ops/test_embedding.py ops/test_rotary.py"),
    "cpu_updates": ("update/cpu*", "ops/test_updates.py ops/test_moments8.py"),
    "cpu_lamb": ("update/rules/cpu_lamb.cpp", "ops/test_lamb.py"),
    "cpu_newton_schulz": ("newton_schulz/cpu.cpp", "ops/test_unit_matrices.py ops/test_newton_schulz.py"),
    "cpu_gemm": (
        "gemm/cpu/gemm.cpp gemm/cpu/blocked.cpp gemm/cpu/portable.cpp gemm/cpu/product.cpp gemm/cpu/syrk.cpp gemm/cpu/grouped.cpp gemm/cpu/tile.h",
        "ops/test_gemm_cpu.py ops/test_syrk.py ops/test_grouped_mm.py ops/test_gemm_epilogue.py ops/test_gemm_dact.py ops/test_linear.py ops/test_grouped_gemm.py",
    ),
}  # fmt: skip


@cache
def family_of(file: str) -> str | None:
    return next(
        (name for name, (patterns, _) in FAMILIES.items() if any(Path(file).match(p) for p in patterns.split())), None
    )


# Files that only run where the processor has these instructions.
NEEDS = {"update/cpu_plain8_avx512.h": "avx512bw", "update/cpu_plain8_avx2.h": "avx2"}
INFO = Path("/proc/cpuinfo")


@cache
def sources(family: str) -> list[str]:
    """The files of a family that run here."""
    files = sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*.*"))
    here = INFO.read_text() if INFO.exists() else ""
    return [file for file in files if family_of(file) == family and NEEDS.get(file, "") in here]


@cache
def included(name: str) -> frozenset[str]:
    """The files that a source includes, itself too, by the names of the include lines."""
    path = next((folder / name for folder in FOLDERS if (folder / name).exists()), None)
    found = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE) if path else []
    return frozenset({name}.union(*map(included, found)))


def tests_of(file: str) -> list[str]:
    """The tests that must notice a bug in a file: of its family, the pytest files, and the programs that include it."""
    _, tests = FAMILIES[family_of(file)]
    return [test for test in tests.split() if test.endswith(".py") or file in included(f"{test}.cpp")]


# Changes that no test can notice: the file, the line as the change leaves it, and why.
CHANGE_NOTHING = {
    ("cast/cast.cu", "constexpr int kLoads = std::[[min => max]]<int>(kCastBytesInFlight / (V * sizeof(From)), 8);"): "more loads of a thread in flight: the results are the same",
    ("column_sums/column_sums.cu", "const bool aligned = vector_aligned(p.x) && [[p.pitch % kVec => kVec % p.pitch]] == 0 && p.columns % kVec == 0;"): "rows of one vector alone are read as vectors; the order of additions is the same",
    ("gradients/exponent_histogram.cu", "[[if (thread_index() == 0) => if (true) ]]atomic_max(largest + position, most);"): "no thread has a larger one than the block",
    ("activation/cpu.cpp", "std::max<int64_t>(4, 4 * kTile / std::[[max => min]]<int64_t>(1, width)); // rows that fit the L1 cache"): "other rows fit the cache: the results are the same",
    ("base/cpu/column_sums.h", "const int64_t strip = std::max(kLeastRows, (rows + kStrips - 1) / kStrips), strips = (rows + strip[[ - 1 => ]]) / strip;"): "a strip without rows more, whose sums are 0",
    ("base/cpu/column_sums.h", "const int64_t grain = std::[[max => min]]<int64_t>(1, kGrain / std::max<int64_t>(1, strip * width));"): "another share of a thread: the results are the same",
    ("base/cpu/column_sums.h", "constexpr int64_t kStrips = [[64 => 64 / 2]], kLeastRows = 4, kGrain = 32768; // elements that are worth a thread"): "another order of additions, none of which is promised",
    ("loss/cpu.cpp", "for (int64_t at = 0; at[[ < => <= ]]classes; at += kTile) {"): "a span without classes more, whose sums are 0",
}  # fmt: skip
