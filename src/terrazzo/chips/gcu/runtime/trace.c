/* What was run, kept for profilers while somebody asks for it. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gcuRecord *records;
static size_t first, count, room;     /* of a ring */
static int64_t taken_away;            /* records before the first of the ring */

/* Traces may begin inside others: a record is kept until the outermost takes it. What an inner one
   has is read after its end without being taken away, from `next` up to `last`. */
enum { MOST_TRACES = 64 };
static int64_t begins[MOST_TRACES];   /* the number of the first record of each that is open */
static int open_traces;
static int64_t next, last;
static bool reads_inner;
static _Atomic bool tracing;
static _Atomic int64_t correlations;
static _Thread_local int64_t tag;

int64_t next_correlation(void) { return atomic_fetch_add(&correlations, 1) + 1; }

int64_t current_tag(void) { return tag; }

gcuError gcuTraceTag(int64_t number) {
  tag = number;
  return gcuSuccess;
}

bool is_tracing(void) { return atomic_load_explicit(&tracing, memory_order_relaxed); }

static bool grow(void) {
  size_t larger = room ? 2 * room : 256;
  gcuRecord *moved = malloc(larger * sizeof *moved);
  if (!moved) return false;
  for (size_t place = 0; place < count; place++) moved[place] = records[(first + place) % room];
  free(records);
  records = moved, room = larger, first = 0;
  return true;
}

void trace(const gcuRecord *record, const char *name) {
  pthread_mutex_lock(&lock);
  /* Without memory for it the record is lost, and the program goes on. */
  if (count < room || grow()) {
    gcuRecord *kept = &records[(first + count++) % room];
    *kept = *record;
    snprintf(kept->name, sizeof kept->name, "%s", name);
  }
  pthread_mutex_unlock(&lock);
}

gcuError gcuTraceStart(void) {
  gcuError error = ready();
  if (error) return error;
  pthread_mutex_lock(&lock);
  bool is_room = open_traces < MOST_TRACES;
  if (!open_traces) taken_away += count, first = count = 0;
  if (is_room) begins[open_traces++] = taken_away + count;
  reads_inner = false;
  pthread_mutex_unlock(&lock);
  if (!is_room) return fail(gcuErrorInvalidValue, "%d traces are open already", MOST_TRACES);
  atomic_store(&tracing, true);
  return gcuSuccess;
}

gcuError gcuTraceStop(void) {
  gcuError error = ready();
  if (error) return error;
  pthread_mutex_lock(&lock);
  if (open_traces) next = begins[--open_traces];
  if (next < taken_away) next = taken_away;
  last = taken_away + count;
  reads_inner = open_traces > 0;
  if (!open_traces) atomic_store(&tracing, false);
  pthread_mutex_unlock(&lock);
  return gcuSuccess;
}

static int read_inner(gcuRecord *target, int most) {
  int number = 0;
  for (; number < most && next < last; number++, next++)
    target[number] = records[(first + (size_t)(next - taken_away)) % room];
  return number;
}

static int take(gcuRecord *target, int most) {
  int number = 0;
  for (; number < most && count; number++, count--, taken_away++, first = (first + 1) % room)
    target[number] = records[first];
  return number;
}

gcuError gcuTraceRead(gcuRecord *target, int most, int *taken) {
  gcuError error = ready();
  if (error) return error;
  if (!taken || most < 0 || (most && !target))
    return fail(gcuErrorInvalidValue, "gcuTraceRead of %d records to %p", most, (void *)target);
  pthread_mutex_lock(&lock);
  *taken = reads_inner ? read_inner(target, most) : take(target, most);
  if (!*taken) reads_inner = false;
  pthread_mutex_unlock(&lock);
  return gcuSuccess;
}
