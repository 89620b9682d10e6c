/* Device memory: addresses over one sparse anonymous file, so that an allocation costs nothing until it is written, the
 * limit of each device is kept, and another process of this machine can map it (IPC handles, collectives). */
#define _GNU_SOURCE
#include "device.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPAN (1ul << 38) /* addresses of one device: more than its memory, so that no fragment is ever too small */
#define PAGE 4096ul

typedef struct { size_t at, bytes; int counted; } block_t;
typedef struct { block_t *blocks; size_t count, room, used; } space_t; /* sorted by address */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static space_t spaces[MOST_DEVICES];
static char *base;
static int file = -1;

/* A forked child has no device memory of its own yet; CUDA refuses such a child outright, and torch says so. */
static void forget(void) {
  base = NULL;
  file = -1;
  memset(spaces, 0, sizeof spaces);
  pthread_mutex_init(&lock, NULL);
}

static int start(void) {
  if (base) return 1;
  static int registered;
  if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
  file = memfd_create("nullcuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, SPAN * MOST_DEVICES)) return 0;
  char *span = mmap(NULL, SPAN * MOST_DEVICES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (span == MAP_FAILED) return 0;
  base = span;
  return 1;
}

int memory_file(void) {
  pthread_mutex_lock(&lock);
  start();
  pthread_mutex_unlock(&lock);
  return file;
}

long place_of(const void *address) {
  const char *p = address;
  return base && p >= base && p < base + SPAN * MOST_DEVICES ? p - base : -1;
}

/* ---- memory of other processes ------------------------------------------------------------------------------- */
#define MOST_PEERS 256
typedef struct { int process, file; char *span; } peer_t;
static peer_t peers[MOST_PEERS];
static int peer_count;

char *memory_of(int process, int number) {
  if (process == getpid()) return base;
  char path[64];
  pthread_mutex_lock(&lock);
  char *span = NULL;
  for (int i = 0; i < peer_count && !span; i++)
    if (peers[i].process == process && peers[i].file == number) span = peers[i].span;
  if (!span && peer_count < MOST_PEERS) {
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, number);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened >= 0) {
      span = mmap(NULL, SPAN * MOST_DEVICES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
      close(opened);
      if (span == MAP_FAILED) span = NULL;
      else peers[peer_count++] = (peer_t){process, number, span};
    }
  }
  pthread_mutex_unlock(&lock);
  return span;
}

static const char *peer_span(const void *address) {
  for (int i = 0; i < peer_count; i++)
    if ((char *)address >= peers[i].span && (char *)address < peers[i].span + SPAN * MOST_DEVICES) return peers[i].span;
  return NULL;
}

int is_device(const void *address) { return place_of(address) >= 0 || peer_span(address) != NULL; }

int device_of(const void *address) {
  long place = place_of(address);
  if (place >= 0) return (int)(place / SPAN);
  const char *span = peer_span(address);
  return span ? (int)(((const char *)address - span) / SPAN) : 0;
}

/* ---- allocation ---------------------------------------------------------------------------------------------- */
static void *allocate(size_t bytes, int counted) {
  space_t *space = &spaces[current_device()];
  size_t rounded = (bytes + PAGE - 1) & ~(PAGE - 1), at = 0, i;
  void *found = NULL;
  pthread_mutex_lock(&lock);
  if (!start() || (counted && space->used + rounded > device_bytes())) goto done;
  for (i = 0; i < space->count && space->blocks[i].at - at < rounded; i++) at = space->blocks[i].at + space->blocks[i].bytes;
  if (at + rounded > SPAN) goto done;
  if (space->count == space->room) {
    space->room = space->room ? 2 * space->room : 256;
    space->blocks = realloc(space->blocks, space->room * sizeof(block_t));
  }
  memmove(space->blocks + i + 1, space->blocks + i, (space->count++ - i) * sizeof(block_t));
  space->blocks[i] = (block_t){at, rounded, counted};
  if (counted) {
    space->used += rounded;
    counters.bytes += (long)rounded;
    if (counters.bytes > counters.peak_bytes) counters.peak_bytes = counters.bytes;
  }
  found = base + SPAN * current_device() + at;
done:
  pthread_mutex_unlock(&lock);
  return found;
}

static int release(void *address) {
  long place = place_of(address);
  if (place < 0) return address == NULL;
  space_t *space = &spaces[place / SPAN];
  size_t at = place % SPAN, low = 0, high;
  pthread_mutex_lock(&lock);
  high = space->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (space->blocks[middle].at < at) low = middle + 1;
    else high = middle;
  }
  int found = low < space->count && space->blocks[low].at == at;
  if (found) {
    block_t block = space->blocks[low];
    madvise(base + place, block.bytes, MADV_REMOVE); /* its pages go, and read as zero again */
    if (block.counted) {
      space->used -= block.bytes;
      counters.bytes -= (long)block.bytes;
    }
    memmove(space->blocks + low, space->blocks + low + 1, (--space->count - low) * sizeof(block_t));
  }
  pthread_mutex_unlock(&lock);
  return found;
}

