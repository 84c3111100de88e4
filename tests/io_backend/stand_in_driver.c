/* A stand-in for the CUDA driver library, for tests on machines without one.
 *
 * Enough of the driver's interface for KvikIO to move host memory, and to move ranges that a test declares as device
 * memory (stand_in_device_range) through its staging path. It must not be loaded into a process that uses CUDA.
 *
 * cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 stand_in_driver.c
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int status;
typedef unsigned long long address;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_ORDINAL = 9 };
enum { TYPE_DEVICE = 2, MOST_RANGES = 4096, VERSION_BEFORE_BATCHED_COPIES = 12000 };

static struct { address start; size_t nbytes; } ranges[MOST_RANGES];
static int num_ranges, context, stream, event;
static unsigned long long copied_nbytes;

int stand_in_device_range(void *start, size_t nbytes) {
  if (num_ranges == MOST_RANGES) return INVALID_VALUE;
  ranges[num_ranges].start = (address)start;
  ranges[num_ranges++].nbytes = nbytes;
  return SUCCESS;
}
unsigned long long stand_in_copied_nbytes(void) { return copied_nbytes; }

static int find(address at) {
  for (int i = 0; i < num_ranges; i++)
    if (at >= ranges[i].start && at < ranges[i].start + ranges[i].nbytes) return i;
  return -1;
}

/* What is asked for host memory: a driver that was never initialised means that memory is the host's. */
status cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
status cuDriverGetVersion(int *version) { *version = VERSION_BEFORE_BATCHED_COPIES; return SUCCESS; }
status cuPointerGetAttributes(unsigned count, int *which, void **values, address at) {
  if (find(at) < 0) return NOT_INITIALIZED;
  for (unsigned i = 0; i < count; i++) {
    if (which[i] != ATTRIBUTE_MEMORY_TYPE) return NOT_SUPPORTED;
    *(int *)values[i] = TYPE_DEVICE;
  }
  return SUCCESS;
}

/* What is asked for device memory. */
status cuPointerGetAttribute(void *value, int which, address at) {
  if (find(at) < 0) return INVALID_VALUE;
  if (which == ATTRIBUTE_CONTEXT) *(void **)value = &context;
  else if (which == ATTRIBUTE_MEMORY_TYPE) *(int *)value = TYPE_DEVICE;
  else if (which == ATTRIBUTE_DEVICE_POINTER) *(address *)value = at;
  else if (which == ATTRIBUTE_ORDINAL) *(int *)value = 0;
  else return INVALID_VALUE;
  return SUCCESS;
}
status cuMemGetAddressRange_v2(address *start, size_t *nbytes, address at) {
  int i = find(at);
  if (i < 0) return INVALID_VALUE;
  if (start) *start = ranges[i].start;
  if (nbytes) *nbytes = ranges[i].nbytes;
  return SUCCESS;
}
static status copy(void *to, const void *from, size_t nbytes) {
  memcpy(to, from, nbytes);
  __atomic_fetch_add(&copied_nbytes, nbytes, __ATOMIC_RELAXED);
  return SUCCESS;
}
status cuMemcpyAsync(address to, address from, size_t n, void *s) { (void)s; return copy((void *)to, (void *)from, n); }
status cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) { (void)s; return copy((void *)to, from, n); }
status cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) { (void)s; return copy(to, (void *)from, n); }
status cuMemHostAlloc(void **p, size_t n, unsigned f) { (void)f; return posix_memalign(p, 4096, n) ? OUT_OF_MEMORY : SUCCESS; }
status cuMemFreeHost(void *p) { free(p); return SUCCESS; }
status cuMemHostRegister_v2(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; return SUCCESS; }
status cuMemHostUnregister(void *p) { (void)p; return SUCCESS; }
status cuCtxPushCurrent_v2(void *c) { (void)c; return SUCCESS; }
status cuCtxPopCurrent_v2(void **c) { if (c) *c = &context; return SUCCESS; }
status cuCtxGetCurrent(void **c) { *c = &context; return SUCCESS; }
status cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
status cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
status cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
status cuDeviceGetAttribute(int *value, int which, int device) { (void)which; (void)device; *value = 0; return SUCCESS; }
status cuDevicePrimaryCtxRetain(void **c, int device) { (void)device; *c = &context; return SUCCESS; }
status cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
status cuStreamCreate(void **s, unsigned flags) { (void)flags; *s = &stream; return SUCCESS; }
status cuStreamDestroy_v2(void *s) { (void)s; return SUCCESS; }
status cuStreamSynchronize(void *s) { (void)s; return SUCCESS; }
status cuEventCreate(void **e, unsigned flags) { (void)flags; *e = &event; return SUCCESS; }
status cuEventDestroy_v2(void *e) { (void)e; return SUCCESS; }
status cuEventRecord(void *e, void *s) { (void)e; (void)s; return SUCCESS; }
status cuEventQuery(void *e) { (void)e; return SUCCESS; }
status cuEventSynchronize(void *e) { (void)e; return SUCCESS; }
status cuGetErrorName(status code, const char **text) { (void)code; *text = "STAND_IN_ERROR"; return SUCCESS; }
status cuGetErrorString(status code, const char **text) { (void)code; *text = "an error of the stand-in driver"; return SUCCESS; }

/* What must exist and is never called. */
#define UNUSED(name) status name(void) { return NOT_SUPPORTED; }
UNUSED(cuCtxCreate_v2)
UNUSED(cuCtxCreate_v4)
UNUSED(cuCtxDestroy_v2)
UNUSED(cuLaunchHostFunc)
