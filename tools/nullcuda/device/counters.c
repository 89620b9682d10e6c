/* Counts, and who made the host wait. */
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

counters_t counters;
static void (*watcher)(int kind);

PUBLIC void nullcuda_read(counters_t *out) { *out = counters; }

PUBLIC void nullcuda_reset(void) {
  long bytes = counters.bytes;
  memset(&counters, 0, sizeof counters);
  counters.bytes = counters.peak_bytes = bytes;
}

/* Calls `function` on each wait of the host, in the thread that waits; NULL ends it. */
PUBLIC void nullcuda_watch(void (*function)(int kind)) { watcher = function; }

void host_waits(int kind) {
  long *counts[] = {&counters.stream_syncs, &counters.device_syncs, &counters.event_syncs,
                    &counters.copy_syncs};
  __atomic_add_fetch(counts[kind], 1, __ATOMIC_RELAXED);
  if (watcher) watcher(kind);
}

/* A wait that an operation answered elsewhere (values.py) would have had. */
PUBLIC void nullcuda_waited(void) { host_waits(WAIT_STREAM); }

long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

size_t true_bytes(void) {
  static long elements;
  if (!elements) elements = setting("NULLCUDA_ELEMENTS", 1 << 20);
  return 8 * (size_t)elements;
}

int device_count(void) {
  static int count;
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* set and empty, it hides every device; else it is not read */
  if (visible && !*visible) return 0;
  if (!count) count = (int)setting("NULLCUDA_DEVICES", MOST_DEVICES);
  return count < MOST_DEVICES ? count : MOST_DEVICES;
}

size_t device_bytes(void) {
  static size_t bytes;
  if (!bytes) bytes = (size_t)setting("NULLCUDA_BYTES", 80L << 30);
  return bytes;
}

void *fresh_handle(void) {
  static long next = 0x1000;
  return (void *)__atomic_add_fetch(&next, 16, __ATOMIC_RELAXED);
}

/* Functions that the device does not answer: build makes a stub for each name that torch and TransformerEngine import.
 * A stub says success and is remembered by name. */
#define MOST_STUBS 1024
static const char *called[MOST_STUBS];
static long calls_to_stubs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

long nullcuda_stub(const char *name, int *seen) {
  pthread_mutex_lock(&lock);
  if (!*seen && calls_to_stubs < MOST_STUBS) {
    called[calls_to_stubs++] = name;
    *seen = 1;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

PUBLIC const char *nullcuda_unanswered(long index) { return index < calls_to_stubs ? called[index] : NULL; }
