// AdamW (and Adam) over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32 or split masters and
// 16-bit shadows in the same pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "math/adamw.h"

namespace ak {

enum class Master : uint8_t { kNone, kFloat32, kSplit };

/// One parameter. Every pointer is to its first element, aligned to the element; elements lie in the same order everywhere.
struct AdamWTensor {
  void* param;
  const void* grad;
  int64_t numel;
  DType param_dtype, grad_dtype;  ///< fp32, fp16 or bf16
  void* exp_avg;
  void* exp_avg_sq;
  DType exp_avg_dtype, exp_avg_sq_dtype;  ///< fp32 or bf16
  float* step;                            ///< one value, used by no other parameter
  Master master_kind;                     ///< kNone: the param is its own master; the others need a 16-bit param
  void* master;                           ///< fp32 or int16 by `master_kind`; null for kNone
  void* shadow;                           ///< 16-bit copy of an fp32 param, or null
  DType shadow_dtype;
  int group;
};

struct AdamWGroup {
  AdamWOptions options;
  const float* lr;  ///< on the device, in place of options.lr; null if the host's value counts
  bool maximize;
};

/// What other kernels decided, on the device; each may be null.
struct StepDecisions {
  const float* grad_scale;  ///< gradients are this factor too large
  const float* found_inf;   ///< > 0: nothing at all changes
  const float* sum_sq;      ///< squared norm of the unscaled gradients: they are clipped to `max_norm`
  float max_norm;
};

/// Bytes of device memory one call needs; they may hold anything.
size_t adamw_scratch_bytes(size_t tensors);

/// One step of every parameter. `scratch` is aligned to 16 bytes.
Status adamw(std::span<const AdamWTensor> tensors, std::span<const AdamWGroup> groups, const StepDecisions& decisions, void* scratch,
             Stream stream);

}  // namespace ak
