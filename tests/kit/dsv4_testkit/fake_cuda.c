/* Replaces libcuda.so.1: the calls of the test of copies between GPUs, on memory of the process.
 *
 * FAKE_GPUS      number of GPUs (default 2)
 * FAKE_PEERS     0: the driver supports no copies between them
 * FAKE_ATOMICS   1: they are connected by NVLink
 * FAKE_LIMIT     contexts that one context may map (default 8)
 * FAKE_FREE      free share of the memory of each GPU in percent (default 99)
 * FAKE_FAULT     FUNCTION:CALL:KIND, a fault of one call of a function, the first is 1. KIND: hang, crash, the number of
 *                an error, or for copies lost (nothing arrives) or bit (one bit is wrong)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GPUS = 8 };
static int current;
static int calls_left = -1;
static char lost, bit;

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? strtol(text, NULL, 10) : otherwise;
}

/* Returns the error of this call of `name`; 0 without one. */
static int fault(const char *name) {
  const char *text = getenv("FAKE_FAULT");
  size_t length = strlen(name);
  lost = bit = 0;
  if (!text || strncmp(text, name, length) || text[length] != ':')
    return 0;
  char *kind;
  if (calls_left < 0)
    calls_left = strtol(text + length + 1, NULL, 10);
  strtol(text + length + 1, &kind, 10);
  if (--calls_left)
    return 0;
  kind++;
  if (!strcmp(kind, "hang"))
    for (;;)
      pause();
  if (!strcmp(kind, "crash"))
    abort();
  lost = !strcmp(kind, "lost");
  bit = !strcmp(kind, "bit");
  return atoi(kind);
}

#define MAY_FAIL                                                                                                       \
  int failed = fault(__func__);                                                                                        \
  if (failed)                                                                                                          \
    return failed

static int copied(void *into, const void *from, size_t size) {
  if (!lost)
    memmove(into, from, size);
  if (bit)
    ((unsigned char *)into)[size - 1] ^= 1;
  return 0;
}

int cuInit(unsigned flags) { MAY_FAIL; return flags; }
int cuGetErrorName(int code, const char **name) {
  static char text[32];
  snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
  *name = text;
  return 0;
}
int cuDeviceGetCount(int *count) { MAY_FAIL; *count = setting("FAKE_GPUS", 2); return 0; }
int cuDeviceCanAccessPeer(int *can, int one, int other) { MAY_FAIL; *can = one != other && setting("FAKE_PEERS", 1); return 0; }
int cuDeviceGetP2PAttribute(int *value, int what, int one, int other) {
  MAY_FAIL;
  *value = what == 3 && one != other && setting("FAKE_ATOMICS", 0);
  return 0;
}
int cuDeviceGetPCIBusId(char *text, int size, int device) { MAY_FAIL; snprintf(text, size, "0000:%02X:00.0", device + 1); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { MAY_FAIL; *context = (void *)(uintptr_t)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { MAY_FAIL; current = (int)(uintptr_t)context; return current < 1 || current > GPUS; }
int cuCtxSynchronize(void) { MAY_FAIL; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  MAY_FAIL;
  *total = (size_t)96 << 30;
  *free = *total / 100 * setting("FAKE_FREE", 99);
  return 0;
}
int cuMemAlloc_v2(uint64_t *into, size_t size) { MAY_FAIL; *into = (uint64_t)(uintptr_t)calloc(1, size); return *into ? 0 : 2; }
int cuMemsetD8_v2(uint64_t into, unsigned char value, size_t size) { MAY_FAIL; memset((void *)(uintptr_t)into, value, size); return 0; }
int cuMemcpyHtoD_v2(uint64_t into, const void *from, size_t size) { MAY_FAIL; return copied((void *)(uintptr_t)into, from, size); }
int cuMemcpyDtoH_v2(void *into, uint64_t from, size_t size) { MAY_FAIL; return copied(into, (void *)(uintptr_t)from, size); }
static char mapped[GPUS + 1][GPUS + 1];
int cuCtxEnablePeerAccess(void *context, unsigned flags) {
  MAY_FAIL;
  int other = (int)(uintptr_t)context;
  if (mapped[current][other])
    return 704;
  long count = 1;
  for (int each = 1; each <= GPUS; each++)
    count += mapped[current][each];
  if (count > setting("FAKE_LIMIT", 8))
    return 711; /* CUDA_ERROR_TOO_MANY_PEERS */
  mapped[current][other] = 1;
  return flags;
}
int cuCtxDisablePeerAccess(void *context) { mapped[current][(int)(uintptr_t)context] = 0; return 0; }
int cuMemcpyPeer(uint64_t into, void *into_context, uint64_t from, void *from_context, size_t size) {
  MAY_FAIL;
  if (into_context == from_context)
    return 1;
  return copied((void *)(uintptr_t)into, (void *)(uintptr_t)from, size);
}
int cuModuleLoadData(void **module, const void *text) { MAY_FAIL; *module = (void *)text; return !strstr(text, ".entry copy"); }
int cuModuleGetFunction(void **function, void *module, const char *name) { MAY_FAIL; *function = module; return strcmp(name, "copy") != 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c, unsigned shared,
                   void *stream, void **values, void **extra) {
  MAY_FAIL;
  if (!function || x * y * z * threads * b * c == 0 || shared || stream || extra)
    return 1;
  int peers = 0;
  for (int other = 1; other <= GPUS; other++)
    peers += mapped[current][other];
  if (!peers)
    return 700; /* CUDA_ERROR_ILLEGAL_ADDRESS */
  return copied(*(void **)values[0], *(void **)values[1], (size_t)4 * *(uint32_t *)values[2]);
}
