// The CUDA border: the right context, and errors in words. Implemented in device.cuh, compiled with the kernels.
#pragma once

namespace dream {

int cuda_runtime_version();  // of the statically linked runtime, 13000 = 13.0
int cuda_driver_version();   // what the installed driver supports, 0 without a driver

}  // namespace dream
