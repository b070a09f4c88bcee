// A CUDA driver of two GPUs that compute nothing, and the products of cuBLASLt, for tests of what is around them on a
// machine without a GPU: memory is the host's, copies are made at once, kernels and graphs do nothing. Memory that is
// given to other processes is a file of the kernel's, as descriptors of the driver's are. What is asked for is what
// `precast.loader.driver.library` calls. FAKE_CUDA_ALONE: no GPU opens another one's memory.

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int Status;
typedef uint64_t u64;
enum { PAGE = 2 << 20, NOT_PERMITTED = 800 };
static u64 number = 1;    // of whatever is made
static int descriptors[1 << 12], taken[1 << 12];

Status cuInit(unsigned flags) { return 0; }
Status cuDriverGetVersion(int* version) { *version = 13000; return 0; }
Status cuDeviceGetCount(int* count) { *count = 2; return 0; }
Status cuDeviceGet(int* device, int index) { *device = index; return 0; }
Status cuDeviceGetName(char* name, int length, int device) { snprintf(name, length, "No GPU"); return 0; }
Status cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, device, 16); return 0; }
Status cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : which == 97 ? 227 << 10 : 132;
  return 0;
}
Status cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(u64)(device + 1); return 0; }
Status cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
Status cuCtxPushCurrent_v2(void* context) { return 0; }
Status cuCtxPopCurrent_v2(void** context) { return 0; }
Status cuCtxGetDevice(int* device) { *device = 0; return 0; }
Status cuCtxSynchronize(void) { return 0; }
Status cuMemGetInfo_v2(size_t* free, size_t* total) { *free = *total = (size_t)1 << 30; return 0; }
Status cuMemAlloc_v2(u64* address, size_t bytes) {
  *address = (u64)aligned_alloc(512, (bytes + 511) / 512 * 512);
  memset((void*)*address, 0, bytes);
  return 0;
}
Status cuMemFree_v2(u64 address) { free((void*)address); return 0; }
Status cuMemHostAlloc(void** address, size_t bytes, unsigned flags) { return cuMemAlloc_v2((u64*)address, bytes); }
Status cuMemFreeHost(void* address) { free(address); return 0; }
Status cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) { return 0; }
Status cuMemHostGetDevicePointer_v2(u64* found, void* address, unsigned flags) { *found = (u64)address; return 0; }
Status cuMemHostUnregister(void* address) { return 0; }
Status cuMemcpyAsync(u64 target, u64 source, size_t bytes, void* stream) {
  memmove((void*)target, (void*)source, bytes);
  return 0;
}
Status cuMemsetD8Async(u64 target, unsigned char byte, size_t count, void* stream) {
  memset((void*)target, byte, count);
  return 0;
}
Status cuMemsetD32Async(u64 target, unsigned word, size_t count, void* stream) {
  for (size_t i = 0; i < count; i++) ((unsigned*)target)[i] = word;
  return 0;
}
Status cuStreamWriteValue32_v2(void* stream, u64 target, unsigned value, unsigned flags) {
  *(unsigned*)target = value;
  return 0;
}
struct Copy {
  size_t source_x, source_y; int source_type; void* source_host; u64 source; void* source_array; size_t source_pitch;
  size_t target_x, target_y; int target_type; void* target_host; u64 target; void* target_array; size_t target_pitch;
  size_t width, height;
};
Status cuMemcpy2DAsync_v2(const struct Copy* copy, void* stream) {
  if (copy->source_type != 2 || copy->target_type != 2) return 1;
  for (size_t row = 0; row < copy->height; row++)
    memmove((char*)copy->target + row * copy->target_pitch, (char*)copy->source + row * copy->source_pitch, copy->width);
  return 0;
}

