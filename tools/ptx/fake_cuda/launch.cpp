// Modules, kernels and launches, as nvcc's host code asks for them, and the driver's tensor maps.
#include <cstring>
#include <unordered_map>

#include "fake.h"

namespace fake {

Interpreter interpreter{};

namespace {

struct Kernel {
  std::string name;
  int shared_limit[kDevices] = {48 * 1024, 48 * 1024};
};
std::unordered_map<const void*, Kernel>& kernels() {
  static std::unordered_map<const void*, Kernel> all;
  return all;
}

cudaError_t enqueue_launch(cudaStream_t stream, int number, int overlap) {
  return enqueue(stream, true, [=] { return interpreter.run(number, overlap) ? cudaErrorLaunchFailure : cudaSuccess; });
}

cudaError_t launch(const cudaLaunchConfig_t& c, const void* function, void** arguments) {
  const auto found = kernels().find(function);
  if (found == kernels().end()) return fail(cudaErrorInvalidDeviceFunction, "the kernel was never registered");
  const Kernel& k = found->second;
  if (stream_of(c.stream).device != current_device)
    return fail(cudaErrorInvalidResourceHandle, "a stream of another device for " + k.name);
  if (!interpreter.prepare) return fail(cudaErrorNotSupported, "no interpreter to launch " + k.name);
  Launch l{k.name.c_str(),
           {c.gridDim.x, c.gridDim.y, c.gridDim.z},
           {c.blockDim.x, c.blockDim.y, c.blockDim.z},
           {1, 1, 1},
           c.dynamicSmemBytes,
           0,
           k.shared_limit[current_device],
           current_device,
           arguments};
  for (unsigned i = 0; i < c.numAttrs; i++) {
    const auto& value = c.attrs[i].val;
    switch (c.attrs[i].id) {
      case cudaLaunchAttributeClusterDimension:
        l.cluster[0] = value.clusterDim.x, l.cluster[1] = value.clusterDim.y, l.cluster[2] = value.clusterDim.z;
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        l.overlap = value.programmaticStreamSerializationAllowed;
        break;
      default:
        return fail(cudaErrorNotSupported, "launch attribute " + std::to_string(c.attrs[i].id) + " of " + k.name);
    }
  }
  const int overlap = l.overlap && stream_of(c.stream).kernel_in_front;
  const int number = interpreter.prepare(&l);
  if (number < 0) return cudaErrorLaunchFailure;
  return enqueue_launch(c.stream, number, overlap);
}

}  // namespace
}  // namespace fake

using namespace fake;

FAKE_API void fake_set_interpreter(int (*prepare)(const Launch*), int (*run)(int, int)) {
  interpreter = {prepare, run};
}

/// A launch that the interpreter has prepared by itself: one of Triton's (triton_driver.py).
FAKE_API cudaError_t fake_launch(cudaStream_t stream, int number) { return enqueue_launch(stream, number, 0); }

FAKE_API void** __cudaRegisterFatBinary(void*) {
  static void* module = nullptr;  // kernels are found by their names
  return &module;
}
FAKE_API void __cudaRegisterFatBinaryEnd(void**) {}
FAKE_API void __cudaUnregisterFatBinary(void**) {}
FAKE_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  kernels()[host].name = name;
}
FAKE_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
FAKE_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
FAKE_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(*config, function, arguments);
}
/// Clusters do not span GPCs, of which these chips have one. A block takes an SM.
FAKE_API cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* c) {
  count("cudaOccupancyMaxActiveClusters");
  const auto found = kernels().find(function);
  if (found == kernels().end()) return fail(cudaErrorInvalidDeviceFunction, "the kernel was never registered");
  const Chip& chip = chips[current_device];
  if (chip.major < 9 || c->numAttrs != 1 || c->attrs[0].id != cudaLaunchAttributeClusterDimension ||
      c->gridDim.x % c->attrs[0].val.clusterDim.x != 0)
    return fail(cudaErrorInvalidClusterSize, "no launch of clusters");
  if (c->dynamicSmemBytes > static_cast<size_t>(found->second.shared_limit[current_device]))
    return fail(cudaErrorInvalidValue, "more shared memory than the kernel may have");
  *clusters = chip.sm_count / static_cast<int>(c->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
FAKE_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch({grid, block, shared, stream, nullptr, 0}, kernel, arguments);
}
/// The first call of <<<>>>: only torch's own kernels make it, and they have no PTX.
FAKE_API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported, "a kernel that is not of this package was started with <<<>>>: it has no PTX");
}
FAKE_API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
FAKE_API cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
  count("cudaFuncSetAttribute");
  const auto found = kernels().find(function);
  if (found == kernels().end()) return fail(cudaErrorInvalidDeviceFunction, "the kernel was never registered");
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      value > chips[current_device].shared_per_block)
    return fail(cudaErrorInvalidValue,
                "cudaFuncSetAttribute(" + std::to_string(which) + ", " + std::to_string(value) + ")");
  found->second.shared_limit[current_device] = value;
  return cudaSuccess;
}