void *borrow(size_t bytes) { return allocate(bytes, 0); }
void give_back(void *address) { release(address); }

cudaError_t cudaMalloc(void **out, size_t bytes) {
  *out = NULL;
  if (bytes == 0) return cudaSuccess;
  *out = allocate(bytes, 1);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *address) { return release(address) ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = device_bytes();
  *unused = *total - spaces[current_device()].used;
  return cudaSuccess;
}

/* ---- pinned memory of the host ------------------------------------------------------------------------------- */
typedef struct { char *at; size_t bytes; int owned; } pinned_t;
static pinned_t *pinned;
static size_t pinned_count, pinned_room;

static void pin(void *at, size_t bytes, int owned) {
  pthread_mutex_lock(&lock);
  if (pinned_count == pinned_room) {
    pinned_room = pinned_room ? 2 * pinned_room : 64;
    pinned = realloc(pinned, pinned_room * sizeof(pinned_t));
  }
  pinned[pinned_count++] = (pinned_t){at, bytes, owned};
  pthread_mutex_unlock(&lock);
}

static int is_pinned(const void *address) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < pinned_count && !found; i++)
    found = (char *)address >= pinned[i].at && (char *)address < pinned[i].at + pinned[i].bytes;
  pthread_mutex_unlock(&lock);
  return found;
}

static cudaError_t unpin(void *address, int owned) {
  cudaError_t error = cudaErrorHostMemoryNotRegistered;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < pinned_count && error; i++)
    if (pinned[i].at == address && pinned[i].owned == owned) {
      pinned[i] = pinned[--pinned_count];
      error = cudaSuccess;
    }
  pthread_mutex_unlock(&lock);
  if (!error && owned) free(address);
  return error;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) {
  if (posix_memalign(out, PAGE, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  pin(*out, bytes ? bytes : 1, 1);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return cudaMallocHost(out, bytes); }
cudaError_t cudaFreeHost(void *address) { return address ? unpin(address, 1) : cudaSuccess; }
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) { return pin(address, bytes, 0), cudaSuccess; }
cudaError_t cudaHostUnregister(void *address) { return unpin(address, 0); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  memset(out, 0, sizeof *out);
  out->hostPointer = (void *)address;
  out->device = device_of(address);
  if (is_device(address)) {
    out->type = cudaMemoryTypeDevice;
    out->devicePointer = (void *)address;
    out->hostPointer = NULL;
  } else if (is_pinned(address)) {
    out->type = cudaMemoryTypeHost;
    out->devicePointer = (void *)address;
  } else out->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

/* ---- handles that another process opens ---------------------------------------------------------------------- */
typedef struct { int process, file; long place; } handle_t;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *address) {
  handle_t handle = {getpid(), memory_file(), place_of(address)};
  memset(out, 0, sizeof *out);
  if (handle.place < 0) return cudaErrorInvalidValue;
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t content, unsigned flags) {
  handle_t handle;
  memcpy(&handle, &content, sizeof handle);
  if (handle.process == getpid()) return cudaErrorInvalidValue; /* as CUDA: not in the process that made it */
  char *span = memory_of(handle.process, handle.file);
  *out = span ? span + handle.place : NULL;
  return span ? cudaSuccess : cudaErrorMapBufferObjectFailed;
}
cudaError_t cudaIpcCloseMemHandle(void *address) { return cudaSuccess; }

/* ---- copies -------------------------------------------------------------------------------------------------- */
static cudaError_t copy(void *to, const void *from, size_t bytes) {
  int target = is_device(to), source = is_device(from);
  if (source && !target) { COUNT(d2h, 1); COUNT(d2h_bytes, bytes); }
  else if (target && !source) { COUNT(h2d, 1); COUNT(h2d_bytes, bytes); }
  else { COUNT(d2d, 1); COUNT(d2d_bytes, bytes); }
  if (bytes <= true_bytes() && to != from) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  host_waits(WAIT_COPY);
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (width * height <= true_bytes())
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * pitch, (char *)from + row * other, width);
  return copy(to, to, width * height);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes <= true_bytes()) memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, 0); }
