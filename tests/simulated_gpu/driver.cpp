// The driver that torch asks whether the device is in use. See __init__.py.

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}

int cuDeviceGet(int* device, int) {
  *device = 0;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  static int here;
  *context = &here;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int) { return cuCtxGetCurrent(context); }

// Those that libcaffe2_nvrtc.so wants to be there, and nobody calls.
#define UNUSED(name) \
  int name(...) { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
UNUSED(cuCtxSetCurrent)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuGetErrorString)
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLaunchKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoad)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleLoadDataEx)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuPointerGetAttribute)
UNUSED(cuTensorMapEncodeTiled)

}  // extern "C"