// ---- tensor maps: checked by the driver's documented rules (CUDA Driver API, cuTensorMapEncodeTiled), and written as
// plain fields
namespace {

struct Fields {  // mirrored in interpreter/tensor_map.py
  uint64_t magic;
  int32_t type, rank;
  uint64_t base, size[5], stride[4];
  uint32_t box[5];
  int32_t swizzle;
};
static_assert(sizeof(Fields) <= sizeof(CUtensorMap));

CUresult refuse(const char* why) {
  fail(cudaErrorInvalidValue, why);
  return CUDA_ERROR_INVALID_VALUE;
}

/// As a driver would that takes cuda.h at its word.
bool refuses_overlaps = false;

/// cuda.h gives strides as globalStrides[0] = globalDim[0] * element + padding[0] and
/// globalStrides[i] = globalStrides[i - 1] * (globalDim[i] + padding[i]), in bytes: the least that each may be. Null,
/// or the rule that is broken; real drivers are not known to check it.
const char* overlap(cuuint32_t rank, uint64_t element, const cuuint64_t* size, const cuuint64_t* stride) {
  uint64_t least = size[0] * element;
  for (cuuint32_t i = 0; i + 1 < rank; least = stride[i] * size[i + 1], i++) {
    if (stride[i] < least) return i == 0 ? "tensor map: rows overlap" : "tensor map: matrices within rows";
  }
  return nullptr;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* size,
                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* element_stride,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
  count("cuTensorMapEncodeTiled");
  const bool half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (!half && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32) return refuse("tensor map: a data type that no kernel uses");
  const uint64_t element = half ? 2 : 4;
  if (reinterpret_cast<uintptr_t>(map) % 64) return refuse("tensor map: the map is not aligned to 64 bytes");
  if (rank < 1 || rank > 5) return refuse("tensor map: a rank of 1 to 5");
  if (reinterpret_cast<uintptr_t>(base) % 16 || !base)
    return refuse("tensor map: the tensor is not aligned to 16 bytes");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return refuse("tensor map: interleave or fill that no kernel uses");
  Fields f{
      0x544d4150, static_cast<int32_t>(type),   static_cast<int32_t>(rank), reinterpret_cast<uintptr_t>(base), {}, {},
      {},         static_cast<int32_t>(swizzle)};
  for (cuuint32_t i = 0; i < rank; i++) {
    if (size[i] < 1 || size[i] > uint64_t{1} << 32) return refuse("tensor map: sizes of 1 to 2^32");
    if (box[i] < 1 || box[i] > 256) return refuse("tensor map: boxes of 1 to 256 elements");
    if (element_stride[i] != 1) return refuse("tensor map: an element stride that no kernel uses");
    f.size[i] = size[i];
    f.box[i] = box[i];
    if (i + 1 == rank) continue;
    if (stride[i] % 16 || stride[i] >= uint64_t{1} << 40)
      return refuse("tensor map: strides are multiples of 16 below 2^40");
    f.stride[i] = stride[i];
  }
  if (const char* why = overlap(rank, element, size, stride)) {
    if (refuses_overlaps) return refuse(why);
    count(why);
  }
  const uint64_t inner = box[0] * element;
  if (inner % 16) return refuse("tensor map: the inner box is a multiple of 16 bytes");
  const uint64_t span[] = {0, 32, 64, 128};
  if (swizzle < 0 || swizzle > 3 || (swizzle && inner > span[swizzle]))
    return refuse("tensor map: the inner box is wider than the swizzle");
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &f, sizeof f);
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_API void fake_refuse_overlaps(int refused) { refuses_overlaps = refused != 0; }
FAKE_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  const bool known = !std::strcmp(name, "cuTensorMapEncodeTiled");
  *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
