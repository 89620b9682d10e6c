/* Collectives and messages between processes of this machine, or of one process that stands for all ranks.
 *
 * A rank shows where in its device memory the data lies; the others read it there. Every rank computes its own result
 * from all of them in the order of the ranks, in double precision, so that results are the same on every rank and in
 * every run. */
#define _GNU_SOURCE
#include "communicator.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_SEQ_CST)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0); }

/* Until *word is no longer `value`: 0, or an error where a peer has gone, aborted, or does not come. */
static int wait_while(ncclComm_t comm, uint32_t *word, uint32_t value) {
  double until = now() + (double)setting("NULLCUDA_TIMEOUT", 120);
  struct timespec pause = {0, 20000000};
  while (LOAD(*word) == value) {
    syscall(SYS_futex, word, FUTEX_WAIT, value, &pause, NULL, 0);
    if (LOAD(*word) != value) return 0;
    if (LOAD(comm->shared->aborted)) return ncclRemoteError;
    for (int i = 0; i < comm->ranks; i++) {
      int process = LOAD(comm->shared->members[i].process);
      if (process && kill(process, 0) && errno == ESRCH) return ncclRemoteError;
    }
    if (now() > until) {
      fprintf(stderr, "null device: rank %d of %d waited too long in %s\n", comm->rank, comm->ranks, comm->name);
      return ncclRemoteError;
    }
  }
  return 0;
}

/* Returns when every rank is here. */
int meet(ncclComm_t comm) {
  shared_t *s = comm->shared;
  uint32_t generation = LOAD(s->generation);
  if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_SEQ_CST) == (uint32_t)comm->ranks) {
    s->arrived = 0;
    __atomic_add_fetch(&s->generation, 1, __ATOMIC_SEQ_CST);
    wake(&s->generation);
    return 0;
  }
  return wait_while(comm, &s->generation, generation);
}

static size_t segment_bytes(int ranks) { return sizeof(shared_t) + sizeof(queue_t) * (size_t)(ranks * ranks); }

