// What the bindings ask of CUDA. Implemented in device.cu.
#pragma once

namespace dream {

int cuda_runtime_version();  // of the statically linked runtime, 13000 = 13.0
int cuda_driver_version();   // what the installed driver supports, 0 without a driver
void warm_device(int device);  // loads every kernel and fits its limits, so that the first launch may be inside a graph capture

}  // namespace dream
