// Clears the device cache, for the fake CUDA runtime (tools/ptx), which changes the device.
#ifndef AK_EMULATE
#include "device/device_facts.h"

extern "C" __attribute__((visibility("default"))) void ak_forget_devices() { ak::detail::known_devices().forget(); }
#endif
