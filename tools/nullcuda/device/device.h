/* What the files of the null device share. See ../README.md for what the device is. */
#ifndef NULLCUDA_DEVICE_H
#define NULLCUDA_DEVICE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 8
#define PUBLIC __attribute__((visibility("default")))

/* Counts of this process since the last nullcuda_reset; counters.py reads them by this order. */
typedef struct {
  long launches;      /* kernels, by the runtime or the driver */
  long bad_launches;  /* of those, refused: a grid or a block beyond the device's limits */
  long stream_syncs, device_syncs, event_syncs, copy_syncs; /* the host waited */
  long d2h, d2h_bytes, h2d, h2d_bytes, d2d, d2d_bytes;      /* copies */
  long gemms;
  long collectives, collective_bytes, communicators;
  long bytes, peak_bytes; /* device memory in use, over all devices */
  double gemm_flops;
} counters_t;
extern counters_t counters;
#define COUNT(field, amount) __atomic_add_fetch(&counters.field, (long)(amount), __ATOMIC_RELAXED)

/* One wait of the host, for the counters and for whoever watches call sites. */
enum { WAIT_STREAM, WAIT_DEVICE, WAIT_EVENT, WAIT_COPY };
void host_waits(int kind);

long setting(const char *name, long otherwise); /* an environment variable, as a number */
size_t true_bytes(void);                        /* copies and collectives up to this size move real values */
int device_count(void);
size_t device_bytes(void);
int current_device(void);
void *fresh_handle(void);

/* memory.c: all devices of one process are one span of addresses over one anonymous file. */
int is_device(const void *address);
int device_of(const void *address);
long place_of(const void *address);               /* offset in the span; -1 if not of this device */
int memory_file(void);                            /* its descriptor, by which another process maps it */
char *memory_of(int process, int file);           /* another process's span here; NULL if it is gone */
void *borrow(size_t bytes);                       /* device memory beyond the limit and the counters */
void give_back(void *address);

/* streams.c: a graph being captured counts its launches. */
void launched(dim3 grid, dim3 block, int *error); /* error: 1 where the limits refuse it */

/* blas.c */
void count_gemm(double rows, double columns, double inner);

/* By what the numbers of an fp8 factor are multiplied: nothing, one scale, or one for each 128 along the sum of a row or
 * of 128 rows. `rows` and `inner` are those of the factor as the product has it. */
typedef struct { int mode; const float *at; } scales_t;

/* values of a small matrix product: operands column-major with leading dimensions, as cuBLAS has them */
typedef struct {
  int type_a, type_b, type_c, transpose_a, transpose_b;
  long m, n, k, lda, ldb, ldc;
  const void *a, *b, *c;
  void *d;
  double alpha, beta;
  scales_t scales_a, scales_b;
} product_t;
int multiply(const product_t *product); /* 0 where the types are not known */

/* numbers.c: elements of arrays as doubles; types are cudaDataType's */
double number_at(const void *array, long index, int type);
void set_number(void *array, long index, int type, double value);
int number_bytes(int type); /* 0 where not known */

#endif
