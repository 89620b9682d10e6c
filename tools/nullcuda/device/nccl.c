/* NCCL's functions: communicators, groups of calls, counts by operation and group. */
#define _GNU_SOURCE
#include "communicator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t communicators; /* never freed: their counts are read after the groups have gone */
static int alone;

/* From now on this process stands for every rank of the communicators that it makes. */
PUBLIC void nullcuda_alone(int yes) { alone = yes; }

/* Counts of the communicator at `index`, newest first, since the last call for it: 0 beyond the last. */
PUBLIC int nullcuda_collectives(long index, char *name, int *ranks, long *calls, long *bytes) {
  ncclComm_t at = communicators;
  while (at && index-- > 0) at = at->next;
  if (!at) return 0;
  memcpy(name, at->name, sizeof at->name);
  *ranks = at->ranks;
  memcpy(calls, at->calls, sizeof at->calls);
  memcpy(bytes, at->bytes, sizeof at->bytes);
  memset(at->calls, 0, sizeof at->calls);
  memset(at->bytes, 0, sizeof at->bytes);
  return 1;
}

/* ---- communicators ------------------------------------------------------------------------------------------- */
ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclRemoteError: return "null device: a peer has gone, aborted or did not come";
    case ncclInvalidUsage: return "null device: ranks ask for different collectives";
    default: return "null device: an operation that it does not answer";
  }
}
const char *ncclGetLastError(ncclComm_t comm) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static int made;
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/nullcuda-%d-%d-%ld%09ld", getpid(),
           __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED), (long)t.tv_sec, t.tv_nsec);
  return ncclSuccess;
}

static ncclResult_t make(ncclComm_t *out, int ranks, int rank, const char *segment, const ncclConfig_t *config) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  comm->ranks = ranks;
  comm->rank = rank;
  snprintf(comm->segment, sizeof comm->segment, "%s", segment);
  const char *name = config && config->commName ? config->commName : "";
  snprintf(comm->name, sizeof comm->name, "%s", name);
  int error = alone || ranks == 1 ? 0 : share(comm);
  pthread_mutex_lock(&lock);
  comm->next = communicators;
  communicators = comm;
  pthread_mutex_unlock(&lock);
  COUNT(communicators, 1);
  *out = comm;
  return (ncclResult_t)error;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return make(out, ranks, rank, id.internal, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
  return make(out, ranks, rank, id.internal, NULL);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int count, ncclUniqueId *ids, ncclConfig_t *config) {
  return make(out, ranks, rank, ids[0].internal, config);
}
ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
  *out = NULL;
  if (!from->shared && from->ranks > 1) return ncclInvalidUsage; /* alone: nobody says who else has this color */
  int ranks = 1, rank = 0, error = 0;
  char segment[128];
  snprintf(segment, sizeof segment, "%.90s-%d-%d", from->segment, from->splits++, color);
  if (from->shared) {
    member_t *members = from->shared->members;
    members[from->rank].color = color;
    members[from->rank].key = key;
    error = meet(from);
    ranks = 0;
    for (int r = 0; r < from->ranks; r++) {
      if (members[r].color != color) continue;
      ranks++;
      rank += members[r].key < key || (members[r].key == key && r < from->rank);
    }
    if (!error) error = meet(from);
  }
  if (error || color == NCCL_SPLIT_NOCOLOR) return (ncclResult_t)error;
  return make(out, ranks, rank, segment, config);
}
ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { return *count = comm->ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { return *device = current_device(), ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; } /* a peer may still read what this rank sent */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->shared) __atomic_store_n(&comm->shared->aborted, 1, __ATOMIC_SEQ_CST);
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void **out, size_t bytes) { return cudaMalloc(out, bytes) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclMemFree(void *address) { return cudaFree(address) ? ncclInvalidArgument : ncclSuccess; }

/* ---- calls and groups of calls --------------------------------------------------------------------------------
 * In a group the messages go out first, so that ranks which send to one another do not wait for each other. */
typedef struct {
  ncclComm_t comm;
  int operation, type, reduction, root; /* root: or the peer of a message */
  const void *from;
  void *to;
  size_t count;
} call_t;
static __thread call_t *calls;
static __thread size_t call_count, call_room;
static __thread int depth;

static size_t width(int type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

/* Alone: what peer would send to this rank is what this rank sends to itself in the same group, if it does. */
static const void *own_message(const call_t *call) {
  for (size_t i = 0; i < call_count; i++)
    if (calls[i].operation == SEND && calls[i].comm == call->comm && calls[i].root == call->comm->rank &&
        calls[i].count * width(calls[i].type) == call->count * width(call->type))
      return calls[i].from;
  return NULL;
}

static int answer(const call_t *call) {
  size_t bytes = call->count * width(call->type);
  if (call->operation < SEND)
    return collect(call->comm, call->operation, call->from, call->to, call->count, call->type, call->reduction, call->root);
  if (call->comm->shared && call->operation == SEND) return post(call->comm, call->root, call->from, bytes);
  if (call->comm->shared) return take(call->comm, call->root, call->to, bytes);
  if (call->operation == SEND || bytes > true_bytes()) return 0;
  const void *message = own_message(call);
  if (message) memmove(call->to, message, bytes);
  else memset(call->to, 0, bytes); /* nobody sent it */
  return 0;
}

static ncclResult_t asked(call_t call) {
  __atomic_add_fetch(&call.comm->calls[call.operation], 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&call.comm->bytes[call.operation], (long)(call.count * width(call.type)), __ATOMIC_RELAXED);
  COUNT(collectives, 1);
  COUNT(collective_bytes, call.count * width(call.type));
  if (!depth) return (ncclResult_t)answer(&call);
  if (call_count == call_room) {
    call_room = call_room ? 2 * call_room : 64;
    calls = realloc(calls, call_room * sizeof(call_t));
  }
  calls[call_count++] = call;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
  if (--depth) return ncclSuccess;
  int error = 0;
  for (int sends = 1; sends >= 0; sends--)
    for (size_t i = 0; i < call_count && !error; i++)
      if ((calls[i].operation == SEND) == sends) error = answer(&calls[i]);
  call_count = 0;
  return (ncclResult_t)error;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                           cudaStream_t stream) {
  return asked((call_t){comm, ALL_REDUCE, type, reduction, 0, from, to, count});
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return asked((call_t){comm, BROADCAST, type, 0, root, from, to, count});
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, REDUCE, type, reduction, root, from, to, count});
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, ALL_GATHER, type, 0, 0, from, to, count});
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                               ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, REDUCE_SCATTER, type, reduction, 0, from, to, count});
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, ALL_TO_ALL, type, 0, 0, from, to, count});
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, SEND, type, 0, peer, from, NULL, count});
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return asked((call_t){comm, RECEIVE, type, 0, peer, NULL, to, count});
}
