/* Kernels: registered, launched, counted, never run. The runtime's, the driver's (Triton) and NVRTC's. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int attribute_value(int name);
cudaError_t refuse(cudaError_t error);

/* ---- the runtime: what nvcc's code calls --------------------------------------------------------------------- */
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread,
                            uint3 *block, dim3 *block_shape, dim3 *grid_shape, int *warp) {}
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int outside, size_t bytes,
                       int constant, int global) {}
char __cudaInitModule(void **handle) { return 1; }

typedef struct { dim3 grid, block; size_t shared; void *stream; } configuration_t;
static __thread configuration_t pushed[16];
static __thread unsigned depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed[depth++ & 15] = (configuration_t){grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  configuration_t top = pushed[--depth & 15];
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *(void **)stream = top.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}

static cudaError_t launch(dim3 grid, dim3 block) {
  int error;
  launched(grid, block, &error);
  return error ? refuse(cudaErrorInvalidConfiguration) : cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(grid, block);
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(grid, block);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
  return launch(how->gridDim, how->blockDim);
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(grid, block);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *how) {
  return *clusters = 132, cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  static char room[1 << 16]; /* never read by a kernel */
  return *address = room, cudaSuccess;
}

/* ---- the driver ---------------------------------------------------------------------------------------------- */
static char context[64]; /* its address is the one context */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
  return *value = attribute_value((int)name), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *out) { return *out = (CUcontext)context, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = current_device(), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  return *active = 1, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return *out = (CUcontext)context, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "null device error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }
CUresult cuModuleLoad(CUmodule *out, const char *name) { return *out = fresh_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *out, const void *image) { return *out = fresh_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
  return *out = fresh_handle(), CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *library, void **library_values, unsigned library_count) {
  return *out = fresh_handle(), CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) { return *out = fresh_handle(), CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
  return *out = fresh_handle(), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
  return *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute name, CUdeviceptr address) {
  int device = is_device((void *)address);
  if (name == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(int *)out = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (name == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out = device_of((void *)address);
  else if (name == CU_POINTER_ATTRIBUTE_CONTEXT) *(void **)out = context;
  else *(CUdeviceptr *)out = address;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *how) { return *out = 132, CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction function, int threads, size_t shared) {
  return *out = 2, CUDA_SUCCESS;
}
static CUresult driver_launch(dim3 grid, dim3 block) {
  int error;
  launched(grid, block, &error);
  return error ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void **arguments, void **extra) {
  return driver_launch((dim3){x, y, z}, (dim3){a, b, c});
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b,
                                   unsigned c, unsigned shared, CUstream stream, void **arguments) {
  return driver_launch((dim3){x, y, z}, (dim3){a, b, c});
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
  return driver_launch((dim3){how->gridDimX, how->gridDimY, how->gridDimZ},
                       (dim3){how->blockDimX, how->blockDimY, how->blockDimZ});
}

/* ---- NVRTC: programs are taken, not compiled ----------------------------------------------------------------- */
static const char nothing[64];
nvrtcResult nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetNumSupportedArchs(int *count) { return *count = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetSupportedArchs(int *out) { return *out = 90, NVRTC_SUCCESS; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *source, const char *name, int count,
                               const char *const *headers, const char *const *names) {
  return *out = fresh_handle(), NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) { return *program = NULL, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *out) { return *out = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) { return *bytes = sizeof nothing, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *out) { return memset(out, 0, sizeof nothing), NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) { return *bytes = sizeof nothing, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *out) { return memset(out, 0, sizeof nothing), NVRTC_SUCCESS; }
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *expression) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *expression, const char **out) {
  return *out = "kernel", NVRTC_SUCCESS;
}
const char *nvrtcGetErrorString(nvrtcResult error) { return "null device"; }
