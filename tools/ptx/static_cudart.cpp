// Linked into the package's library as the static CUDA runtime is, which keeps a current device beside that of torch's
// runtime. CUDA lets both follow the driver's context; this one follows nothing but its own cudaSetDevice, so that work
// which relies on torch's having been called goes to the wrong device.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#define OWN extern "C" __attribute__((visibility("hidden")))

namespace {

thread_local int own_device = 0;

template <class Function>
Function* of_the_driver(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

#define OF_THE_DRIVER(name) of_the_driver(&name, #name)

OWN cudaError_t cudaGetDevice(int* device) { return *device = own_device, cudaSuccess; }
OWN cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = OF_THE_DRIVER(cudaSetDevice)(device);
  if (!error) own_device = device;
  return error;
}
OWN cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (const cudaError_t error = cudaSetDevice(own_device)) return error;
  return OF_THE_DRIVER(cudaMalloc)(p, bytes);
}
OWN cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
  if (const cudaError_t error = cudaSetDevice(own_device)) return error;
  return OF_THE_DRIVER(cudaFuncSetAttribute)(function, which, value);
}
OWN cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* config) {
  if (const cudaError_t error = cudaSetDevice(own_device)) return error;
  return OF_THE_DRIVER(cudaOccupancyMaxActiveClusters)(clusters, function, config);
}
OWN cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  if (const cudaError_t error = cudaSetDevice(own_device)) return error;
  return OF_THE_DRIVER(cudaLaunchKernelExC)(config, function, arguments);
}
