/* A NCCL communicator: of this process alone, or of processes of this machine that share a segment. */
#ifndef NULLCUDA_COMMUNICATOR_H
#define NULLCUDA_COMMUNICATOR_H

#include "device.h"

#include <nccl.h>

#define MOST_RANKS 64
#define QUEUE 64

enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE, OPERATIONS };

/* What one rank shows the others during a collective. */
typedef struct { int process, file, color, key; uint64_t what; long place; } member_t;
/* Messages from one rank to another, oldest first; places are in the sender's memory. */
typedef struct { uint32_t sent, taken; struct { long place; size_t bytes; } messages[QUEUE]; } queue_t;
typedef struct {
  uint32_t arrived, generation, joined, aborted;
  member_t members[MOST_RANKS];
  queue_t queues[]; /* [from * ranks + to] */
} shared_t;

struct ncclComm {
  int ranks, rank, splits;
  char name[48];    /* torch's description of the group */
  char segment[128];
  shared_t *shared; /* NULL: alone */
  uint32_t freed[MOST_RANKS];
  long calls[OPERATIONS], bytes[OPERATIONS];
  struct ncclComm *next;
};

/* exchange.c: each returns 0 or a ncclResult_t */
int share(ncclComm_t comm);
int meet(ncclComm_t comm);
void leave(ncclComm_t comm);
int collect(ncclComm_t comm, int operation, const void *from, void *to, size_t count, int type, int reduction, int root);
int post(ncclComm_t comm, int peer, const void *from, size_t bytes);
int take(ncclComm_t comm, int peer, void *to, size_t bytes);

#endif
