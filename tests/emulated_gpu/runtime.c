/* Stand in for CUDA's runtime and driver: streams finish at once, memory is the host's, and the runtime launches no kernel.

Loaded before libcudart.so and in place of libcuda.so.1, it lets a CUDA build of torch find GPUs of compute capability
9.0, as many as the environment variable EMULATED_GPUS says. Whoever needs results replaces the kernels (kernels.cpp).
*/
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DONE return cudaSuccess
#define BLOCKS 65536 /* torch's caching allocators ask for few, large blocks */

static __thread int current = 0;

static int devices(void) {
  const char *count = getenv("EMULATED_GPUS");
  return count ? atoi(count) : 1;
}

/* Memory. Pointers know whether they are of the host (pinned) or of a device. */

static struct { char *start; size_t size; int device; } blocks[BLOCKS]; /* device -1: pinned memory of the host */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t note(void *start, size_t size, int device) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < BLOCKS && blocks[i].start) ++i;
  if (i < BLOCKS) { blocks[i].start = start; blocks[i].size = size; blocks[i].device = device; }
  pthread_mutex_unlock(&lock);
  return i < BLOCKS ? cudaSuccess : cudaErrorMemoryAllocation;
}

static cudaError_t forget(void *start) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < BLOCKS; ++i) if (blocks[i].start == start) blocks[i].start = NULL;
  pthread_mutex_unlock(&lock);
  DONE;
}

static cudaError_t allocate(void **pointer, size_t size, int device) {
  if (posix_memalign(pointer, 512, size ? size : 1)) return cudaErrorMemoryAllocation;
  memset(*pointer, 0, size); /* indices that a compiled kernel left out are 0, which no operator refuses */
  return note(*pointer, size, device);
}

static cudaError_t release(void *pointer) {
  forget(pointer);
  free(pointer);
  DONE;
}

cudaError_t cudaMalloc(void **p, size_t size) { return allocate(p, size, current); }
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return allocate(p, size, -1); }
cudaError_t cudaFreeHost(void *p) { return release(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { return note(p, size, -1); }
cudaError_t cudaHostUnregister(void *p) { return forget(p); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = 79ull << 30; *total = 80ull << 30; DONE; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { memmove(to, from, n); DONE; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) { memmove(to, from, n); DONE; }
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) { memmove(to, from, n); DONE; }
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t n, size_t at, enum cudaMemcpyKind kind) { DONE; }
cudaError_t cudaMemset(void *p, int value, size_t n) { memset(p, value, n); DONE; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { memset(p, value, n); DONE; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < BLOCKS; ++i) {
    if (!blocks[i].start || (char *)p < blocks[i].start || (char *)p >= blocks[i].start + blocks[i].size) continue;
    a->type = blocks[i].device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = blocks[i].device < 0 ? current : blocks[i].device;
    a->hostPointer = (void *)p;
    a->devicePointer = (void *)p;
  }
  pthread_mutex_unlock(&lock);
  DONE;
}

/* Devices: an H100's figures. */

cudaError_t cudaGetDeviceCount(int *n) { *n = devices(); return *n ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int *d) { *d = current; DONE; }
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
  current = d;
  DONE;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; DONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; DONE; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Emulated GPU");
  p->major = 9;
  p->totalGlobalMem = 80ull << 30;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->memoryBusWidth = 5120;
  p->unifiedAddressing = p->concurrentKernels = 1;
  DONE;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int d) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    default: *value = 0;
  }
  DONE;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; DONE; }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned flags) { DONE; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) { snprintf(id, n, "0000:%02x:00.0", d + 1); DONE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; DONE; }
cudaError_t cudaDeviceSynchronize(void) { DONE; }
cudaError_t cudaGetLastError(void) { DONE; }
cudaError_t cudaPeekAtLastError(void) { DONE; }

/* Streams and events, whose work is done as soon as it is asked for. */

static cudaError_t handle(void **h) { return (*h = malloc(8)) ? cudaSuccess : cudaErrorMemoryAllocation; }

cudaError_t cudaStreamCreate(cudaStream_t *s) { return handle((void **)s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return handle((void **)s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return handle((void **)s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { DONE; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; DONE; }
cudaError_t cudaStreamQuery(cudaStream_t s) { DONE; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { DONE; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { DONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; DONE; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  DONE;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { DONE; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return handle((void **)e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return handle((void **)e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); DONE; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { DONE; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { DONE; }
cudaError_t cudaEventQuery(cudaEvent_t e) { DONE; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { DONE; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; DONE; }

/* Kernels of the runtime */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  DONE;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) { DONE; }
/* All of torch's kernels are replaced, so that one which is launched would leave its output as it was. */
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return cudaErrorNotSupported; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; DONE; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return cudaErrorNotSupported; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t shared, unsigned flags) { *n = 2; DONE; }

/* The driver, which torch's code for compiled kernels and Triton call */

static void *const context = (void *)8;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult e, const char **text) { *text = "an error of the emulated GPU"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **text) { *text = "an error of the emulated GPU"; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice d) {
  cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, d); /* both count alike */
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = context; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *m, const char *file) { *m = context; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = context; return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) { *m = context; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = context; return CUDA_SUCCESS; }
CUresult cuLinkCreate(unsigned n, CUjit_option *o, void **v, CUlinkState *s) { *s = context; return CUDA_SUCCESS; }
CUresult cuLinkAddData(CUlinkState s, CUjitInputType type, void *data, size_t size, const char *name, unsigned n, CUjit_option *o, void **v) { return CUDA_SUCCESS; }
CUresult cuLinkComplete(CUlinkState s, void **image, size_t *size) { *size = 0; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream s, void **args, void **extra) { return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **args, void **extra) { return CUDA_SUCCESS; }
CUresult cuLaunchCooperativeKernel(
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream s, void **args) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads, size_t shared) { *n = 2; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) { *n = 2; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr p) { *(CUdeviceptr *)value = p; return CUDA_SUCCESS; }
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **values, CUdeviceptr p) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) { return CUDA_SUCCESS; }

static int nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status) {
  *function = strcmp(symbol, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)cuDevicePrimaryCtxGetState;
  if (status) *status = cudaDriverEntryPointSuccess;
  DONE;
}
