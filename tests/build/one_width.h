// Included before every source of the sanitized library: code for one width of vectors, a third of the compile time.
#pragma once
#include "base/cpu/simd.h"

#undef AK_SIMD_CLONES
#define AK_SIMD_CLONES
#undef AK_HAS_SIMD_CLONES
#define AK_HAS_SIMD_CLONES 0