/* Joins the segment comm->segment; the file goes as soon as all have joined, so that nothing outlives the processes. */
int share(ncclComm_t comm) {
  if (comm->ranks > MOST_RANKS) return ncclInvalidArgument;
  int file = shm_open(comm->segment, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)segment_bytes(comm->ranks))) return ncclSystemError;
  comm->shared = mmap(NULL, segment_bytes(comm->ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (comm->shared == MAP_FAILED) return ncclSystemError;
  member_t *me = &comm->shared->members[comm->rank];
  me->file = memory_file();
  __atomic_store_n(&me->process, getpid(), __ATOMIC_SEQ_CST);
  int error = meet(comm);
  if (comm->rank == 0) shm_unlink(comm->segment);
  return error;
}

void leave(ncclComm_t comm) {
  if (!comm->shared) return;
  munmap(comm->shared, segment_bytes(comm->ranks));
  comm->shared = NULL;
}

/* ---- arithmetic ---------------------------------------------------------------------------------------------- */
static const int TYPES[] = {CUDA_R_8I, CUDA_R_8U, CUDA_R_32I, CUDA_R_32U, CUDA_R_64I, CUDA_R_64U,
                            CUDA_R_16F, CUDA_R_32F, CUDA_R_64F, CUDA_R_16BF};

static int64_t reduce_integers(const void **from, int ranks, long i, int type, int reduction) {
  int64_t total = 0;
  for (int r = 0; r < ranks; r++) {
    int64_t value = type == CUDA_R_64I || type == CUDA_R_64U ? ((const int64_t *)from[r])[i]
                                                             : (int64_t)number_at(from[r], i, type);
    if (r == 0) total = value;
    else if (reduction == ncclMax) total = value > total ? value : total;
    else if (reduction == ncclMin) total = value < total ? value : total;
    else if (reduction == ncclProd) total *= value;
    else total += value;
  }
  return reduction == ncclAvg ? total / ranks : total;
}

static double reduce_numbers(const void **from, int ranks, long i, int type, int reduction) {
  double total = 0;
  for (int r = 0; r < ranks; r++) {
    double value = number_at(from[r], i, type);
    if (r == 0) total = value;
    else if (reduction == ncclMax) total = value > total || value != value ? value : total;
    else if (reduction == ncclMin) total = value < total || value != value ? value : total;
    else if (reduction == ncclProd) total *= value;
    else total += value;
  }
  return reduction == ncclAvg ? total / ranks : total;
}

static int reduce(void *to, const void **from, int ranks, size_t count, int nccl_type, int reduction) {
  if ((size_t)nccl_type >= sizeof TYPES / sizeof *TYPES || reduction > ncclAvg) return ncclInvalidArgument;
  int type = TYPES[nccl_type];
  if (nccl_type < (int)ncclFloat16)
    for (size_t i = 0; i < count; i++) {
      int64_t value = reduce_integers(from, ranks, (long)i, type, reduction);
      if (number_bytes(type) == 8) ((int64_t *)to)[i] = value;
      else set_number(to, (long)i, type, (double)value);
    }
  else
    for (size_t i = 0; i < count; i++) set_number(to, (long)i, type, reduce_numbers(from, ranks, (long)i, type, reduction));
  return 0;
}

/* ---- collectives --------------------------------------------------------------------------------------------- */
static int combine(ncclComm_t comm, int operation, const void **from, void *to, size_t count, int type, int reduction, int root) {
  size_t bytes = count * (size_t)(type < 10 ? number_bytes(TYPES[type]) : 1);
  const void *pieces[comm->ranks];
  switch (operation) {
    case ALL_REDUCE: case REDUCE: return reduce(to, from, comm->ranks, count, type, reduction);
    case BROADCAST: memcpy(to, from[root], bytes); return 0;
    case ALL_GATHER:
      for (int r = 0; r < comm->ranks; r++) memcpy((char *)to + (size_t)r * bytes, from[r], bytes);
      return 0;
    case REDUCE_SCATTER:
      for (int r = 0; r < comm->ranks; r++) pieces[r] = (const char *)from[r] + (size_t)comm->rank * bytes;
      return reduce(to, pieces, comm->ranks, count, type, reduction);
    default: /* ALL_TO_ALL */
      for (int r = 0; r < comm->ranks; r++)
        memcpy((char *)to + (size_t)r * bytes, (const char *)from[r] + (size_t)comm->rank * bytes, bytes);
      return 0;
  }
}

static int look(ncclComm_t comm, const void *mine, uint64_t what, const void **from) {
  member_t *members = comm->shared->members;
  members[comm->rank].place = place_of(mine);
  members[comm->rank].what = what;
  int error = meet(comm);
  for (int r = 0; r < comm->ranks && !error; r++) {
    char *span = memory_of(members[r].process, members[r].file);
    if (!span) return ncclRemoteError;
    from[r] = span + members[r].place;
    if (members[r].what == what) continue;
    fprintf(stderr, "null device: in %s rank %d asks for %llx where rank %d asks for %llx (operation, type, count)\n",
            comm->name, comm->rank, (unsigned long long)what, r, (unsigned long long)members[r].what);
    error = ncclInvalidUsage;
  }
  return error;
}

int collect(ncclComm_t comm, int operation, const void *from, void *to, size_t count, int type, int reduction, int root) {
  size_t bytes = count * (size_t)(type < 10 ? number_bytes(TYPES[type]) : 1), wide = (size_t)comm->ranks * bytes;
  size_t read = operation == REDUCE_SCATTER || operation == ALL_TO_ALL ? wide : bytes;
  size_t written = operation == ALL_GATHER || operation == ALL_TO_ALL ? wide : bytes;
  int large = (read > written ? read : written) > true_bytes(), error = 0;
  const void *sources[comm->ranks];
  for (int r = 0; r < comm->ranks; r++) sources[r] = from; /* alone: as if every rank held what this one holds */
  if (comm->shared) {
    uint64_t what = (uint64_t)operation << 56 | (uint64_t)type << 48 | count;
    error = look(comm, operation == BROADCAST && comm->rank != root ? to : from, what, sources);
  }
  void *result = large || error ? NULL : malloc(written + 1);
  if (result) error = combine(comm, operation, sources, result, count, type, reduction, root);
  if (comm->shared && !error) error = meet(comm); /* all have read */
  if (result && !error && (operation != REDUCE || comm->rank == root)) memcpy(to, result, written);
  free(result);
  return error;
}

/* ---- messages ------------------------------------------------------------------------------------------------ */
int post(ncclComm_t comm, int peer, const void *from, size_t bytes) {
  queue_t *queue = &comm->shared->queues[comm->rank * comm->ranks + peer];
  if (queue->sent - LOAD(queue->taken) == QUEUE) {
    int error = wait_while(comm, &queue->taken, queue->sent - QUEUE);
    if (error) return error;
  }
  for (; comm->freed[peer] != LOAD(queue->taken); comm->freed[peer]++) {
    long place = queue->messages[comm->freed[peer] % QUEUE].place;
    if (place >= 0) give_back(memory_of(getpid(), 0) + place);
  }
  void *copy = bytes && bytes <= true_bytes() ? borrow(bytes) : NULL;
  if (copy) memcpy(copy, from, bytes);
  queue->messages[queue->sent % QUEUE].place = copy ? place_of(copy) : -1;
  queue->messages[queue->sent % QUEUE].bytes = bytes;
  __atomic_add_fetch(&queue->sent, 1, __ATOMIC_SEQ_CST);
  wake(&queue->sent);
  return 0;
}

int take(ncclComm_t comm, int peer, void *to, size_t bytes) {
  queue_t *queue = &comm->shared->queues[peer * comm->ranks + comm->rank];
  int error = wait_while(comm, &queue->sent, queue->taken);
  if (error) return error;
  long place = queue->messages[queue->taken % QUEUE].place;
  size_t sent = queue->messages[queue->taken % QUEUE].bytes;
  if (sent != bytes) {
    fprintf(stderr, "null device: in %s rank %d expects %zu bytes from rank %d, which sent %zu\n", comm->name, comm->rank,
            bytes, peer, sent);
    return ncclInvalidUsage;
  }
  char *span = memory_of(comm->shared->members[peer].process, comm->shared->members[peer].file);
  if (!span) return ncclRemoteError;
  if (place >= 0) memcpy(to, span + place, bytes);
  __atomic_add_fetch(&queue->taken, 1, __ATOMIC_SEQ_CST);
  wake(&queue->taken);
  return 0;
}
