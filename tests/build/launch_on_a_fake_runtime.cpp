// Arguments of launch() to CUDA runtime and driver, written down by stand-ins for both, and the tensor maps that are
// kept: the emulator has words of its own for these. The interpreter of PTX reads the maps that the library encodes.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// Known to nvcc alone: the indices, unused here, and this function, in the toolkit's words.
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
template <typename T>
cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attribute, int value) {
  return ::cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}

#include "device/launch.cuh"
#include "device/tensor_map.cuh"

namespace {

constexpr int kSharedLimit = 232448;
int failures = 0;

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("wrong: %s\n", what);
  failures++;
}

// ---- the stand-ins

struct Launch {
  cudaLaunchConfig_t config;
  std::vector<cudaLaunchAttribute> attributes;
  const void* kernel;
  int number;
  bool map_aligned;
};
std::vector<Launch> launches;
struct Allowed {
  const void* kernel;
  int bytes;
};
std::vector<Allowed> allowed;
cudaError_t next_launch = cudaSuccess;
int capability = 90;         // of the device
int asked_for_clusters = 0;  // times

std::vector<void*> encoded;  // addresses of the maps
bool context = false;        // of this thread

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* base, const cuuint64_t* size,
                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  encoded.push_back(base);
  map->opaque[0] = encoded.size();
  return size[0] == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static_assert(std::is_same_v<decltype(&encode), decltype(&cuTensorMapEncodeTiled)>, "the driver's own signature");

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = 3;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  expect(device == 3, "the current device stays");
  context = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  expect(device == 3, "the current device is asked");
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedLimit
           : attribute == cudaDevAttrComputeCapabilityMajor     ? capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor     ? capability % 10
                                                                : 132;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  expect(device == 3, "the current device is described");
  *properties = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  expect(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, "which attribute");
  allowed.push_back({kernel, value});
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const cudaLaunchConfig_t* config) {
  asked_for_clusters++;
  expect(config->numAttrs == 1 && config->attrs[0].id == cudaLaunchAttributeClusterDimension &&
             config->attrs[0].val.clusterDim.x == 8 && config->dynamicSmemBytes == 90000,
         "the cluster that is asked about");
  expect(!allowed.empty() && allowed.back().kernel == kernel, "its shared memory is allowed before");
  *clusters = 15;
  return next_launch;
}
cudaError_t cudaGetLastError() { return std::exchange(next_launch, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "the runtime's words"; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  launches.push_back({*config,
                      {config->attrs, config->attrs + config->numAttrs},
                      kernel,
                      *static_cast<int*>(args[0]),
                      reinterpret_cast<uintptr_t>(args[1]) % 64 == 0});
  return next_launch;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  expect(std::string_view(symbol) == "cuTensorMapEncodeTiled" && version == 12000, "the driver's function");
  *function = reinterpret_cast<void*>(&encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

namespace {

void kernel(int, ak::TensorMap) {}

void test_launch() {
  int stream = 0;
  const ak::TensorMap map{};
  ak::Status status = ak::launch(kernel, {.name = "k", .grid = 7, .block = 96, .stream = &stream}, 41, map);
  expect(status.ok() && launches.size() == 1 && allowed.empty(), "a plain launch");
  const Launch& plain = launches[0];
  expect(plain.config.gridDim.x == 7 && plain.config.gridDim.y == 1 && plain.config.gridDim.z == 1, "the grid");
  expect(plain.config.blockDim.x == 96 && plain.config.blockDim.y == 1 && plain.config.blockDim.z == 1, "the block");
  expect(plain.config.dynamicSmemBytes == 0 && plain.config.stream == reinterpret_cast<cudaStream_t>(&stream),
         "shared memory and stream");
  expect(plain.attributes.empty() && plain.kernel == reinterpret_cast<const void*>(&kernel), "kernel, no attributes");
  expect(plain.number == 41 && plain.map_aligned, "arguments, tensor maps at multiples of 64 bytes");

  status = ak::launch(
      kernel, {.name = "k", .grid = 8, .block = 384, .shared_bytes = 200000, .cluster = 2, .overlap_previous = true},
      42, map);
  expect(status.ok() && launches.size() == 2, "a launch with everything");
  expect(allowed.size() == 1 && allowed[0].kernel == launches[1].kernel, "the limit of shared memory is raised");
  expect(launches[1].config.dynamicSmemBytes == 200000, "shared memory asked for");
  const auto& attributes = launches[1].attributes;
  expect(attributes.size() == 2 && attributes[0].id == cudaLaunchAttributeClusterDimension &&
             attributes[0].val.clusterDim.x == 2 && attributes[0].val.clusterDim.y == 1 &&
             attributes[0].val.clusterDim.z == 1,
         "the cluster");
  expect(attributes.size() == 2 && attributes[1].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
             attributes[1].val.programmaticStreamSerializationAllowed == 1,
         "the overlap");

  const ak::LaunchConfig overlapping{.name = "k", .grid = 1, .block = 32, .overlap_previous = true};
  ak::follows_memset() = true;
  for (const bool overlaps : {false, true}) {
    status = ak::launch(kernel, overlapping, 42, map);
    expect(launches.back().attributes.size() == overlaps, "the kernel after a memset waits for it");
  }

  // The program is compiled for 8.0, 9.0 and 12.0: a 10.0 runs PTX of 8.0, which does not wait.
  for (const auto& [chip, overlaps] : {std::pair{80, false}, {90, true}, {100, false}, {120, true}, {121, true}}) {
    capability = chip;
    ak::detail::known_devices().forget();
    expect(ak::device_runs_sm90_code() == overlaps, "chips with the instructions of sm_90");
    status = ak::launch(kernel, overlapping, 42, map);
    expect(launches.back().attributes.size() == (overlaps ? 1 : 0), "only code that waits may overlap");
  }
  capability = 90;
  ak::detail::known_devices().forget();

  // The limit belongs to the kernel, not to a launch: two threads may start it with different amounts.
  status = ak::launch(kernel, {.name = "k", .grid = 1, .block = 32, .shared_bytes = 60000}, 43, map);
  for (const Allowed& a : allowed) expect(a.bytes == kSharedLimit, "no launch lowers another one's limit");

  next_launch = cudaErrorInvalidConfiguration;
  status = ak::launch(kernel, {.name = "k", .grid = 1, .block = 32}, 44, map);
  expect(status.code == cudaErrorInvalidConfiguration, "an error is handed on");
  expect(ak::device_sm_count() == 132, "multiprocessors");
}

void test_resident_clusters() {
  const ak::LaunchConfig config{.name = "k", .grid = 128, .block = 512, .shared_bytes = 90000, .cluster = 8};
  next_launch = cudaErrorInvalidClusterSize;
  expect(ak::resident_clusters(kernel, config) == 0, "a chip that cannot run the cluster");
  expect(next_launch == cudaSuccess, "the error is forgotten");
  ak::detail::known_devices().forget();
  for (int i = 0; i < 2; i++) expect(ak::resident_clusters(kernel, config) == 15, "what the runtime says");
  expect(asked_for_clusters == 2, "asked once a device");
}

void test_kept_tensor_maps() {
  alignas(16) static char memory[64 * 16];
  const auto spec = [](int i, uint64_t rows) {
    return ak::TensorMapSpec{memory + 16 * i, ak::ElementType::kFloat16, 2, {64, rows}, {64}, {64, 8}};
  };
  ak::TensorMap first, again, other;
  expect(ak::make_tensor_map(&first, spec(0, 5)).ok(), "a map");
  ak::make_tensor_map(&again, spec(0, 5));
  expect(encoded.size() == 1 && first.opaque[0] == again.opaque[0], "the same map is encoded once");
  ak::make_tensor_map(&other, spec(0, 6));
  expect(encoded.size() == 2 && first.opaque[0] != other.opaque[0], "another size is another map");
  for (int i = 0; i < 4096; i++) {  // more than are kept: whatever shares a place, nobody gets another one's map
    ak::TensorMap map, twice;
    ak::make_tensor_map(&map, spec(i / 64, 7 + i % 64));
    const size_t count = encoded.size();
    expect(encoded.back() == memory + 16 * (i / 64) && map.opaque[0] == count, "an own map for each address and size");
    ak::make_tensor_map(&twice, spec(i / 64, 7 + i % 64));
    expect(encoded.size() == count && map.opaque[0] == twice.opaque[0], "which is kept");
  }
  const size_t count = encoded.size();
  const ak::TensorMapSpec refused{memory, ak::ElementType::kFloat16, 2, {0, 5}, {64}, {64, 8}};
  for (int i = 0; i < 2; i++)
    expect(ak::make_tensor_map(&other, refused).code == CUDA_ERROR_INVALID_VALUE && encoded.size() == count + i + 1,
           "a refusal is handed on and not kept");
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {  // AMP_KERNELS_PDL is 0
    ak::launch(kernel, {.name = "k", .grid = 1, .block = 32, .overlap_previous = true}, 42, ak::TensorMap{});
    return launches.back().attributes.empty() ? 0 : 1;
  }
  test_launch();
  test_resident_clusters();
  test_kept_tensor_maps();
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
