// For whoever exchanges the device behind the runtime's back: the fake CUDA runtime of tests/ptx.
#ifndef AK_EMULATE
#include "device/device_facts.h"

extern "C" __attribute__((visibility("default"))) void ak_forget_devices() { ak::detail::known_devices().forget(); }
#endif
