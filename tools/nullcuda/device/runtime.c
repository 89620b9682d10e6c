/* The runtime's devices, streams, events, graphs and errors: eight H100s whose work is done when it is asked for. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int current;
static __thread cudaError_t last;

int current_device(void) { return current; }

/* ---- devices ------------------------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceCount(int *count) { return *count = device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return last = cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return host_waits(WAIT_DEVICE), cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) { return *can = 1, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
  snprintf(text, (size_t)room, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { return *pool = fresh_handle(), cudaSuccess; }

static const struct { int name, value; } attributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},        {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},              {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},         {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},              {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrWarpSize, 32},                    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxRegistersPerBlock, 65536},     {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrClockRate, 1980000},              {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMultiProcessorCount, 132},        {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},      {cudaDevAttrL2CacheSize, 52428800},
    {cudaDevAttrComputeCapabilityMajor, 9},       {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrUnifiedAddressing, 1},            {cudaDevAttrMemoryPoolsSupported, 1},
    {cudaDevAttrCooperativeLaunch, 1},            {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},    {cudaDevAttrCanMapHostMemory, 1},
};
int attribute_value(int name) {
  for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
    if (attributes[i].name == name) return attributes[i].value;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
  return *value = attribute_value(name), cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "NVIDIA H100 80GB HBM3 (null)");
  memset(out->uuid.bytes, device + 1, sizeof out->uuid.bytes);
  out->totalGlobalMem = device_bytes();
  out->major = 9;
  out->warpSize = 32;
  out->multiProcessorCount = 132;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->reservedSharedMemPerBlock = 1024;
  out->totalConstMem = 65536;
  out->l2CacheSize = 52428800;
  out->memoryBusWidth = 5120;
  out->memPitch = 2147483647;
  out->textureAlignment = 512;
  out->texturePitchAlignment = 32;
  out->asyncEngineCount = 3;
  out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->managedMemory = 1;
  out->streamPrioritiesSupported = out->globalL1CacheSupported = out->localL1CacheSupported = 1;
  out->cooperativeLaunch = out->memoryPoolsSupported = out->clusterLaunch = 1;
  return cudaSuccess;
}

/* ---- errors -------------------------------------------------------------------------------------------------- */
cudaError_t refuse(cudaError_t error) { return last = error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "an error of the null device";
  }
}
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

/* ---- streams and graphs --------------------------------------------------------------------------------------
 * A stream is its capture: torch asks each stream whether it is being captured into a graph. */
typedef struct { long launches; } graph_t;
typedef struct { graph_t *graph; unsigned long long id; int priority; } stream_t;
static stream_t usual; /* the default stream, whose handle is 0 */
static __thread graph_t *capturing;

static stream_t *stream_of(cudaStream_t stream) {
  return (uintptr_t)stream < 16 ? &usual : (stream_t *)stream; /* 0, legacy and per-thread */
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  stream_t *stream = calloc(1, sizeof *stream);
  stream->priority = priority;
  return *out = (cudaStream_t)stream, cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; } /* kept: handles stay distinct */
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  return *priority = stream_of(stream)->priority, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream_of(stream)->graph) return refuse(cudaErrorStreamCaptureUnsupported);
  return host_waits(WAIT_STREAM), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  return function(stream, cudaSuccess, data), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  return function(data), cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long captures;
  stream_t *at = stream_of(stream);
  if (at == &usual || at->graph) return refuse(cudaErrorStreamCaptureUnsupported);
  at->graph = capturing = calloc(1, sizeof(graph_t));
  at->id = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  stream_t *at = stream_of(stream);
  *out = (cudaGraph_t)at->graph;
  at->graph = capturing = NULL;
  return *out ? cudaSuccess : refuse(cudaErrorIllegalState);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  return *out = stream_of(stream)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = stream_of(stream)->id;
  if (graph) *graph = (cudaGraph_t)stream_of(stream)->graph;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  graph_t *copy = malloc(sizeof *copy);
  *copy = *(graph_t *)graph;
  return *out = (cudaGraphExec_t)copy, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(out, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  COUNT(launches, 1); /* one call for all of its kernels; what they would compute is not done again */
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  return *count = (size_t)((graph_t *)graph)->launches, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }

void launched(dim3 grid, dim3 block, int *error) {
  COUNT(launches, 1);
  if (capturing) capturing->launches++;
  *error = !grid.x || !grid.y || !grid.z || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 ||
           !block.x || !block.y || !block.z || block.z > 64 || (long)block.x * block.y * block.z > 1024;
  if (*error) COUNT(bad_launches, 1);
}

/* ---- events -------------------------------------------------------------------------------------------------- */
cudaError_t cudaEventCreate(cudaEvent_t *out) { return *out = fresh_handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { return cudaEventCreate(out); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return host_waits(WAIT_EVENT), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return *milliseconds = 0.01f, cudaSuccess; /* no work takes time here; 0 would be divided by */
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t event) {
  return memset(out, 0, sizeof *out), cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *out, cudaIpcEventHandle_t handle) { return cudaEventCreate(out); }

static long unknown(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void *)unknown;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