struct Properties { int type, handle_types, location_type, location; void* none; unsigned char flags[8]; };
Status cuMemGetAllocationGranularity(size_t* step, const struct Properties* about, int option) {
  *step = PAGE;
  return about->type == 1 && about->handle_types == 1 && about->location_type == 1 ? 0 : 1;
}
static u64 handle_of(int descriptor) {
  for (u64 handle = 1; handle < 1 << 12; handle++)
    if (!taken[handle]) { taken[handle] = 1; descriptors[handle] = descriptor; return handle; }
  abort();
}
Status cuMemCreate(u64* handle, size_t bytes, const struct Properties* about, u64 flags) {
  int made = memfd_create("gpu", 0);
  if (bytes % PAGE || ftruncate(made, bytes)) return 1;
  *handle = handle_of(made);
  return 0;
}
Status cuMemRelease(u64 handle) {
  if (!taken[handle]) return 1;
  taken[handle] = 0;
  return close(descriptors[handle]);
}
Status cuMemAddressReserve(u64* address, size_t bytes, size_t alignment, u64 wanted, u64 flags) {
  *address = (u64)mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return bytes % PAGE != 0;
}
Status cuMemAddressFree(u64 address, size_t bytes) { return munmap((void*)address, bytes); }
Status cuMemMap(u64 address, size_t bytes, size_t offset, u64 handle, u64 flags) {
  void* made = mmap((void*)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, descriptors[handle], offset);
  return !taken[handle] || made == MAP_FAILED;
}
Status cuMemUnmap(u64 address, size_t bytes) {
  return mmap((void*)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
}
Status cuMemSetAccess(u64 address, size_t bytes, const int* access, size_t count) {
  if (count != 1 || access[0] != 1 || access[2] != 3) return 1;
  return mprotect((void*)address, bytes, PROT_READ | PROT_WRITE);
}
Status cuMemExportToShareableHandle(int* descriptor, u64 handle, int type, u64 flags) {
  *descriptor = dup(descriptors[handle]);
  return 0;
}
Status cuMemImportFromShareableHandle(u64* handle, void* descriptor, int type) {
  if (getenv("FAKE_CUDA_ALONE")) return NOT_PERMITTED;
  *handle = handle_of(dup((int)(u64)descriptor));
  return 0;
}

Status cuStreamCreate(void** stream, unsigned flags) { *stream = (void*)++number; return 0; }
Status cuStreamDestroy_v2(void* stream) { return 0; }
Status cuStreamSynchronize(void* stream) { return 0; }
Status cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return 0; }
Status cuStreamBeginCapture_v2(void* stream, int mode) { return 0; }
Status cuStreamEndCapture(void* stream, void** graph) { *graph = (void*)++number; return 0; }
Status cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
Status cuGraphInstantiateWithFlags(void** runs, void* graph, u64 flags) { *runs = (void*)++number; return 0; }
Status cuGraphLaunch(void* graph, void* stream) { return 0; }
Status cuGraphExecDestroy(void* graph) { return 0; }
Status cuGraphDestroy(void* graph) { return 0; }
Status cuEventCreate(void** event, unsigned flags) { *event = calloc(1, sizeof(struct timespec)); return 0; }
Status cuEventRecord(void* event, void* stream) { return clock_gettime(CLOCK_MONOTONIC, event); }
Status cuEventQuery(void* event) { return 0; }
Status cuEventSynchronize(void* event) { return 0; }
Status cuEventElapsedTime(float* milliseconds, const struct timespec* first, const struct timespec* last) {
  *milliseconds = 1e3f * (last->tv_sec - first->tv_sec) + 1e-6f * (last->tv_nsec - first->tv_nsec);
  return 0;
}
Status cuEventDestroy_v2(void* event) { free(event); return 0; }
Status cuModuleLoadData(void** module, const char* image) { *module = (void*)++number; return 0; }
Status cuModuleUnload(void* module) { return 0; }
Status cuModuleGetFunction(void** function, void* module, const char* name) { *function = (void*)++number; return 0; }
Status cuFuncGetAttribute(int* value, int which, void* function) { *value = 0; return 0; }
Status cuFuncSetAttribute(void* function, int which, int value) { return 0; }
Status cuFuncLoad(void* function) { return 0; }
Status cuLaunchKernelEx(void* config, void* function, void* args, void* extra) { return 0; }
Status cuGetErrorName(int status, const char** name) {
  *name = status == NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}

size_t cublasLtGetVersion(void) { return 130100; }
Status cublasLtCreate(void** made) { *made = (void*)++number; return 0; }
Status cublasLtMatmulDescCreate(void** made, int compute, int scale) { return cublasLtCreate(made); }
Status cublasLtMatmulDescDestroy(void* made) { return 0; }
Status cublasLtMatmulDescSetAttribute(void* made, int which, void* value, size_t bytes) { return 0; }
Status cublasLtMatmulPreferenceCreate(void** made) { return cublasLtCreate(made); }
Status cublasLtMatmulPreferenceDestroy(void* made) { return 0; }
Status cublasLtMatmulPreferenceSetAttribute(void* made, int which, void* value, size_t bytes) { return 0; }
Status cublasLtMatrixLayoutCreate(void** made, int type, u64 rows, u64 columns, int64_t stride) { return cublasLtCreate(made); }
Status cublasLtMatrixLayoutDestroy(void* made) { return 0; }
struct Found { u64 algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
Status cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* product, void* a, void* b, void* c, void* d, void* preference, int count, struct Found* found,
    int* num_found) {
  memset(found, 0, sizeof(struct Found));
  *num_found = 1;
  return 0;
}
Status cublasLtMatmulAlgoCheck(
    void* handle, void* product, void* a, void* b, void* c, void* d, void* algorithm, struct Found* found) {
  memset(found, 0, sizeof(struct Found));
  return 0;
}
Status cublasLtMatmul(void) { return 0; }
