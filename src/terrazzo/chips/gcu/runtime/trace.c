/* What was run, kept for profilers while somebody asks for it. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gcuRecord *records;
static size_t first, count, room;     /* of a ring */
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
  first = count = 0;
  pthread_mutex_unlock(&lock);
  atomic_store(&tracing, true);
  return gcuSuccess;
}

gcuError gcuTraceStop(void) {
  gcuError error = ready();
  if (!error) atomic_store(&tracing, false);
  return error;
}

gcuError gcuTraceRead(gcuRecord *target, int most, int *taken) {
  gcuError error = ready();
  if (error) return error;
  if (!taken || most < 0 || (most && !target))
    return fail(gcuErrorInvalidValue, "gcuTraceRead of %d records to %p", most, (void *)target);
  pthread_mutex_lock(&lock);
  int number = 0;
  for (; number < most && count; number++, count--, first = (first + 1) % room)
    target[number] = records[first];
  pthread_mutex_unlock(&lock);
  *taken = number;
  return gcuSuccess;
}
